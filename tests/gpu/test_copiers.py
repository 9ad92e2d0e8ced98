"""Every way of copying gives the same bytes, within its bounds, or says that it can't."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from ctypes import CFUNCTYPE, POINTER, c_int, c_size_t, c_void_p
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from kvd import native
from kvd.core.events import JobKind
from kvd.mover.cuda.runs import Runs, runs_of
from kvd.mover.layout import FragmentSpec, GroupMap, LocatedPart
from kvd_proto.libcuda import CopyAttributes, CudaError, Libcuda
from tests.gpu.copy_rig import WAYS, Rig, copying, open_rig
from tests.gpu.driver import Driver

MIB = 1 << 20
LOAD = JobKind.LOAD
BOTH = pytest.mark.parametrize("kind", list(JobKind), ids=["store", "load"])
EACH = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
def rig(driver: Driver) -> Iterator[Rig]:
    del driver
    with open_rig(4 * MIB, 4 * MIB) as made:
        yield made


def group_of(*fragments: FragmentSpec, blocks: int = 32) -> GroupMap:
    return GroupMap(blocks, 1, sum(fragment.bytes for fragment in fragments), fragments)


def runs_in(rig: Rig, group: GroupMap, engine_blocks: list[int]) -> Runs:
    """Blocks of a group at the device buffer's beginning, one after the other in the host's."""
    count = len(engine_blocks)
    part = LocatedPart(
        0,
        np.zeros(count, dtype=np.uint32),
        np.arange(1, count + 1, dtype=np.uint64) * np.uint64(group.part_bytes),
        np.array(engine_blocks, dtype=np.uint32).reshape(count, 1),
    )
    return runs_of(part, group, lambda _: rig.host_address, [rig.device] * 4)


def run(rig: Rig, pitches: tuple[int, int], width: int, height: int) -> Runs:
    """One run from the beginning of both buffers; pitches of host and device."""
    values = (rig.host_address, rig.device, *pitches, width, height)
    return Runs(*(np.array([value], dtype=np.uint64) for value in values))


KEYS_AND_VALUES = group_of(
    *(FragmentSpec(0, 4096 * 32 * half, 4096, 4096) for half in range(6)), blocks=32
)
PADDED = group_of(*(FragmentSpec(0, 640 * layer, 8192, 512) for layer in range(8)))
ODD_WORDS = group_of(*(FragmentSpec(0, 8 + 40 * layer, 1032, 24) for layer in range(8)))
LARGE = group_of(FragmentSpec(0, 0, 300_008, 300_000), blocks=12)
LAYOUTS = {
    "keys and values by layer": (KEYS_AND_VALUES, [9, 3, 31, 4, 5, 6, 7, 20, 0]),
    "padded cross-layer blocks": (PADDED, [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 2, 30]),
    "stretches of three words": (ODD_WORDS, [1, 0, 17, 18, 19, 4]),
    "large blocks": (LARGE, [7, 8, 2]),
}


@EACH
@BOTH
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ways_copy_the_same_bytes_and_no_others(
    rig: Rig, driver: Driver, way: str, kind: JobKind, layout: str
) -> None:
    group, blocks = LAYOUTS[layout]
    rig.check(way, kind, runs_in(rig, group, blocks))
    if driver.is_fake:
        assert driver.counters()["violations"] == 0


@EACH
def test_nothing_to_copy_is_no_copy(rig: Rig, way: str) -> None:
    rig.check(way, JobKind.LOAD, runs_in(rig, PADDED, []))


@EACH
def test_copies_are_queued_behind_each_other(rig: Rig, way: str) -> None:
    """A store behind a load of the same blocks brings back what the load wrote."""
    runs = runs_in(rig, PADDED, [3, 9, 4])
    content = rig.host.copy()
    elsewhere = replace(runs, host=runs.host + np.uint64(2 * MIB))
    with copying(way, JobKind.LOAD) as loads, copying(way, JobKind.STORE) as stores:
        loads.submit(runs, rig.stream)
        stores.submit(elsewhere, rig.stream)
    rig.sync()
    start, end = PADDED.part_bytes, 4 * PADDED.part_bytes
    assert np.array_equal(rig.host[2 * MIB + start : 2 * MIB + end], content[start:end])


# -- batches --------------------------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "batches"), [(16, 1), (17, 2), (32, 2)])
def test_batches_are_short(rig: Rig, driver: Driver, blocks: int, batches: int) -> None:
    if not driver.is_fake:
        pytest.skip("a real driver does not count its calls")
    runs = runs_in(rig, PADDED, [*range(0, 32, 2), *range(1, 32, 2)][:blocks])
    rig.check("batch", JobKind.STORE, runs)
    counted = driver.counters()
    assert (counted["batches"], counted["batch_copies"]) == (batches, 8 * blocks)


@BOTH
def test_narrow_even_stretches_go_strided_and_all_others_in_batches(
    rig: Rig, driver: Driver, kind: JobKind
) -> None:
    if not driver.is_fake:
        pytest.skip("a real driver does not count its calls")
    width = 32 << 10
    even = run(rig, (width, 2 * width), width=width, height=8)
    few = run(rig, (width, 2 * width), width=width, height=7)
    wide = run(rig, (2 * width, 4 * width), width=2 * width, height=8)
    columns = zip(*map(_columns, (even, few, wide)), strict=True)
    together = Runs(*(np.concatenate(column) for column in columns))
    rig.copy("as it is", kind, together)
    counted = driver.counters()
    assert (counted["copies_2d"], counted["batch_copies"], counted["batches"]) == (1, 15, 1)


def _columns(runs: Runs) -> tuple[Any, ...]:
    return (
        runs.host,
        runs.device,
        runs.host_pitch,
        runs.device_pitch,
        runs.width,
        runs.height,
    )


@BOTH
@pytest.mark.parametrize("version", [12080, 12090, 13000, 13010])
def test_both_forms_of_the_batch_call_copy(
    rig: Rig, driver: Driver, kind: JobKind, version: int
) -> None:
    if not driver.is_fake:
        pytest.skip("a real driver has its own version only")
    driver.inject("driver_version", version=version)
    rig.check("batch", kind, runs_in(rig, ODD_WORDS, [2, 8, 5]))
    assert driver.counters()["batch_copies"] == 24


def test_a_driver_before_batches_is_said_to_have_none(
    rig: Rig, driver: Driver, capfd: pytest.CaptureFixture[str]
) -> None:
    if not driver.is_fake:
        pytest.skip("a real driver has its own version only")
    driver.inject("driver_version", version=12060)
    rig.check("as it is", JobKind.LOAD, runs_in(rig, PADDED, [4]))
    assert "it speaks CUDA 12.6, and CUDA 12.8 is needed" in capfd.readouterr().err
    assert driver.counters()["batches"] == 0


@pytest.mark.parametrize("stream", [0, 1])
def test_batches_are_never_put_on_the_legacy_stream(rig: Rig, stream: int) -> None:
    with pytest.raises(AssertionError, match="legacy stream"), copying("batch", LOAD) as copier:
        copier.submit(runs_in(rig, PADDED, [4]), stream)


class Refusing:
    """A driver whose batch call refuses, noting what it was given. It stands in for what a
    driver finds wrong with one copy, which nobody can make a healthy one do."""

    def __init__(self, version: int, failed: int) -> None:
        self.version = version
        self.asked: list[int] = []
        self.given: list[tuple[list[int], int, int, int, int]] = []
        arrays = (POINTER(c_size_t),) * 3
        form: list[Any] = [*arrays, c_size_t, POINTER(CopyAttributes), POINTER(c_size_t), c_size_t]
        if version < 13000:
            form.append(POINTER(c_size_t))
        form.append(c_void_p)

        def call(*given: Any) -> int:
            destinations, _, _, count, attributes, first, attributes_count, *told, stream = given
            order = attributes[0].source_access_order
            entries = (order, first[0], attributes_count, stream)
            self.given.append(([destinations[row] for row in range(count)], *entries))
            if told:
                told[0][0] = failed
            return 1

        self.call = CFUNCTYPE(c_int, *form)(call)

    def driver_version(self) -> int:
        return self.version

    def entry(self, name: str, cuda_version: int) -> int | None:
        assert name == "cuMemcpyBatchAsync"
        self.asked.append(cuda_version)
        return ctypes.cast(self.call, c_void_p).value

    def error(self, function: str, code: int) -> CudaError:
        return CudaError(function, code, "CUDA_ERROR_INVALID_VALUE", "invalid argument")


COPIES = tuple(np.array(values, dtype=np.uint64) for values in ([16, 32], [0x100, 0x200], [8, 24]))
ANYWHERE = c_size_t(-1).value


@pytest.mark.parametrize(
    ("version", "failed", "index", "words"),
    [
        (12080, 1, 1, r"copy 1 of 2: 0x200 to 0x20, 24 bytes"),
        (12090, ANYWHERE, None, r"in a batch of 2 copies"),
        (13000, 0, None, r"in a batch of 2 copies"),
    ],
)
def test_a_refused_batch_names_the_copy_where_the_driver_tells(
    driver: Driver, version: int, failed: int, index: int | None, words: str
) -> None:
    from kvd.mover.cuda.batch import BatchCall, BatchRefused

    refusing = Refusing(version, failed)
    call = BatchCall(cast(Libcuda, refusing))
    assert refusing.asked == [12080 if version < 13000 else 13000]
    with pytest.raises(BatchRefused, match=words) as caught:
        call.copy(JobKind.LOAD, cast(Any, COPIES), 0x5000)
    assert caught.value.index == index
    assert (caught.value.code, caught.value.function) == (1, "cuMemcpyBatchAsync")


@pytest.mark.parametrize(("kind", "order"), [(JobKind.STORE, 1), (JobKind.LOAD, 3)])
@pytest.mark.parametrize("version", [12080, 13000])
def test_one_attribute_is_for_all_copies_and_says_when_sources_may_be_read(
    driver: Driver, version: int, kind: JobKind, order: int
) -> None:
    from kvd.mover.cuda.batch import BatchCall

    refusing = Refusing(version, 0)
    with pytest.raises(CudaError):
        BatchCall(cast(Libcuda, refusing)).copy(kind, cast(Any, COPIES), 0x5000)
    assert refusing.given == [([16, 32], order, 0, 1, 0x5000)]


def test_a_driver_has_read_its_lists_when_the_call_returns(rig: Rig) -> None:
    """The native library fills the same arrays for each batch, whatever is still queued."""
    import cupy

    from kvd.mover.cuda.copiers import Copier, Memories, batch_call

    library = native.library()
    if library is None:
        pytest.skip(native.why_not())
    copier = Copier(LOAD, batch_call(), library)
    content, before = rig.host.copy(), rig.read_device()
    memories = Memories(
        np.array([rig.device] * 4, dtype=np.uint64), np.array([rig.host_address], dtype=np.uint64)
    )
    gate = threading.Event()
    cupy.cuda.ExternalStream(rig.stream).launch_host_func(lambda _: gate.wait(10), None)
    for number, block in enumerate(range(0, 32, 2)):
        slots = np.array([number * KEYS_AND_VALUES.part_bytes], dtype=np.uint64)
        part = LocatedPart(0, np.zeros(1, np.uint32), slots, np.array([[block]], dtype=np.uint32))
        copies = copier.list(part, KEYS_AND_VALUES, memories)
        while copies.has_more:
            copies.submit(3 * 4096, rig.stream)  # three stretches a call
    gate.set()
    rig.sync()
    expected = before
    for number, block in enumerate(range(0, 32, 2)):
        at = number * KEYS_AND_VALUES.part_bytes
        for fragment in KEYS_AND_VALUES.fragments:
            start = fragment.base + block * fragment.stride
            expected[start : start + 4096] = content[at : at + 4096]
            at += 4096
    assert np.array_equal(rig.read_device(), expected)


# -- addresses ------------------------------------------------------------------------------


@pytest.fixture
def unreached(rig: Rig, driver: Driver) -> Driver:
    """A device that has other addresses for registered host memory than the host."""
    del rig
    if not driver.is_fake:
        pytest.skip("a real device is as it is")
    driver.inject("host_pointer", usable=0)
    return driver


@BOTH
@pytest.mark.parametrize("way", WAYS)
def test_a_device_with_other_addresses_gets_no_batches_that_send_it_the_hosts(
    unreached: Driver, rig: Rig, way: str, kind: JobKind, capfd: pytest.CaptureFixture[str]
) -> None:
    rig.check(way, kind, runs_in(rig, PADDED, [5, 6, 2]))
    counted = unreached.counters()
    assert (counted["violations"], counted["batches"]) == (0, 0)
    assert ("can't reach host memory" in capfd.readouterr().err) == (way != "plain")


# -- strided copies -------------------------------------------------------------------------


def test_strided_copies_are_one_call_a_run(rig: Rig, driver: Driver) -> None:
    if not driver.is_fake:
        pytest.skip("a real driver does not count its calls")
    runs = runs_in(rig, PADDED, [1, 3, 5, 7])
    assert len(runs) == 4
    rig.check("strided", JobKind.LOAD, runs)
    assert driver.counters()["copies_2d"] == 4


@BOTH
def test_stretches_that_overlap_on_the_device_are_copied_one_by_one(
    rig: Rig, kind: JobKind
) -> None:
    rig.host[:] = 7  # what overlaps must be equal, or a load's outcome would be left open
    rig.check("strided", kind, run(rig, (24, 8), width=16, height=5))


@BOTH
def test_steps_beyond_the_devices_largest_pitch_are_copied_one_by_one(
    driver: Driver, kind: JobKind
) -> None:
    pitch = 1 << 31
    with open_rig(64, 3 * 4096) as rig:
        rig.runtime.free(rig.device)
        rig.device = int(rig.runtime.malloc(pitch + 4096))
        for at in (0, pitch):
            rig.write_device(np.arange(4096, dtype=np.uint16).view(np.uint8)[:4096], at)
        host = rig.host.copy()
        rig.copy("strided", kind, run(rig, (4096, pitch), width=1024, height=2))
        for row, at in enumerate((0, pitch)):
            seen = rig.host[4096 * row : 4096 * row + 1024].copy()
            assert np.array_equal(rig.read_device(at, 1024), seen)
        changed = kind is JobKind.STORE
        assert np.array_equal(rig.host, host) != changed
        assert np.array_equal(rig.host[8192:], host[8192:])
        if driver.is_fake:
            assert driver.counters()["copies_2d"] == 0


# -- failures -------------------------------------------------------------------------------


@EACH
def test_an_error_of_the_device_is_raised_and_the_copier_goes_on(
    rig: Rig, driver: Driver, way: str
) -> None:
    if not driver.is_fake:
        pytest.skip("a real device is not broken on purpose")
    runs = runs_in(rig, ODD_WORDS, [2, 8, 5])
    with copying(way, LOAD) as copier:
        driver.inject("copy_error", code=2, after=0)
        with pytest.raises((CudaError, rig.runtime.CUDARuntimeError)):
            submit_and_wait(rig, lambda: copier.submit(runs, rig.stream))
        driver.reset()
        copier.submit(runs, rig.stream)
    rig.sync()
    first = ODD_WORDS.fragments[0]
    at = first.base + 2 * first.stride
    start = ODD_WORDS.part_bytes
    assert np.array_equal(rig.read_device(at, first.bytes), rig.host[start : start + first.bytes])


def submit_and_wait(rig: Rig, submit: Callable[[], None]) -> None:
    submit()
    rig.sync()


@EACH
def test_what_a_queued_copy_needs_lives_until_it_has_run(
    rig: Rig, driver: Driver, way: str
) -> None:
    if driver.is_fake:
        driver.inject("latency", microseconds=3000)
    content = rig.host.copy()
    blocks = list(range(0, 32, 2))
    with copying(way, LOAD) as copier:
        for block in blocks:  # each with lists of its own, all queued before the first has run
            runs = runs_in(rig, PADDED, [block])
            copier.submit(runs, rig.stream)
            del runs
    rig.sync()
    expected = content[PADDED.part_bytes : 2 * PADDED.part_bytes]
    for block in blocks:
        found = [
            rig.read_device(fragment.base + block * fragment.stride, fragment.bytes)
            for fragment in PADDED.fragments
        ]
        assert np.array_equal(np.concatenate(found), expected)
