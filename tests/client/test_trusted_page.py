"""Loads that go by the index page's word, while the lookup's answer is on its way."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvd_client import EngineIdentity, SchedulerConnection, SchedulerOptions
from kvd_client.scheduler import lookup, request
from kvd_proto.v1 import engine_pb2
from tests.client.engine_rig import FULL, SLIDING, TOKENS, Rig, blocks, namespace
from tests.client.fake_daemon import PENDING

BLOCKS = 5
PROMPT = BLOCKS * TOKENS + 1  # one more is always computed


def trusting(*groups: object, **changes: object) -> Rig:
    """Over a daemon that was heard of lately and has not answered yet."""
    rig = Rig(*groups, options=SchedulerOptions(trusts_page=True), **changes)  # type: ignore[arg-type]
    rig.daemon.is_quick = True
    rig.daemon.answers_at_once = False
    for group in range(len(rig.groups)):
        rig.holds("p", BLOCKS * TOKENS, group)
    return rig


def load(rig: Rig, name: str = "r") -> int:
    assert rig.ask(name) == BLOCKS * TOKENS
    rig.allocate(name, [blocks(0, BLOCKS + 1)], BLOCKS * TOKENS)
    [job] = rig.step().loads
    return job


def test_what_the_page_shows_whole_is_not_waited_for() -> None:
    rig = trusting()
    rig.arrive("r", PROMPT)
    load(rig)
    assert rig.daemon.blocking_calls == 0
    assert len(rig.daemon.lookups) == 1, "its lease was asked for"
    assert rig.daemon.given_up == [1], "and will be given back"


def test_an_answer_that_is_there_counts_before_the_page() -> None:
    rig = trusting()
    rig.arrive("r", PROMPT)
    rig.daemon.holds(rig.keys("p", BLOCKS * TOKENS)[0][3:], PENDING)
    rig.daemon.answer()
    assert rig.ask("r") is None, "the last ones are not ready"


def test_an_answer_that_comes_before_there_are_blocks_counts_in_the_next_step() -> None:
    rig = trusting()
    rig.arrive("r", PROMPT)
    assert rig.ask("r") == BLOCKS * TOKENS
    rig.step()
    rig.daemon.holds(rig.keys("p", BLOCKS * TOKENS)[0][3:], status=0)
    rig.daemon.answer()
    assert rig.ask("r") == 3 * TOKENS
    assert rig.daemon.blocking_calls == 0


def test_it_counts_after_a_step_of_any_length_and_nothing_is_asked_anew() -> None:
    rig = trusting()
    rig.arrive("r", PROMPT)
    assert rig.ask("r") == BLOCKS * TOKENS
    rig.step()
    rig.now += 10 * SchedulerOptions().miss_ttl_s
    rig.daemon.on_page = set(rig.keys("p", BLOCKS * TOKENS)[0])
    rig.daemon.holds(rig.keys("p", BLOCKS * TOKENS)[0][3:], status=0)
    rig.daemon.answer()
    assert rig.ask("r") == 3 * TOKENS
    assert (len(rig.daemon.lookups), rig.daemon.given_up) == (1, [])


def test_of_a_long_prompt_what_is_answered_counts_before_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookup, "KEYS_PER_CALL", 3)
    rig = trusting()
    rig.daemon.on_page = set(rig.keys("p", BLOCKS * TOKENS)[0])
    rig.daemon.holds(rig.keys("p", BLOCKS * TOKENS)[0][2:], status=0)
    rig.arrive("r", PROMPT)
    second = rig.daemon._unanswered.pop(2)
    rig.daemon.answer()
    rig.daemon._unanswered[2] = second
    assert rig.ask("r") == 2 * TOKENS
    assert rig.daemon.blocking_calls == 1, "the rest is waited for"


@pytest.mark.parametrize("why", ["slow daemon", "part of it", "reuse filter", "not wanted"])
def test_otherwise_the_answer_is_waited_for(why: str) -> None:
    rig = trusting(store_threshold=2 if why == "reuse filter" else 1)
    if why == "slow daemon":
        rig.daemon.is_quick = False
    elif why == "part of it":
        rig.daemon.on_page = set(rig.keys("p", 4 * TOKENS)[0])
    elif why == "not wanted":
        rig.scheduler.options = rig.scheduler._queue._options = SchedulerOptions()
    rig.arrive("r", PROMPT)
    assert rig.ask("r") == BLOCKS * TOKENS
    assert rig.daemon.blocking_calls == 1


def test_with_windows_the_page_must_show_every_block_of_every_group() -> None:
    rig = trusting(FULL, SLIDING)
    rig.daemon.on_page = {key for keys in rig.keys("p", BLOCKS * TOKENS) for key in keys[1:]}
    rig.daemon.on_page.add(rig.keys("p", TOKENS)[0][0])
    rig.arrive("r", PROMPT)
    assert rig.ask("r") == BLOCKS * TOKENS
    assert rig.daemon.blocking_calls == 1


def test_a_page_that_was_wrong_is_asked_about_once_and_then_nothing_is_looked_up() -> None:
    rig = trusting()
    rig.arrive("r", PROMPT)
    rig.report(load(rig), done=False)
    second = load(rig)
    assert rig.daemon.blocking_calls == 1, "it did not go by the page again"
    rig.report(second, done=False)
    assert rig.ask("r") == 0
    rig.arrive("other", PROMPT)
    assert rig.ask("other") == BLOCKS * TOKENS
    assert rig.daemon.blocking_calls == 1, "others do"


def test_a_load_that_fails_late_was_no_refusal_and_nothing_is_looked_up() -> None:
    rig = trusting()
    rig.arrive("r", PROMPT)
    job = load(rig)
    rig.now += request.REFUSED_WITHIN_S
    rig.report(job, done=False)
    assert rig.ask("r") == 0
    assert len(rig.daemon.lookups) == 1


def test_who_was_told_to_wait_goes_on_by_answers() -> None:
    rig = trusting()
    rig.arrive("r", PROMPT)
    keys = rig.keys("p", BLOCKS * TOKENS)[0]
    rig.daemon.holds(keys, PENDING)
    rig.daemon.answer()
    assert rig.ask("r") is None
    rig.daemon.on_page = set(keys)
    rig.daemon.holds(keys)
    rig.step()
    rig.now += 2 * SchedulerOptions().ask_again_s
    assert rig.ask("r") is None, "asked again"
    rig.step()
    assert rig.ask("r") == BLOCKS * TOKENS
    assert rig.daemon.blocking_calls == 1, "it did not go by the page"


def test_a_daemon_is_prompt_while_it_answers_and_was_heard_of_lately(tmp_path: Path) -> None:
    identity = EngineIdentity("prompt", b"0" * 16)
    connection = SchedulerConnection(str(tmp_path / "nobody"), identity, namespace())
    try:
        assert not connection.is_prompt(0.5, 60.0), "it was never heard of"
        connection._heard_s = time.monotonic()
        assert connection.is_prompt(600.0, 60.0)
        call_id = connection._lookups.start([], time.monotonic() - 61)
        assert connection.is_prompt(600.0, 600.0)
        assert not connection.is_prompt(600.0, 60.0)
        connection.give_up(call_id)
        assert not connection.is_prompt(600.0, 60.0), "nobody wants the answer, and it is due"
        connection._lookups.take_reply(engine_pb2.LookupReply(call_id=call_id))
        assert connection.is_prompt(600.0, 60.0)
    finally:
        connection.close()
