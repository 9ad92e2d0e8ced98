"""Any order of schedulers, workers and deaths: one live start an id, one mover a place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvd.core.engines import meeting as m
from kvd.core.engines.layouts import GroupFigures, RankLayout, RankPlacement
from kvd.core.errors import EngineAlreadyLives, LayoutMismatch, LimitExceeded, RankTaken
from kvd.core.keys import MoverId, SessionId
from tests.core.bench import BLOCK, spec

USER = 7
WORLD = 2
SPEC = spec(shards=WORLD)
engines = st.sampled_from(["one", "two"])
nonces = st.sampled_from([b"a", b"b"])
ranks = st.integers(0, WORLD - 1)
picks = st.integers(0, 20)


def layout(
    rank: int, *, size: int = BLOCK, blocks: int = 1, guessed: bool = False, writer: bool = True
) -> RankLayout:
    placement = RankPlacement(rank, rank, writer)
    return RankLayout(WORLD, placement, (GroupFigures(size, blocks),), guessed)


class MeetingRules(RuleBasedStateMachine):
    """Processes that come and die, and movers that take their time to end."""

    def __init__(self) -> None:
        super().__init__()
        self.meeting = m.Meeting()
        self.number = 0
        self.living: set[str] = set()
        self.sessions: dict[SessionId, m.EngineStart] = {}
        self.schedulers: dict[SessionId, m.ClientProcess] = {}
        self.movers: dict[MoverId, tuple[str, int]] = {}  # whose processes run: engine, rank
        self.workers: dict[MoverId, m.ClientProcess] = {}
        self.answers: set[MoverId] = set()
        self.attached: dict[MoverId, SessionId] = {}
        self.to_end: set[MoverId] = set()
        self.told: dict[SessionId, frozenset[MoverId]] = {}  # the movers that were ready last

    def carry_out(self, orders: Sequence[m.MeetingOrder]) -> None:
        for order in orders:
            match order:
                case m.AttachRank():
                    assert order.mover in self.movers, "a mover that is gone is attached"
                    assert order.mover not in self.attached, "attached twice"
                    assert order.session in self.sessions, "attached to a session that is over"
                    self.attached[order.mover] = order.session
                case m.TellRanksReady():
                    self.is_told_ready(order.session)
                case m.EndSession():
                    self.leave(order.session)
                case m.EndRank() | m.EndUnattached():
                    assert order.mover in self.movers, "one that is gone is to end"
                    self.to_end.add(order.mover)
                case m.NoteRankGone():
                    pass

    def is_told_ready(self, session: SessionId) -> None:
        standing = self.standing(session)
        assert standing is not None, "ready is told before every worker knows of its mover"
        assert self.told.get(session) != standing, "ready is told twice"
        self.told[session] = standing

    def standing(self, session: SessionId) -> frozenset[MoverId] | None:
        """The movers of a session that has all: each attached, seated and known to its worker."""
        seated = self.sessions[session].ranks.values()
        movers = {r.mover for r in seated if self.attached.get(r.mover) == session}
        good = movers & self.answers & self.movers.keys()
        return frozenset(good) if len(good) == WORLD else None

    def snapshot(self) -> Any:
        starts = self.meeting.starts
        return (
            {name: (id(s), s.session, dict(s.ranks), dict(s.movers)) for name, s in starts.items()},
            {mover: (id(r), r.state) for mover, r in self.meeting.registrations.items()},
            [s.session and s.session.readiness for s in starts.values()],
            len(self.meeting.shares),
        )

    def process(self) -> m.ClientProcess:
        self.number += 1
        token = f"process {self.number}"
        self.living.add(token)
        return m.ClientProcess(token, self.number, "engine")

    def claim(self, engine: str, nonce: bytes) -> m.EngineStart | None:
        """None: refused, or movers of an earlier start still run."""
        before = self.snapshot()
        held = self.meeting.starts.get((USER, engine))
        try:
            found = self.meeting.claim(USER, engine, nonce, frozenset(self.living))
        except EngineAlreadyLives:
            assert held is not None
            assert held.nonce != nonce
            assert held.holder(self.living) is not None, "nobody holds it"
            assert self.snapshot() == before, "a refusal changed something"
            return None
        if isinstance(found, list):
            assert self.snapshot() == before, "who has to wait changed something"
            self.carry_out(found)
            return None
        if held is not None and found is not held:
            assert held.holder(self.living) is None, "a live start lost its id"
            assert not held.movers, "a start began while movers of an earlier one run"
        return found

    # -- what happens --------------------------------------------------------------------------

    @rule(engine=engines, nonce=nonces, first=st.integers(0, WORLD), guess=st.booleans())
    def engine_comes_up(self, engine: str, nonce: bytes, first: int, guess: bool) -> None:
        """Its scheduler and all its ranks, in some order; who has to wait comes again."""
        for each in [*range(first, WORLD + 1), *range(first)]:
            for _ in range(2):
                start = self.meeting.starts.get((USER, engine))
                if each == WORLD and (start is None or start.session is None):
                    self.scheduler_comes(engine, nonce, again=True, size=1)
                elif each != WORLD and (start is None or each not in start.ranks):
                    kind = "guessed" if guess else "right"
                    self.worker_comes(engine, nonce, each, kind, same=True, seats=True)
                for mover in sorted(self.to_end & self.movers.keys()):
                    self.mover_is_gone(mover)
        for mover in sorted(self.movers):
            self.answers.add(mover)
            self.carry_out(self.meeting.answered(mover))

    @rule(engine=engines, nonce=nonces, again=st.booleans(), size=st.sampled_from([1, 1, 1, 2]))
    def scheduler_comes(self, engine: str, nonce: bytes, again: bool, size: int) -> None:
        process = self.process()
        start = self.claim(engine, nonce)
        if start is None:
            return
        if again and start.session is not None:
            process = start.session.process  # another stream of the same process
        wanted = spec(shards=WORLD, block_bytes=size * BLOCK)
        before = self.snapshot()
        try:
            orders = self.meeting.check_scheduler(start, process, frozenset(self.living))
        except EngineAlreadyLives:
            assert self.snapshot() == before, "a refusal changed something"
            assert start.session is not None
            assert start.session.process.token in self.living - {process.token}, "for no reason"
            return
        held = self.schedulers.get(start.session.session) if start.session else None
        assert held is None or held == process or held.token not in self.living, "two of one start"
        self.carry_out(orders)
        start = self.claim(engine, nonce)  # with the older session its record may have gone
        assert start is not None
        before = self.snapshot()
        try:
            self.meeting.check_ranks(start, wanted, WORLD)
        except LayoutMismatch:
            assert self.snapshot() == before, "a refusal changed something"
        else:
            self.number += 1
            session = SessionId(self.number)
            self.sessions[session], self.schedulers[session] = start, process
            side = m.SchedulerSide(session, process, wanted, WORLD)
            self.carry_out(self.meeting.join(start, side))
            sizes = {g.blocks_per_block for r in start.ranks.values() for g in r.layout.groups}
            assert sizes <= {1}, "a rank that guessed wrong has its place"
        self.meeting.release(start)

    @rule(
        engine=engines,
        nonce=nonces,
        rank=ranks,
        kind=st.sampled_from(["right"] * 6 + ["guessed", "guessed wrong", "other size", "reader"]),
        same=st.booleans(),
        seats=st.sampled_from([True, True, True, False]),
    )
    def worker_comes(
        self, engine: str, nonce: bytes, rank: int, kind: str, same: bool, seats: bool
    ) -> None:
        process = self.process()
        start = self.claim(engine, nonce)
        if start is None:
            return
        if same and rank in start.ranks:
            process = start.ranks[rank].process
        said = layout(
            rank,
            size=2 * BLOCK if kind == "other size" else BLOCK,
            blocks=2 if kind == "guessed wrong" else 1,
            guessed=kind.startswith("guessed"),
            writer=kind != "reader",
        )
        before = self.snapshot()
        try:
            self.meeting.check_place(start, process, said, frozenset(self.living))
        except (RankTaken, LayoutMismatch) as error:
            assert self.snapshot() == before, "a refusal changed something"
            if isinstance(error, RankTaken):
                holder = start.ranks[rank].process.token
                assert holder in self.living - {process.token}, "for no reason"
            self.meeting.release(start)
            return
        ending = self.meeting.occupants(start, rank)
        self.carry_out(ending)
        if not ending and seats:
            self.number += 1
            mover = MoverId(self.number)
            self.movers[mover], self.workers[mover] = (engine, rank), process
            self.carry_out(self.meeting.seat(start, mover, process, said))
        self.meeting.release(start)

    @precondition(lambda self: self.movers)
    @rule(pick=picks)
    def worker_is_answered(self, pick: int) -> None:
        mover = sorted(self.movers)[pick % len(self.movers)]
        self.answers.add(mover)
        self.carry_out(self.meeting.answered(mover))

    @precondition(lambda self: self.movers)
    @rule(pick=picks, by_itself=st.booleans())
    def mover_ends(self, pick: int, by_itself: bool) -> None:
        some = sorted(self.movers if by_itself else self.to_end & self.movers.keys())
        if some:
            self.mover_is_gone(some[pick % len(some)])

    def mover_is_gone(self, mover: MoverId) -> None:
        del self.movers[mover]
        self.forget_ready(mover)
        self.carry_out(self.meeting.mover_gone(mover))
        before = self.snapshot()
        assert not self.meeting.mover_gone(mover), "told of twice, heard once"
        assert not self.meeting.answered(mover)
        assert not self.meeting.worker_ended(mover)
        assert self.snapshot() == before

    def forget_ready(self, mover: MoverId) -> None:
        """Of this one its scheduler is told that it was lost."""
        self.told = {s: movers for s, movers in self.told.items() if mover not in movers}

    @precondition(lambda self: self.living)
    @rule(pick=picks, is_seen=st.booleans())
    def process_dies(self, pick: int, is_seen: bool) -> None:
        """Its connection's end may be heard of later."""
        token = sorted(self.living)[pick % len(self.living)]
        self.living.discard(token)
        if is_seen:
            self.ends_are_seen()

    @rule()
    def ends_are_seen(self) -> None:
        for mover, worker in list(self.workers.items()):
            if worker.token not in self.living:
                self.carry_out(self.meeting.worker_ended(mover))
        for session, process in list(self.schedulers.items()):
            if process.token not in self.living and session in self.sessions:
                self.leave(session)

    @precondition(lambda self: self.sessions)
    @rule(pick=picks)
    def stream_breaks(self, pick: int) -> None:
        self.leave(sorted(self.sessions)[pick % len(self.sessions)])

    def leave(self, session: SessionId) -> None:
        start = self.sessions.pop(session)
        self.told.pop(session, None)
        orders = self.meeting.leave(start, session)
        unattached = {o.mover for o in orders if isinstance(o, m.EndUnattached)}
        theirs = {mover for mover, whose in self.attached.items() if whose == session}
        assert theirs & start.movers.keys() <= unattached, "a mover of the session is forgotten"
        self.carry_out(orders)
        before = self.snapshot()
        assert not self.meeting.leave(start, session), "it left before"
        assert self.snapshot() == before

    # -- what must hold ------------------------------------------------------------------------

    @invariant()
    def a_place_has_one_mover(self) -> None:
        assert not [place for place, n in Counter(self.movers.values()).items() if n > 1]
        assert self.meeting.registrations.keys() == self.movers.keys()

    @invariant()
    def a_record_goes_with_its_last_session_and_mover(self) -> None:
        starts = self.meeting.starts
        for start in starts.values():
            assert start.session is not None or start.movers, "a record of nothing"
        assert self.meeting.shares.of(USER) == len(self.meeting.shares) == len(starts)
        for mover, registration in self.meeting.registrations.items():
            start = registration.start
            assert starts[start.name] is start, "a mover runs whose start is forgotten"
            assert start.movers[mover] is registration
            has_place = start.ranks.get(registration.rank) is registration
            assert has_place == (registration.state is not m.RegistrationState.LEFT)
        for session, start in self.sessions.items():
            alive = self.schedulers[session].token in self.living
            is_known = starts.get(start.name) is start
            assert is_known or not alive, "a live scheduler's start is forgotten"

    @invariant()
    def sessions_with_all_ranks_were_told_so(self) -> None:
        for session, start in self.sessions.items():
            standing = self.standing(session)
            assert self.told.get(session) == standing, "ready, and not told, or the other way round"
            assert start.session is not None
            is_ready = start.session.readiness is m.Readiness.READY
            assert is_ready == (standing is not None)

    def teardown(self) -> None:
        for session in list(self.sessions):
            self.leave(session)
        for mover in list(self.movers):
            self.mover_is_gone(mover)
        assert not self.meeting.starts
        assert not self.meeting.registrations
        assert not len(self.meeting.shares)


MeetingRules.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestMeeting = MeetingRules.TestCase


def test_a_users_share_of_engines_is_asked_for_before_anything_changes() -> None:
    meeting = m.Meeting()
    for number in range(m.MAX_ENGINES_OF_A_USER):
        meeting.claim(USER, f"{number}", b"a", frozenset())
    before = dict(meeting.starts)
    with pytest.raises(LimitExceeded):
        meeting.claim(USER, "one more", b"a", frozenset())
    assert meeting.starts == before
