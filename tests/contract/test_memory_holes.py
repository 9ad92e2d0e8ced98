"""Stores of engine memory that was never written: zeros arrive, and no page is made for it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvd import native
from kvd.core.errors import InvalidArgument
from kvd.core.events import JobKind
from kvd.core.keys import MoverId
from kvd.mover import presence
from kvd.mover.checksums import checksums
from kvd.mover.facts import MoverFacts
from kvd.mover.host_shm import HostSharedMemory
from kvd.mover.layout import FragmentSpec, GroupMap, LocatedPart, MoverConfig, Region
from kvd.processes.mappings import ExtentFiles, Mapping

PAGE = 4096
EXTENT_BYTES = 1 << 20
BLOCKS = 48
OFFSET = 8  # regions need not begin on a page
RESIZER = """
import os, sys
fd, short, long = map(int, sys.argv[1:])
while True:
    os.ftruncate(fd, short)
    os.ftruncate(fd, long)
"""

Store = Callable[[HostSharedMemory, MoverConfig, list[int]], bytes]


def test_of_what_the_kernel_knows_nothing_every_page_is_taken_as_missing() -> None:
    nowhere = presence.Presence(PAGE, 8 * PAGE)  # below what any process may map
    assert nowhere.learn(2, 4).tolist() == [0] * 4
    assert not nowhere.covers(np.array([2 * PAGE]), PAGE)
    assert not nowhere.full


@pytest.mark.parametrize("refused", [False, True])
def test_a_mover_says_where_the_kernel_may_not_tell_it_of_pages(
    memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    if native.library() is None:
        pytest.skip(f"no native library: {native.why_not()}")
    if refused:
        monkeypatch.setattr(presence, "present_pages", lambda *_: False)
    engine = HostSharedMemory(config_of(tmp_path, memory, tensors(1, PAGE)), native.library())
    assert ("mincore" in engine.facts.note) is refused
    assert MoverFacts.unpack(engine.facts.pack()) == engine.facts
    engine.close()


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("engine")
    yield fd
    os.close(fd)


@pytest.fixture(params=["numpy", "native"])
def library(request: pytest.FixtureRequest) -> native.Library | None:
    if request.param == "numpy":
        return None
    if native.library() is None:
        pytest.skip(f"no native library: {native.why_not()}")
    return native.library()


@pytest.fixture
def store(shared_directory: Path) -> Store:
    """Store these engine blocks into slots from 0 on; the bytes of the slots."""
    (shared_directory / "extents").mkdir()
    path = _files(shared_directory).path(0)
    path.write_bytes(b"\xee" * EXTENT_BYTES)

    def run(engine: HostSharedMemory, config: MoverConfig, blocks: list[int]) -> bytes:
        size = config.groups[0].part_bytes
        numbers = np.array(blocks, dtype=np.uint32).reshape(-1, 1)
        places = np.arange(len(blocks), dtype=np.uint64) * np.uint64(size)
        part = LocatedPart(0, np.zeros(len(blocks), dtype=np.uint32), places, numbers)
        engine.open_extent(0)
        if engine.sums_up:
            copied, sums = engine.copy_and_sum(JobKind.STORE, part, lambda: True)
            written = np.fromfile(path, dtype=np.uint64, count=len(blocks) * size // 8)
            assert sums.tolist() == checksums(written.reshape(len(blocks), -1)).tolist()
        else:
            copied = engine.copy(JobKind.STORE, part, lambda: True)
        assert copied == len(blocks) * size
        engine.close_extent(0)
        return path.read_bytes()[: len(blocks) * size]

    return run


def config_of(directory: Path, fd: int, fragments: tuple[FragmentSpec, ...]) -> MoverConfig:
    end = max(f.base + (BLOCKS - 1) * f.stride + f.bytes for f in fragments)
    os.ftruncate(fd, OFFSET + end)
    group = GroupMap(BLOCKS, 1, sum(f.bytes for f in fragments), fragments)
    region = Region(fd, OFFSET, end)
    return MoverConfig(MoverId(1), (region,), (group,), _files(directory))


def _files(directory: Path) -> ExtentFiles:
    return ExtentFiles(directory / "extents", 0, EXTENT_BYTES)


def tensors(count: int, size: int) -> tuple[FragmentSpec, ...]:
    """As layers lie: one tensor after the other."""
    return tuple(FragmentSpec(0, n * BLOCKS * size, size, size) for n in range(count))


def interleaved(count: int, size: int) -> tuple[FragmentSpec, ...]:
    """A block's fragments apart, with bytes of nobody's between them."""
    stride = count * 2 * size
    return tuple(FragmentSpec(0, 2 * n * size, stride, size) for n in range(count))


LAYOUTS = {
    "whole blocks": tensors(1, 16384),
    "layers": tensors(4, 4096),
    "small fragments": tensors(6, 1000),
    "fragments apart": interleaved(3, 2048),
}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def there(fd: int) -> int:
    """Bytes of memory behind the file."""
    return os.fstat(fd).st_blocks * 512


def as_file_says(fd: int, config: MoverConfig, blocks: list[int]) -> bytes:
    return b"".join(
        os.pread(fd, f.bytes, OFFSET + f.base + block * f.stride)
        for block in blocks
        for f in config.groups[0].fragments
    )


@pytest.mark.parametrize("fragments", LAYOUTS.values(), ids=LAYOUTS)
def test_memory_written_here_and_there_is_stored_as_it_is_and_does_not_grow(
    shared_directory: Path,
    memory: int,
    store: Store,
    fragments: tuple[FragmentSpec, ...],
    library: native.Library | None,
) -> None:
    dice = random.Random(str(fragments))
    config = config_of(shared_directory, memory, fragments)
    engine = HostSharedMemory(config, library)
    size = os.fstat(memory).st_size
    for _ in range(30):
        os.pwrite(memory, dice.randbytes(dice.choice([8, 3000, 9000])), dice.randrange(size - 9000))
        before = there(memory)
        first = dice.randrange(BLOCKS)
        blocks = [*range(first, BLOCKS), *dice.sample(range(BLOCKS), 5)][:8]
        assert store(engine, config, blocks) == as_file_says(memory, config, blocks)
        assert there(memory) == before
    engine.close()


def test_memory_that_is_there_is_asked_about_once(
    shared_directory: Path,
    memory: int,
    store: Store,
    library: native.Library | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So what a store costs beside its copy does not grow with the memory, nor come twice."""
    asked: list[int] = []
    learn = presence.Presence.learn

    def counted(self: presence.Presence, first: int, count: int) -> presence.Flags:
        asked.append(first)
        return learn(self, first, count)

    monkeypatch.setattr(presence.Presence, "learn", counted)
    config = config_of(shared_directory, memory, tensors(4, 65536))
    engine = HostSharedMemory(config, library)
    for f in config.groups[0].fragments:
        os.pwrite(memory, b"x" * f.bytes * 8, OFFSET + f.base)
    blocks = [0, 1, 2]
    store(engine, config, blocks)
    assert len(asked) <= 4 * 3
    asked.clear()
    store(engine, config, blocks)
    assert asked == []
    os.pwrite(memory, b"y" * os.fstat(memory).st_size, 0)
    engine.warm_memory(lambda: True)
    asked.clear()
    assert store(engine, config, blocks) == as_file_says(memory, config, blocks)
    assert store(engine, config, list(range(4))) == as_file_says(memory, config, list(range(4)))
    assert asked == []
    engine.close()


def test_memory_that_was_taken_back_since_is_still_stored_right(
    shared_directory: Path, memory: int, store: Store, library: native.Library | None
) -> None:
    config = config_of(shared_directory, memory, tensors(1, 16384))
    engine = HostSharedMemory(config, library)
    os.pwrite(memory, b"x" * 16384 * 4, OFFSET)
    assert store(engine, config, [0, 1]) == b"x" * 32768
    os.ftruncate(memory, 0)
    os.ftruncate(memory, OFFSET + BLOCKS * 16384)
    assert store(engine, config, [0, 1]) == bytes(32768)
    engine.close()


def test_hole_behind_the_files_end_fails_the_store(
    shared_directory: Path, memory: int, store: Store, library: native.Library | None
) -> None:
    config = config_of(shared_directory, memory, tensors(1, 16384))
    engine = HostSharedMemory(config, library)
    os.ftruncate(memory, 16384)
    with pytest.raises(OSError, match="memory ends at byte"):
        store(engine, config, [3])
    engine.close()


def test_no_region_reaches_beyond_what_was_mapped_while_the_engine_resizes_its_file(
    shared_directory: Path, memory: int
) -> None:
    """Two regions of one file are looked at one after the other, and mapped with the first."""
    short, long = 1 << 20, 4 << 20
    group = GroupMap(1, 1, PAGE, (FragmentSpec(1, 0, PAGE, PAGE),))
    regions = (Region(memory, 0, short), Region(memory, short, long - short))
    config = MoverConfig(MoverId(1), regions, (group,), _files(shared_directory))
    arguments = [str(memory), str(short), str(long)]
    resizer = subprocess.Popen([sys.executable, "-c", RESIZER, *arguments], pass_fds=(memory,))
    tries = taken = 0
    try:
        while taken < 500 or tries < 20_000:
            tries += 1
            try:
                engine = HostSharedMemory(config)
            except InvalidArgument:
                continue
            taken += 1
            file, region = engine._regions[1]
            assert region.offset + region.bytes <= len(file.mapping.view), f"after {tries} tries"
            engine.close()
    finally:
        resizer.kill()
        resizer.wait()


def test_holes_take_no_memory_however_many_are_looked_at(memory: int) -> None:
    size = 256 << 30
    os.ftruncate(memory, size)
    mapping = Mapping.of(memory, size)
    known = presence.Presence(mapping.address, size)
    pages = 4 << 20 >> 12
    before = resident_bytes()
    for first in range(0, size // PAGE, 4 * pages):
        assert not known.learn(first, pages).any()
    assert resident_bytes() - before < 4 << 20, "a byte for each page was to be none"
    mapping.close()


def test_pages_far_apart_take_little_memory_each(memory: int) -> None:
    apart = 8 << 30  # whose pages' flags fill a huge page of 2 MiB
    size = 64 * apart
    os.ftruncate(memory, size)
    mapping = Mapping.of(memory, size)
    known = presence.Presence(mapping.address, size)
    starts = np.arange(0, size, apart)
    for start in starts.tolist():
        os.pwrite(memory, b"x" * PAGE, start)
    before = resident_bytes()
    assert known.covers(starts, PAGE)
    assert resident_bytes() - before < 4 << 20
    mapping.close()


def test_a_store_of_tiny_fragments_takes_no_memory_for_each(
    shared_directory: Path, memory: int
) -> None:
    fragments = tuple(FragmentSpec(0, 16 * n, 16 * 4096, 8) for n in range(4096))
    blocks = EXTENT_BYTES * 16 // (8 * 4096)
    whole = blocks * 16 * 4096
    os.ftruncate(memory, whole + PAGE)  # whose last page is a hole
    for at in range(0, whole, EXTENT_BYTES):
        os.pwrite(memory, b"x" * EXTENT_BYTES, at)
    group = GroupMap(blocks, 1, 8 * 4096, fragments)
    region = Region(memory, 0, whole + PAGE)
    engine = HostSharedMemory(
        MoverConfig(MoverId(1), (region,), (group,), _files(shared_directory))
    )
    numbers = np.arange(blocks, dtype=np.uint32)
    part = LocatedPart(0, numbers, numbers.astype(np.uint64), numbers.reshape(-1, 1))
    tracemalloc.start()
    try:
        assert engine._is_present(part)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20, "16 MiB have as many starts"
    finally:
        tracemalloc.stop()
    engine.close()


@pytest.mark.parametrize("beyond", [0, 1, 100])
@pytest.mark.parametrize("kind", JobKind)
def test_the_library_touches_no_byte_behind_a_region_whatever_block_is_named(
    shared_directory: Path, memory: int, kind: JobKind, beyond: int
) -> None:
    """The core has refused such a number before: this is the last look at it."""
    if native.library() is None:
        pytest.skip(f"no native library: {native.why_not()}")
    (shared_directory / "extents").mkdir()
    path = _files(shared_directory).path(0)
    path.write_bytes(b"\xee" * EXTENT_BYTES)
    later = (FragmentSpec(0, 8192 * BLOCKS, 4096, 4096),)  # begins behind another's
    config = config_of(shared_directory, memory, later)
    end = os.fstat(memory).st_size
    os.pwrite(memory, b"\x55" * (end + (2 << 20)), 0)  # and what lies behind is another's
    engine = HostSharedMemory(config, native.library())
    engine.warm_memory(lambda: True)
    engine.open_extent(0)
    places = np.zeros(1, dtype=np.uint64)
    numbers = np.array([[BLOCKS + beyond]], dtype=np.uint32)
    part = LocatedPart(0, np.zeros(1, dtype=np.uint32), places, numbers)
    with pytest.raises(native.BadStretch, match="outside the engine's memory"):
        engine.copy(kind, part, lambda: True)
    engine.close()
    assert os.pread(memory, end + (2 << 20), 0) == b"\x55" * (end + (2 << 20))
    assert path.read_bytes() == b"\xee" * EXTENT_BYTES
