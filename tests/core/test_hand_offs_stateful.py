"""Hand-offs among everything else that may happen: held means readable, and all of it ends."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.keys import NamespaceId, ScopeId, SessionId
from kvd.core.room import reclaim
from tests.core.bench import SECOND, context, keys, numbers_of, only
from tests.core.drawn import SPECS, accounts, key_lists, requests, sessions
from tests.core.test_machine_stateful import MachineRules

Block = tuple[int, str, str, int]  # namespace, epoch, account, key; all of group 0


class HandOffRules(MachineRules):
    """The rules of the whole machine, and engines that hand off.

    `promised` is what must be readable: what was handed off, until a load of it by another
    session, the deadline, a clear, or the end of all who could use it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.promised: dict[tuple[int, str], tuple[int, set[Block]]] = {}
        self.loading: dict[tuple[int, int], set[Block]] = {}
        # A class without a row may end promises after a while: `test_promised_rows.py`.
        self.promises_last = patch.object(reclaim, "PROMISED_NS", 1 << 62)
        self.promises_last.start()

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.promises_last.stop()

    def feed(self, event: ev.Event) -> list[act.Action]:
        if isinstance(event, ev.LoadRequested):
            which = next(w for w, session in self.ids.items() if session == event.session)
            (run,) = event.runs
            blocks = self.blocks(which, event.context.account, numbers_of(run.keys))
            self.loading[event.session, event.job] = blocks
        actions = super().feed(event)
        for end in only(actions, act.EndJob):
            taken = self.loading.pop((end.session, end.job), set())
            if end.status is ev.JobStatus.DONE:
                for (session, _), (_, blocks) in self.promised.items():
                    if session != end.session:
                        blocks.difference_update(taken)
        for cleared in only(actions, act.AnnounceCleared):
            for _, blocks in self.promised.values():
                gone = {block for block in blocks if block[0] == cleared.namespace}
                blocks.difference_update(gone)
        for each in only(actions, act.AnnounceRemoved):
            if self.is_forsaken(each.namespace, each.epoch):
                for _, blocks in self.promised.values():
                    gone = {b for b in blocks if b[:2] == (each.namespace, each.epoch)}
                    blocks.difference_update(gone)
        if isinstance(event, ev.TimerTicked):
            now_ns = self.bench.now_ns
            self.promised = {n: p for n, p in self.promised.items() if p[0] > now_ns}
        return actions

    def is_forsaken(self, namespace: int, epoch: str) -> bool:
        """Whether no engine is there any more that could use this."""
        used = {(self.numbers[SPECS[w].fingerprint], self.epochs[w]) for w in self.ids}
        private = namespace == self.numbers[SPECS[3].fingerprint]
        return (namespace, epoch) not in used and (private or epoch != "")

    def blocks(self, which: int, account: str, numbers: list[int]) -> set[Block]:
        namespace = self.numbers[SPECS[which].fingerprint]
        return {(namespace, self.epochs[which], account, number) for number in numbers}

    @rule(
        which=sessions,
        numbers=key_lists,
        account=accounts,
        request=requests,
        seconds=st.integers(1, 5),
        stored=st.booleans(),
    )
    def hand_off(
        self,
        which: int,
        numbers: list[int],
        account: str,
        request: str,
        seconds: int,
        stored: bool,
    ) -> None:
        """A request ends, its KV stored or still on its way; what is held from then on stays."""
        self.come_back(which)
        self.store(which, numbers, account, 0, True, 0, [])
        if stored:
            self.finish_all()
        there = self.resident(which, account)
        session = self.ids[which]
        lasting_ns = seconds * SECOND
        self.feed(
            ev.HandOffRequested(
                SessionId(session), context(account, request), 0, keys(*numbers), lasting_ns
            )
        )
        state = self.bench.machine.state
        found = state.hand_offs.get((SessionId(session), context(account, request).request))
        if found is None:
            return
        until_ns, before = self.promised.get((session, request), (0, set()))
        mine = self.blocks(which, account, [n for n in numbers if n in there])
        held = set()
        if 0 in found.held:
            owner = state.classes[NamespaceId(found.namespace), 0]
            slots = sorted(found.held[0])
            words = state.slots.keys(owner.width)[slots]
            scopes = state.slots.scopes[slots].tolist()
            accounts = [state.scopes[ScopeId(scope)].account for scope in scopes]
            below = state.namespaces[found.namespace].cleared_below
            held = {
                (a, int(word))
                for a, word, scope in zip(accounts, words[:, 0], scopes, strict=True)
                if scope >= below
            }
        mine = {block for block in mine if block[2:] in held}
        self.promised[session, request] = (
            max(until_ns, self.bench.now_ns + lasting_ns),
            before | mine,
        )

    @rule(which=sessions, other=sessions, numbers=key_lists)
    def prefill_then_decode(self, which: int, other: int, numbers: list[int]) -> None:
        """The purpose of it all: stored here, this engine gone, loaded there."""
        self.hand_off(which, numbers, "", "p", 5, True)
        self.close_session(which)
        self.scheduler_step(other, numbers, "", False, 3)

    @invariant()
    def promised_blocks_stay(self) -> None:
        if not hasattr(self, "bench"):
            return
        for _, blocks in self.promised.values():
            for namespace, epoch, account, number in blocks:
                announced = self.bench.pool.announced.get(namespace, set())
                assert (epoch, account, 0, number) in announced, "a handed-off block was evicted"

    def everything_ends(self) -> None:
        self.tick(5000)
        state = self.bench.machine.state
        assert not state.hand_offs, "a hand-off outlived its deadline"
        super().everything_ends()


HandOffRules.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestHandOffs = HandOffRules.TestCase
