"""What an engine says of tiers: of its own blocks, in order, once, and bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_client import event_watch, tier_record
from kvd_client.event_watch import EventWatch, Reading
from kvd_client.tier_record import HOST, Key, News, NewsList, Residence, TierRecord
from kvd_proto.limits import MAX_TIERS
from kvd_proto.v1 import events_pb2
from tests.client.test_event_watch import keys_of

DISK = Residence("STORAGE", "LOCAL", "disk")
FAR = Residence("STORAGE", "REMOTE", "far")
ONE, TWO, THREE = keys_of("hand-fed", 3)


class Hand:
    """A watch that is fed by hand, and what a router would know by it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.watch = EventWatch("/nowhere", "test", clock=lambda: self.now)
        monkeypatch.setattr(self.watch, "_run", lambda: None)
        self.watch.follow(1, "e")
        self.reading = Reading(self.watch._turn, "e", set(), {})

    def announce(self, *keys: Key) -> None:
        """So long ago that what the stream says from now on is of these."""
        self.watch.announce(keys)
        self.now += event_watch.DOUBT_S

    def tell(self, kind: str, place: Residence, *keys: Key, epoch: str = "e") -> None:
        hashes = b"".join(key[: -event_watch.GROUP_BYTES] for key in keys)
        self.watch._take_in(
            events_pb2.CacheEvent(
                kind=f"KIND_{kind}",
                epoch=epoch,
                hashes=hashes,
                hash_bytes=32,
                medium=place.medium,
                locality=place.locality,
                tier=place.tier,
            ),
            self.reading,
        )

    def snapshot(self, *known: tuple[Residence, Key]) -> None:
        """What the stream says when it begins anew."""
        reading = Reading(
            self.watch._turn, "e", set(self.watch._tracked), self.watch._tiers.known()
        )
        self.reading = reading
        events = [
            events_pb2.CacheEvent(
                kind="KIND_STORED",
                epoch="e",
                hashes=key[: -event_watch.GROUP_BYTES],
                hash_bytes=32,
                medium=place.medium,
                locality=place.locality,
                tier=place.tier,
            )
            for place, key in known
        ]
        whole = events_pb2.WatchEventsResponse(snapshot=True, snapshot_end=True, events=events)
        self.watch._read([whole], reading)


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    return Hand(monkeypatch)


def test_a_tier_that_was_told_of_before_the_engine_spoke_is_said_with_the_block(hand: Hand) -> None:
    hand.tell("STORED", HOST, ONE)
    hand.tell("STORED", DISK, ONE)
    assert hand.watch.take() == []
    assert hand.watch.announce([ONE]) == [ONE]
    assert hand.watch.take() == [News(DISK, removed=False, keys=[ONE])]


def test_of_blocks_that_the_engine_never_announced_nothing_is_said(hand: Hand) -> None:
    for kind in ("STORED", "REMOVED"):
        for place in (HOST, DISK):
            hand.tell(kind, place, TWO)
    assert hand.watch.take() == []


def test_a_block_that_a_tier_brings_up_is_in_host_memory_again(hand: Hand) -> None:
    hand.announce(ONE)
    hand.tell("STORED", DISK, ONE)
    hand.tell("REMOVED", HOST, ONE)
    hand.tell("STORED", HOST, ONE)
    hand.tell("REMOVED", HOST, ONE)
    hand.tell("STORED", HOST, ONE)
    places = [(news.place, news.removed) for news in hand.watch.take()]
    assert places == [(DISK, False), (HOST, True), (HOST, False), (HOST, True), (HOST, False)]
    assert hand.watch.announce([ONE, TWO]) == [TWO], "said already: not to be counted twice"


def test_a_removed_block_is_told_again_when_somebody_stores_it(hand: Hand) -> None:
    hand.announce(ONE)
    hand.tell("REMOVED", HOST, ONE)
    hand.tell("STORED", HOST, ONE)
    hand.tell("STORED", HOST, TWO)
    told = [News(HOST, removed=removed, keys=[ONE]) for removed in (True, False)]
    assert hand.watch.take() == told, "of a block that was never announced nothing is said"
    assert hand.watch.announce([ONE]) == [], "said already"


def test_a_lost_tier_takes_its_own_blocks_along_and_no_others(hand: Hand) -> None:
    hand.watch.announce([ONE, TWO])
    hand.tell("STORED", DISK, ONE, TWO)
    hand.tell("STORED", FAR, ONE)
    hand.watch.take()
    hand.tell("TIER_LOST", DISK)
    assert hand.watch.take() == [News(DISK, removed=True, keys=[ONE, TWO])]
    hand.tell("TIER_LOST", DISK)
    hand.tell("REMOVED", DISK, ONE)
    assert hand.watch.take() == []
    hand.tell("REMOVED", FAR, ONE)
    assert hand.watch.take() == [News(FAR, removed=True, keys=[ONE])]


def test_a_cleared_namespace_is_gone_from_tiers_too(hand: Hand) -> None:
    hand.announce(ONE)
    hand.tell("STORED", DISK, ONE)
    hand.watch.take()
    hand.tell("CLEARED", Residence(""))
    assert hand.watch.take() == [
        News(HOST, removed=True, keys=[ONE]),
        News(DISK, removed=True, keys=[ONE]),
    ]


def test_a_reset_says_nothing_of_tiers_and_what_follows_is_of_another_epoch(hand: Hand) -> None:
    hand.watch.announce([ONE])
    hand.tell("STORED", DISK, ONE)
    hand.watch.forget()
    hand.tell("REMOVED", DISK, ONE)
    hand.tell("STORED", DISK, TWO, epoch="other")
    hand.watch.announce([TWO])
    assert hand.watch.take() == []


def said_of(hand: Hand) -> list[tuple[Residence, bool, Key]]:
    """What the next step says."""
    return [(each.place, each.removed, key) for each in hand.watch.take() for key in each.keys]


def test_what_listeners_have_dropped_is_said_once_more_where_it_still_is(hand: Hand) -> None:
    hand.announce(ONE, TWO)
    hand.tell("STORED", DISK, ONE)
    hand.watch.take()
    hand.tell("REMOVED", HOST, TWO)
    hand.watch.say_again()
    assert said_of(hand) == [(HOST, True, TWO), (HOST, False, ONE), (DISK, False, ONE)]
    assert said_of(hand) == []


def test_what_is_new_anyway_is_not_said_twice(hand: Hand) -> None:
    hand.announce(ONE, TWO)
    hand.tell("STORED", DISK, ONE)
    hand.watch.say_again()
    assert hand.watch.announce([TWO]) == [TWO], "the engine says it at once"
    assert sorted(said_of(hand)) == sorted([(DISK, False, ONE), (HOST, False, ONE)])


def test_what_goes_before_it_is_said_once_more_is_not_said(
    hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_record, "MAX_AGAIN", 1)
    hand.announce(ONE, TWO, THREE)
    hand.watch.say_again()
    assert said_of(hand) == [(HOST, False, ONE)]
    hand.tell("REMOVED", HOST, TWO)
    assert said_of(hand) == [(HOST, True, TWO), (HOST, False, THREE)]
    hand.watch.say_again()
    hand.watch.forget()
    assert said_of(hand) == []


def test_of_much_news_a_step_takes_some_and_what_goes_before_an_announcement(
    hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_record, "MAX_TAKEN", 2)
    many = keys_of("many", 6)
    hand.announce(*many)
    hand.tell("REMOVED", HOST, *many)
    assert said_of(hand) == [(HOST, True, key) for key in many[:2]]
    earlier, fresh = hand.watch.take_and_announce([many[4]])
    assert (earlier, fresh) == ([News(HOST, removed=True, keys=[many[4]])], [many[4]])
    assert said_of(hand) == [(HOST, True, key) for key in many[2:4]]
    assert said_of(hand) == [(HOST, True, many[5])]
    assert said_of(hand) == []


def test_news_of_which_each_step_brings_more_than_it_takes_are_not_told_ever_later(
    hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_record, "MAX_TAKEN", 2)
    monkeypatch.setattr(tier_record, "TAKEN_IN_STEPS", 4)
    told: list[Key] = []
    for step in range(40):
        fresh = keys_of(str(step), 5)
        hand.announce(*fresh)
        hand.tell("REMOVED", HOST, *fresh)
        told += [key for _, _, key in said_of(hand)]
        assert 5 * (step + 1) - len(told) <= 4 * 5, "what waits stays within so many steps' news"
    assert told == [key for step in range(40) for key in keys_of(str(step), 5)][: len(told)]


def test_an_announcement_looks_through_no_news_of_other_blocks(hand: Hand) -> None:
    many = keys_of("many", 6)
    hand.announce(*many)
    hand.tell("REMOVED", HOST, *many)
    hand.tell("STORED", HOST, many[4])
    news = hand.watch._news
    seen: list[int] = []

    class Watched(dict[int, Any]):
        def __getitem__(self, number: int) -> Any:
            seen.append(number)
            return super().__getitem__(number)

        def __iter__(self) -> Any:
            raise AssertionError("all news are looked through")

        values = items = keys = __iter__

    news._news = Watched(news._news)
    earlier, _ = hand.watch.take_and_announce([many[4], ONE])
    assert [each.removed for each in earlier] == [True, False]
    assert len(seen) == 2, "that of the block, and no other"


def test_a_new_snapshot_takes_back_what_it_does_not_name(hand: Hand) -> None:
    hand.watch.announce([ONE, TWO, THREE])
    hand.tell("STORED", DISK, ONE, TWO)
    hand.watch.take()
    hand.snapshot((HOST, ONE), (HOST, TWO), (HOST, THREE), (DISK, ONE), (DISK, THREE))
    assert hand.watch.take() == [
        News(DISK, removed=False, keys=[THREE]),
        News(DISK, removed=True, keys=[TWO]),
    ]


def test_too_many_blocks_in_tiers_are_forgotten_as_removed(
    hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_record, "MAX_TOLD", 2)
    monkeypatch.setattr(tier_record, "MAX_EARLY", 2)
    hand.watch.announce([ONE, TWO, THREE])
    hand.tell("STORED", DISK, ONE, TWO)
    assert hand.watch.take() == [News(DISK, removed=False, keys=[ONE, TWO])]
    hand.tell("STORED", DISK, THREE)
    assert hand.watch.take() == [
        News(DISK, removed=False, keys=[THREE]),
        News(DISK, removed=True, keys=[ONE]),
    ]
    unknown = keys_of("unknown", 5)
    hand.tell("STORED", DISK, *unknown)
    hand.watch.announce(unknown)
    assert hand.watch.take()[0] == News(DISK, removed=False, keys=[unknown[3]]), "and then the last"


def test_more_tiers_than_a_daemon_may_have_are_not_followed() -> None:
    news = NewsList()
    record = TierRecord(news)
    for number in range(MAX_TIERS + 1):
        record.stored(Residence("STORAGE", "LOCAL", str(number)), ONE, is_announced=True)
    assert len(news.take()) == MAX_TIERS


PLACES = st.sampled_from([DISK, FAR])
STEPS = st.one_of(
    st.tuples(st.just("stored"), PLACES, st.integers(0, 4)),
    st.tuples(st.just("removed"), PLACES, st.integers(0, 4)),
    st.tuples(st.just("announced"), st.none(), st.integers(0, 4)),
    st.tuples(st.just("lost"), PLACES, st.just(0)),
)


@given(st.lists(STEPS, max_size=40))
def test_what_a_router_gathers_is_what_tiers_hold_of_announced_blocks(
    steps: list[tuple[str, Residence | None, int]],
) -> None:
    news = NewsList()
    record = TierRecord(news)
    holds: set[tuple[Residence, Key]] = set()
    announced: set[Key] = set()
    gathered: set[tuple[Residence, Key]] = set()
    for what, place, number in steps:
        key = bytes([number])
        if place is None:
            announced.add(key)
            record.announced(key)
        elif what == "lost":
            holds = {held for held in holds if held[0] != place}
            record.lost(place.tier)
            while record.let_go(1):
                pass
        elif what == "stored":
            holds.add((place, key))
            record.stored(place, key, is_announced=key in announced)
        else:
            holds.discard((place, key))
            record.removed(place, key)
        for each in news.take():
            told = {(each.place, key) for key in each.keys}
            assert not told & gathered if not each.removed else told <= gathered
            gathered = gathered - told if each.removed else gathered | told
        assert gathered == {held for held in holds if held[1] in announced}
        known = record.known()
        assert {(place, key) for place, keys in known.items() for key in keys} == gathered


class Between:
    """A lock that is noted whenever it is given back, and what is done then."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._then()


@pytest.mark.parametrize("what", ["CLEARED", "TIER_LOST"])
def test_the_engine_gets_between_the_blocks_of_a_clear_and_of_a_lost_tier(
    hand: Hand, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(event_watch, "KEYS_AT_ONCE", 2)
    many = keys_of("many", 9)
    hand.announce(*many)
    hand.tell("STORED", DISK, *many)
    assert sum(len(news.keys) for news in hand.watch.take()) == len(many)
    pieces: list[int] = []

    def take() -> None:
        pieces.append(sum(len(news.keys) for news in hand.watch._news.take()))

    monkeypatch.setattr(hand.watch, "_lock", Between(take))
    hand.tell(what, DISK)
    places = 2 if what == "CLEARED" else 1
    assert max(pieces) == 2 * places
    assert sum(pieces) == len(many) * places


def test_what_is_announced_again_amid_a_clear_is_not_said_to_be_removed(
    hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_watch, "KEYS_AT_ONCE", 1)
    hand.announce(ONE, TWO, THREE)
    said: list[list[Key]] = []

    def announce() -> None:
        if not said:
            said.append(hand.watch._announce([THREE]))

    with monkeypatch.context() as patch:
        patch.setattr(hand.watch, "_lock", Between(announce))
        hand.tell("CLEARED", HOST)
    assert said == [[]]
    hand.tell("STORED", HOST, THREE)
    hand.now += event_watch.DOUBT_S
    assert hand.watch.take() == [(HOST, True, [ONE, TWO])]


def test_what_is_dropped_amid_the_loss_of_its_tier_is_said_when_it_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where very much is not taken yet, what goes and comes says nothing new to who has it."""
    monkeypatch.setattr(tier_record, "MAX_NEWS", 0)
    news = NewsList()
    record = TierRecord(news)
    for key in (ONE, TWO):
        record.stored(DISK, key, is_announced=True)
    news.take()
    record.lost(DISK.tier)
    news.say_again(record.in_order())
    assert not record.let_go(2)
    record.stored(DISK, ONE, is_announced=True)
    assert news.take() == [(DISK, True, [ONE, TWO]), (DISK, False, [ONE])]


AGAIN = "whoever listens has dropped all"
TURNS = st.lists(  # None: it is taken
    st.tuples(PLACES, st.integers(0, 3)) | st.none() | st.just(AGAIN), max_size=60
)


@given(TURNS)
def test_news_that_nobody_takes_come_to_the_same_and_stay_few(
    turns: list[tuple[Residence, int] | str | None],
) -> None:
    news = NewsList()
    there: set[tuple[Residence, Key]] = set()
    gathered: set[tuple[Residence, Key]] = set()
    most, has_dropped = 3 + 8, False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier_record, "MAX_NEWS", 3)
        for turn in [*turns, None]:
            if isinstance(turn, tuple):
                place, key = turn[0], bytes([turn[1]])
                news.add(place, key, removed=(place, key) in there)
                there ^= {(place, key)}
                assert len(news._news) <= most, "no more than one of each block at its place"
                continue
            if turn == AGAIN:
                news.say_again(there)
                gathered, most, has_dropped = set(), most + 8, True
                continue
            for each in [*news.take(), *news.take_again()]:
                told = {(each.place, key) for key in each.keys}
                may_be = told <= gathered or has_dropped if each.removed else not told & gathered
                assert may_be, "nothing is said twice"
                gathered = gathered - told if each.removed else gathered | told
            assert gathered == there
            most = 3 + 8
