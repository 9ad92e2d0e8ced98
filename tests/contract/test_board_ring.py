"""The memory that worker, mover and control share: who writes, who reads, and what holds when
the other end is hostile."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvd_proto import layout
from kvd_proto.board import (
    BoardOverrun,
    BoardReader,
    BoardRecord,
    BoardWriter,
    create_board,
    seal_board,
)
from kvd_proto.ring import RingReader, RingWriter, create_ring


@pytest.fixture
def ring_fds() -> Iterator[tuple[int, int]]:
    fds = create_ring(), os.eventfd(0, os.EFD_NONBLOCK)
    yield fds
    for fd in fds:
        os.close(fd)


@pytest.fixture
def board_fd() -> Iterator[int]:
    fd = create_board()
    yield fd
    os.close(fd)


def words_of(fd: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.frombuffer(mmap.mmap(fd, size), dtype=np.uint64)


def record(job: int) -> BoardRecord:
    return BoardRecord(job, 2, 1, job * 3, job * 5)


# -- ready ring -------------------------------------------------------------------------------


def test_ready_jobs_come_out_once_and_in_order(ring_fds: tuple[int, int]) -> None:
    writer, reader = RingWriter(*ring_fds), RingReader(ring_fds[0])
    assert writer.mark_ready([7, 1 << 63])
    assert writer.mark_ready([9])
    assert os.eventfd_read(ring_fds[1]) == 2
    assert reader.take() == [7, 1 << 63, 9]
    assert reader.take() == []


def test_the_ring_goes_round_many_times(ring_fds: tuple[int, int]) -> None:
    writer, reader = RingWriter(*ring_fds), RingReader(ring_fds[0])
    batch, sent = 1500, 0
    for _ in range(20):
        ids = list(range(sent, sent + batch))
        assert writer.mark_ready(ids)
        assert reader.take() == ids
        sent += batch


def test_a_full_ring_refuses_and_loses_nothing(ring_fds: tuple[int, int]) -> None:
    writer, reader = RingWriter(*ring_fds), RingReader(ring_fds[0])
    ids = list(range(layout.RING_ENTRIES))
    assert writer.mark_ready(ids)
    assert not writer.mark_ready([1])
    assert reader.take() == ids
    assert writer.mark_ready([1])
    assert reader.take() == [1]


def test_a_writer_that_comes_back_goes_on_where_the_ring_stands(ring_fds: tuple[int, int]) -> None:
    reader = RingReader(ring_fds[0])
    RingWriter(*ring_fds).mark_ready([1, 2])
    assert reader.take() == [1, 2]
    RingWriter(*ring_fds).mark_ready([3])
    assert reader.take() == [3]


def test_two_threads_mark_ready_without_losing_one(ring_fds: tuple[int, int]) -> None:
    writer, reader = RingWriter(*ring_fds), RingReader(ring_fds[0])

    def mark(first: int) -> None:
        for job in range(first, first + 2000):
            assert writer.mark_ready([job])

    threads = [threading.Thread(target=mark, args=(first,)) for first in (0, 100_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = reader.take()
    assert sorted(taken) == [*range(2000), *range(100_000, 102_000)]


@pytest.mark.parametrize("tail", [layout.RING_ENTRIES + 1, 1 << 40, (1 << 64) - 1])
def test_a_senseless_tail_is_dropped_and_the_ring_goes_on(
    ring_fds: tuple[int, int], tail: int
) -> None:
    reader = RingReader(ring_fds[0])
    words = words_of(ring_fds[0], layout.RING_BYTES)
    words[layout.RING_TAIL_OFFSET // 8] = tail
    assert reader.take() == []
    assert RingWriter(*ring_fds).mark_ready([5])
    assert reader.take() == [5]


def test_a_scribbled_head_is_the_workers_own_loss(ring_fds: tuple[int, int]) -> None:
    writer, reader = RingWriter(*ring_fds), RingReader(ring_fds[0])
    words_of(ring_fds[0], layout.RING_BYTES)[layout.RING_HEAD_OFFSET // 8] = 12345
    assert not writer.mark_ready([1])  # as if the ring were full: the RPC remains
    assert reader.take() == []


def test_no_job_is_abandoned_before_the_worker_says_so(ring_fds: tuple[int, int]) -> None:
    writer, reader = RingWriter(*ring_fds), RingReader(ring_fds[0])
    jobs = (0, 1, layout.RING_ENTRIES - 1, layout.RING_ENTRIES, (1 << 64) - 1)
    assert not any(reader.abandoned(job) for job in jobs)
    writer.abandon(0)
    assert [job for job in jobs if reader.abandoned(job)] == [0]
    writer.abandon(1)
    assert not reader.abandoned(layout.RING_ENTRIES + 1)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_abandoned_job_stays_abandoned_when_another_shares_its_word(
    ring_fds: tuple[int, int], order: tuple[int, int]
) -> None:
    writer, reader = RingWriter(*ring_fds), RingReader(ring_fds[0])
    old, new = 5, 5 + 3 * layout.RING_ENTRIES
    for place in order:
        writer.abandon((old, new)[place])
    assert reader.abandoned(old)
    assert reader.abandoned(new)
    assert not reader.abandoned(new + layout.RING_ENTRIES)


def test_the_ring_cannot_be_resized_under_the_mover(ring_fds: tuple[int, int]) -> None:
    for size in (0, layout.RING_BYTES * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(ring_fds[0], size)


@pytest.mark.parametrize("end", [RingReader, lambda fd: RingWriter(fd, -1)])
def test_memory_that_is_no_ring_is_refused(end: type[RingReader]) -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, layout.RING_BYTES)
    with pytest.raises(ValueError, match="not a ready ring"):
        end(fd)
    os.close(fd)


@pytest.mark.parametrize(("make", "end"), [(create_ring, RingReader), (create_board, BoardReader)])
@pytest.mark.parametrize("is_shorter", [False, True])
def test_memory_of_another_layout_is_refused_with_what_to_install(
    make: Callable[[], int], end: Callable[[int], object], is_shorter: bool
) -> None:
    ours = make()
    other = os.memfd_create("other")
    os.ftruncate(other, layout.HEADER_BYTES if is_shorter else os.fstat(ours).st_size)
    words = np.frombuffer(os.pread(ours, layout.HEADER_BYTES, 0), dtype=np.uint64).copy()
    words[1] = layout.LAYOUT_VERSION + 1
    os.pwrite(other, words.tobytes(), 0)
    with pytest.raises(ValueError, match="layout 2, where this client reads 1: install the kvd-cl"):
        end(other)
    words[1:3] = layout.LAYOUT_VERSION, 7
    os.pwrite(other, words.tobytes(), 0)
    with pytest.raises(ValueError, match="it begins with"):
        end(other)
    os.close(ours)
    os.close(other)


# -- board ------------------------------------------------------------------------------------


def test_records_of_both_lanes_are_polled_once_and_in_order(board_fd: int) -> None:
    mover = BoardWriter(board_fd, layout.LANE_MOVER)
    control = BoardWriter(board_fd, layout.LANE_CONTROL)
    reader = BoardReader(board_fd)
    for job in (1, 2):
        mover.post(record(job))
    control.post(record(8))
    assert reader.poll() == [record(1), record(2), record(8)]
    assert reader.poll() == []


def test_the_board_goes_round_many_times(board_fd: int) -> None:
    writer, reader = BoardWriter(board_fd, layout.LANE_CONTROL), BoardReader(board_fd)
    seen: list[int] = []
    for job in range(3 * layout.BOARD_RECORDS):
        writer.post(record(job))
        if job % 5000 == 0:
            seen += [found.job_id for found in reader.poll()]
    seen += [found.job_id for found in reader.poll()]
    assert seen == list(range(3 * layout.BOARD_RECORDS))


def test_a_reader_exactly_one_board_behind_has_lost_nothing(board_fd: int) -> None:
    writer, reader = BoardWriter(board_fd, layout.LANE_MOVER), BoardReader(board_fd)
    for job in range(layout.BOARD_RECORDS):
        writer.post(record(job))
    assert len(reader.poll()) == layout.BOARD_RECORDS


def test_a_reader_that_was_lapped_hears_that_records_are_lost(board_fd: int) -> None:
    writer, reader = BoardWriter(board_fd, layout.LANE_MOVER), BoardReader(board_fd)
    for job in range(layout.BOARD_RECORDS + 1):
        writer.post(record(job))
    with pytest.raises(BoardOverrun):
        reader.poll()


def test_a_sealed_board_is_still_written_by_its_writers_and_by_nobody_else(board_fd: int) -> None:
    writer = BoardWriter(board_fd, layout.LANE_MOVER)
    seal_board(board_fd)
    reader = BoardReader(board_fd)
    writer.post(record(4))
    assert reader.poll() == [record(4)]
    with pytest.raises(PermissionError):
        mmap.mmap(board_fd, layout.BOARD_BYTES)
    with pytest.raises(PermissionError):
        os.pwrite(board_fd, b"x", 0)
    for size in (0, layout.BOARD_BYTES * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(board_fd, size)


def test_threads_that_post_at_once_lose_no_record(board_fd: int) -> None:
    writer, reader = BoardWriter(board_fd, layout.LANE_MOVER), BoardReader(board_fd)

    def post(first: int) -> None:
        for job in range(first, first + 2000):
            writer.post(record(job))

    threads = [threading.Thread(target=post, args=(first,)) for first in (0, 10_000)]
    for thread in threads:
        thread.start()
    seen: list[BoardRecord] = []
    while len(seen) < 4000 and any(thread.is_alive() for thread in threads):
        seen += reader.poll()
    for thread in threads:
        thread.join()
    seen += reader.poll()
    assert sorted(seen) == [record(j) for j in (*range(2000), *range(10_000, 12_000))]
