"""The page says present for what is there, and nobody but the daemon can write to it."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvd.pool.index_page import IndexPage
from kvd_proto import layout
from kvd_proto.page import PageReader
from kvd_proto.tags import (
    bucket_mask,
    bucket_pair,
    bucket_pair_of,
    hash_words,
    mix,
    tag_of,
    tags_of,
)

pytestmark = pytest.mark.usefixtures("both_ways")


@pytest.fixture
def page() -> Iterator[IndexPage]:
    page = IndexPage("kvd-test-page", 4096)
    yield page
    page.close()


@pytest.fixture
def reader(page: IndexPage) -> Iterator[PageReader]:
    reader = PageReader(page.read_only_fd)
    yield reader
    reader.close()


def tags(first: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return mix(np.arange(first + 1, first + count + 1, dtype=np.uint64))


def test_tag_that_is_in_twice_is_there_until_it_was_removed_twice(
    page: IndexPage, reader: PageReader
) -> None:
    some = tags(0, 100)
    page.insert(some)
    page.insert(some)
    page.remove(some)
    assert reader.probe(some).all()
    page.insert(some)
    page.remove(np.concatenate([some, some[:50]]))
    assert not reader.probe(some[:50]).any()
    assert reader.probe(some[50:]).all()


def test_a_full_page_holds_every_tag_and_no_other(page: IndexPage, reader: PageReader) -> None:
    resident = tags(0, 4096)
    assert page.insert(resident) == 0
    assert reader.probe(resident).all()
    assert not reader.probe(tags(4096, 4096)).any()
    page.remove(resident)
    assert not reader.probe(resident).any()
    assert page.spilled == 0


def test_many_rounds_of_eviction_spill_nothing(page: IndexPage, reader: PageReader) -> None:
    resident = tags(0, 4096)
    page.insert(resident)
    order = np.random.default_rng(3)
    for round_number in range(1, 40):
        order.shuffle(resident)
        fresh = tags(round_number * 4096, 1024)
        page.remove(resident[:1024])
        assert page.insert(fresh) == 0
        assert not reader.probe(resident[:1024]).any()
        resident[:1024] = fresh
    assert reader.probe(resident).all()


def test_tags_that_share_both_buckets_spill_and_are_counted(
    page: IndexPage, reader: PageReader
) -> None:
    crowd = np.arange(1, 101, dtype=np.uint64) << np.uint64(20)
    first, second = bucket_pair(crowd, bucket_mask(page.buckets))
    places = 8 * len({*first.tolist(), *second.tolist()})
    spilled = page.insert(crowd)
    present = reader.probe(crowd)
    assert spilled == page.spilled == 100 - int(present.sum())
    assert 0 < int(present.sum()) <= places
    page.remove(crowd[~present])
    assert page.spilled == 0
    page.remove(crowd[present])
    assert not reader.probe(crowd).any()


def test_a_tag_may_be_removed_more_often_than_it_can_be_there(
    page: IndexPage, reader: PageReader
) -> None:
    other = tags(0, 1)
    crowd = np.repeat(tags(1, 1), 5000)
    assert page.insert(np.concatenate([other, crowd])) == 5000 - 16
    page.remove(crowd)
    assert not reader.probe(crowd[:1]).any()
    assert reader.probe(other).all()
    assert (page.tags, page.spilled) == (1, 0)


@pytest.mark.parametrize("hash_bytes", [1, 8, 13, 32, 64])
def test_single_and_batched_probes_agree(
    page: IndexPage, reader: PageReader, hash_bytes: int
) -> None:
    draw = np.random.default_rng(hash_bytes)
    hashes = sorted({draw.bytes(hash_bytes) for _ in range(60)})
    seed = 0xFEED_FACE_CAFE_BEEF
    words = hash_words(b"".join(hashes), hash_bytes)
    all_tags = tags_of(words, seed)
    assert [tag_of(h, seed) for h in hashes] == all_tags.tolist()
    pairs = [bucket_pair_of(int(t), page.buckets) for t in all_tags]
    first, second = bucket_pair(all_tags, bucket_mask(page.buckets))
    assert pairs == list(zip(first.tolist(), second.tolist(), strict=True))
    page.insert(all_tags[::2])
    singly = [reader.probe_first(h, seed) for h in hashes]
    assert singly == reader.probe(all_tags).tolist()
    assert singly[::2] == [True] * len(singly[::2])
    other_scope = 0x0123_4567_89AB_CDEF
    assert not any(reader.probe_first(h, other_scope) for h in hashes)


def test_probing_nothing_answers_nothing(reader: PageReader) -> None:
    assert reader.probe(np.zeros(0, dtype=np.uint64)).shape == (0,)


def test_room_and_closed_are_read_live(page: IndexPage, reader: PageReader) -> None:
    page.set_room([5] * layout.PAGE_ROOM_GROUPS)
    assert reader.room(0) == reader.room(layout.PAGE_ROOM_GROUPS - 1) == 5
    assert not reader.closed


def test_the_granted_descriptor_can_not_be_written_grown_or_unsealed(page: IndexPage) -> None:
    fd = page.read_only_fd
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 4096)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"x", 0)
    # The daemon's own user may reopen it for writing; the seals hold all the same.
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        for size in (0, 2 * page.page_bytes):
            with pytest.raises(PermissionError):
                os.ftruncate(again, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(again, 1033, 0x8)
    finally:
        os.close(again)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_not_open_the_granted_descriptor_for_writing(page: IndexPage) -> None:
    reads = subprocess.run(
        ["/bin/sh", "-c", "head -c 8; : <>/proc/self/fd/0"],
        stdin=page.read_only_fd,
        user=65534,
        capture_output=True,
        text=True,
        check=False,
    )
    assert reads.stdout == "KVDPAGE1"
    assert reads.returncode
    assert "Permission denied" in reads.stderr


@pytest.mark.parametrize(
    ("offset", "content", "why"),
    [
        (0, b"KVDPAGE2", "not an index page"),
        (8, b"\x01", "layout 1, where this client reads 2: install the kvd-client"),
        (32, b"\xff\xff\x01", "tables up to level"),
        (32, b"\x07", "tables up to level 7"),
    ],
)
def test_a_foreign_memory_is_no_page(offset: int, content: bytes, why: str) -> None:
    fd = os.memfd_create("kvd-test-foreign")
    try:
        os.ftruncate(fd, layout.page_bytes(6))
        header = (layout.PAGE_MAGIC, layout.PAGE_VERSION, 6, 0, 6)
        os.pwrite(fd, np.array(header, dtype=np.uint64).tobytes(), 0)
        PageReader(fd).close()
        os.pwrite(fd, content, offset)
        with pytest.raises(ValueError, match=why):
            PageReader(fd)
    finally:
        os.close(fd)


def test_a_table_word_of_nonsense_leads_nowhere_else(page: IndexPage) -> None:
    """The daemon's own user could write one."""
    reader = PageReader(page.read_only_fd)
    for word in (0, 5, 255, 2**64 - 1):
        page._words[layout.PAGE_TABLE_OFFSET // 8] = word
        assert not reader.probe(tags(0, 10)).any()
        assert not reader.probe_first(bytes(32), 1)
    reader.close()


class PageLikeASet(RuleBasedStateMachine):
    """Whatever is inserted and removed in whatever batches, a tag is present or it was spilled."""

    def __init__(self) -> None:
        super().__init__()
        self.page = IndexPage("kvd-test-page", 64)
        self.reader = PageReader(self.page.read_only_fd)
        self.resident: list[int] = []
        self.next_tag = 0

    @rule(count=st.integers(1, 24))
    def insert(self, count: int) -> None:
        count = min(count, 64 - len(self.resident))
        fresh = tags(self.next_tag, count)
        self.next_tag += count
        self.page.insert(fresh)
        self.resident += fresh.tolist()

    @rule(choice=st.randoms(use_true_random=False), count=st.integers(1, 24))
    def remove(self, choice: object, count: int) -> None:
        choice.shuffle(self.resident)  # type: ignore[attr-defined]
        gone, self.resident = self.resident[:count], self.resident[count:]
        self.page.remove(np.array(gone, dtype=np.uint64))
        assert not self.reader.probe(np.array(gone, dtype=np.uint64)).any()

    @invariant()
    def every_tag_is_present_or_spilled(self) -> None:
        present = self.reader.probe(np.array(self.resident, dtype=np.uint64))
        assert int(present.sum()) + self.page.spilled == len(self.resident)

    def teardown(self) -> None:
        self.reader.close()
        self.page.close()


def test_a_page_is_like_a_set() -> None:
    bounds = settings(max_examples=30, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(PageLikeASet, settings=bounds)


READER = """
import sys, time
import numpy as np
from kvd_proto.page import PageReader
from kvd_proto.tags import mix
stable = mix(np.arange(1, 2049, dtype=np.uint64))
absent = mix(np.arange(10**9, 10**9 + 2048, dtype=np.uint64))
reader = PageReader(int(sys.argv[1]))
print("reading", flush=True)
probes = missed = invented = 0
while not reader.closed:
    missed += 2048 - int(reader.probe(stable).sum())
    invented += int(reader.probe(absent).sum())
    probes += 1
print(probes, missed, invented)
"""


def test_a_reader_beside_the_writer_never_misses_what_stays() -> None:
    page = IndexPage("kvd-test-page", 4096)
    stable = tags(0, 2048)
    page.insert(stable)
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(page.read_only_fd)],
        stdout=subprocess.PIPE,
        pass_fds=[page.read_only_fd],
        text=True,
        cwd=Path(__file__).parents[2],
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
        end = time.monotonic() + 0.5
        rounds = 0
        while time.monotonic() < end or rounds <= 10:
            passing = tags(5000 + rounds * 2048, 2048)
            page.insert(passing)
            page.remove(passing)
            rounds += 1
        page.close()
        probes, missed, invented = (int(n) for n in reader.stdout.readline().split())
    assert rounds > 10
    assert probes > 10
    assert (missed, invented) == (0, 0)
