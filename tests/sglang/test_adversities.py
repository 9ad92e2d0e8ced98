"""What may go wrong between SGLang and the daemon: no wrong byte, no thread that hangs."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

from kvd_client.batches import BlockBatches
from kvd_client.integrations.sglang.namespace import keys_of
from kvd_client.integrations.sglang.sequences import MAX_SEQUENCES, Sequences
from tests.client.interrupts import interrupted
from tests.daemon_process import DaemonProcess
from tests.daemons import ROOT
from tests.sglang.conftest import MakeBackend, StartRank
from tests.sglang.prompts import PAGES, keys, prompt
from tests.sglang.rig import (
    HURRIED,
    PAGE_TOKENS,
    Rank,
    host_pool,
    mha_device_pool,
    wait_for,
)

LONG_S = 60.0  # no test's threads may take so long, on however slow a machine


def come(rank: Rank, number: int) -> int:
    """How many pages of a prompt are found and come; each of them has the prompt's bytes."""
    found = rank.backend.batch_exists(keys(number))
    room = rank.pool.alloc(PAGES * PAGE_TOKENS)
    done = rank.backend.batch_get_v1(keys(number)[:found], room[: found * PAGE_TOKENS])
    leading = done.index(False) if False in done else len(done)
    assert not rank.wrong_pages(room, leading * PAGE_TOKENS, seed=number)
    for place, ok in enumerate(done):
        if ok:
            page = rank.pool.get_data_page(int(room[place * PAGE_TOKENS])).flatten()
            assert torch.equal(page, rank.content(number, place))
    rank.free(room)
    return sum(done)


@pytest.fixture
def small(make_daemon: Callable[[], DaemonProcess]) -> Iterator[DaemonProcess]:
    """A daemon whose pool holds a few of the prompts."""
    daemon = make_daemon()
    daemon.pool_bytes = 8 << 20
    daemon.start()
    yield daemon
    daemon.thaw()


def test_pages_that_are_evicted_meanwhile_are_misses_or_right(small: DaemonProcess) -> None:
    ranks = [Rank(small.socket) for _ in range(2)]
    pages: list[int] = []
    try:
        for each in ranks:
            each.wait_usable()

        def work(rank: Rank, seed: int) -> int:
            draw, came = random.Random(seed), 0
            for _ in range(40):
                number = draw.randrange(40)
                stored = rank.fill(prompt(number), seed=number)
                rank.backend.batch_set_v1(keys(number), stored)
                rank.free(stored)
                came += come(rank, draw.randrange(40))
            return came

        with ThreadPoolExecutor(2) as threads:
            pages = list(threads.map(work, ranks, (1, 2), timeout=LONG_S))
    finally:
        for each in ranks:
            each.close()
    assert sum(pages)


def test_a_prompt_of_several_sets_loses_its_tail_before_its_head(small: DaemonProcess) -> None:
    """Where SGLang says what comes before the pages of a set."""
    rank, pages = Rank(small.socket), 200  # SGLang sets 128 at once
    try:
        rank.wait_usable()
        batches, wanted = rank.backend._opened[0], keys_of(keys(900, pages))
        stored = rank.fill(prompt(900, pages), seed=900)
        rank.controller.write_storage(
            stored, prompt(900, pages), hash_value=keys(900, pages), prefix_keys=[]
        )
        done = rank.controller.ack_backup_queue.get(timeout=LONG_S)
        assert done.completed_tokens == pages * PAGE_TOKENS
        rank.free(stored)
        present = np.ones(pages, dtype=np.bool_)
        for number in range(100, 140):
            stored = rank.fill(prompt(number), seed=number)
            assert all(rank.backend.batch_set_v1(keys(number), stored))
            rank.free(stored)
            session = batches._connection.session
            assert session is not None
            present = session.present(0, batches.account, wanted)
            if np.count_nonzero(present) < 100:
                break
        assert 0 < np.count_nonzero(present) < 100
        assert present[: np.count_nonzero(present)].all()
    finally:
        rank.close()


def test_a_set_goes_on_with_the_prompt_whose_last_page_comes_before_it() -> None:
    sequences = Sequences()
    assert sequences.grow("kv", None, ["a"]) == ("", [])
    first, over = sequences.grow("kv", [], ["a", "b"])
    assert first
    assert not over
    of_drafter, _ = sequences.grow("draft", [], ["a", "b"])
    assert sequences.grow("draft", ["a", "b"], ["c"]) == (of_drafter, [])
    assert sequences.grow("kv", ["a", "b"], ["c", "d"]) == (first, [])
    branch, over = sequences.grow("kv", ["a", "b"], ["e"])
    assert branch not in ("", first, of_drafter)
    assert not over
    again, over = sequences.grow("kv", ["x", "b"], ["d"])
    assert over == [first]
    assert again != first


def test_of_prompts_that_may_go_on_the_oldest_is_over() -> None:
    sequences = Sequences()
    names = [sequences.grow("kv", [], [f"{n}"])[0] for n in range(MAX_SEQUENCES)]
    assert sequences.grow("kv", ["0"], ["0 and on"]) == (names[0], [])
    assert sequences.grow("kv", [], ["another"])[1] == [names[1]]


def test_the_daemon_hears_of_prompts_that_are_over(start_rank: StartRank) -> None:
    rank = start_rank()
    batches, stored = rank.backend._opened[0], rank.fill(prompt(1), seed=1)
    start = HiCacheStorageExtraInfo(prefix_keys=[])
    for number in range(MAX_SEQUENCES + 2):
        page = keys(2000 + number)[:1]
        assert rank.backend.batch_set_v1(page, stored[:PAGE_TOKENS], start) == [True]
    assert len(batches._lasting) == MAX_SEQUENCES


def test_pages_are_kept_at_once_whatever_the_store_threshold(
    make_daemon: Callable[[], DaemonProcess],
) -> None:
    """SGLang ends a backup at the first page that is not kept, and its own policy counts uses."""
    daemon = make_daemon()
    daemon.flags["store-threshold"] = 3
    daemon.start()
    rank = Rank(daemon.socket)
    try:
        rank.wait_usable()
        stored = rank.fill(prompt(1), seed=1)
        assert all(rank.backend.batch_set_v1(keys(1), stored))
        assert come(rank, 1) == PAGES
    finally:
        rank.close()


def test_two_that_store_the_same_pages_at_once_both_have_them(start_rank: StartRank) -> None:
    ranks = [start_rank(), start_rank()]
    for number in range(1, 6):
        stored = [rank.fill(prompt(number), seed=number) for rank in ranks]
        with ThreadPoolExecutor(2) as threads:
            done = threads.map(
                lambda rank, indices, which=number: rank.backend.batch_set_v1(keys(which), indices),
                ranks,
                stored,
                timeout=LONG_S,
            )
            assert all(all(each) for each in done)
        for rank, indices in zip(ranks, stored, strict=True):
            assert come(rank, number) == PAGES
            rank.free(indices)


def test_a_batch_may_name_a_page_twice(start_rank: StartRank) -> None:
    rank, (one, other) = start_rank(), keys(6, 2)
    stored = rank.fill(prompt(6, 2), seed=6)
    assert rank.backend.batch_set_v1([one, other, one], torch.cat([stored, stored[:PAGE_TOKENS]]))
    repeated = [one, other, other, one]
    assert rank.backend.batch_exists(repeated) == len(repeated)
    room = rank.pool.alloc(len(repeated) * PAGE_TOKENS)
    assert rank.backend.batch_get_v1(repeated, room) == [True] * len(repeated)
    got = [rank.pool.get_data_page(int(index)).flatten() for index in room[::PAGE_TOKENS]]
    expected = [rank.content(6, place) for place in (0, 1, 1, 0)]
    assert all(map(torch.equal, got, expected))


def test_a_hundred_thousand_pages_may_be_asked_for_at_once(start_rank: StartRank) -> None:
    rank = start_rank()
    there, unknown = keys(7, 2), [f"{number:064x}" for number in range(100_000)]
    assert all(rank.backend.batch_set_v1(there, rank.fill(prompt(7, 2), seed=7)))
    assert rank.backend.batch_exists(unknown) == 0
    assert rank.backend.batch_exists(there + unknown) == 2
    assert rank.backend.batch_exists([*there[:1], *unknown, there[1]]) == 1


def test_memory_that_shrinks_under_the_daemon_costs_its_own_rank_alone(
    start_rank: StartRank,
) -> None:
    rank, other = start_rank(options=HURRIED), start_rank()
    stored = rank.fill(prompt(8), seed=8)
    assert all(rank.backend.batch_set_v1(keys(8), stored))
    memory = rank.pool.allocator.fds[0]
    size = os.fstat(memory).st_size
    os.ftruncate(memory, 4096)
    assert not any(rank.backend.batch_get_v1(keys(8), stored))
    assert not any(rank.backend.batch_set_v1(keys(9), stored))
    assert come(other, 8) == PAGES
    os.ftruncate(memory, size)
    stored = rank.fill(prompt(9), seed=9)
    wait_for(lambda: all(rank.backend.batch_set_v1(keys(9), stored)))
    assert come(other, 9) == PAGES


def test_an_engine_killed_in_mid_set_leaves_whole_pages_or_none(
    start_rank: StartRank, tmp_path_factory: pytest.TempPathFactory
) -> None:
    reader = start_rank()
    began = tmp_path_factory.mktemp("killed") / "began"
    socket = reader.backend.options.socket_path
    command = [sys.executable, "-m", "tests.sglang.storing_engine", socket, str(began), "100"]
    engine = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        wait_for(began.exists, LONG_S)
        wait_for(lambda: reader.backend.batch_exists(keys(101)) > 0, LONG_S)
    finally:
        engine.kill()
        engine.wait()
    last = 100
    while come(reader, last) == PAGES:  # checks every byte
        last += 1
    assert last > 100  # the first was stored before
    stored = reader.fill(prompt(last), seed=last)
    wait_for(lambda: all(reader.backend.batch_set_v1(keys(last), stored)))
    assert come(reader, last) == PAGES


def test_a_daemon_that_stops_in_mid_get_gives_right_pages_or_none(
    make_daemon: Callable[[], DaemonProcess],
) -> None:
    daemon = make_daemon()
    daemon.start()
    rank = Rank(daemon.socket, options=HURRIED)
    try:
        rank.wait_usable()
        for number in range(1, 4):
            stored = rank.fill(prompt(number), seed=number)
            assert all(rank.backend.batch_set_v1(keys(number), stored))
            rank.free(stored)
        draw, until = random.Random(3), time.monotonic() + 2.5

        def interrupt() -> None:
            while time.monotonic() < until:
                time.sleep(draw.uniform(0.0, 0.2))
                daemon.freeze()
                time.sleep(draw.choice([0.001, 0.05, 0.8]))
                daemon.thaw()

        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        while interrupter.is_alive():
            come(rank, draw.randrange(1, 4))
        interrupter.join()
        wait_for(lambda: come(rank, 1) == PAGES, LONG_S)
    finally:
        daemon.thaw()
        rank.close()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_close_that_a_handler_interrupted_is_ended_by_the_next(
    kvd: DaemonProcess, make_backend: MakeBackend, after: bool
) -> None:
    pools = {"kv": host_pool(mha_device_pool()), "draft": host_pool(mha_device_pool(layers=1))}
    before = len(kvd.movers())
    backend = make_backend(pools)
    assert len(kvd.movers()) == before + 2
    with interrupted(BlockBatches, "close", after=after):
        backend.close()
    backend.close()
    wait_for(lambda: len(kvd.movers()) == before)


def test_a_close_from_two_threads_at_once_ends_every_mover(
    kvd: DaemonProcess, make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = {"kv": host_pool(mha_device_pool()), "draft": host_pool(mha_device_pool(layers=1))}
    before = len(kvd.movers())
    backend = make_backend(pools)
    assert len(kvd.movers()) == before + 2
    last, close, both = backend._opened[-1], BlockBatches.close, threading.Barrier(2)

    def close_together(batches: BlockBatches) -> None:
        if batches is last:
            both.wait(LONG_S)
        close(batches)

    monkeypatch.setattr(BlockBatches, "close", close_together)
    with ThreadPoolExecutor(2) as threads:
        for closing in [threads.submit(backend.close) for _ in range(2)]:
            closing.result()
    wait_for(lambda: len(kvd.movers()) == before)
