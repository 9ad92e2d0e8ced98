"""What SGLang's "clear the storage" reaches, and what it leaves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvd_client.integrations.sglang import namespace
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
