"""How often vLLM's scheduler thread waits for a real daemon, with 64 requests at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm.node_daemon import NodeDaemon
from tests.vllm.stand_process import Ask, stand_process
from tests.waiting import wait_until

REQUESTS = 64
DECODERS = 16
BLOCKS = 10  # of 16 tokens, in each prompt
LOADED = BLOCKS * 16 - 1  # the last token is computed anew, for what follows it


@pytest.fixture(scope="module")
def ask(fork_server: None, kvd: NodeDaemon) -> Iterator[Ask]:
    """Runs a case on a stand: vLLM's scheduler, connector and worker hooks without a model."""
    with stand_process("waiting_stand", kvd.socket, kvd.pid) as asked:
        yield asked


@pytest.fixture(scope="module")
def cold(ask: Ask, kvd: NodeDaemon) -> dict[str, Any]:
    """64 requests that nobody has seen, all stored when this is here."""
    told = ask("run")
    wait_until(lambda: kvd.ready_blocks() == REQUESTS * BLOCKS)
    return told


def test_steps_without_a_hit_wait_for_nothing(cold: dict[str, Any]) -> None:
    assert cold["cached"] == [0] * REQUESTS
    assert cold["stores"] == REQUESTS
    assert set(cold["waits"]) == {0}
    assert cold["counted_by_kvd"] == 0


def test_a_step_with_64_hits_waits_once_at_most(cold: dict[str, Any], ask: Ask) -> None:
    told = ask("run")
    assert told["cached"] == [LOADED] * REQUESTS
    assert (told["loads"], told["stores"]) == (REQUESTS, 0)
    assert max(told["waits"]) <= 1
    assert sum(told["waits"]) == told["counted_by_kvd"]


def test_what_was_found_and_missed_is_told_as_vllm_would_count_it(
    cold: dict[str, Any], ask: Ask, kvd: NodeDaemon
) -> None:
    ask("run")
    ask("unseen")
    before = told_lookups(kvd)
    ask("run")
    ask("unseen")
    told = told_lookups(kvd)
    more = {name: told[name] - before[name] for name in told}
    assert more == {
        "requests": REQUESTS + 1,
        "requests_found": REQUESTS,
        "blocks": (REQUESTS + 1) * BLOCKS,
        "blocks_found": REQUESTS * BLOCKS,
        "tokens": (REQUESTS + 1) * BLOCKS * 16,
        "tokens_found": REQUESTS * BLOCKS * 16,  # and of these it computes the last one again
    }


def told_lookups(kvd: NodeDaemon) -> dict[str, int]:
    """What the one tenant's engines told so far."""
    (tenant,) = kvd.status().tenants
    return {field.name: value for field, value in tenant.lookups.ListFields()}


def test_64_lookups_that_nobody_answers_are_one_wait(cold: dict[str, Any], ask: Ask) -> None:
    told = ask("unanswered")
    assert told["first_step"] == [1]
    assert told["first_by_kvd"] == 1
    assert max(told["waits"]) <= 1
    assert told["cached"] == [LOADED] * REQUESTS, "put off, they were answered all the same"


def test_what_many_requests_generate_in_the_same_steps_is_all_stored(ask: Ask) -> None:
    told = ask("decode")
    assert told["jobs_by_step"].count(DECODERS) >= 2, "a step stored one block of each request"
    assert told["whole"] == [3 * 16] * DECODERS
    assert told["cached"] == told["whole"]


def test_loads_that_a_hung_daemon_never_begins_are_computed(cold: dict[str, Any], ask: Ask) -> None:
    told = ask("held")
    assert told["loads"] == REQUESTS
    assert told["computed"] >= REQUESTS * BLOCKS * 16, "every prompt was computed in the end"
    assert told["steps"] < 200 * (1 + told["seconds"]), "the engine spun through empty steps"
