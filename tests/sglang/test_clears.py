"""What SGLang's "clear the storage" reaches, and what it leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvd_client.integrations.sglang import namespace
from kvd_client.integrations.sglang.weights import watch
from tests.sglang.conftest import StartRank
from tests.sglang.prompts import PAGES, keys, prompt
from tests.sglang.rig import Rank, mla_device_pool


def store(rank: Rank, number: int) -> None:
    stored = rank.fill(prompt(number), seed=number)
    assert all(rank.backend.batch_set_v1(keys(number), stored))
    rank.free(stored)


def clear(rank: Rank) -> None:
    assert rank.backend.clear()
    rank.wait_usable()


def started_with(**arguments: Any) -> SimpleNamespace:
    """SGLang's arguments, as far as they matter here."""
    return SimpleNamespace(model_path="m", **{"random_seed": 1, "port": 30000} | arguments)


@pytest.mark.parametrize(
    "other", [{}, {"random_seed": 2}, {"port": 30001}], ids=["alike", "seed", "port"]
)
def test_ranks_of_one_start_meet_after_a_clear_and_other_starts_do_not(
    start_rank: StartRank, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    """Also where one process starts both."""
    ranks, number = (start_rank(), start_rank()), 10 + len(str(other))
    monkeypatch.setattr(namespace, "server_arguments", started_with)
    clear(ranks[0])
    store(ranks[0], number)
    monkeypatch.setattr(namespace, "server_arguments", lambda: started_with(**other))
    clear(ranks[1])
    assert ranks[1].backend.batch_exists(keys(number)) == (0 if other else PAGES)


def test_the_next_start_by_the_same_process_finds_nothing_that_was_kept_unshared(
    start_rank: StartRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of MLA pages there is one copy for all ranks of a start, and it outlives them."""
    monkeypatch.setattr(namespace, "server_arguments", started_with)
    found: list[int] = []
    for run in ("first", "first", "second"):
        monkeypatch.setenv("SGLANG_RUN_ID", run)  # as SGLang does at each start
        rank = start_rank(device_pool=mla_device_pool(), options={"unshared": True})
        if not found:
            store(rank, 50)
        found.append(rank.backend.batch_exists(keys(50)))
    assert found == [PAGES, PAGES, 0]


def test_a_backend_that_is_attached_anew_finds_nothing_of_before_the_clear(
    start_rank: StartRank,
) -> None:
    rank, other = start_rank(), start_rank()
    store(rank, 40)
    clear(rank)
    rank.attach_anew()
    assert rank.backend.batch_exists(keys(40)) == 0
    store(rank, 41)
    assert rank.backend.batch_exists(keys(41)) == PAGES
    clear(rank)
    assert rank.backend.batch_exists(keys(41)) == 0
    assert other.backend.batch_exists(keys(40)) == PAGES


class ToldLock:
    """A lock that tells who is about to take it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.on_take: Callable[[], None] = lambda: None

    def __enter__(self) -> None:
        self.on_take()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_clear_amid_a_change_of_the_weights_is_not_undone_by_it(
    start_rank: StartRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage thread that has seen the change knows where to go when the clear comes."""
    rank, other, lock, is_come = start_rank(), start_rank(), ToldLock(), threading.Event()
    backend = rank.backend
    monkeypatch.setattr(backend, "_lock", lock)

    def come() -> None:
        backend.clear()
        is_come.set()

    def tell() -> None:
        if threading.current_thread() is clearing:
            is_come.set()

    def epoch() -> str:
        before = own_epoch()
        if threading.current_thread() is not clearing and not is_come.is_set():
            clearing.start()
            is_come.wait()
        return before

    clearing, lock.on_take, own_epoch = threading.Thread(target=come), tell, backend._epoch
    monkeypatch.setattr(backend, "_epoch", epoch)
    monkeypatch.setattr(watch, "changes", watch.changes + 1)
    monkeypatch.setattr(watch, "flushed_changes", watch.changes)
    assert backend.batch_exists(keys(60)) == 0
    clearing.join()
    clear(other)
    rank.wait_usable()
    store(rank, 60)
    assert other.backend.batch_exists(keys(60)) == PAGES
