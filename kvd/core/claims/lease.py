"""Leases: expiring claims on ready blocks, renewed by steps, capped per tenant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from kvd.core.blocks import slot_lifecycle
from kvd.core.events import Query
from kvd.core.keys import I32, LeaseId, RequestId, Slots
from kvd.core.model import backlog
from kvd.core.model.leases import Lease
from kvd.core.model.size_class import LeasesLeft, SizeClass
from kvd.core.model.state import Session, State
from kvd.core.model.turn import Turn

MAX_LEASES_PER_SESSION = 16384
# Blocks of leases of all its sessions, one counted again for each lease: eight bytes each.
MAX_LEASED_PER_TENANT = 1 << 23
LEASES_LOOKED_AT = 512  # in one event
EXPIRED_AT_ONCE = 2048  # leases, in one event
ENDED_AT_ONCE = 1024  # leases of requests that have ended, in one event
SLOTS_LOOKED_AT = 1 << 16  # of those, but for the last one's


@dataclass(slots=True)
class _Few:
    """What an event lets go of ended leases at once: a few; the rest goes in pieces."""

    leases: int = 0  # so far
    blocks: int = 0

    @property
    def is_full(self) -> bool:
        return self.leases >= backlog.LEASES_AT_ONCE or self.blocks >= backlog.LEASED_BLOCKS_AT_ONCE


def leasable(state: State, session: Session, owner: SizeClass, slots: Slots, room: int) -> int:
    """How many of these slots, from the first on, a lease of this session may take.

    `room`: bytes of the tenant's cap that are for it.
    """
    if len(session.leases) + session.ended_leases >= MAX_LEASES_PER_SESSION:
        return 0
    claims = max(0, MAX_LEASED_PER_TENANT - owner.tenant.leased_claims)
    return min(claims, _within(state, owner, slots, room))


def within_cap(state: State, owner: SizeClass, slots: Slots) -> int:
    """How many of these slots, from the first on, the tenant's cap lets anybody claim."""
    share, block_bytes = state.config.lease_share, owner.block_bytes
    room = owner.tenant.lease_room(state.pool_bytes, share, block_bytes)
    return _within(state, owner, slots, room)


def rooms(state: State, wanted: Sequence[tuple[SizeClass, Slots]]) -> list[int]:
    """Bytes of the tenant's cap for each of these, that one request would lease.

    Where all is too much, each gets as large a part, and first of all one block: a hit of several
    groups takes some of each.
    """
    ones = {owner.name: owner.block_bytes for owner, slots in wanted if len(slots)}
    if not ones:
        return [0] * len(wanted)
    tenant, share = wanted[0][0].tenant, state.config.lease_share
    left = max(0, tenant.lease_room(state.pool_bytes, share, sum(ones.values())))
    if len(wanted) == 1:
        return [left]
    costs = [len(slots) * owner.block_bytes for owner, slots in wanted]
    if sum(costs) > left:
        costs = [
            int(_costs(state, owner, slots)[-1]) if len(slots) else 0 for owner, slots in wanted
        ]
    firsts = []
    for cost, (owner, _) in zip(costs, wanted, strict=True):
        firsts.append(min(cost, owner.block_bytes, left))
        left -= firsts[-1]
    more = [cost - first for cost, first in zip(costs, firsts, strict=True)]
    left, total = min(left, sum(more)), max(1, sum(more))
    return [first + left * rest // total for first, rest in zip(firsts, more, strict=True)]


def _within(state: State, owner: SizeClass, slots: Slots, room: int) -> int:
    if len(slots) * owner.block_bytes <= room:
        return len(slots)
    return int(np.count_nonzero(_costs(state, owner, slots) <= max(room, 0)))


def _costs(state: State, owner: SizeClass, slots: Slots) -> Slots:
    """Bytes of the cap that these slots take, each with those before it.

    A block counts once however many leases and hand-offs claim it.
    """
    fresh = state.slots.leases[slots] == 0
    return np.cumsum(fresh & state.slots.firsts(slots)) * owner.block_bytes


def take_lease(
    turn: Turn, session: Session, request: RequestId, owner: SizeClass, slots: Slots
) -> LeaseId:
    """Hold these distinct READY slots for the request from now on."""
    state = turn.state
    lease = Lease(LeaseId(state.next_lease), session.session, request, owner, slots, turn.now_ns)
    state.next_lease += 1
    session.leases[lease.lease] = lease
    session.by_request.setdefault(request, set()).add(lease.lease)
    claim(state, owner, slots)
    owner.tenant.leased_claims += len(slots)
    return lease.lease


def hold(turn: Turn, session: Session, query: Query, owner: SizeClass, slots: Slots) -> LeaseId:
    """Hold these distinct READY slots by the lease that the query extends, or by a new one."""
    state = turn.state
    lease = session.leases.get(query.extends) if query.extends is not None else None
    if lease is None or lease.size_class is not owner:
        return take_lease(turn, session, query.context.request, owner, slots)
    fresh = state.slots.without(slots, lease.slots)
    claim(state, owner, fresh)
    owner.tenant.leased_claims += len(fresh)
    lease.slots = np.concatenate([lease.slots, fresh])
    return lease.lease


def claim(state: State, owner: SizeClass, slots: Slots) -> None:
    """One more lease or hand-off holds each of these distinct slots."""
    slot_lifecycle.pin(state, owner, slots)
    holders = state.slots.leases.take(slots)
    owner.tenant.leased_bytes += (len(slots) - int(np.count_nonzero(holders))) * owner.block_bytes
    holders += 1
    state.slots.leases[slots] = holders


def unclaim(state: State, owner: SizeClass, slots: Slots, claims: I32 | int = 1) -> None:
    """Take so many such claims away from each of these distinct slots."""
    holders = state.slots.leases.take(slots)
    holders -= claims
    state.slots.leases[slots] = holders
    owner.tenant.leased_bytes -= (len(slots) - int(np.count_nonzero(holders))) * owner.block_bytes
    slot_lifecycle.unpin(state, owner, slots, claims)


def end_leases(
    state: State, session: Session, leases: Iterable[LeaseId], few: _Few | None = None
) -> None:
    """End the leases that are still held; ids that are not are ignored."""
    ended = []
    for number in list(leases):
        lease = session.leases.pop(number, None)
        if lease is None:
            continue
        siblings = session.by_request[lease.request]
        siblings.discard(number)
        if not siblings:
            del session.by_request[lease.request]
        ended.append(lease)
    _give_up(state, session, ended, few or _Few())


def end_all(state: State, session: Session) -> None:
    """End every lease of the session."""
    ended = list(session.leases.values())
    session.leases, session.by_request = {}, {}
    _give_up(state, session, ended, _Few())


def _give_up(state: State, session: Session, ended: list[Lease], few: _Few) -> None:
    """Take the claims of a few leases away now, those of the others in pieces."""
    for count, lease in enumerate(ended):
        if few.is_full:
            later = ended[count:]
            state.backlog.leases.extend(later)
            session.ended_leases += len(later)
            state.namespaces[session.namespace].ended_leases += len(later)
            return
        _let_go(state, lease)
        few.leases += 1
        few.blocks += len(lease.slots)


def _let_go(state: State, lease: Lease) -> None:
    unclaim(state, lease.size_class, lease.slots)
    lease.size_class.tenant.leased_claims -= len(lease.slots)


def unclaim_ended(state: State) -> list[Session]:
    """Take the claims of some ended leases away. The sessions of which none is left now."""
    queue, blocks, over = state.backlog.leases, 0, []
    for _ in range(min(backlog.LEASES_AT_ONCE, len(queue))):
        lease = queue.popleft()
        _let_go(state, lease)
        session = state.sessions[lease.session]
        session.ended_leases -= 1
        state.namespaces[session.namespace].ended_leases -= 1
        if not session.ended_leases:
            over.append(session)
        blocks += len(lease.slots)
        if blocks >= backlog.LEASED_BLOCKS_AT_ONCE:
            break
    return over


def end_leases_of(state: State, session: Session, requests: Sequence[RequestId]) -> int:
    """End what is held for these requests, or for some of them where that is much.

    How many of them, from the first on, hold nothing any more.
    """
    ended: list[LeaseId] = []
    whole = 0
    for request in requests:
        held = session.by_request.get(request, ())
        room = ENDED_AT_ONCE - len(ended)
        ended += sorted(held if len(held) <= room else islice(held, room))
        if len(held) > room:
            break
        whole += 1
    end_leases(state, session, ended)
    return whole


def end_leases_on(state: State, owner: SizeClass, span: slice, left: LeasesLeft) -> None:
    """End those of the next few leases that hold a slot of the span, which takes no new ones."""
    slots = 0
    for _ in range(LEASES_LOOKED_AT):
        if slots >= SLOTS_LOOKED_AT:
            return
        while not left.leases:
            if not left.sessions:
                return
            left.session = left.sessions.pop()
            opened = state.sessions.get(left.session)
            left.leases = list(opened.leases) if opened is not None else []
        number = left.leases.pop()
        session = state.sessions.get(left.session) if left.session is not None else None
        lease = session.leases.get(number) if session is not None else None
        if session is None or lease is None or lease.size_class is not owner:
            continue
        slots += len(lease.slots)
        if ((lease.slots >= span.start) & (lease.slots < span.stop)).any():
            state.counters.leases_expired += 1
            end_leases(state, session, [number])


def expire_leases(turn: Turn) -> None:
    """End leases that neither their taking nor their session's last step keeps alive.

    What is beyond the bound stays due, for the next piece of work.
    """
    state = turn.state
    left, state.backlog.has_expired = EXPIRED_AT_ONCE, False
    oldest, few = turn.now_ns - state.config.lease_ttl_ns, _Few()
    for session in state.sessions.values():
        if session.renewed_ns > oldest or not session.leases:
            continue  # as most of a thousand are
        expired = list(islice(_expired(session, oldest), left + 1))
        if len(expired) > left:
            state.backlog.has_expired = True
            del expired[left:]
        left -= len(expired)
        state.counters.leases_expired += len(expired)
        end_leases(state, session, expired, few)


def _expired(session: Session, oldest: int) -> Iterator[LeaseId]:
    for number, lease in session.leases.items():  # in the order in which they were taken
        if lease.taken_ns > oldest:
            return
        yield number
