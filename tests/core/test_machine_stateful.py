"""Any order of events keeps every invariant, and the log of it can be replayed exactly."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.keys import JobId, MoverId, RequestId, SessionId
from kvd.core.machine import MachineConfig
from kvd.core.model import backlog
from kvd.core.model.tiers import TierTerms
from tests.core import drawn
from tests.core.bench import (
    BLOCK,
    EXTENT,
    MS,
    SECRET,
    Bench,
    context,
    engine_blocks,
    finished,
    keys,
    only,
    verdict,
)
from tests.core.drawn import RANKS, SESSIONS, SPECS, accounts, groups, key_lists, requests, sessions
from tests.core.replaying import replay
from tests.core.test_recovery import restarted


class MachineRules(RuleBasedStateMachine):
    """Engines, movers and an operator, all at once."""

    tiers: tuple[TierTerms, ...] = ()

    @initialize(
        threshold=st.sampled_from([1, 1, 2]),
        policy=st.sampled_from(["lru", "arc", "s3fifo", "turns"]),
        extents=st.integers(2, 8),
        nodes=drawn.node_counts,
        at_once=st.sampled_from([1, 2, 64]),
    )
    def begin(self, threshold: int, policy: str, extents: int, nodes: int, at_once: int) -> None:
        self.pieces = patch.multiple(
            backlog,
            LEASES_AT_ONCE=at_once,
            PARTS_AT_ONCE=at_once,
            STORES_LOOKED_AT=at_once,
            BLOCKS_AT_ONCE=at_once,
            CLAIMED_AT_ONCE=max(1, at_once // 2),
            SCOPES_AT_ONCE=at_once,
            EMPTIED_AT_ONCE=at_once,
            EVICTED_AT_ONCE=at_once,
            EVICTED_FOR_A_STORE=at_once,
            EVICTED_IN_A_BATCH=max(1, at_once // 2),
        )
        self.pieces.start()
        config = MachineConfig(
            extents=extents,
            extent_bytes=EXTENT,
            policy=policy,
            store_threshold=threshold,
            tracker_blocks=64,
            tag_secret=SECRET,
            spare_bytes=EXTENT,
            extent_nodes=drawn.dealt(extents, nodes),
            private_grace_ns=3000 * MS,
            submit_deadline_ns=1000 * MS,
            copy_deadline_ns=1000 * MS,
            tiers=self.tiers,
        )
        self.bench = Bench(config)
        self.open: set[int] = set()
        self.movers: dict[int, tuple[int, int]] = {}  # mover -> session, rank
        self.ending: set[int] = set()
        self.next_id = 10
        self.ids: dict[int, int] = {}  # which of SESSIONS -> session id
        self.jobs: set[tuple[int, int]] = set()
        self.held: dict[int, tuple[int, str, str, list[int]]] = {}  # lease -> what it holds
        self.unmaps: list[act.UnmapRow] = []
        self.zeros: list[act.ZeroRow] = []
        self.epochs: dict[int, str] = {}
        self.entered: set[tuple[int, str]] = set()  # which engine was ever in which epoch
        self.numbers: dict[str, int] = {}  # of namespaces, by fingerprint
        for which in SESSIONS:
            self.open_session(which)

    def feed(self, event: ev.Event) -> list[act.Action]:
        actions = self.bench.feed(event)
        for end in only(actions, act.EndJob):
            assert (end.session, end.job) in self.jobs, "a job ended that was not running"
            self.jobs.discard((end.session, end.job))
        self.unmaps += only(actions, act.UnmapRow)
        self.zeros += only(actions, act.ZeroRow)
        self.ending |= {order.mover for order in only(actions, act.KillMover)}
        for cleared in only(actions, act.AnnounceCleared):
            gone = self.bench.machine.state.namespaces[cleared.namespace].spec.fingerprint
            self.held = {n: h for n, h in self.held.items() if h[1].split("/")[0] != gone}
        return actions

    # -- sessions and ranks --------------------------------------------------------------------

    def open_session(self, which: int) -> None:
        """Its engine may have been reset before its stream broke, and names its epoch again."""
        self.next_id += 1
        self.ids[which] = self.next_id
        epoch = self.epochs.setdefault(which, "")
        session = SessionId(self.next_id)
        opened = ev.SessionOpened(
            session, SPECS[which], epoch, RANKS[which], bool(epoch), f"engine {which}"
        )
        self.entered.add((which, epoch))
        (reply,) = only(self.feed(opened), act.Reply)
        self.numbers[SPECS[which].fingerprint] = reply.payload.namespace
        for rank in range(RANKS[which]):
            self.attach(which, rank)

    def attach(self, which: int, rank: int) -> None:
        self.next_id += 1
        session = SessionId(self.ids[which])
        self.movers[self.next_id] = (session, rank)
        self.feed(ev.RankAttached(session, MoverId(self.next_id), rank, rank, True, rank - 1))

    def come_back(self, which: int) -> None:
        """The engine starts again if it is down, and registers the ranks that it lacks."""
        if which not in self.ids:
            self.open_session(which)
            return
        session = self.ids[which]
        for rank in range(RANKS[which]):
            if (session, rank) not in self.movers.values():
                self.attach(which, rank)

    @rule(
        which=sessions,
        numbers=key_lists,
        account=accounts,
        whole=st.booleans(),
        ends=st.integers(0, 6),
    )
    def scheduler_step(
        self, which: int, numbers: list[int], account: str, whole: bool, ends: int
    ) -> None:
        """What an engine does most: look up, load what is there, store the rest."""
        self.come_back(which)

        self.look_up(which, numbers, account, "p", ev.LeaseMode.PREFIX)
        there = [n for n in numbers if n in self.resident(which, account)]
        if there:
            self.load(which, there, account, False)
        self.store(which, numbers, account, 0, whole, 0, [])
        self.feed(ev.StepEnded(SessionId(self.ids[which])))
        for number in range(ends):
            self.finish_one(7 * number, ev.TransferOutcome.DONE)
        self.end_request(which, "p")
        self.bench.now_ns += 20 * MS

    def close_session(self, which: int, gone: bool = False) -> None:
        if which in self.ids:
            session = self.ids.pop(which)
            self.feed(ev.SessionClosed(SessionId(session), gone))
            if gone:
                self.epochs[which] = ""
            self.held = {n: held for n, held in self.held.items() if held[0] != session}

    def lose_a_rank(self, pick: int, ending: bool) -> None:
        if not self.movers:
            return
        mover = sorted(self.movers)[pick % len(self.movers)]
        if ending:
            self.feed(ev.RankEnding(MoverId(mover), "test"))
            self.ending.add(mover)
            return
        del self.movers[mover]
        self.ending.discard(mover)
        self.unmaps = [order for order in self.unmaps if order.mover != mover]
        for number, order in list(self.bench.transfers.items()):
            if order.mover == mover:
                del self.bench.transfers[number]
        self.feed(ev.MoverGone(MoverId(mover), "test"))

    def change_epoch(self, which: int, epoch: str) -> None:
        if which in self.ids:
            session = self.ids[which]
            self.epochs[which] = epoch
            self.entered.add((which, epoch))
            self.feed(ev.EpochChanged(SessionId(session), epoch))
            self.held = {n: held for n, held in self.held.items() if held[0] != session}

    @rule(
        which=sessions,
        numbers=key_lists,
        whole=st.booleans(),
        kind=st.sampled_from(
            ["close", "lose", "end", "epoch", "quota", "terms", "clear", "touch", "drop", "kill"]
        ),
        pick=st.integers(0, 9),
    )
    def disturb(self, which: int, numbers: list[int], whole: bool, kind: str, pick: int) -> None:
        """Something happens in the middle of traffic."""
        self.scheduler_step(which, numbers, "", whole, pick % 3)
        match kind:
            case "close":
                self.close_session(which, gone=pick % 2 == 0)
            case "lose" | "end" | "kill":
                self.lose_a_rank(pick, kind != "lose")
            case "epoch":
                self.change_epoch(which, ["", "e1"][pick % 2])
            case "quota":
                quota = [0, 0, 5, 20][pick % 4] * BLOCK
                self.feed(ev.QuotaSet(1, SPECS[1 + 2 * (pick % 2)].tenant, quota))
            case "terms":
                share, lasting = (pick % 5 + 1) / 10, (pick + 1) * 100 * MS
                self.feed(ev.TermsChanged(share, lasting, lasting, lasting))
            case "clear":
                known = self.bench.machine.namespaces()
                self.feed(ev.NamespaceCleared(1, known[pick % len(known)]))
            case "touch":
                session = SessionId(self.ids[which])
                request = ["r", "prefetches"][pick % 2]
                self.feed(ev.Touched(session, context(request=request), 0, keys(*numbers)))
            case "drop":
                self.look_up(which, numbers, "", "q", ev.LeaseMode.ALL)
                self.finish_all()
                self.load(which, numbers, "", True)

    # -- verbs ---------------------------------------------------------------------------------

    @rule(
        which=sessions,
        numbers=key_lists,
        account=accounts,
        group=groups,
        whole=st.booleans(),
        shift=st.sampled_from([0, 0, 0, 7]),
        later=drawn.later_pieces,
    )
    def store(  # noqa: PLR0917 - hypothesis draws each
        self,
        which: int,
        numbers: list[int],
        account: str,
        group: int,
        whole: bool,
        shift: int,
        later: list[tuple[int, int]],
    ) -> None:
        """One job in one piece or several, which repeat keys, and between which copies end."""
        if which not in self.ids:
            return
        group = group if which == 3 else 0
        session = self.ids[which]
        job = self.next_id = self.next_id + 1
        self.jobs.add((session, job))
        pieces = [(numbers, 0), *((numbers[first % len(numbers) :], n) for first, n in later)]
        for place, (some, ends) in enumerate(pieces):
            for number in range(ends):
                self.finish_one(5 * number, ev.TransferOutcome.DONE)
            blocks = engine_blocks([n + shift * (place + 1) for n in some])
            run = ev.Run(group, keys(*some), blocks)
            last = place == len(pieces) - 1
            answer = verdict(
                self.feed(
                    ev.StoreRequested(
                        SessionId(session), JobId(job), context(account), (run,), whole, last
                    )
                )
            )
            assert answer.accepted or answer.reason

    @rule(which=sessions, numbers=key_lists, account=accounts, pick=st.booleans())
    def load(self, which: int, numbers: list[int], account: str, pick: bool) -> None:
        if which not in self.ids:
            return
        session = self.ids[which]
        if pick:  # what is there, so that loads do start
            resident = self.resident(which, account)
            numbers = sorted(resident)[:8] or numbers
        self.next_id += 1
        self.jobs.add((session, self.next_id))
        run = ev.Run(0, keys(*numbers), engine_blocks(numbers))
        event = ev.LoadRequested(SessionId(session), JobId(self.next_id), context(account), (run,))
        # Before: what the load uses may leave with the same event, for a class that needs its row.
        readable = set(numbers) <= self.resident(which, account)
        answer = verdict(self.feed(event))
        assert not answer.accepted or readable, "a load of blocks that nobody announced"

    def resident(self, which: int, account: str) -> set[int]:
        """Keys of group 0 that the announced events say this session can read."""
        namespace = self.numbers[SPECS[which].fingerprint]
        blocks = self.bench.pool.announced.get(namespace, set())
        scope = (self.epochs[which], account, 0)
        return {key for *of, key in blocks if tuple(of) == scope}

    @rule(
        which=sessions,
        numbers=key_lists,
        account=accounts,
        request=requests,
        mode=st.sampled_from(ev.LeaseMode),
    )
    def look_up(
        self, which: int, numbers: list[int], account: str, request: str, mode: ev.LeaseMode
    ) -> None:
        if which not in self.ids:
            return
        session = self.ids[which]
        query = ev.Query(context(account, request), 0, keys(*numbers), mode)
        # Before: what is no lease's may leave with the same event, for a class that needs its row.
        resident = self.resident(which, account)
        (reply,) = only(self.feed(ev.LookupRequested(SessionId(session), (query,))), act.Reply)
        answer = reply.payload[0]
        statuses = [status & 3 for status in answer.statuses]
        for number, status in zip(numbers, statuses, strict=True):
            assert (status in (1, 3)) == (number in resident), "the oracle says otherwise"
        if answer.lease is not None:
            hits = [n for n, s in zip(numbers, statuses, strict=True) if s == 1]
            first_other = next((i for i, s in enumerate(statuses) if s != 1), len(statuses))
            kept = hits if mode is ev.LeaseMode.ALL else numbers[:first_other]
            where = f"{SPECS[which].fingerprint}/{self.epochs[which]}"
            self.held[answer.lease] = (session, where, account, kept)

    def end_request(self, which: int, request: str) -> None:
        if which in self.ids:
            session = self.ids[which]
            self.feed(ev.RequestsEnded(SessionId(session), (RequestId(request),)))

    # -- movers, pool, operator, time ------------------------------------------------------------

    @precondition(lambda self: self.bench.transfers)
    @rule(
        pick=st.integers(0, 100),
        outcome=st.sampled_from([ev.TransferOutcome.DONE] * 4 + list(ev.TransferOutcome)),
    )
    def finish(self, pick: int, outcome: ev.TransferOutcome) -> None:
        self.finish_one(pick, outcome)

    def finish_one(self, pick: int, outcome: ev.TransferOutcome) -> None:
        running = self.bench.transfers
        if running:
            order = running.pop(sorted(running)[pick % len(running)])
            self.feed(finished(order, outcome))

    @rule()
    def finish_all(self) -> None:
        while self.bench.transfers:
            _, order = self.bench.transfers.popitem()
            self.feed(finished(order, ev.TransferOutcome.DONE))

    @rule()
    def movers_and_pool_catch_up(self) -> None:
        unmaps, self.unmaps = self.unmaps, []
        for order in unmaps:
            self.feed(ev.RowUnmapped(order.mover, order.row))
        zeros, self.zeros = self.zeros, []
        for zero in zeros:
            self.feed(ev.RowZeroed(zero.row))

    @rule(after_ms=st.sampled_from([10, 250, 1100, 2500]))
    def tick(self, after_ms: int) -> None:
        self.bench.now_ns += after_ms * MS
        self.feed(ev.TimerTicked())

    # -- what must hold ----------------------------------------------------------------------

    @invariant()
    def leased_blocks_stay(self) -> None:
        if not hasattr(self, "bench"):
            return
        state = self.bench.machine.state
        for number, (session, where, account, numbers) in self.held.items():
            found = state.sessions.get(SessionId(session))
            if found is None or number not in found.leases:
                continue  # it has ended
            fingerprint, epoch = where.split("/")
            namespace = self.numbers[fingerprint]
            announced = self.bench.pool.announced.get(namespace, set())
            for key in numbers:
                assert (epoch, account, 0, key) in announced, "a leased block was evicted"

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        try:
            self.next_incarnation_serves_the_same()
            self.everything_ends()
            replay(self.bench)
        finally:
            self.pieces.stop()

    @precondition(lambda self: self.bench.machine.has_work())
    @rule()
    def long_work_goes_on(self) -> None:
        self.feed(ev.WorkContinued())

    def work_off(self) -> None:
        while self.bench.machine.has_work():
            self.feed(ev.WorkContinued())

    def next_incarnation_serves_the_same(self) -> None:
        """Killed now, the daemon would serve exactly what was announced."""
        next_one = restarted(self.bench)
        before = {n: blocks for n, blocks in self.bench.pool.announced.items() if blocks}
        after = {n: blocks for n, blocks in next_one.pool.announced.items() if blocks}
        assert before == after

    def everything_ends(self) -> None:
        """I5, I10: once all engines and movers are gone, nothing is held."""
        for which in list(self.ids):
            self.close_session(which, gone=which != 2)
        for mover in list(self.movers):
            self.bench.transfers = {
                n: t for n, t in self.bench.transfers.items() if t.mover != mover
            }
            self.feed(ev.MoverGone(MoverId(mover), "test"))
        self.work_off()
        state = self.bench.machine.state
        assert not self.jobs, "a job never ended"
        assert len(state.sessions) + len(state.transfers) == 0
        assert not state.slots.pins.any()
        assert not any(c.reserved or c.quarantined for c in state.classes.values())
        for _ in range(4):
            self.tick(3000)
            self.work_off()
            self.movers_and_pool_catch_up()
            self.work_off()
        assert {n.spec for n in state.namespaces.values()} == {SPECS[1]}, "private ones stay"
        met = {epoch for _, epoch in self.entered if {(1, epoch), (2, epoch)} <= self.entered}
        assert {scope.epoch for scope in state.scopes.values()} <= {"", *met}, "own epochs stay"


MachineRules.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestMachine = MachineRules.TestCase
