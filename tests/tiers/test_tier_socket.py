"""Nonsense on the socket of a tier's process, in both directions, and the end of control."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd.processes import parent
from kvd.processes.framing import MAX_TEXT_CHARS, BadFrame, frame, pack_number
from kvd.tiers import frames
from kvd.tiers.frames import Order, TierFrame, TierHello, TierLeft, TierRefusal
from kvd.tiers.process import (
    OrderEnd,
    OrderId,
    ProcessReason,
    TierAnswer,
)
from kvd.tiers.store import Outcome, TierUsage
from tests.tiers.tier_rig import (
    BAD,
    MEMORY,
    on_loop,
    placed,
    soon,
    tier_rig,
)

# -- nonsense -------------------------------------------------------------------------------------


def _answer(**changes: object) -> bytes:
    fields = {"order": OrderId(1), "end": OrderEnd.ANSWERED, **changes}
    return frames.pack_answer(TierAnswer(**fields))  # type: ignore[arg-type]


def _usage(**changes: Any) -> bytes:
    return frames.pack_usage(
        TierUsage(**({"blocks": 0, "bytes": 0, "capacity_bytes": 0} | changes))
    )


@pytest.mark.parametrize(
    "said",
    [
        frame(TierFrame.ANSWER, b""),
        frame(TierFrame.ANSWER, b"\xff" * 200),
        frame(TierFrame.ANSWER, _answer()),  # no values
        frame(TierFrame.ANSWER, _answer(order=OrderId(99))),
        frame(TierFrame.ANSWER, _answer(values=np.array([9], dtype=np.uint8))),
        frame(TierFrame.ANSWER, _answer(values=np.array([Outcome.FULL], dtype=np.uint8))),
        frame(TierFrame.ANSWER, _answer(values=np.array([Outcome.DAMAGED], dtype=np.uint8))),
        frame(TierFrame.ANSWER, _answer(values=np.array([1, 1], dtype=np.uint8))),
        frame(TierFrame.ANSWER, _answer(end=OrderEnd.FAILED, values=np.ones(1, dtype=np.uint8))),
        frame(TierFrame.ANSWER, _answer(end=OrderEnd.FAILED)[:-8]),
        frame(TierFrame.ANSWER, _answer(end=OrderEnd.FAILED, reason="\u00e9" * 30)),
        frame(TierFrame.ANSWER, _answer(end=4)),
        frame(TierFrame.ROW_UNMAPPED, b""),
        frame(TierFrame.ROW_UNMAPPED, pack_number(7)),
        frame(TierFrame.USAGE, b"{}"),
        frame(TierFrame.USAGE, b"[1]"),
        frame(TierFrame.USAGE, _usage(blocks=-1)),
        frame(TierFrame.USAGE, _usage(bytes=1 << 63)),
        frame(TierFrame.USAGE, _usage(capacity_bytes=1.5)),
        frame(TierFrame.USAGE, _usage().replace(b" 0,", b" Infinity,", 1)),
        frame(TierFrame.USAGE, _usage()) * 3,  # two may be due
        frame(TierFrame.LEFT, frames.pack_left(TierLeft(()))),
        frame(TierFrame.USAGE, b"[" * 100_000),
        frame(TierFrame.HELLO),
        frame(TierFrame.REFUSED, b"{}"),
        frame(TierFrame.WRITE, b""),
        b"\x07\x00\x00\x00\x00\x00\x00\x00",
        b"\xff" * 64,
        b"\x10\x00\x00\x00\x63\x00\x00\x00" + bytes(8),
    ],
)
@on_loop
async def test_a_process_that_writes_nonsense_is_ended_with_that_as_the_reason(said: bytes) -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + "Hangs")
        tier.read(r.next_order(), placed([1], [2]), soon())
        await r.signed("reading")
        parent.Channel(tier).data_received(said)
        await r.sink.until(lambda: r.sink.gone)
        assert "wrote nonsense" in r.sink.gone[0]
        assert r.sink.answers[1].reason == ProcessReason.TIER_GONE


@pytest.mark.parametrize(
    "points",
    [["/\u00e9" * frames.MAX_MOUNTS_CHARS], ["/a\0b"], [""] * (frames.MAX_MOUNTS_CHARS // 2)],
    ids=["long", "impossible", "many"],
)
def test_what_no_later_process_could_be_told_is_no_hello(points: list[str]) -> None:
    """Its keeper would never start another."""
    with pytest.raises(BadFrame, match="no hello"):
        frames.unpack_hello(frames.pack_hello(TierHello(names_left=True, mounts=tuple(points))))


def test_what_a_store_says_in_words_is_cut() -> None:
    """Every message and log line can carry it."""
    long = "\ud800" + "x" * 2_000_000
    usage = frames.unpack_usage(_usage(notes=(long,) * 20))
    assert [note[:2] for note in usage.notes] == ["?x"] * frames.MAX_NOTES
    refusal = frames.unpack_refusal(frames.pack_refusal(TierRefusal("UNUSABLE", "options", long)))
    left = frames.unpack_text(b"\xff" + b"x" * 2_000_000)
    for said in (*usage.notes, refusal.message, left):
        assert len(said.encode()) <= 2 * MAX_TEXT_CHARS + 2


_ORDER = frames.pack_order(Order(OrderId(1), TierFrame.READ, 1e9, tuple(placed([1], [1]))))


@pytest.mark.parametrize(
    "said",
    [
        frame(TierFrame.READ, b""),
        frame(TierFrame.READ, _ORDER[:-8]),
        frame(TierFrame.EXISTS, _ORDER[:60]),
        frame(TierFrame.READ, b"\xff" * 1000),
        frame(TierFrame.DELETE_SCOPES, b"\xff" * 100),
        frame(TierFrame.UNMAP_ROW, b"\xff" * 16),
        frame(TierFrame.ANSWER),
        frame(TierFrame.CONFIGURE, b"{}"),
        b"\xff" * 64,
    ],
)
@on_loop
async def test_a_process_that_is_told_nonsense_ends(said: bytes) -> None:
    async with tier_rig() as r:
        tier = await r.start()
        tier._write_frame(said)
        await r.sink.until(lambda: r.sink.gone)
        assert "exited with status 1" in r.sink.gone[0]


@pytest.mark.parametrize("first", [b"\xff" * 64, frame(TierFrame.STOP), frame(TierFrame.CONFIGURE)])
def test_a_process_that_is_greeted_with_nonsense_ends(first: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, "-m", "kvd.tiers", str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(),),
            stderr=subprocess.DEVNULL,
        )
        ours.sendall(first)
        assert child.wait(10) == 1


# -- control ends ---------------------------------------------------------------------------------

_CONTROL = f"""
import asyncio, sys
from pathlib import Path
from tests.tiers.tier_rig import BAD, TierRig, placed, soon

async def live() -> None:
    r = TierRig(Path(sys.argv[1]))
    tier = await r.start(sys.argv[2])
    tier.read(r.next_order(), placed([1], [2]), soon())
    if sys.argv[2] != {MEMORY!r}:
        await r.signed("reading")
    print(tier.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(live())
"""


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.mark.parametrize("store", [MEMORY, BAD + "Hangs", BAD + "HoldsTheInterpreter"])
def test_a_tiers_process_dies_with_control(store: str, shared_directory: Path) -> None:
    for name in ("extents", "signs"):
        (shared_directory / name).mkdir()
    control = subprocess.Popen(
        [sys.executable, "-c", _CONTROL, str(shared_directory), store],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert control.stdout is not None
    pid = int(control.stdout.readline())
    with closing(os.pidfd_open(pid)) as tier:
        control.kill()
        control.wait()
        control.stdout.close()
        ended, _, _ = select.select([tier], [], [], 2.0)
    assert ended, "the tier's process outlived control"
