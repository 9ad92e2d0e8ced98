"""Where scheduler and ranks meet: refusals in their words, and what each comer and goer causes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvd.core.engines import meeting as m
from kvd.core.engines.layouts import GroupFigures, RankLayout, RankPlacement, check_layout
from kvd.core.errors import EngineAlreadyLives, KvdError, LayoutMismatch, LimitExceeded, RankTaken
from kvd.core.keys import MoverId, SessionId
from tests.core.bench import BLOCK, spec

USER, NAME = 7, "engine"
SPEC = spec(shards=2, groups=2)
SESSION = SessionId(5)
SCHEDULER, FIRST, SECOND = (
    m.ClientProcess(token, pid, "vllm")
    for token, pid in (("scheduler", 10), ("first", 11), ("second", 12))
)
ALL = frozenset({"scheduler", "first", "second"})
NOBODY = frozenset[str]()


def layout(rank: int = 0, *, shard: int | None = None, writer: bool = True) -> RankLayout:
    placement = RankPlacement(rank, rank if shard is None else shard, writer)
    return RankLayout(2, placement, (GroupFigures(BLOCK, 1),) * 2)


def side(session: SessionId = SESSION, process: m.ClientProcess = SCHEDULER) -> m.SchedulerSide:
    return m.SchedulerSide(session, process, SPEC, 2)


def refusal(call: Callable[[], object]) -> tuple[type[KvdError], str, str]:
    with pytest.raises(KvdError) as caught:
        call()
    return type(caught.value), str(caught.value), caught.value.field


@pytest.fixture
def meeting() -> m.Meeting:
    return m.Meeting()


@pytest.fixture
def start(meeting: m.Meeting) -> m.EngineStart:
    found = meeting.claim(USER, NAME, b"a", ALL)
    assert isinstance(found, m.EngineStart)
    return found


# -- layouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "words", "field"),
    [
        (
            replace(layout(1), world_size=3),
            "rank 1 says world_size 3, the scheduler says 2",
            "world_size",
        ),
        (
            replace(layout(1), groups=(GroupFigures(BLOCK, 1),)),
            "rank 1 has 1 groups, the namespace has 2",
            "groups",
        ),
        (layout(1, shard=2), "rank 1 holds shard 2, group 0 has 2", "shard"),
        (
            replace(layout(1), groups=(GroupFigures(BLOCK, 1), GroupFigures(BLOCK + 8, 1))),
            (
                "rank 1, group 1: the fragments of an engine block add up to 4104 bytes, the"
                " scheduler says 4096 for shard 1"
            ),
            "groups[1].fragments",
        ),
        (
            replace(layout(1), groups=(GroupFigures(BLOCK, 1), GroupFigures(BLOCK, 2))),
            "rank 1, group 1: 2 engine blocks per block, the scheduler says 1",
            "groups[1].blocks_per_block",
        ),
    ],
)
def test_a_layout_that_disagrees_is_refused_in_words_whoever_came_first(
    meeting: m.Meeting, start: m.EngineStart, said: RankLayout, words: str, field: str
) -> None:
    expected = LayoutMismatch, words, field
    meeting.seat(start, MoverId(1), FIRST, said)
    assert refusal(lambda: meeting.check_ranks(start, SPEC, 2)) == expected
    meeting.mover_gone(MoverId(1))
    meeting.claim(USER, NAME, b"a", ALL)
    start.session = side()
    assert refusal(lambda: meeting.check_place(start, FIRST, said, ALL)) == expected


def test_a_guess_of_the_blocks_size_is_no_disagreement() -> None:
    guessed = replace(layout(), groups=(GroupFigures(BLOCK, 2),) * 2, blocks_guessed=True)
    check_layout(guessed, SPEC, 2)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (layout(0, writer=False), layout(1), "shard 0 has 0 writing ranks [], not 1"),
        (layout(0), layout(1, shard=0), "shard 0 has 2 writing ranks [0, 1], not 1"),
        (layout(0), layout(1, writer=False), "shard 1 has 0 writing ranks [], not 1"),
    ],
)
def test_a_shard_without_one_writer_is_refused_once_all_ranks_are_there(
    meeting: m.Meeting, start: m.EngineStart, first: RankLayout, second: RankLayout, words: str
) -> None:
    expected = LayoutMismatch, words, "writer"
    start.session = side()
    meeting.check_place(start, FIRST, first, ALL)
    meeting.seat(start, MoverId(1), FIRST, first)
    assert refusal(lambda: meeting.check_place(start, SECOND, second, ALL)) == expected
    meeting.seat(start, MoverId(2), SECOND, second)
    assert refusal(lambda: meeting.check_ranks(start, SPEC, 2)) == expected


def test_a_rank_that_comes_again_is_not_counted_twice_among_the_writers(
    meeting: m.Meeting, start: m.EngineStart
) -> None:
    meeting.join(start, side())
    meeting.seat(start, MoverId(1), FIRST, layout(0))
    meeting.seat(start, MoverId(2), SECOND, layout(1))
    meeting.check_place(start, SECOND, layout(1), ALL)


# -- who is refused -----------------------------------------------------------------------------


def test_a_second_live_start_is_refused_in_words(meeting: m.Meeting, start: m.EngineStart) -> None:
    def claim() -> object:
        return meeting.claim(USER, NAME, b"b", ALL)

    expected = "engine id 'engine' is held by the live process {} (vllm); end it or choose another"
    meeting.seat(start, MoverId(1), FIRST, layout())
    assert refusal(claim) == (
        EngineAlreadyLives,
        expected.format(11) + " id",
        "identity.engine_id",
    )
    meeting.join(start, side())
    assert refusal(claim) == (
        EngineAlreadyLives,
        expected.format(10) + " id",
        "identity.engine_id",
    )


def test_once_there_is_a_scheduler_only_its_life_holds_the_id(
    meeting: m.Meeting, start: m.EngineStart
) -> None:
    meeting.seat(start, MoverId(1), FIRST, layout())
    meeting.join(start, side())
    assert start.holder(frozenset({"first"})) is None
    assert start.holder(frozenset({"scheduler"})) is SCHEDULER
    assert start.processes() == [SCHEDULER, FIRST]


def test_a_start_after_a_dead_one_waits_for_its_movers_and_says_so(
    meeting: m.Meeting, start: m.EngineStart
) -> None:
    meeting.seat(start, MoverId(1), FIRST, layout())
    assert meeting.claim(USER, NAME, b"b", NOBODY) == [
        m.EndRank(MoverId(1), "its engine started anew")
    ]
    meeting.mover_gone(MoverId(1))
    fresh = meeting.claim(USER, NAME, b"b", NOBODY)
    assert isinstance(fresh, m.EngineStart)
    assert (fresh.uid, fresh.engine_id, fresh.nonce) == (USER, NAME, b"b")
    assert fresh.name == (USER, NAME)


def test_a_second_live_scheduler_of_one_start_is_refused_in_words(
    meeting: m.Meeting, start: m.EngineStart
) -> None:
    assert meeting.check_scheduler(start, SCHEDULER, ALL) == []
    meeting.join(start, side())
    other = m.ClientProcess("other", 99, "vllm")
    assert refusal(lambda: meeting.check_scheduler(start, other, ALL)) == (
        EngineAlreadyLives,
        "the live process 10 is the scheduler of this engine start",
        "identity.boot_nonce",
    )


@pytest.mark.parametrize(
    ("process", "living"),
    [
        (SCHEDULER, ALL),
        (m.ClientProcess("other", 99, "vllm"), NOBODY),
        (m.ClientProcess("its next connection", SCHEDULER.pid, "vllm"), ALL),
    ],
    ids=["the same", "the other is dead", "the same process, connected anew"],
)
def test_an_earlier_stream_of_the_scheduler_ends_with_a_reason(
    meeting: m.Meeting, start: m.EngineStart, process: m.ClientProcess, living: frozenset[str]
) -> None:
    meeting.join(start, side())
    assert meeting.check_scheduler(start, process, living) == [
        m.EndSession(SESSION, "a newer session of the same scheduler came")
    ]


def test_processes_whose_pids_are_not_seen_are_told_apart_by_their_numbers(
    meeting: m.Meeting, start: m.EngineStart
) -> None:
    first = m.ClientProcess("first", 0, "vllm", number=7)
    meeting.join(start, side(process=first))
    living = frozenset({"first"})
    second = m.ClientProcess("second", 0, "vllm", number=8)
    with pytest.raises(EngineAlreadyLives):
        meeting.check_scheduler(start, second, living)
    for number in (7, 0):  # connected anew, and perhaps so
        same = m.ClientProcess("its next connection", 0, "vllm", number)
        assert meeting.check_scheduler(start, same, living) == [
            m.EndSession(SESSION, "a newer session of the same scheduler came")
        ]


def test_a_rank_of_a_live_process_is_refused_in_words(
    meeting: m.Meeting, start: m.EngineStart
) -> None:
    meeting.seat(start, MoverId(1), FIRST, layout())
    assert refusal(lambda: meeting.check_place(start, SECOND, layout(), ALL)) == (
        RankTaken,
        "rank 0 is registered by the live process 11",
        "rank",
    )
    meeting.check_place(start, SECOND, layout(1), ALL)
    meeting.check_place(start, FIRST, layout(), ALL)
    meeting.check_place(start, SECOND, layout(), frozenset({"second"}))
    assert meeting.occupants(start, 0) == [m.EndRank(MoverId(1), "its rank registered again")]
    assert meeting.occupants(start, 1) == []


def test_engines_have_bounds_of_their_own(meeting: m.Meeting) -> None:
    bound = meeting.shares.bound
    assert (bound.most, bound.each) == (m.MAX_ENGINES, m.MAX_ENGINES_OF_A_USER)
    for number in range(m.MAX_ENGINES_OF_A_USER):
        meeting.claim(USER, f"{number}", b"a", NOBODY)
    assert refusal(lambda: meeting.claim(USER, "one more", b"a", NOBODY)) == (
        LimitExceeded,
        "uid 7 has 512 engines, as many as one user may: end some",
        "identity.engine_id",
    )
    meeting.claim(USER + 1, NAME, b"a", NOBODY)


# -- what follows -------------------------------------------------------------------------------


def test_ranks_that_came_first_are_attached_in_order_and_ready_is_told_once(
    meeting: m.Meeting, start: m.EngineStart
) -> None:
    assert meeting.seat(start, MoverId(2), SECOND, layout(1)) == []
    assert meeting.seat(start, MoverId(1), FIRST, layout(0)) == []
    assert meeting.answered(MoverId(1)) == []
    assert meeting.join(start, side()) == [
        m.AttachRank(SESSION, MoverId(1), RankPlacement(0, 0, writer=True)),
        m.AttachRank(SESSION, MoverId(2), RankPlacement(1, 1, writer=True)),
    ]
    assert meeting.answered(MoverId(2)) == [m.TellRanksReady(SESSION)]
    assert meeting.answered(MoverId(2)) == []
    assert start.session is not None
    assert start.session.readiness is m.Readiness.READY


def test_a_scheduler_that_comes_last_hears_at_once_that_ranks_are_ready(
    meeting: m.Meeting, start: m.EngineStart
) -> None:
    for rank, process in enumerate((FIRST, SECOND)):
        meeting.seat(start, MoverId(1 + rank), process, layout(rank))
        meeting.answered(MoverId(1 + rank))
    assert meeting.join(start, side())[2:] == [m.TellRanksReady(SESSION)]


def test_a_rank_that_guessed_wrong_is_ended_and_told_of_and_the_other_is_attached(
    meeting: m.Meeting, start: m.EngineStart
) -> None:
    wrong = replace(layout(0), groups=(GroupFigures(BLOCK, 2),) * 2, blocks_guessed=True)
    meeting.seat(start, MoverId(1), FIRST, wrong)
    meeting.seat(start, MoverId(2), SECOND, layout(1))
    assert meeting.join(start, side()) == [
        m.NoteRankGone(USER, NAME, 0),
        m.EndRank(MoverId(1), "its blocks have another size"),
        m.AttachRank(SESSION, MoverId(2), RankPlacement(1, 1, writer=True)),
    ]
    assert start.ranks.keys() == {1}
    assert start.movers.keys() == {1, 2}


def test_a_lost_rank_is_told_of_and_ready_is_told_again_when_it_is_back(
    meeting: m.Meeting, start: m.EngineStart
) -> None:
    meeting.join(start, side())
    for rank, process in enumerate((FIRST, SECOND)):
        meeting.seat(start, MoverId(1 + rank), process, layout(rank))
        meeting.answered(MoverId(1 + rank))
    assert meeting.worker_ended(MoverId(2)) == [m.EndRank(MoverId(2), "its worker process is gone")]
    assert meeting.mover_gone(MoverId(2)) == [m.NoteRankGone(USER, NAME, 1)]
    assert start.session is not None
    assert start.session.readiness is m.Readiness.GATHERING
    assert meeting.seat(start, MoverId(3), SECOND, layout(1)) == [
        m.AttachRank(SESSION, MoverId(3), RankPlacement(1, 1, writer=True))
    ]
    assert meeting.answered(MoverId(3)) == [m.TellRanksReady(SESSION)]


def test_with_the_session_every_rank_loses_its_place_and_every_mover_ends(
    meeting: m.Meeting, start: m.EngineStart
) -> None:
    meeting.join(start, side())
    for rank, process in enumerate((FIRST, SECOND)):
        meeting.seat(start, MoverId(1 + rank), process, layout(rank))
    assert meeting.leave(start, SessionId(99)) == [], "it is another's"
    assert meeting.leave(start, SESSION) == [
        m.NoteRankGone(USER, NAME, 0),
        m.NoteRankGone(USER, NAME, 1),
        m.EndUnattached(MoverId(1), "its session has ended"),
        m.EndUnattached(MoverId(2), "its session has ended"),
    ]
    assert meeting.mover_gone(MoverId(1)) == []
    assert meeting.starts, "a mover may still run"
    assert meeting.mover_gone(MoverId(2)) == []
    assert not meeting.starts


def test_who_was_never_seated_causes_nothing(meeting: m.Meeting) -> None:
    for told in (meeting.answered, meeting.worker_ended, meeting.mover_gone):
        assert told(MoverId(9)) == []


def test_two_sessions_or_movers_of_one_place_and_a_forgotten_start_are_our_own_fault(
    meeting: m.Meeting, start: m.EngineStart
) -> None:
    meeting.seat(start, MoverId(1), FIRST, layout())
    with pytest.raises(AssertionError, match=r"^a mover has its place already"):
        meeting.seat(start, MoverId(1), FIRST, layout(1))
    with pytest.raises(AssertionError, match=r"^two movers of one place"):
        meeting.seat(start, MoverId(2), FIRST, layout())
    meeting.join(start, side())
    with pytest.raises(AssertionError, match=r"^two sessions of one start"):
        meeting.join(start, side(SessionId(6)))
    meeting.leave(start, SESSION)
    meeting.mover_gone(MoverId(1))
    with pytest.raises(AssertionError, match=r"^a start that was forgotten"):
        meeting.join(start, side())
    with pytest.raises(AssertionError, match=r"^a start that was forgotten"):
        meeting.seat(start, MoverId(3), FIRST, layout())
