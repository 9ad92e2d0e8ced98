"""Answers that come when their request needs no lease any more."""

from __future__ import annotations

import pytest

from kvd_client.draft import BlockRun
from kvd_proto.key_status import RETRY
from tests.client.engine_rig import FULL, RECURRENT, TOKENS, Rig, blocks
from tests.client.fake_daemon import hashes


def released(rig: Rig) -> list[int]:
    return [lease for step in rig.daemon.steps for lease in step.released_leases]


@pytest.mark.parametrize("stores", [False, True])
def test_what_a_reuse_filter_is_asked_leases_nothing_for_who_loads_nothing(stores: bool) -> None:
    rig = Rig(FULL, RECURRENT, store_threshold=2)
    rig.daemon.answers_at_once = False
    rig.holds("p", 8 * TOKENS)  # without its state: no hit
    rig.arrive("r", 12 * TOKENS)
    assert rig.ask("r") == 0
    table = [blocks(0, 13), blocks(20, 4)]
    rig.allocate("r", table)
    rig.step(("r", table, 5 * TOKENS))
    rig.daemon.answer()
    if stores:
        rig.step(("r", table, 12 * TOKENS))  # which asks for the filter's verdicts
    for _ in range(2):
        rig.step(("r", table, 12 * TOKENS + 1))
    assert rig.daemon.lookups
    assert released(rig) == [rig.daemon._last_lease]


def test_of_a_block_beside_the_grid_nobody_waits_for_the_answer_once_its_request_loads() -> None:
    rig = Rig()
    rig.holds("p", 3 * TOKENS)
    rig.arrive("r", 5 * TOKENS)
    assert rig.ask("r") == 3 * TOKENS
    rig.daemon.answers_at_once = rig.daemon.answers_when_waited_for = False
    queue, request = rig.scheduler._queue, rig.scheduler._requests["r"]
    assert queue.ask_alone(request, BlockRun(0, 0, hashes("tail", 1))) == RETRY
    rig.allocate("r", [blocks(0, 5)], 3 * TOKENS)
    assert rig.daemon.given_up == [len(rig.daemon.lookups)]
    assert not request.lookup.alone
    assert not queue._unanswered
