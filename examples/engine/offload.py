"""Where the engine's scheduler meets kvd.

Without a socket nothing is offloaded, and the engine runs on its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from examples.engine.config import EngineConfig
from examples.engine.requests import Request
from examples.engine.weights import Checkpoint


@dataclass(frozen=True)
class Progress:
    """A request in this step, and how many of its tokens are computed after it."""

    request: Request
    computed_after: int


@dataclass(frozen=True)
class OffloadOutcome:
    """Ids of requests whose load ended."""

    finished_loads: Sequence[str] = ()
    failed_loads: Sequence[str] = ()


class Offload(Protocol):
    """What the engine's scheduler asks and tells, in the order of a step."""

    def arrived(self, request: Request) -> None: ...

    def matched(self, request: Request, computed: int, /) -> int | None:
        """Tokens after `computed` that can be loaded; None: not known yet, ask next step."""
        ...

    def allocated(self, request: Request, external: int, /) -> None: ...

    def plan(self, progress: Iterable[Progress], preempted: Sequence[Request], /) -> Any:
        """What each rank must do around this step."""
        ...

    def outcome(self, reports: Sequence[Any], /) -> OffloadOutcome: ...

    def finished(self, request: Request) -> None: ...

    @property
    def pending(self) -> bool:
        """Whether copies are under way: the engine must keep stepping to let them end."""
        ...

    @property
    def copied_bytes(self) -> tuple[int, int]:
        """Bytes stored and bytes loaded so far, over all ranks."""
        ...

    def wait_until_connected(self, timeout_s: float, /) -> bool:
        """Wait for the daemon once all ranks have registered; False: go on without it."""
        ...

    def close(self) -> None: ...


class NoOffload:
    """An engine without a daemon."""

    def arrived(self, request: Request) -> None:
        pass

    def matched(self, _request: Request, _computed: int, /) -> int | None:
        return 0

    def allocated(self, _request: Request, external: int, /) -> None:
        assert external == 0

    def plan(self, _progress: Iterable[Progress], _preempted: Sequence[Request], /) -> Any:
        return None

    def outcome(self, _reports: Sequence[Any], /) -> OffloadOutcome:
        return OffloadOutcome()

    def finished(self, request: Request) -> None:
        pass

    @property
    def pending(self) -> bool:
        return False

    @property
    def copied_bytes(self) -> tuple[int, int]:
        return 0, 0

    def wait_until_connected(self, _timeout_s: float, /) -> bool:
        return True

    def close(self) -> None:
        pass


def open_offload(config: EngineConfig, checkpoint: Checkpoint, boot_nonce: bytes) -> Offload:
    """The scheduler's connection to the daemon that the configuration names, if it does."""
    if not config.socket:
        return NoOffload()
    # Imported here: an engine on its own needs no gRPC.
    from examples.engine.kvd_offload import KvdOffload

    return KvdOffload(config, checkpoint, boot_nonce)
