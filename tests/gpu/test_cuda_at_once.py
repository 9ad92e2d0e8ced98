"""Two copies of one direction at once: the second is submitted behind the first, and both land."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvd.core.events import JobKind
from kvd.mover.copy_engine import CopyStopped, KeepGoing
from kvd.mover.layout import FragmentSpec, GroupMap, LocatedPart
from kvd_proto.libcuda import CudaError
from tests.contract.test_copy_engine_contract import part
from tests.gpu.cuda_bench import EXTENT_BYTES, Bench, workshop_of
from tests.gpu.cuda_bench import bench_of as engine_of
from tests.gpu.driver import Driver, Exporter

BLOCKS = 32
BLOCK_BYTES = 4096
MOVED = 5  # blocks of each copy, each a piece of its own
INVALID_VALUE = 1  # of one call, and the device goes on
LATENCY_US = 2000
PATIENCE_S = 20.0
WAITED_S = 0.02  # in which a copy comes to wait for its turn

BOTH = pytest.mark.parametrize("kind", list(JobKind), ids=["store", "load"])
WAYS = pytest.mark.parametrize(
    "pinned",
    [(0, 1), (), (0,), (1,)],
    ids=["pinned", "staged", "pinned then staged", "staged then pinned"],
)


@pytest.fixture
def bench(driver: Driver, exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """An engine that copies a block at a time, slowly on the fake; no extent is pinned yet."""
    from kvd.mover.cuda import engine

    monkeypatch.setattr(engine, "MAX_PIECE_BYTES", BLOCK_BYTES)
    half = BLOCK_BYTES // 2
    fragments = (FragmentSpec(0, 0, half, half), FragmentSpec(0, BLOCKS * half, half, half))
    groups = (GroupMap(BLOCKS, 1, BLOCK_BYTES, fragments),)
    if driver.is_fake:
        driver.inject("latency", microseconds=LATENCY_US)
    with (
        workshop_of(driver, exporter) as shop,
        engine_of(shop, shop.config([BLOCKS * BLOCK_BYTES], groups)) as made,
    ):
        yield made
        if driver.is_fake:
            assert driver.counters()["violations"] == 0


@pytest.fixture
def fake(driver: Driver) -> Driver:
    if not driver.is_fake:
        pytest.skip("faults are the fake driver's")
    return driver


def pin(bench: Bench, extents: tuple[int, ...]) -> None:
    for extent in extents:
        bench.engine.warm_extent(extent, lambda: True)


def moved(extent: int, first: int = 0, slot: int = 0) -> LocatedPart:
    """Blocks that lie apart in the engine's memory, and in a row in that extent."""
    places = [(extent, (slot + n) * BLOCK_BYTES) for n in range(MOVED)]
    return part(0, places, [[first + 3 * n] for n in range(MOVED)])


@dataclass
class Sent:
    """A copy in a thread of its own."""

    part: LocatedPart
    keep_going: KeepGoing = lambda: True
    failure: BaseException | None = None


def copy_at_once(bench: Bench, kind: JobKind, first: Sent, second: Sent) -> None:
    """Both copies, the second of which begins while the first submits its pieces."""
    begun = threading.Event()

    def run(sent: Sent, before: Callable[[], object]) -> None:
        def keep_going() -> bool:
            before()
            return sent.keep_going()

        try:
            bench.engine.copy(kind, sent.part, keep_going)
        except (CopyStopped, CudaError) as error:
            sent.failure = error

    threads = [
        threading.Thread(target=run, args=(first, begun.set)),
        threading.Thread(target=run, args=(second, lambda: None)),
    ]
    threads[0].start()
    assert begun.wait(PATIENCE_S)
    threads[1].start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@WAYS
@BOTH
def test_both_land_right(bench: Bench, kind: JobKind, pinned: tuple[int, ...]) -> None:
    pin(bench, pinned)
    for slot in range(0, 10, 5):
        first, second = Sent(moved(0, slot=slot)), Sent(moved(1, first=16, slot=slot))
        copy_at_once(bench, kind, first, second)
        assert (first.failure, second.failure) == (None, None)
        bench.expect(kind, first.part)
        bench.expect(kind, second.part)
        bench.check()


@WAYS
@BOTH
def test_what_the_second_writes_over_the_firsts_bytes_stands(
    bench: Bench, kind: JobKind, pinned: tuple[int, ...]
) -> None:
    pin(bench, pinned)
    # A load into the same engine blocks from another extent; a store from other blocks into the
    # same slots, so both go to the first's extent and by its way.
    second = moved(1) if kind is JobKind.LOAD else moved(0, first=16)
    sent = Sent(moved(0)), Sent(second)
    copy_at_once(bench, kind, *sent)
    for one in sent:
        assert one.failure is None
        bench.expect(kind, one.part)
    bench.check()


@BOTH
def test_the_second_is_submitted_before_the_first_has_ended(
    bench: Bench, kind: JobKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvd.mover.cuda.lane import Flight

    pin(bench, (0, 1))
    submitters: list[int] = []
    both = threading.Event()
    submit, wait = Flight.submit, Flight.wait

    def noted(flight: Flight, *piece: Any) -> int:
        submitted = submit(flight, *piece)
        submitters.append(threading.get_ident())
        if len(set(submitters)) == 2:
            both.set()
        return submitted

    def patient(flight: Flight) -> None:
        assert both.wait(PATIENCE_S), "the second waited for the first one's end"
        wait(flight)

    monkeypatch.setattr(Flight, "submit", noted)
    monkeypatch.setattr(Flight, "wait", patient)
    copy_at_once(bench, kind, Sent(moved(0)), Sent(moved(1, first=16)))
    order = [submitters.index(who) for who in dict.fromkeys(submitters)]
    assert order == [0, MOVED], "pieces of the two took turns"
    assert len(submitters) == 2 * MOVED


@WAYS
@BOTH
@pytest.mark.parametrize("stopped", [0, 1], ids=["the first", "the second"])
def test_one_that_is_stopped_half_way_leaves_the_other_right(
    bench: Bench, kind: JobKind, pinned: tuple[int, ...], stopped: int
) -> None:
    from kvd.mover.cuda import engine

    pin(bench, pinned)
    looks = iter([True, True, True])
    sent = [Sent(moved(0)), Sent(moved(1, first=16))]
    sent[stopped].keep_going = lambda: next(looks, False)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine, "_FIRST_SLAB_BYTES", BLOCK_BYTES)  # a look a block, staged too
        patched.setattr(engine, "_MAX_SLAB_BYTES", BLOCK_BYTES)
        copy_at_once(bench, kind, *sent)
    assert isinstance(sent[stopped].failure, CopyStopped)
    whole_after_one_failed(bench, kind, sent, stopped)


@WAYS
@BOTH
def test_one_that_is_revoked_before_its_turn_touches_no_extent(
    bench: Bench, kind: JobKind, pinned: tuple[int, ...]
) -> None:
    """Who revoked it has let go of its extents: they may be closed by then."""
    pin(bench, pinned)
    others = threading.Event()
    sent = [Sent(moved(0)), Sent(moved(1, first=16))]
    sent[0].keep_going = lambda: others.wait(PATIENCE_S)
    sent[1].keep_going = lambda: False
    bench.engine.close_extent(1)
    opening = threading.Timer(WAITED_S, others.set)
    opening.start()
    copy_at_once(bench, kind, *sent)
    opening.join()
    assert sent[0].failure is None
    assert isinstance(sent[1].failure, CopyStopped)
    bench.engine.open_extent(1)
    bench.expect(kind, sent[0].part)
    bench.check()


@WAYS
@BOTH
@pytest.mark.parametrize("failed", [0, 1], ids=["the first", "the second"])
def test_one_that_fails_leaves_the_other_right(
    bench: Bench, fake: Driver, kind: JobKind, pinned: tuple[int, ...], failed: int
) -> None:
    pin(bench, pinned)
    sent = [Sent(moved(0)), Sent(moved(1, first=16))]
    fake.inject("copy_error", code=INVALID_VALUE, after=failed * MOVED + 2)
    copy_at_once(bench, kind, *sent)
    assert "INVALID_VALUE" in str(sent[failed].failure)
    whole_after_one_failed(bench, kind, sent, failed)


def whole_after_one_failed(bench: Bench, kind: JobKind, sent: list[Sent], failed: int) -> None:
    """The other one is right, nothing else was touched, and the failed one works when repeated."""
    kept, lost = sent[1 - failed], sent[failed]
    assert kept.failure is None
    bench.expect(kind, kept.part)
    seen = [bench.shop.extent(extent).copy() for extent in range(len(bench.pool))]
    bench.copy(kind, lost.part)
    bench.check()
    for extent, before in enumerate(seen):  # what of it had landed lay where it belongs
        inside = np.zeros(EXTENT_BYTES, dtype=bool)
        if kind is JobKind.STORE and extent == failed:
            inside[: MOVED * BLOCK_BYTES] = True
        assert np.array_equal(before[~inside], bench.pool[extent][~inside])
