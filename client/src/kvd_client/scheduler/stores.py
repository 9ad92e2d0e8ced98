"""Which blocks to store: what was computed, and is neither in the daemon nor on its way.

Decided on the spot, without a call, from the index page, the page header's room and our own
jobs in flight. All blocks of a step are probed in one go for each group and account.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvd_client.draft import (
    AFTER_THE_STEP,
    BEFORE_THE_STEP,
    BlockRun,
    JobDraft,
    StepDraft,
    in_parts,
    within_limit,
)
from kvd_client.identity import NamespaceFields
from kvd_client.scheduler.jobs import JobTable
from kvd_client.scheduler.lookup import LookupQueue
from kvd_client.scheduler.offers import BlockOffer
from kvd_client.scheduler.request import Request
from kvd_client.scheduler.stats import StatsCollector
from kvd_client.session import SessionView
from kvd_proto.limits import MAX_PARTS_PER_STEP


@dataclass(slots=True)
class _Choice:
    """What one step stores and touches, as it is being chosen.

    By request, each named by its `id`: two of them may have one request id, and other accounts.
    """

    session: SessionView
    key_room: int
    room: dict[int, int]  # by group
    requests: dict[int, Request] = field(default_factory=dict)
    runs: dict[tuple[int, bool], list[BlockRun]] = field(default_factory=dict)
    sighted: dict[tuple[int, int], list[BlockRun]] = field(default_factory=dict)

    def add(self, offer: BlockOffer, run: BlockRun) -> None:
        self.requests[id(offer.request)] = offer.request
        self.runs.setdefault((id(offer.request), offer.computed), []).append(run)
        self.room[offer.group] -= len(run.block_hashes)

    def sight(self, offer: BlockOffer, block_hashes: list[bytes]) -> None:
        """No copy, but the daemon's policy and its reuse filter shall know of the sighting."""
        self.requests[id(offer.request)] = offer.request
        run = BlockRun(offer.group, offer.first_block, block_hashes)
        self.sighted.setdefault((id(offer.request), offer.group), []).append(run)


class StoreQueue:
    """Turns offered blocks into store jobs."""

    def __init__(
        self, namespace: NamespaceFields, jobs: JobTable, queue: LookupQueue, tally: StatsCollector
    ) -> None:
        self._groups = namespace.groups
        self._jobs = jobs
        self._queue = queue
        self._tally = tally

    def submit(
        self, offers: Iterable[BlockOffer], session: SessionView, step: StepDraft, key_room: int
    ) -> tuple[list[int], list[int]]:
        """Add jobs to the step for what is worth storing, `key_room` keys at most, and all that
        ended requests offer.

        Gives the job ids of blocks that this step computes, and of those computed before.
        What found no room is offered again by the next step.
        """
        offers = list(offers)
        self._probe(offers, session)
        room = {group: session.room(group) for group in {offer.group for offer in offers}}
        choice = _Choice(session, key_room, room)
        blocked: set[tuple[int, int]] = set()
        for offer in offers:
            owner = id(offer.request), offer.group
            done = 0 if owner in blocked else self._choose(offer, choice)
            # Blocks passed over count too: simpler, and still a bound.
            choice.key_room = max(0, choice.key_room - done)
            if owner not in blocked:
                offer.dealt_with(done)
            if done < len(offer.block_hashes):
                blocked.add(owner)
                self._tally.without_room(len(offer.block_hashes) - done)
        left = MAX_PARTS_PER_STEP - len(step.touches)
        for (owned_by, _), runs in list(choice.sighted.items())[:left]:
            [joined] = within_limit(runs, most=1)
            step.touches.append((choice.requests[owned_by].context, joined))
        new: tuple[list[int], list[int]] = ([], [])
        for (owned_by, computed), runs in choice.runs.items():
            request = choice.requests[owned_by]
            drafts = self._add_jobs(request, runs, step, session.generation)
            for draft in drafts:
                draft.ready_together = BEFORE_THE_STEP if computed else AFTER_THE_STEP
            new[computed].extend(draft.job_id for draft in drafts)
        return new

    def _probe(self, offers: list[BlockOffer], session: SessionView) -> None:
        batches: dict[tuple[int, str], list[BlockOffer]] = {}
        for offer in offers:
            batches.setdefault((offer.group, offer.request.account), []).append(offer)
        for (group, account), batch in batches.items():
            hashes = [block_hash for offer in batch for block_hash in offer.block_hashes]
            present = session.present(group, account, hashes).tolist()
            start = 0
            for offer in batch:
                offer.present = present[start : start + len(offer.block_hashes)]
                start += len(offer.block_hashes)

    def _room(self, offer: BlockOffer, choice: _Choice) -> int:
        """Blocks of the offer that may become part of a job."""
        if (id(offer.request), offer.computed) not in choice.runs:
            new = len(choice.runs)
            if (new >= MAX_PARTS_PER_STEP and not offer.is_last) or self._jobs.free <= new:
                return 0
        # A request-level store must be whole: there the daemon decides about room, and says so.
        most = self._most(offer, choice)
        return most if offer.request.request_level else min(most, choice.room[offer.group])

    def _most(self, offer: BlockOffer, choice: _Choice) -> int:
        """Blocks of the offer that the step may deal with."""
        return len(offer.block_hashes) if offer.is_last else choice.key_room

    def _choose(self, offer: BlockOffer, choice: _Choice) -> int:
        """Add to the choice what to store of the offer; how many of its blocks are dealt with."""
        width = self._groups[offer.group].blocks_per_block
        room = self._room(offer, choice)
        first = offer.first_block
        count = len(offer.block_hashes)
        if count <= room and not self._needs_choice(offer, choice.session.store_threshold > 1):
            choice.add(offer, BlockRun(offer.group, first, offer.block_hashes, offer.engine_blocks))
            return count
        hashes: list[bytes] = []
        blocks: list[int] = []
        sighted: list[bytes] = []  # known: there already, or kept out by the reuse filter
        done = 0
        for place, block_hash in enumerate(offer.block_hashes[: self._most(offer, choice)]):
            if self._needs_no_copy(offer, place, choice.session):
                if not offer.was_offered(place):  # else it was sighted then
                    sighted.append(block_hash)
            elif self._is_wanted(offer, place):
                if len(hashes) >= room:
                    break
                first = first if hashes else offer.first_block + place
                hashes.append(block_hash)
                blocks += offer.engine_blocks[place * width : (place + 1) * width]
            done += 1
        if sighted:
            choice.sight(offer, sighted)
        if hashes:
            choice.add(offer, BlockRun(offer.group, first, hashes, blocks))
        return done

    def _needs_choice(self, offer: BlockOffer, filtered: bool) -> bool:
        """Whether some of the offer's blocks may not be wanted; mostly all are."""
        if offer.request.request_level:
            return False
        if filtered or any(offer.present) or offer.request.failures:
            return True
        run = BlockRun(offer.group, 0, offer.block_hashes, offer.engine_blocks)
        return self._jobs.touches(offer.request.account, run)

    def _needs_no_copy(self, offer: BlockOffer, place: int, session: SessionView) -> bool:
        """Whether the daemon has the block, or has said that it would not store it yet."""
        if offer.request.request_level:
            return False
        if offer.present[place] or session.store_threshold <= 1:
            return offer.present[place]
        # A store that failed was a sighting: of what the daemon said nothing, one is enough.
        unknown = not offer.was_offered(place)
        block = offer.first_block + place
        return not self._queue.admitted(offer.request, offer.group, block, unknown=unknown)

    def _is_wanted(self, offer: BlockOffer, place: int) -> bool:
        request, group = offer.request, offer.group
        if request.request_level:
            return True
        block_hash = offer.block_hashes[place]
        if self._jobs.is_storing(group, request.account, block_hash):
            return False
        if request.gave_up_storing(group, block_hash):
            return False
        width = self._groups[group].blocks_per_block
        rows = offer.engine_blocks[place * width : (place + 1) * width]
        return not self._jobs.readers(group, rows)

    def _add_jobs(
        self, request: Request, runs: list[BlockRun], step: StepDraft, generation: int
    ) -> list[JobDraft]:
        added = []
        for part in in_parts(runs):
            draft = JobDraft(self._jobs.next_id(), request.context, part, request.request_level)
            self._jobs.begin(draft, request, generation)
            request.store_jobs.add(draft.job_id)
            step.stores.append(draft)
            added.append(draft)
        return added
