"""The memory of an index page follows the tags in it, and whoever mapped it once misses none."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvd.core.keys import U64
from kvd.pool import index_page
from kvd.pool.index_page import IndexPage
from kvd.runtime.batching import PIECE_KEYS
from kvd_proto import layout
from kvd_proto.page import TRIES, PageReader
from kvd_proto.tags import hash_words, mix, tags_of

pytestmark = pytest.mark.usefixtures("both_ways")
MANY = 1 << 17
SMALL = layout.HEADER_BYTES + 4096  # of a page without tags
BYTES_A_TAG = 64  # at most, once nothing is left to do


@pytest.fixture
def page() -> Iterator[IndexPage]:
    page = IndexPage("kvd-test-page", MANY)
    yield page
    page.close()


@pytest.fixture
def reader(page: IndexPage) -> Iterator[PageReader]:
    reader = PageReader(page.read_only_fd)
    yield reader
    reader.close()


def tags(first: int, count: int) -> U64:
    return mix(np.arange(first + 1, first + count + 1, dtype=np.uint64))


def insert(page: IndexPage, all_tags: U64) -> int:
    """As stores do: in pieces. How many were spilled."""
    starts = range(0, len(all_tags), PIECE_KEYS)
    return sum(page.insert(all_tags[start : start + PIECE_KEYS]) for start in starts)


def can_mend(page: IndexPage) -> bool:
    return page.has_room_again


def settle(page: IndexPage, units: int = 4096) -> int:
    """How many pieces of upkeep that took."""
    pieces = 0
    while page.unsettled:
        page.upkeep(units)
        pieces += 1
        assert pieces < 100_000
    return pieces


def test_memory_grows_and_shrinks_with_the_tags_and_not_with_the_pool(
    page: IndexPage, reader: PageReader
) -> None:
    assert page.taken == SMALL
    resident = tags(0, MANY)
    for count in (1000, 20_000, MANY):
        assert insert(page, resident[page.tags : count]) == 0
        settle(page)
        assert page.taken <= BYTES_A_TAG * count + SMALL
        assert reader.probe(resident[:count]).all()
    assert page.taken >= 16 * MANY
    for left in (20_000, 1000, 0):
        page.remove(resident[left : page.tags])
        settle(page)
        assert page.taken <= BYTES_A_TAG * left + SMALL
        assert reader.probe(resident[:left]).all()
        assert not reader.probe(resident[left:]).any()
    assert page.taken == SMALL


def test_a_full_page_is_as_large_as_all_its_tags_want_it(page: IndexPage) -> None:
    assert insert(page, tags(0, MANY)) == 0
    settle(page)
    assert page.taken == layout.HEADER_BYTES + 16 * MANY


def test_no_insertion_does_more_than_its_share_of_a_growth(
    page: IndexPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted: bytes had, and tags copied, by one call with 256 tags."""
    work = {"bytes": 0, "tags": 0}
    copy, allocate = page._add_to_next, page._allocate

    def counted_copy(some: U64) -> None:
        work["tags"] += len(some)
        copy(some)

    def counted_allocate(first: int, size: int) -> None:
        work["bytes"] += size
        allocate(first, size)

    monkeypatch.setattr(page, "_add_to_next", counted_copy)
    monkeypatch.setattr(page, "_allocate", counted_allocate)
    most = {"bytes": 0, "tags": 0}
    for first in range(0, MANY, PIECE_KEYS):
        work.update(bytes=0, tags=0)
        assert page.insert(tags(first, PIECE_KEYS)) == 0
        most = {name: max(count, most[name]) for name, count in work.items()}
    assert page._phase is index_page._Phase.SETTLED
    assert 0 < most["tags"] <= 40 * PIECE_KEYS  # a small table is changed whole
    assert 0 < most["bytes"] <= 1 << 20


def test_a_piece_of_upkeep_is_bounded_and_many_pages_take_turns() -> None:
    pages = [IndexPage("kvd-test-page", MANY) for _ in range(20)]
    for each in pages:
        insert(each, tags(0, 5000))
        each.remove(tags(0, 5000))
    for each in pages:
        before = each.taken
        assert each.upkeep(4) <= 4
        assert each.taken > before - (64 << 10)
    assert sum(settle(each, 400) for each in pages) <= 20 * 8
    assert {each.taken for each in pages} == {SMALL}
    for each in pages:
        each.close()


def test_without_memory_for_a_larger_table_tags_spill_and_later_ones_find_room(
    page: IndexPage, reader: PageReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    insert(page, tags(0, 256))
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refuse)
        spilled = insert(page, tags(256, 10_000))
        present = reader.probe(tags(0, 10_256))
        assert page.spilled == spilled == 10_256 - int(present.sum())
        assert reader.probe(tags(0, 256)).all()
        assert page.taken <= 64 << 10
        for _ in range(3 * index_page.RETRY_CALLS):
            page.upkeep(4096)
        assert page.taken <= 64 << 10
    settle(page)
    assert page.insert(tags(20_000, 1000)) == 0
    assert reader.probe(tags(20_000, 1000)).all()
    assert reader.probe(tags(0, 10_256)).tolist() == present.tolist()
    page.remove(tags(0, 10_256))
    page.remove(tags(20_000, 1000))
    assert (page.tags, page.spilled) == (0, 0)
    settle(page)
    assert page.taken == SMALL


def test_what_was_spilled_is_mended_once_there_is_room_and_nothing_stands_twice(
    page: IndexPage, reader: PageReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refuse)
        assert insert(page, tags(0, 10_000)) > 9000
        assert can_mend(page) is False
    settle(page)
    assert can_mend(page)
    page.remove(tags(9000, 1000))
    for first in range(0, 9000, 1000):  # who mends names every block, those that are there too
        assert page.mend(tags(first, 1000)) > 0 or not page.spilled
        if not can_mend(page):
            break
    assert (page.tags, page.spilled) == (9000, 0)
    assert reader.probe(tags(0, 9000)).all()
    assert not reader.probe(tags(9000, 1000)).any()
    page.remove(tags(0, 9000))
    assert not reader.probe(tags(0, 9000)).any()
    settle(page)
    assert (page.tags, page.spilled, page.taken) == (0, 0, SMALL)


def test_what_was_spilled_is_mended_when_other_blocks_have_gone(
    page: IndexPage, reader: PageReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory ever comes; the small table has room for what is left."""

    def refuse(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    insert(page, tags(0, 2000))
    left = tags(0, 2000)[~reader.probe(tags(0, 2000))][:100]
    page.remove(np.setdiff1d(tags(0, 2000), left))
    assert (page.tags, page.spilled) == (0, 100)
    while page.unsettled:
        page.upkeep(4096)
    assert page.has_room_again
    assert page.mend(left) == 100
    assert reader.probe(left).all()


def test_a_table_that_shrinks_stays_where_many_tags_come(
    page: IndexPage, reader: PageReader
) -> None:
    insert(page, tags(0, 50_000))
    settle(page)
    page.remove(tags(100, 49_900))
    while page._phase is not index_page._Phase.COPYING:
        page.upkeep(1)
    assert insert(page, tags(100_000, 40_000)) == 0
    settle(page)
    assert page.spilled == 0
    assert reader.probe(tags(0, 100)).all()
    assert reader.probe(tags(100_000, 40_000)).all()
    assert page.taken <= BYTES_A_TAG * 40_100 + SMALL


def test_what_is_removed_while_the_table_changes_is_gone_from_the_next_one(
    page: IndexPage, reader: PageReader
) -> None:
    resident = tags(0, 30_000)
    assert insert(page, resident) == 0
    settle(page)
    page.remove(resident[5000:])
    while page._phase is not index_page._Phase.COPYING:
        page.upkeep(1)
    for first in range(4000, 0, -1000):
        for _ in range(20):
            page.upkeep(1)
        assert page._phase is index_page._Phase.COPYING
        page.remove(resident[first : first + 1000])
    settle(page)
    assert reader.probe(resident[:1000]).all()
    assert not reader.probe(resident[1000:]).any()
    assert (page.tags, page.spilled) == (1000, 0)


def test_tag_of_two_blocks_stays_one_of_two_while_the_table_changes(
    page: IndexPage, reader: PageReader
) -> None:
    """As while a namespace that was cleared is stored again."""
    twice, passing = tags(0, 2000), tags(10_000, 40_000)
    for some in (twice, passing, twice):
        assert insert(page, some) == 0
    settle(page)
    page.remove(passing)
    while page._copied < page.buckets // 3 or page._phase is not index_page._Phase.COPYING:
        page.upkeep(1)
    page.remove(twice[:500])
    settle(page)
    assert reader.probe(twice).all()
    page.remove(twice)
    settle(page)
    assert not reader.probe(twice[:500]).any()
    assert reader.probe(twice[500:]).all()
    page.remove(twice[500:])
    assert not reader.probe(twice).any()


def test_what_readers_touch_beside_the_table_is_given_back(page: IndexPage) -> None:
    reader = PageReader(page.read_only_fd)
    insert(page, tags(0, 100))
    assert not np.array(reader._words[512::512]).all()  # a client that reads all there is
    assert page.taken > layout.page_bytes(10)
    for _ in range(3):
        page.take_strays()
    assert page.taken <= SMALL + 8192
    assert reader.probe(tags(0, 100)).all()
    reader.close()


class Between:
    """Something of a reader's; before each look at it the writer does something."""

    def __init__(self, under: Any, step: Callable[[], None]) -> None:
        self._under = under
        self._step = step

    def __getitem__(self, key: Any) -> Any:
        self._step()
        return self._under[key]

    def take(self, indices: Any, axis: int) -> Any:
        self._step()
        return self._under.take(indices, axis=axis)

    def release(self) -> None:
        self._under.release()


class Interrupted(PageReader):
    """A reader that is interrupted at each of its looks at the page."""

    def __init__(self, fd: int, step: Callable[[], None]) -> None:
        self._step = step
        super().__init__(fd)
        self._words: Any = Between(self._words, step)

    def _table_of(self, word: int) -> Any:
        table = super()._table_of(word)
        rows: Any = Between(table.rows, self._step)
        return table._replace(rows=rows)


Step = tuple[str, Any]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("upkeep"), st.sampled_from([1, 1, 8, 100, 100_000])),
        st.tuples(st.just("insert"), st.integers(1, 600)),
        st.tuples(st.just("remove"), st.floats(0, 1)),
    ),
    max_size=12,
)
SEED = 7
MOST = 1 << 14


class Writer:
    """Does what it is told, a step at a time, and knows what is resident."""

    def __init__(self, choice: random.Random) -> None:
        self.page = IndexPage("kvd-test-page", MOST)
        self.resident: dict[int, bytes] = {}  # hash by tag
        self.steps: list[Step] = []
        self._numbers = 0
        self.choice = choice

    def step(self) -> None:
        if self.steps:
            what, how_much = self.steps.pop(0)
            getattr(self, what)(how_much)

    def upkeep(self, units: int) -> None:
        self.page.upkeep(units)

    def run(self, act: Callable[[], None]) -> None:
        act()

    def insert(self, count: int) -> None:
        count = min(count, MOST - len(self.resident))
        numbers = np.arange(self._numbers, self._numbers + count, dtype=np.uint64)
        self._numbers += count
        fresh = tags_of(numbers.reshape(-1, 1), SEED)
        insert(self.page, fresh)
        for tag, number in zip(fresh.tolist(), numbers.tolist(), strict=True):
            self.resident[tag] = number.to_bytes(8, "little")

    def remove(self, share: float) -> None:
        gone = self.choice.sample(list(self.resident), int(share * len(self.resident)))
        self.page.remove(np.array(gone, dtype=np.uint64))
        for tag in gone:
            del self.resident[tag]


def ask(reader: PageReader, hashes: list[bytes], *, singly: bool) -> list[bool]:
    if singly:
        return [reader.probe_first(each, SEED) for each in hashes]
    found: list[bool] = reader.probe(tags_of(hash_words(b"".join(hashes), 8), SEED)).tolist()
    return found


@settings(deadline=None, max_examples=60)
@given(
    rounds=st.lists(st.tuples(STEPS, STEPS), min_size=1, max_size=5),
    singly=st.booleans(),
    seed=st.integers(0, 2**32),
)
@example(  # numpy's batches were as large as the table, and one tag found its bucket full
    rounds=[
        (
            [],
            [
                ("insert", 508),
                ("remove", 0.6875),
                ("remove", 0.875),
                ("upkeep", 1),
                ("insert", 126),
            ],
        )
    ],
    singly=False,
    seed=50470795,
)
def test_what_stays_is_found_whatever_the_writer_does_between_two_looks(
    rounds: list[tuple[list[Step], list[Step]]], singly: bool, seed: int
) -> None:
    with scripted(random.Random(seed)) as (writer, reader):
        play(writer, reader, rounds, singly=singly)
        settle(writer.page)
        most = BYTES_A_TAG * len(writer.resident) + SMALL + index_page.STRAY_BYTES
        assert writer.page.taken <= most


@contextlib.contextmanager
def scripted(choice: random.Random) -> Iterator[tuple[Writer, PageReader]]:
    writer = Writer(choice)
    reader = Interrupted(writer.page.read_only_fd, writer.step)
    try:
        yield writer, reader
    finally:
        writer.steps = []
        reader.close()
        writer.page.close()


def play(
    writer: Writer,
    reader: PageReader,
    rounds: list[tuple[list[Step], list[Step]]],
    *,
    singly: bool,
) -> None:
    writer.insert(40)
    for before, while_asked in rounds:
        for step in before:
            writer.steps = [step]
            writer.step()
        asked = dict(writer.resident)
        if singly:
            asked = dict(writer.choice.sample(list(asked.items()), min(8, len(asked))))
        writer.steps = list(while_asked)
        found = ask(reader, list(asked.values()), singly=singly)
        stayed = [tag in writer.resident for tag in asked]
        assert not writer.page.spilled
        assert [f for f, s in zip(found, stayed, strict=True) if s] == [True] * sum(stayed)
        writer.steps = []


def test_a_table_that_went_and_came_back_is_not_taken_for_one_that_stayed() -> None:
    """Tags may stand elsewhere in it by then."""
    with scripted(random.Random(1)) as (writer, reader):
        writer.insert(300)
        page, stable = writer.page, dict(writer.resident)

        def go_and_come_back() -> None:
            insert(page, tags(10**6, 8000))
            settle(page)
            page.remove(tags(10**6, 8000))
            settle(page)

        go_and_come_back()
        level = page._level
        for before in (1, 2, 3):  # of a probe's first looks: at the word, and at each bucket
            wait: list[Step] = [("run", lambda: None)] * before
            writer.steps = [*wait, ("run", go_and_come_back)]
            assert all(ask(reader, list(stable.values()), singly=False))
            assert not writer.steps
            assert page._level == level


def test_a_reader_that_the_table_outruns_asks_by_a_call() -> None:
    absent = (10**9).to_bytes(8, "little")
    change: list[Step] = [("insert", 8000), ("remove", 1.0), ("upkeep", 100_000)]
    with scripted(random.Random(1)) as (writer, reader):
        for singly in (True, False):
            assert ask(reader, [absent], singly=singly) == [False]
            writer.steps = change * 4 * TRIES
            assert ask(reader, [absent], singly=singly) == [True]
            assert writer.steps
            writer.steps = []


READER = """
import sys
import numpy as np
from kvd_proto.page import PageReader
from kvd_proto.tags import mix, tags_of
stable = mix(np.arange(1, 513, dtype=np.uint64))
absent = mix(np.arange(10**9, 10**9 + 64, dtype=np.uint64))
reader = PageReader(int(sys.argv[1]))
print("reading", flush=True)
probes = missed = invented = 0
tables = set()
while not reader.closed:
    missed += 512 - int(reader.probe(stable).sum())
    invented += int(reader.probe(absent).sum())
    tables.add(reader._table.word)
    probes += 1
print(probes, missed, invented, len(tables))
"""


def test_a_process_that_reads_beside_growing_and_shrinking_tables_misses_nothing() -> None:
    page = IndexPage("kvd-test-page", MANY)
    page.insert(tags(0, 512))
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(page.read_only_fd)],
        stdout=subprocess.PIPE,
        pass_fds=[page.read_only_fd],
        text=True,
        cwd=Path(__file__).parents[2],
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
        for number in range(1, 41):
            passing = tags(1000 + number * 20_000, 20_000)
            assert insert(page, passing) == 0
            page.remove(passing)
            settle(page)
        page.close()
        probes, missed, invented, tables = map(int, reader.stdout.readline().split())
    assert probes > 10
    assert tables > 10
    assert (missed, invented) == (0, 0)


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("power", [0, 3, 6, 10, 17])
def test_a_level_has_as_many_buckets_as_were_wanted_and_the_one_below_has_not(
    power: int, more: int
) -> None:
    wanted = (1 << power) + more
    level = layout.page_level(wanted)
    assert layout.page_table_span(level)[1] // 64 >= wanted
    if level > layout.PAGE_SMALLEST_LEVEL:
        assert layout.page_table_span(level - 1)[1] // 64 < wanted
