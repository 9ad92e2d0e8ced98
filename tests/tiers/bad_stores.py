"""Stores that break their promises, each in one way: what a tier's process must survive, or die of.

Loaded by module path in a process of their own, like any site's. An event that a test waits for is
a file in the directory `signs`.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvd.tiers.store import (
    Found,
    Outcome,
    TierBlock,
    TierError,
    TierKey,
    TierOptions,
    TierReason,
    TierUnusable,
    TierUsage,
)
from tests.tiers.memory_store import MemoryStore

MARK = 0x5A  # what the stores write that write where they may not


class _Store(MemoryStore):
    def __init__(self, options: TierOptions) -> None:
        super().__init__(
            {n: v for n, v in options.items() if n in ("capacity_bytes", "concurrency")}
        )
        self.options = options

    def sign(self, name: str) -> None:
        (Path(str(self.options["signs"])) / name).touch()

    def wait_for(self, name: str) -> None:
        while not (Path(str(self.options["signs"])) / name).exists():
            time.sleep(0.005)


class TakesOnce(_Store):
    """Is FULL for what is there already, and says that it moves the bytes of that."""

    moves_what_is_there = True

    def write(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        there = self.exists([block.key for block in blocks], deadline)
        outcomes = super().write(blocks, deadline)
        return [Outcome.FULL if was else now for was, now in zip(there, outcomes, strict=True)]


class Raises(_Store):
    """Raises what `what` names, in every call."""

    def _raise(self) -> Any:
        match self.options["what"]:
            case "tier":
                raise TierError("nobody answers", TierReason.UNREACHABLE)
            case "odd":
                error = TierError("of my own making")
                error.reason = "ROUTER_17_\u00fc"  # type: ignore[assignment]
                raise error
            case "value":
                raise ValueError("a bug")
            case "assertion":
                raise AssertionError
            case "memory":
                raise MemoryError
            case _:
                sys.exit(3)

    def exists(self, keys: Sequence[TierKey], deadline: float) -> list[bool]:
        return self._raise()  # type: ignore[no-any-return]

    def read(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        return self._raise()  # type: ignore[no-any-return]

    def write(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        return self._raise()  # type: ignore[no-any-return]

    def delete_scopes(self, scopes: Sequence[bytes], deadline: float) -> None:
        self._raise()

    def usage(self) -> TierUsage:
        return self._raise()  # type: ignore[no-any-return]


class Dies(_Store):
    """Ends its process in the middle of a read, in the way that `how` names."""

    def read(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        blocks[0].parts[0][:8] = bytes([MARK]) * 8
        match self.options["how"]:
            case "exit":
                os._exit(0)
            case "segfault":
                ctypes.string_at(0)
            case _:
                os.kill(os.getpid(), signal.SIGKILL)
        return [Outcome.DONE] * len(blocks)


class Hangs(_Store):
    """Never returns from a read, nor from a question about a key of HANGING."""

    def read(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        self.sign("reading")
        while True:
            blocks[0].parts[0][:1] = bytes([MARK])
            time.sleep(0.01)

    def exists(self, keys: Sequence[TierKey], deadline: float) -> list[bool]:
        if self.options.get("exists"):
            self.sign("asked")
            threading.Event().wait()
        return super().exists(keys, deadline)


class HoldsTheInterpreter(_Store):
    """A read in native code that never lets go of the interpreter's lock."""

    def read(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        self.sign("reading")
        ctypes.PyDLL(None).sleep(3600)
        return [Outcome.DONE] * len(blocks)


class ClosesItsChannel(HoldsTheInterpreter):
    """Shuts what its process says to control, and never lets go of the interpreter's lock."""

    def read(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        with socket.socket(fileno=os.dup(int(sys.argv[1]))) as channel:
            channel.shutdown(socket.SHUT_WR)
        return super().read(blocks, deadline)


class Slow(_Store):
    """Writes and reads go on only when a test says so; it answers after every deadline."""

    def write(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        self.sign("writing")
        self.wait_for("go")
        return super().write(blocks, deadline + 3600)

    def read(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        if self.options.get("reads"):
            self.sign("reading")
            self.wait_for("go")
        return super().read(blocks, deadline + 3600)

    def exists(self, keys: Sequence[TierKey], deadline: float) -> list[bool]:
        if self.options.get("exists"):
            self.sign("asked")
            self.wait_for("go")
        return super().exists(keys, deadline + 3600)


class Lies(_Store):
    """Answers what `lie` names."""

    def _lie(self, count: int) -> Any:
        match self.options["lie"]:
            case "fewer":
                return [1] * (count - 1)
            case "more":
                return [1] * (count + 1)
            case "none":
                return None
            case "impossible":
                return [9] * count
            case "negative":
                return [-1] * count
            case "words":
                return ["DONE"] * count
            case _:
                return 1

    def exists(self, keys: Sequence[TierKey], deadline: float) -> list[bool]:
        return self._lie(len(keys))  # type: ignore[no-any-return]

    def read(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        return self._lie(len(blocks))  # type: ignore[no-any-return]

    def write(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        return self._lie(len(blocks))  # type: ignore[no-any-return]


class WrongWay(_Store):
    """Answers a read as only a write may be, and the other way round."""

    def read(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        return [Outcome.FULL] * len(blocks)

    def write(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        return [Outcome.MISSING] * len(blocks)


class KeepsMemory(_Store):
    """Keeps hold of the memory that a read lent it, in the way that `how` names."""

    kept: Any = None

    def read(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        part = blocks[0].parts[0]
        match self.options["how"]:
            case "block":
                self.kept = blocks[0]
            case "slice":
                self.kept = part[8:16]
            case "array":
                self.kept = np.frombuffer(part, dtype=np.uint64)
            case "ctypes":
                self.kept = (ctypes.c_char * 8).from_buffer(part)
            case "thread":
                threading.Thread(target=self._scribble, args=(part,), daemon=True).start()
            case _:  # garbage in a circle is nobody's
                circle: list[Any] = [part]
                circle.append(circle)
        return super().read(blocks, deadline)

    def _scribble(self, part: memoryview) -> None:
        while True:
            part[:1] = bytes([MARK])


class DoesNotStop(_Store):
    """Goes on writing to its target, and hangs in close."""

    def read(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        self.sign("reading")
        count = 0
        while True:
            count += 1
            blocks[0].parts[0][:8] = count.to_bytes(8, "little")

    def close(self) -> None:
        threading.Event().wait()


class HangsAtTheEnd(_Store):
    """Does all it should, but never returns from close."""

    def close(self) -> None:
        threading.Event().wait()


class UsageHangs(_Store):
    """Does all it should, but never says how it fares."""

    def usage(self) -> TierUsage:
        threading.Event().wait()
        raise AssertionError


class UsageLate(_Store):
    """Takes its time to say how it fares, and says something else each time."""

    def usage(self) -> TierUsage:
        time.sleep(0.1)
        return TierUsage(time.monotonic_ns(), 0, 0)


class UsageLies(_Store):
    """Says of itself what can't be."""

    def usage(self) -> Any:
        return {"blocks": "many"}


def hangs_in_opening(_options: TierOptions) -> MemoryStore:
    """Never opens."""
    threading.Event().wait()
    raise AssertionError


def finds_no_threads(options: TierOptions) -> MemoryStore:
    """Opens where there are as many threads as there may be, or comes to be when it has."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threading.Thread.start = start  # type: ignore[method-assign]
    if options["when"] == "opening":
        threading.Thread().start()
    return MemoryStore({})


def ends_in_opening(_options: TierOptions) -> MemoryStore:
    """Takes its process along."""
    os._exit(7)


def can_not_be_opened(options: TierOptions) -> MemoryStore:
    """Names what to change."""
    raise TierUnusable(f"place is {options.get('place')!r}: there is no such directory")


def raises_in_opening(_options: TierOptions) -> MemoryStore:
    """Says nothing that helps."""
    raise ZeroDivisionError


def opens_later(options: TierOptions) -> MemoryStore:
    """Opens once a test says so."""
    if not (Path(str(options["signs"])) / "open").exists():
        raise TierUnusable("not yet")
    return MemoryStore({})


class Moody(_Store):
    """Takes its time, fails now and then, and scribbles over what a failed read should fill."""

    def _mood(self) -> float:
        mood = random.random()
        time.sleep(mood * 0.004)
        if mood < 0.1:
            raise TierError("not today", TierReason.IO_ERROR)
        return mood

    def exists(self, keys: Sequence[TierKey], deadline: float) -> list[bool]:
        self._mood()
        return super().exists(keys, deadline)

    def write(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        self._mood()
        return super().write(blocks, deadline)

    def read(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        for part in blocks[0].parts:
            part[:] = bytes([MARK]) * part.nbytes
        self._mood()
        return super().read(blocks, deadline)


class Forks(_Store):
    """Has a process of its own, by fork, which holds all that it inherits."""

    def write(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        pid = os.fork()
        if pid == 0:
            signal.pause()
        self.sign(f"forked-{pid}")
        return super().write(blocks, deadline)


class KnowsHalf(_Store):
    """Says of no second key whether it is there."""

    def exists(  # type: ignore[override]
        self, keys: Sequence[TierKey], deadline: float
    ) -> Sequence[Found | bool]:
        found = super().exists(keys, deadline)
        return [Found.UNKNOWN if n % 2 else there for n, there in enumerate(found)]


class NotesAWhile(_Store):
    """Has a note when it is opened, and none a second later."""

    def __init__(self, options: TierOptions) -> None:
        super().__init__(options)
        self._noted_until = time.monotonic() + 1.0

    def usage(self) -> TierUsage:
        notes = ("a server is away",) if time.monotonic() < self._noted_until else ()
        return replace(super().usage(), notes=notes)


class SaysDamaged(_Store):
    """Says of every block that its bytes are not those that were stored."""

    compares_sums = True

    def write(self, blocks: Sequence[TierBlock], deadline: float) -> list[Outcome]:
        return [Outcome.DAMAGED for _ in blocks]


class Names(_Store):
    """Says with the first call that `count` blocks have left that it never had."""

    def __init__(self, options: TierOptions) -> None:
        super().__init__(options)
        self._leaving = int(str(options["count"]))

    def take_left(self) -> list[TierKey]:
        count, self._leaving = self._leaving, 0
        return [TierKey(bytes(range(32)), n.to_bytes(20, "big")) for n in range(count)]
