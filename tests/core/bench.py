"""A machine on the bench: builds events, carries out actions on a toy pool, checks all rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.keys import (
    JobId,
    KeyBatch,
    LeaseId,
    MoverId,
    NamespaceId,
    RequestId,
    RowId,
    SessionId,
    TenantId,
    TransferId,
)
from kvd.core.machine import Machine, MachineConfig
from kvd.core.model.slots import STAMP_MASK
from kvd.core.spec import GroupSpec, NamespaceSpec
from kvd_proto.groups import GroupKind
from tests.core import invariants

BLOCK = 4096
SECRET = b"sixteen byte key"
EXTENT = 16 * BLOCK  # 16 slots in a row of one shard
MS = 1_000_000
SECOND = 1000 * MS

A = TypeVar("A")


def only(actions: Iterable[object], kind: type[A]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def done(actions: Iterable[object]) -> dict[int, int]:
    """Blocks of the long work that has ended, by its token."""
    return {each.token: each.blocks for each in only(actions, act.TellDone)}


def keys(*numbers: int, hash_bytes: int = 32) -> KeyBatch:
    return KeyBatch.from_bytes(
        b"".join(n.to_bytes(hash_bytes, "little") for n in numbers), hash_bytes
    )


def numbers_of(batch: KeyBatch) -> list[int]:
    raw, size = batch.to_bytes(), batch.hash_bytes
    return [int.from_bytes(raw[i : i + size], "little") for i in range(0, len(raw), size)]


def spec(
    name: str = "ns",
    tenant: str = "tenant",
    shards: int = 1,
    groups: int = 1,
    block_bytes: int = BLOCK,
    blocks_per_block: int = 1,
) -> NamespaceSpec:
    group = GroupSpec(
        GroupKind.FULL_ATTENTION,
        blocks_per_block,
        tuple(block_bytes // blocks_per_block for _ in range(shards)),
    )
    return NamespaceSpec(name, TenantId(tenant), 32, (group,) * groups)


class ToyPool:
    """Carries out actions as the pool and the page would, and asserts their promised order."""

    def __init__(self) -> None:
        self.ready: dict[int, tuple[int, int]] = {}  # slot -> (scope, key)
        self.stamps: dict[int, int] = {}
        self.tags: Counter[tuple[int, int]] = Counter()
        self.announced: dict[int, set[tuple[str, str, int, int]]] = {}
        self.told: set[tuple[int, int, str, str, int, int]] = set()  # of tiers
        self.scopes: dict[int, act.OpenScope] = {}
        self.cleared: set[int] = set()  # of those
        self.rows: dict[int, act.GrantRow] = {}
        self.copying: dict[int, set[int]] = {}  # transfer -> slots that it writes
        self.dead_tags: set[int] = set()

    def carry_out(self, action: act.Action) -> None:
        match action:
            case act.OpenScope():
                self.scopes[action.scope] = action
            case act.ClearScopes():
                of = (n for n, s in self.scopes.items() if s.namespace == action.namespace)
                self.cleared |= {n for n in of if n < action.below}
            case act.ForgetScopes():
                for forgotten in action.scopes:
                    del self.scopes[forgotten]
                named = {scope for scope, _ in self.ready.values()}
                assert not named & set(action.scopes), "a record names a forgotten scope"
            case act.ForgetNamespace():
                self.forget(action.namespace)
            case act.GrantRow():
                assert action.row not in self.rows
                self.rows[action.row] = action
            case act.ReleaseRow():
                row = self.rows.pop(action.row)
                held = range(row.first_slot, row.first_slot + row.slots)
                assert not self.ready.keys() & set(held), "a READY block's row was released"
            case act.WriteReady():
                stamps = action.stamps.tolist()
                for slot, scope, key, stamp in zip(
                    action.slots.tolist(),
                    action.scopes.tolist(),
                    numbers_of(action.keys),
                    stamps,
                    strict=True,
                ):
                    assert slot not in self.ready, "READY over READY"
                    assert scope in self.scopes, "a record names an unknown scope"
                    assert scope not in self.cleared, "a block is stored that was cleared"
                    self.ready[slot] = (scope, key)
                    self.stamps[slot] = stamp
            case act.WriteStamps():
                for slot, stamp in zip(action.slots.tolist(), action.stamps.tolist(), strict=True):
                    assert slot in self.ready, "the stamp of a block that isn't there"
                    self.stamps[slot] = stamp | self.stamps[slot] & int(STAMP_MASK)
            case act.WriteFree():
                for slot in action.slots.tolist():
                    assert slot in self.ready, "FREE over FREE"
                    del self.ready[slot]
            case act.PublishTags():
                self.tags.update((action.namespace, tag) for tag in action.tags.tolist())
            case act.RetractTags():
                self.tags.subtract((action.namespace, tag) for tag in action.tags.tolist())
                self.tags = +self.tags
            case act.StartTransfer() if action.kind is ev.JobKind.STORE:
                slots = {s for part in action.parts for s in part.slots.tolist()}
                assert not slots & self.ready.keys(), "a store overwrites a READY block"
                self.copying[action.transfer] = slots
            case act.AnnounceStored(tier=None) | act.AnnounceRemoved(tier=None):
                self.announce(action)
            case act.AnnounceCleared():
                self.announce(action)
                self.told = {told for told in self.told if told[1] != action.namespace}
            case act.AnnounceStored() | act.AnnounceRemoved() | act.AnnounceTierLost():
                self.tell_of_tier(action)

    def tell_of_tier(
        self, action: act.AnnounceStored | act.AnnounceRemoved | act.AnnounceTierLost
    ) -> None:
        """A watcher may hear twice of what a tier holds, and of the end of what it never heard."""
        if isinstance(action, act.AnnounceTierLost):
            self.told = {told for told in self.told if told[0] != action.tier}
            return
        assert action.tier is not None
        scope = (action.namespace, action.epoch, action.account, action.group)
        blocks = {(action.tier, *scope, key) for key in numbers_of(action.keys)}
        if isinstance(action, act.AnnounceStored):
            self.told |= blocks
        else:
            self.told -= blocks

    def announce(
        self, action: act.AnnounceStored | act.AnnounceRemoved | act.AnnounceCleared
    ) -> None:
        match action:
            case act.AnnounceStored():
                news = self.announced.setdefault(action.namespace, set())
                for key in numbers_of(action.keys):
                    block = (action.epoch, action.account, action.group, key)
                    assert block not in news, "a block was announced twice"
                    news.add(block)
            case act.AnnounceRemoved():
                for key in numbers_of(action.keys):
                    block = (action.epoch, action.account, action.group, key)
                    self.announced[action.namespace].remove(block)
            case act.AnnounceCleared():
                self.announced[action.namespace] = set()

    def forget(self, namespace: int) -> None:
        named = {scope for scope, _ in self.ready.values()}
        known = {n for n, scope in self.scopes.items() if scope.namespace == namespace}
        assert not named & known, "a record names a forgotten namespace"
        assert not any(n == namespace for n, _ in self.tags), "a tag nobody retracted"
        assert not self.announced.pop(namespace, set()), "a block nobody took back"
        self.scopes = {n: scope for n, scope in self.scopes.items() if n not in known}

    def check(self, machine: Machine) -> None:
        """I9 and the page: what is announced, published and recorded is what is readable."""
        assert sum(self.tags.values()) == len(self.ready), "published tags = READY records"
        for namespace in machine.namespaces():
            resident = {
                (epoch, account, group, key)
                for piece in machine.resident(namespace)
                for epoch, account, group, batch, _ in piece
                for key in numbers_of(batch)
            }
            assert resident == self.announced.get(namespace, set()), "events = index"
            recorded = {
                (s.epoch, s.account, s.group, key)
                for scope, key in self.ready.values()
                if (s := self.scopes[scope]).namespace == namespace and scope not in self.cleared
            }
            assert recorded == resident, "records = index"


@dataclass
class Bench:
    """Feeds a machine and keeps a log that can be replayed."""

    config: MachineConfig
    now_ns: int = SECOND
    token: int = 0
    next_job: int = 1
    check_every: int = 1  # so many events: all of the invariants take a millisecond
    fed: int = 0
    log: list[tuple[ev.Event, int]] = field(default_factory=list)
    history: list[list[act.Action]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machine = Machine(self.config)
        self.pool = ToyPool()
        self.transfers: dict[int, act.StartTransfer] = {}

    def feed(self, event: ev.Event) -> list[act.Action]:
        self.log.append((event, self.now_ns))
        actions = self.machine.handle(event, self.now_ns)
        self.history.append(actions)
        for action in actions:
            if isinstance(action, act.StartTransfer):
                slots = {s for part in action.parts for s in part.slots.tolist()}
                for other in self.transfers.values():
                    if ev.JobKind.STORE in (action.kind, other.kind) and other.jobs != action.jobs:
                        theirs = {s for part in other.parts for s in part.slots.tolist()}
                        assert not slots & theirs, "a slot is reused before its copy ended"
                self.transfers[action.transfer] = action
            self.pool.carry_out(action)
        self.fed += 1
        if self.fed % self.check_every == 0:
            invariants.check(self.machine)
            self.pool.check(self.machine)
        return actions

    def ask(self, event: ev.Event) -> object:
        """The payload of the event's reply."""
        replies = only(self.feed(event), act.Reply)
        assert len(replies) == 1
        return replies[0].payload

    def open(  # noqa: PLR0917 - every test names what it changes
        self,
        session: int = 1,
        namespace: NamespaceSpec | None = None,
        ranks: int = 1,
        epoch: str = "",
        attach: bool = True,
        own: bool = False,
        engine: str = "",
        payer: str = "",
    ) -> act.SessionAccepted:
        namespace = namespace or spec(shards=ranks)
        accepted = self.ask(
            ev.SessionOpened(SessionId(session), namespace, epoch, ranks, own, engine, payer)
        )
        assert isinstance(accepted, act.SessionAccepted)
        for rank in range(ranks if attach else 0):
            self.attach(session, rank)
        return accepted

    def attach(
        self,
        session: int,
        rank: int = 0,
        shard: int | None = None,
        writer: bool = True,
        blocks: tuple[int, ...] = (),
    ) -> int:
        mover = 100 * session + rank
        shard = rank if shard is None else shard
        self.feed(
            ev.RankAttached(
                SessionId(session), MoverId(mover), rank, shard, writer, engine_blocks=blocks
            )
        )
        return mover

    def store(
        self,
        numbers: Sequence[int],
        session: int = 1,
        *,
        job: int = 0,
        blocks: Sequence[int] | None = None,
        account: str = "",
        group: int = 0,
        whole: bool = False,
        last: bool = True,
    ) -> list[act.Action]:
        run = ev.Run(group, keys(*numbers), engine_blocks(numbers if blocks is None else blocks))
        number = self._job(job)
        return self.feed(
            ev.StoreRequested(
                SessionId(session),
                number,
                context(account, f"store-{number}"),
                (run,),
                whole,
                last,
            )
        )

    def load(
        self, numbers: Sequence[int], session: int = 1, job: int = 0, account: str = ""
    ) -> list[act.Action]:
        run = ev.Run(0, keys(*numbers), engine_blocks(numbers))
        return self.feed(
            ev.LoadRequested(SessionId(session), self._job(job), context(account), (run,))
        )

    def finish(
        self,
        actions: Iterable[act.Action] | None = None,
        outcome: ev.TransferOutcome = ev.TransferOutcome.DONE,
    ) -> list[act.Action]:
        """Report these transfers' end, or that of all that run."""
        orders = (
            list(self.transfers.values()) if actions is None else only(actions, act.StartTransfer)
        )
        made: list[act.Action] = []
        for order in orders:
            self.transfers.pop(order.transfer, None)
            made += self.feed(
                ev.TransferFinished(order.mover, order.transfer, outcome, BLOCK, 1000)
            )
        return made

    def stored(self, numbers: Sequence[int], session: int = 1, account: str = "") -> None:
        """Store and finish; all of it became readable."""
        started = self.store(numbers, session, account=account)
        ended = only(started + self.finish(started), act.EndJob)
        assert [e.status for e in ended] == [ev.JobStatus.DONE]

    def lookup(
        self,
        numbers: Sequence[int],
        session: int = 1,
        *,
        lease: ev.LeaseMode = ev.LeaseMode.NONE,
        account: str = "",
        request: str = "r",
        group: int = 0,
    ) -> act.Answer:
        query = ev.Query(context(account, request), group, keys(*numbers), lease)
        answers = self.ask(ev.LookupRequested(SessionId(session), (query,)))
        assert isinstance(answers, tuple)
        (answer,) = answers
        assert isinstance(answer, act.Answer)
        return answer

    def leased(self, answer: act.Answer, session: int = 1) -> int:
        """How many blocks the answer's lease holds; 0 without one."""
        if answer.lease is None:
            return 0
        return len(self.machine.state.sessions[SessionId(session)].leases[answer.lease].slots)

    def statuses(
        self, numbers: Sequence[int], session: int = 1, account: str = "", group: int = 0
    ) -> str:
        """M(iss), H(it), P(ending), R(etry) by key; lower case m where a store is filtered."""
        answer = self.lookup(numbers, session, account=account, group=group)
        return "".join({0: "m", 4: "M", 1: "H", 2: "P", 3: "R"}[s] for s in answer.statuses)

    def gone(self, mover: int) -> list[act.Action]:
        for number, order in list(self.transfers.items()):
            if order.mover == mover:
                del self.transfers[number]
        return self.feed(ev.MoverGone(MoverId(mover), "killed")) + self.work_off()

    def close(self, session: int = 1, *, gone: bool = False) -> list[act.Action]:
        return self.feed(ev.SessionClosed(SessionId(session), gone)) + self.work_off()

    def work_off(self) -> list[act.Action]:
        """Let long work go on to its end."""
        made: list[act.Action] = []
        while self.machine.has_work():
            made += self.feed(ev.WorkContinued())
        return made

    def leave(self, session: int = 1, ranks: int = 1, *, gone: bool = False) -> list[act.Action]:
        """The session and its movers are gone, one after the other; the pool has caught up."""
        made = [*self.close(session, gone=gone)]
        for rank in range(ranks):
            made += self.gone(100 * session + rank)
        return made + self.settle(made)

    def settle(self, actions: Iterable[act.Action]) -> list[act.Action]:
        """The pool zeroes rows until nothing more comes of it."""
        made: list[act.Action] = []
        zeros = only(actions, act.ZeroRow)
        while zeros:
            zeroed = self.feed(ev.RowZeroed(RowId(zeros.pop().row))) + self.work_off()
            zeros += only(zeroed, act.ZeroRow)
            made += zeroed
        return made

    def release(self, *leases: int, session: int = 1) -> None:
        self.feed(ev.LeasesReleased(SessionId(session), tuple(LeaseId(n) for n in leases)))

    def tick(self, after_ns: int = 250 * MS) -> list[act.Action]:
        self.now_ns += after_ns
        return self.feed(ev.TimerTicked()) + self.work_off()

    def quota(self, quota_bytes: int, tenant: str = "tenant") -> int:
        """Blocks that went; the tenant keeps it, or only pinned blocks are beyond it."""
        token = self._token()
        made = self.feed(ev.QuotaSet(token, TenantId(tenant), quota_bytes)) + self.work_off()
        (done,) = [each for each in only(made, act.TellDone) if each.token == token]
        return done.blocks

    def clear(self, namespace: int = 1) -> int:
        """Blocks that went; nothing of the clear is left to be done."""
        token = self._token()
        made = self.feed(ev.NamespaceCleared(token, NamespaceId(namespace))) + self.work_off()
        (done,) = [each for each in only(made, act.TellDone) if each.token == token]
        return done.blocks

    def unmap(self, actions: Iterable[act.Action]) -> list[act.Action]:
        """Movers and pool carry out what takes a row back."""
        made = list(actions)
        for order in only(actions, act.UnmapRow):
            made += self.feed(ev.RowUnmapped(order.mover, order.row))
        for zero in only(made, act.ZeroRow):
            made += self.feed(ev.RowZeroed(RowId(zero.row)))
        return made

    def _token(self) -> int:
        self.token += 1
        return self.token

    def _job(self, job: int) -> JobId:
        if not job:
            job = self.next_job
        self.next_job = max(self.next_job, job) + 1
        return JobId(job)


# What comes with requests of these names.
HINTED = {
    "retains": ev.Advice(ev.Hint.RETAIN, SECOND),
    "releases": ev.Advice(ev.Hint.RELEASE),
}


def context(account: str = "", request: str = "r") -> ev.RequestContext:
    """Requests of some names come with a hint."""
    prefetch = request.startswith("prefetches")
    return ev.RequestContext(
        RequestId(request), account, advice=HINTED.get(request), prefetch=prefetch
    )


def engine_blocks(numbers: Sequence[int]) -> np.ndarray[tuple[int, int], np.dtype[np.uint32]]:
    return np.array([n % 100_000 for n in numbers], dtype=np.uint32).reshape(-1, 1)


def verdict(actions: Iterable[act.Action]) -> act.Verdict:
    (reply,) = only(actions, act.Reply)
    assert isinstance(reply.payload, act.Verdict)
    return reply.payload


def finished(order: act.StartTransfer, outcome: ev.TransferOutcome) -> ev.TransferFinished:
    return ev.TransferFinished(order.mover, TransferId(order.transfer), outcome, BLOCK, 1000)


def small(extents: int = 4, **options: object) -> Bench:
    """A pool of a few rows of 16 slots."""
    config = MachineConfig(extents=extents, extent_bytes=EXTENT, tag_secret=SECRET, **options)  # type: ignore[arg-type]
    return Bench(config)
