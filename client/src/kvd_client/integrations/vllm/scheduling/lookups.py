"""Lookups of vLLM's requests: all blocks of a request at once, then answered from memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvd_client.draft import BlockRun
from kvd_client.integrations.vllm.scheduling.requests import (
    LOOKUP_RESULTS,
    OffloadGroups,
    TrackedRequest,
    sources_of,
    verdicts_of,
)
from kvd_client.scheduler.lookup import LookupQueue
from kvd_client.scheduler.request import Knowledge, LookupState
from kvd_client.session import SessionView
from kvd_proto.key_status import HIT, MISS, PENDING, RETRY, STATUS_BITS


class Prompt(NamedTuple):
    """What a lookup is about: a hash for each whole block, by group, and token counts."""

    hashes: Sequence[Sequence[bytes]]
    num_tokens: int
    computed_tokens: int = 0  # on the device already


class RequestLookups:
    """Asks once for a whole request, and answers vLLM's questions about its keys from that."""

    def __init__(
        self,
        groups: OffloadGroups,
        clock: Callable[[], float],
    ) -> None:
        self._groups = groups
        self._clock = clock

    def begin(self, tracked: TrackedRequest, prompt: Prompt, queue: LookupQueue) -> Knowledge:
        """Bring what is known of the request's blocks up to date. May wait, once in a step."""
        request = tracked.request
        known = [len(row) for row in request.lookup.statuses]
        request.hashes, request.num_tokens, request.computed_tokens = prompt
        counts = [
            request.known_blocks(index, group.tokens_per_block)
            for index, group in enumerate(self._groups.values())
        ]
        if known and known != counts:
            queue.forget(request)
        knowledge = queue.resolve(request, prompt.computed_tokens)
        tracked.verdicts = {}
        tracked.sources = None
        if knowledge is Knowledge.STATUSES:
            self._cut(tracked, prompt.computed_tokens, queue)
        return knowledge

    def _cut(self, tracked: TrackedRequest, computed_tokens: int, queue: LookupQueue) -> None:
        """Take as a miss what was doubtful for too long."""
        lookup = tracked.request.lookup
        for doubtful in sorted(lookup.doubts, reverse=True):  # RETRY first
            if queue.is_doubt_too_late(tracked.request, computed_tokens, doubtful):
                queue.give_up_doubtful(tracked.request, lookup.statuses, doubtful)

    def defer(self, tracked: TrackedRequest, queue: LookupQueue) -> None:
        """VLLM put the request off: what was doubtful is asked again, and its time runs."""
        lookup, now = tracked.request.lookup, self._clock()
        kinds = {int(kind) for row in lookup.statuses for kind in np.unique(row & STATUS_BITS)}
        doubtful = kinds & {RETRY, PENDING}
        for kind in doubtful:
            lookup.doubts.setdefault(kind, now)
        if doubtful:
            queue.ask_again(tracked.request, now)

    def settle(self, tracked: TrackedRequest, hit_tokens: int) -> int:
        """VLLM takes so many tokens beyond the device's. How many blocks that will load."""
        tracked.request.lookup.doubts.clear()
        return sum(-(-hit_tokens // group.tokens_per_block) for group in self._groups.values())

    def hit_run(self, tracked: TrackedRequest, group: int, stretch: range) -> int | None:
        """Leading blocks of the stretch that can be loaded; None: doubtful, ask again.

        What one `lookup` after the other would say: doubt beyond the first miss doesn't count.
        `group` is vLLM's number.
        """
        statuses = tracked.request.lookup.statuses
        if not statuses:
            return 0
        row = statuses[self._groups[group].index][stretch.start : stretch.stop] & STATUS_BITS
        gaps = np.flatnonzero(row == MISS)
        run = row[: gaps[0]] if len(gaps) else row
        return None if (run != HIT).any() else len(run)

    def one(
        self, tracked: TrackedRequest, key: OffloadKey, session: SessionView, queue: LookupQueue
    ) -> LookupResult:
        """One key of a request whose statuses are known."""
        request = tracked.request
        if request.lookup.state is not LookupState.KNOWN:
            return LookupResult.MISS
        if not tracked.verdicts:
            tracked.verdicts = verdicts_of(request, self._groups)
        verdict = tracked.verdicts.get(key)
        return self._alone(tracked, key, session, queue) if verdict is None else verdict

    def source(self, tracked: TrackedRequest, key: OffloadKey) -> CacheHitSource:
        """From where the daemon had a block that the lookup found."""
        if not tracked.request.lookup.sources:
            return CacheHitSource.HOST
        if tracked.sources is None:
            tracked.sources = sources_of(tracked.request, self._groups)
        return tracked.sources.get(key, CacheHitSource.HOST)

    def _alone(
        self, tracked: TrackedRequest, key: OffloadKey, session: SessionView, queue: LookupQueue
    ) -> LookupResult:
        """A key off the blocks' grid: the end of a partial tail. Mostly the page says miss.

        VLLM asks for each once in a lookup.
        """
        request, block_hash = tracked.request, get_offload_block_hash(key)
        group = self._groups[get_offload_group_idx(key)].index
        if not session.shows(group, request.account, block_hash):
            return LookupResult.MISS
        status = queue.ask_alone(request, BlockRun(group, 0, [block_hash]))
        return LOOKUP_RESULTS[status & STATUS_BITS]
