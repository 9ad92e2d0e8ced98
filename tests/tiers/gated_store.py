"""A store whose calls stop where a test says so: files in the directory `signs` are the words."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvd.tiers.store import Outcome, TierBlock, TierKey, TierOptions
from tests.tiers.memory_store import MemoryStore
from tests.waiting import wait_until

MANY = 128  # keys: such questions have a gate of their own


class Gate:
    """Both sides of it: the test's, and the store's."""

    def __init__(self, signs: Path) -> None:
        self._signs = signs
        signs.mkdir(exist_ok=True)

    @contextmanager
    def held(self, call: str) -> Iterator[None]:
        """Calls of this name stop before they do anything, until this ends."""
        (self._signs / f"hold {call}").touch()
        try:
            yield
        finally:
            (self._signs / f"hold {call}").unlink()
            (self._signs / f"at {call}").unlink(missing_ok=True)

    def wait_for(self, call: str) -> None:
        """Until one has stopped."""
        wait_until((self._signs / f"at {call}").exists, f"a {call}")

    def pass_through(self, call: str) -> None:
        while (self._signs / f"hold {call}").exists():
            (self._signs / f"at {call}").touch()
            time.sleep(0.005)


class GatedStore(MemoryStore):
    """Answers after its deadline, too, as a library does that knows of none."""

    def __init__(self, options: TierOptions) -> None:
        super().__init__({name: value for name, value in options.items() if name != "signs"})
        self._gate = Gate(Path(str(options["signs"])))

    def exists(self, keys: Sequence[TierKey], deadline: float) -> list[bool]:
        self._gate.pass_through("exists" if len(keys) < MANY else "exists of many")
        return super().exists(keys, deadline + 60)

    def read(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        self._gate.pass_through("read")
        return super().read(blocks, deadline + 60)

    def write(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        self._gate.pass_through("write")
        return super().write(blocks, deadline + 60)

    def delete_scopes(self, scopes: Sequence[bytes], deadline: float) -> None:
        self._gate.pass_through("delete")
        super().delete_scopes(scopes, deadline + 60)
