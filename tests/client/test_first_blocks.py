"""Where the page hides what tiers hold, a prompt's first blocks are asked for first."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvd_client import Group
from kvd_client.scheduler import shown
from kvd_client.scheduler.shown import FIRST_BLOCKS
from tests.client.engine_rig import FULL, RECURRENT, SLIDING, TOKENS, WIDE, Rig, blocks
from tests.client.fake_daemon import HIT, MISS, PENDING

MANY = 4 * FIRST_BLOCKS


def hiding(*groups: Group, store_threshold: int = 1) -> Rig:
    """A page that shows nothing, and tiers that may hold something."""
    rig = Rig(*groups, store_threshold=store_threshold)
    rig.daemon.page_hides_some = True
    rig.daemon.on_page = set()
    return rig


def asked(rig: Rig) -> list[int]:
    """How many keys each call was for."""
    return [sum(len(q.run.block_hashes) for q in queries) for queries in rig.daemon.lookups]


def later(rig: Rig, seconds: float = 0.01) -> None:
    rig.now += seconds
    rig.step()


def test_a_prompt_that_is_nowhere_is_asked_for_by_its_first_blocks_alone() -> None:
    rig = hiding()
    rig.arrive("r", MANY * TOKENS)
    assert rig.ask("r") == 0
    assert asked(rig) == [FIRST_BLOCKS]


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_prompt_that_is_not_longer_than_that_is_asked_for_at_once(more: int) -> None:
    rig = hiding()
    rig.holds("p", MANY * TOKENS)
    count = FIRST_BLOCKS + more
    rig.arrive("r", count * TOKENS + 1)
    assert rig.ask("r") == count * TOKENS
    assert asked(rig) == ([count] if more < 1 else [FIRST_BLOCKS, count])


@pytest.mark.parametrize("lead", [0, 1, FIRST_BLOCKS - 1, FIRST_BLOCKS, FIRST_BLOCKS + 1])
@pytest.mark.parametrize("found", [MISS, HIT])
def test_the_first_blocks_are_those_behind_what_the_page_shows(lead: int, found: int) -> None:
    rig = hiding()
    keys = rig.keys("p", MANY * TOKENS)[0]
    rig.daemon.holds(keys, found)
    rig.daemon.holds(keys[:lead])
    rig.daemon.on_page = set(keys[:lead])
    rig.arrive("r", MANY * TOKENS + 1)
    assert rig.ask("r") == (MANY if found else lead) * TOKENS
    assert asked(rig) == [lead + FIRST_BLOCKS, MANY][: 1 + found]


def test_a_prompt_that_the_page_shows_is_asked_for_at_once() -> None:
    rig = hiding()
    rig.holds("p", MANY * TOKENS)
    rig.daemon.on_page = None
    rig.arrive("r", MANY * TOKENS + 1)
    assert rig.ask("r") == MANY * TOKENS
    assert asked(rig) == [MANY]


def test_the_rest_is_asked_for_once_the_first_blocks_are_not_only_sought() -> None:
    rig = hiding()
    rig.holds("p", MANY * TOKENS, status=PENDING)
    rig.arrive("r", MANY * TOKENS + 1)
    assert rig.ask("r") is None  # whether a tier has them is not known yet
    later(rig)
    assert rig.ask("r") is None
    later(rig)
    assert rig.ask("r") is None  # one has
    assert asked(rig) == [FIRST_BLOCKS, FIRST_BLOCKS, MANY]
    rig.holds("p", MANY * TOKENS)
    for _ in range(2):
        later(rig)
        found = rig.ask("r")
    assert found == MANY * TOKENS
    assert asked(rig)[3:] == [MANY]


def test_what_was_sought_and_is_nowhere_ends_it() -> None:
    rig = hiding()
    rig.holds("p", MANY * TOKENS, status=PENDING)
    rig.arrive("r", MANY * TOKENS)
    assert rig.ask("r") is None
    rig.holds("p", MANY * TOKENS, status=MISS)
    later(rig)
    assert rig.ask("r") is None
    later(rig)
    assert rig.ask("r") == 0
    assert asked(rig) == [FIRST_BLOCKS] * 2


def test_leases_of_the_first_blocks_are_given_back_when_all_are_asked_for() -> None:
    rig = hiding()
    rig.holds("p", MANY * TOKENS)
    rig.arrive("r", MANY * TOKENS + 1)
    assert rig.ask("r") == MANY * TOKENS
    rig.step()
    assert rig.daemon.last_step.released_leases == [101]
    assert rig.scheduler._requests["r"].lookup.leases == [102]


def test_what_the_device_has_is_no_miss() -> None:
    """Behind it all is there, though the daemon lacks what the device has."""
    rig = hiding()
    keys = rig.keys("p", MANY * TOKENS)[0]
    for computed in (3, FIRST_BLOCKS - 1, FIRST_BLOCKS, FIRST_BLOCKS + 5, MANY - 1):
        rig.daemon.statuses = dict.fromkeys(keys[computed:], HIT)
        rig.daemon.lookups.clear()
        rig.arrive(f"r{computed}", MANY * TOKENS + 1)
        assert rig.ask(f"r{computed}", computed * TOKENS) == (MANY - computed) * TOKENS
        assert asked(rig) == [FIRST_BLOCKS, MANY - computed]


def test_a_slow_daemon_is_waited_for_once_in_a_step() -> None:
    rig = hiding()
    rig.daemon.answers_at_once = False
    rig.holds("p", MANY * TOKENS)
    rig.arrive("r", MANY * TOKENS + 1)
    assert rig.ask("r") is None  # the rest is on its way
    assert rig.daemon.blocking_calls == 1
    later(rig)
    assert rig.ask("r") == MANY * TOKENS


def test_blocks_that_were_not_asked_for_may_be_stored() -> None:
    rig = hiding()
    rig.arrive("r", MANY * TOKENS)
    assert rig.ask("r") == 0
    rig.step(("r", [blocks(0, MANY)], MANY * TOKENS))
    assert rig.stored_hashes()[FIRST_BLOCKS:] == rig.keys("p", MANY * TOKENS)[0][FIRST_BLOCKS:]


def test_a_reuse_filter_is_asked_about_every_block() -> None:
    rig = hiding(store_threshold=2)
    rig.arrive("r", MANY * TOKENS)
    assert rig.ask("r") == 0
    assert asked(rig) == [MANY]


def test_groups_of_which_no_miss_ends_a_hit_are_asked_for_at_once() -> None:
    rig = hiding(SLIDING)
    rig.arrive("r", MANY * TOKENS)
    assert rig.ask("r") == 0
    assert asked(rig) == [MANY]


KINDS = [
    (FULL,),
    (WIDE,),
    (FULL, WIDE),
    (FULL, SLIDING),
    (WIDE, RECURRENT),
    (replace(FULL, drafter=True), FULL),
    (FULL, replace(WIDE, drafter=True), RECURRENT, SLIDING),
]


@pytest.mark.parametrize("seed", range(30))
def test_what_is_found_is_what_asking_for_all_finds(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    for groups in KINDS:
        tokens = chance.randint(1, 40) * TOKENS + chance.randint(0, TOKENS)
        computed = chance.choice((0, 0, chance.randint(0, tokens) // (4 * TOKENS) * 4 * TOKENS))
        share = chance.choice((0.5, 0.9, 0.99))
        found = []
        for first in (1_000_000, chance.randint(1, 9)):
            monkeypatch.setattr(shown, "FIRST_BLOCKS", first)
            rig = hiding(*groups)
            draw = random.Random(seed + 1)
            rig.daemon.on_page = set()
            for keys in rig.keys("p", tokens):
                held = [each for each in keys if draw.random() < share]
                rig.daemon.holds(held, draw.choice((HIT, HIT, PENDING)))
                rig.daemon.on_page.update(e for e in held if draw.random() < 0.5)
            rig.arrive("r", tokens)
            if rig.ask("r", computed) is None:
                later(rig)
                rig.ask("r", computed)
            rig.daemon.statuses = {
                each: HIT if draw.random() < 0.8 else MISS for each in rig.daemon.statuses
            }
            later(rig)
            while (hit := rig.ask("r", computed)) is None:
                later(rig)
            found.append(hit)
        assert found[0] == found[1]


def test_a_prompt_of_less_than_a_block_is_no_hit() -> None:
    rig = hiding(WIDE)
    rig.arrive("r", TOKENS + 1)
    assert rig.ask("r") == 0
    assert asked(rig) == []


@pytest.mark.parametrize("pause_s", [0.01, 0.2])
def test_steps_that_are_far_apart_do_not_begin_anew(pause_s: float) -> None:
    rig = hiding()
    rig.holds("p", MANY * TOKENS, status=PENDING)
    rig.arrive("r", MANY * TOKENS + 1)
    for _ in range(3):
        assert rig.ask("r") is None
        later(rig, pause_s)
    rig.ask("r")
    assert asked(rig)[-1] == MANY


def test_a_session_that_goes_before_the_rest_is_asked_for_is_a_miss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = hiding()
    rig.daemon.answers_at_once = False
    rig.holds("p", MANY * TOKENS)
    rig.arrive("r", MANY * TOKENS + 1)
    rig.daemon.answer()
    with monkeypatch.context() as gone:
        gone.setattr(rig.daemon, "start_lookup", lambda _queries: 0)
        assert rig.ask("r") == 0
    rig.daemon.answers_at_once = True
    later(rig)
    assert rig.ask("r") == MANY * TOKENS
