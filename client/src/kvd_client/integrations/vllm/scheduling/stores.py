"""Which offered blocks to store, decided on the spot: from the page, its header, what is open."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    get_offload_block_hash,
    get_offload_group_idx,
)

from kvd_client.draft import count_parts
from kvd_client.integrations.vllm.scheduling.requests import OffloadGroups, TrackedRequest, by_group
from kvd_client.integrations.vllm.stats import NO_ROOM, KvdStats
from kvd_client.session import SessionView
from kvd_proto.limits import MAX_KEYS_PER_MESSAGE, MAX_PARTS_PER_STEP

KEYS_PER_STEP = MAX_KEYS_PER_MESSAGE  # to store
LOAD_KEYS_PER_STEP = 4 * MAX_KEYS_PER_MESSAGE  # in some messages
SAMPLED = 8  # of a long run's keys, before all of them are looked up

Admitted = Callable[[TrackedRequest, int, int], bool]  # (request, group, block)
IsWhole = Callable[[ReqContext, int, int], bool]  # likewise: all its engine blocks are there


@dataclass(slots=True)
class BlocksSpec(LoadStoreSpec):
    """The blocks of a job that is being made: hashes by vLLM's group number, in key order.

    It stays in the scheduler; workers learn of jobs by their ids.
    """

    keys: Sequence[OffloadKey]
    parts: list[tuple[int, list[bytes]]]


def blocks_of(spec: LoadStoreSpec) -> BlocksSpec:
    """The daemon's side of a job, as the manager made it."""
    assert isinstance(spec, BlocksSpec)
    return spec


class OfferedBlocks(NamedTuple):
    """What vLLM offers of one request."""

    tracked: TrackedRequest
    req_context: ReqContext
    keys: list[OffloadKey]
    parts: list[tuple[int, list[bytes]]] | None  # their hashes by vLLM's group, where known


@dataclass(slots=True)
class StepBudget:
    """What one step has taken of the limits and of the room that the page's header showed."""

    load_keys: int = 0
    loads: int = 0
    store_keys: int = 0
    stores: int = 0
    room: dict[int, int] = field(default_factory=dict)

    def take_load(self, keys: int) -> None:
        self.load_keys += keys
        self.loads += count_parts(keys)

    def holds_load(self, keys: int, free_jobs: int) -> bool:
        """Whether another load of so many blocks still goes with this step.

        Of the jobs that may still be in flight some are this step's already. For its size none
        is put off twice: one always goes.
        """
        if self.loads + self.stores + count_parts(keys) > free_jobs:
            return False
        return not self.load_keys or self.load_keys + keys <= LOAD_KEYS_PER_STEP


def nothing() -> PrepareStoreOutput:
    """None of the offered blocks needs a copy."""
    return PrepareStoreOutput([], BlocksSpec([], []), [])


class StorePlanner:
    """Decides what vLLM may store, and knows which blocks this engine is storing."""

    def __init__(self, groups: OffloadGroups, stats: KvdStats) -> None:
        self._groups = groups
        self._stats = stats
        self._storing: set[OffloadKey] = set()
        self._probed: dict[OffloadKey, bool] = {}  # for this step's offers
        self.kept_out: list[OffloadKey] = []  # of the last plan, by the daemon's reuse filter
        # Of this step: whose blocks found no room, but the ones before them did.
        self.cut: list[tuple[str, set[OffloadKey]]] = []
        self.budget = StepBudget()
        self.is_whole: IsWhole | None = None

    def plan(
        self, offer: OfferedBlocks, session: SessionView, admitted: Admitted
    ) -> PrepareStoreOutput | None:
        """What of these to store. None: no room now, offer them again.

        `kept_out` says then what the reuse filter would not let in, for which the daemon has yet
        to hear of this request.
        """
        tracked, req_context, keys, parts = offer
        self.kept_out = []
        is_request_level = tracked.policy is OffloadPolicy.REQUEST_LEVEL
        if is_request_level:
            self._note_offered(tracked, keys, req_context)
        if self.is_whole is not None:
            offered, parts = keys, None
            keys = [k for k in offered if self.is_whole(req_context, *self._place(k, req_context))]
        if len(keys) == 1 and session.store_threshold <= 1 and not tracked.request.request_level:
            return self._plan_one(tracked, keys, parts or list(by_group(keys)), session)
        if parts is None:
            parts = list(by_group(keys))
        wanted = keys
        if not is_request_level:
            wanted = self._absent(tracked, keys, parts, session)
            if session.store_threshold > 1:
                wanted = self._let_in(offer, wanted, admitted)
        if not wanted:
            return nothing()
        if wanted is not keys:
            parts = list(by_group(wanted))
        room = self._take_room(parts, len(wanted), session)
        if room is None:
            return None
        if room < len(wanted) and tracked.policy is OffloadPolicy.CHUNK_LEVEL:
            offered, wanted = wanted, _heads(wanted, parts, self.budget, self._groups)
            self.cut.append((req_context.req_id, set(offered).difference(wanted)))
            self._stats.counts[NO_ROOM] += 1
            parts = list(by_group(wanted))
        self._stats.note_allocation(len(wanted))
        self._storing.update(wanted)
        return PrepareStoreOutput(wanted, BlocksSpec(wanted, parts), [])

    def _let_in(
        self, offer: OfferedBlocks, wanted: list[OffloadKey], admitted: Admitted
    ) -> list[OffloadKey]:
        """Those that the reuse filter lets in; the others are noted."""
        let_in: list[OffloadKey] = []
        for key in wanted:
            is_in = admitted(offer.tracked, *self._place(key, offer.req_context))
            (let_in if is_in else self.kept_out).append(key)
        return let_in

    def plan_leaving(
        self, keys: list[OffloadKey], account: str, session: SessionView
    ) -> tuple[list[OffloadKey], list[OffloadKey]] | None:
        """Of blocks that may leave the device those to store, and those that the daemon has.

        Sorted by group, in the order given. None: no room now. The others find no room yet.
        """
        there: list[OffloadKey] = []
        wanted: list[OffloadKey] = []
        for group, hashes in by_group(keys):
            flags = session.present(self._groups[group].index, account, hashes).tolist()
            first = len(there) + len(wanted)
            for key, is_there in zip(keys[first : first + len(hashes)], flags, strict=True):
                (there if is_there or key in self._storing else wanted).append(key)
        if not wanted:
            return [], there
        parts = list(by_group(wanted))
        room = self._take_room(parts, len(wanted), session)
        if room is None:
            self._stats.counts[NO_ROOM] += 1
            return None
        if room < len(wanted):
            self._stats.counts[NO_ROOM] += 1
            wanted = _heads(wanted, parts, self.budget, self._groups)
        self._stats.note_allocation(len(wanted))
        self._storing.update(wanted)
        return wanted, there

    def _plan_one(
        self,
        tracked: TrackedRequest,
        keys: list[OffloadKey],
        parts: list[tuple[int, list[bytes]]],
        session: SessionView,
    ) -> PrepareStoreOutput | None:
        """`plan` for what decoding offers, over and over: a single block."""
        key = keys[0]
        there = self._probed.pop(key, None)
        if there is None:
            ((group, (block_hash,)),) = parts
            there = session.shows(self._groups[group].index, tracked.request.account, block_hash)
        if there or key in self._storing:
            return nothing()
        if self._take_room(parts, 1, session) is None:
            return None
        self._stats.note_allocation(1)
        self._storing.add(key)
        return PrepareStoreOutput(keys, BlocksSpec(keys, parts), [])

    def probe(self, keys: list[OffloadKey], account: str, session: SessionView) -> None:
        """Look these up in one go; the step will offer them one by one."""
        self._probed = {}
        for group, hashes in by_group(keys):
            places = range(len(self._probed), len(self._probed) + len(hashes))
            flags = session.present(self._groups[group].index, account, hashes).tolist()
            self._probed.update(zip((keys[place] for place in places), flags, strict=True))

    def next_step(self) -> None:
        """What was probed, taken of the limits and cut was this step's."""
        self.budget, self._probed, self.cut = StepBudget(), {}, []

    def is_storing(self, key: OffloadKey) -> bool:
        """Whether the block is on its way."""
        return key in self._storing

    def ended(self, keys: Collection[OffloadKey]) -> None:
        """These are not on their way any more."""
        self._storing.difference_update(keys)

    def clear(self) -> None:
        """The cache was reset: what is on its way counts for nothing."""
        self._storing.clear()

    def block_of(self, key: OffloadKey, req_context: ReqContext) -> int:
        """Which block of its request in its group the key names."""
        return self._place(key, req_context)[1]

    def _place(self, key: OffloadKey, req_context: ReqContext) -> tuple[int, int]:
        group = self._groups[get_offload_group_idx(key)]
        end = req_context.get_offload_key_position(key) or 1
        return group.index, (end - 1) // group.tokens_per_block

    def _absent(
        self,
        tracked: TrackedRequest,
        keys: list[OffloadKey],
        parts: list[tuple[int, list[bytes]]],
        session: SessionView,
    ) -> list[OffloadKey]:
        """Keys that are neither in the daemon nor on their way there, in the order given.

        Of what nobody has the page is not read whole, which costs more than all the rest of the
        plan: a run of which the samples are absent counts as absent. The daemon copies no block
        that it has.
        """
        account = tracked.request.account
        wanted = keys
        if any(self._may_show(g, account, hashes, session) for g, hashes in parts):
            found = [session.present(self._groups[g].index, account, hashes) for g, hashes in parts]
            present = chain.from_iterable(flags.tolist() for flags in found)
            wanted = [key for key, there in zip(keys, present, strict=True) if not there]
        if self._storing.isdisjoint(wanted):
            return wanted
        return [key for key in wanted if key not in self._storing]

    def _may_show(
        self, group: int, account: str, hashes: list[bytes], session: SessionView
    ) -> bool:
        """Whether any of a few of these, the first and the last among them, stands in the page."""
        last = len(hashes) - 1
        if last < 4 * SAMPLED:
            return True
        index = self._groups[group].index
        places = range(0, last, -(-last // (SAMPLED - 1)))
        return any(session.shows(index, account, hashes[place]) for place in (*places, last))

    def _take_room(
        self, parts: list[tuple[int, list[bytes]]], keys: int, session: SessionView
    ) -> int | None:
        """How many of the keys find room, the first ones of each group; None: wait for room."""
        budget = self.budget
        jobs = count_parts(keys)
        if budget.stores and (
            budget.store_keys + keys > KEYS_PER_STEP or budget.stores + jobs > MAX_PARTS_PER_STEP
        ):
            return None  # but for its size none is put off for ever: one always goes
        lacking = 0
        for group, hashes in parts:
            index = self._groups[group].index
            room = budget.room.get(index)
            if room is None:
                room = session.room(index)
            if room <= 0:
                return None
            budget.room[index] = room - len(hashes)
            lacking += max(0, len(hashes) - room)
        budget.store_keys += keys
        budget.stores += jobs
        return keys - lacking

    def _note_offered(
        self, tracked: TrackedRequest, keys: list[OffloadKey], req_context: ReqContext
    ) -> None:
        for key in keys:
            group, block = self._place(key, req_context)
            tracked.offered[group][block] = get_offload_block_hash(key)


def _heads(
    wanted: list[OffloadKey],
    parts: list[tuple[int, list[bytes]]],
    budget: StepBudget,
    groups: OffloadGroups,
) -> list[OffloadKey]:
    """The first keys of each group, as many as there was room for: a prefix is worth most."""
    kept: list[OffloadKey] = []
    first = 0
    for group, hashes in parts:
        short = max(0, -budget.room[groups[group].index])
        kept += wanted[first : first + len(hashes) - short]
        first += len(hashes)
    return kept
