"""Which blocks to store: what was computed, and is neither in the daemon nor on its way.

Decided on the spot, without a call, from the index page, the page header's room and our own
jobs in flight. All blocks of a step are probed in one go for each group and account.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvd_client.draft import BlockRun, JobDraft, StepDraft
from kvd_client.identity import Namespace
from kvd_client.scheduler.jobs import Job, JobTable, Kind
from kvd_client.scheduler.lookup import LookupDesk
from kvd_client.scheduler.params import SchedulerOptions
from kvd_client.scheduler.request import Request
from kvd_client.session import SessionView
from kvd_proto import layout


@dataclass(slots=True)
class Offer:
    """Computed blocks of one request in one group, next to each other, none of them null."""

    request: Request
    group: int
    first_block: int
    block_hashes: Sequence[bytes]
    engine_blocks: Sequence[int]
    computed: bool = False  # by an earlier step
    present: Sequence[bool] = field(default_factory=list)
    advances: bool = True  # next_store follows what becomes of it


class StoreDesk:
    """Turns offers into store jobs."""

    def __init__(
        self, namespace: Namespace, options: SchedulerOptions, jobs: JobTable, desk: LookupDesk
    ) -> None:
        self._groups = namespace.groups
        self._options = options
        self._jobs = jobs
        self._desk = desk
        self._room: dict[int, int] = {}

    def computed_offers(
        self, request: Request, tables: Sequence[Sequence[int]], computed_tokens: int
    ) -> list[Offer]:
        """Blocks that are wholly computed and were not offered yet.

        Blocks with a null engine block are passed over for good.
        """
        if request.stores_end:
            return []
        limit_tokens = self._limit_tokens(request, computed_tokens)
        offers: list[Offer] = []
        thresholds = []
        for group, spec in enumerate(self._groups):
            first = request.next_store[group]
            thresholds.append((first + 1) * spec.tokens_per_block)
            if limit_tokens < thresholds[-1]:
                continue
            end = self._whole_count(request, group, tables[group], limit_tokens)
            offers += self._whole_blocks(request, group, range(first, end), tables[group])
        request.offer_at = min(thresholds)
        return offers

    def held_runs(self, request: Request, tables: Sequence[Sequence[int]]) -> list[BlockRun]:
        """All that an ended request leaves to be stored: its whole blocks, loaded or computed,
        that the engine still holds (of a sliding window, the last); one run for each group.
        """
        if request.stores_end:
            return []
        limit_tokens = self._limit_tokens(request, request.computed_after)
        runs = []
        for group, table in enumerate(tables):
            count = self._whole_count(request, group, table, limit_tokens)
            offers = self._whole_blocks(request, group, range(count), table)
            hashes = [block_hash for offer in offers for block_hash in offer.block_hashes]
            if hashes:
                runs.append(BlockRun(group, offers[0].first_block, hashes))
        return runs

    def _limit_tokens(self, request: Request, computed_tokens: int) -> int:
        limit_tokens = computed_tokens
        if self._options.prompt_only:
            limit_tokens = min(limit_tokens, request.num_tokens)
        if request.params.max_store_tokens is not None:
            limit_tokens = min(limit_tokens, request.params.max_store_tokens)
        return limit_tokens

    def _whole_count(
        self, request: Request, group: int, table: Sequence[int], limit_tokens: int
    ) -> int:
        spec = self._groups[group]
        return min(
            limit_tokens // spec.tokens_per_block,
            len(request.hashes[group]),
            len(table) // spec.blocks_per_block,
        )

    def _whole_blocks(
        self, request: Request, group: int, blocks: range, table: Sequence[int]
    ) -> list[Offer]:
        width = self._groups[group].blocks_per_block
        rows = list(table[blocks.start * width : blocks.stop * width])
        nulls = {self._options.null_block, layout.NULL_ENGINE_BLOCK}
        if blocks and nulls.isdisjoint(rows):
            hashes = request.hashes[group][blocks.start : blocks.stop]
            return [Offer(request, group, blocks.start, hashes, rows)]
        offers = []
        for place, block in enumerate(blocks):
            row = rows[place * width : (place + 1) * width]
            if nulls.isdisjoint(row):
                hashes = request.hashes[group][block : block + 1]
                offers.append(Offer(request, group, block, hashes, row))
        if not offers and blocks:
            request.next_store[group] = blocks.stop
        return offers

    # -- from offers to jobs ----------------------------------------------------------------

    def submit(
        self, offers: Iterable[Offer], session: SessionView, step: StepDraft, key_room: int
    ) -> tuple[list[int], list[int]]:
        """Add jobs to the step for what is worth storing, `key_room` keys at most.

        Gives the job ids of blocks that this step computes, and of those computed before.
        What found no room is offered again by the next step.
        """
        offers = list(offers)
        self._probe(offers, session)
        self._room = {group: session.room(group) for group in {offer.group for offer in offers}}
        runs: dict[tuple[str, bool], list[BlockRun]] = {}
        requests: dict[str, Request] = {}
        blocked: set[tuple[str, int]] = set()
        for offer in offers:
            request = offer.request
            if (request.request_id, offer.group) in blocked:
                continue
            run, done = self._choose(offer, session, key_room, step)
            if offer.advances:
                request.next_store[offer.group] = offer.first_block + done
            if done < len(offer.block_hashes):
                blocked.add((request.request_id, offer.group))
            key_room -= done  # blocks passed over count too: simpler, and a bound all the same
            if run is not None:
                runs.setdefault((request.request_id, offer.computed), []).append(run)
                requests[request.request_id] = request
        new: tuple[list[int], list[int]] = ([], [])
        for (request_id, computed), job_runs in runs.items():
            new[computed].append(
                self._add_job(requests[request_id], job_runs, step, session.generation)
            )
        return new

    def _probe(self, offers: list[Offer], session: SessionView) -> None:
        batches: dict[tuple[int, str], list[Offer]] = {}
        for offer in offers:
            batches.setdefault((offer.group, offer.request.account), []).append(offer)
        for (group, account), batch in batches.items():
            hashes = [block_hash for offer in batch for block_hash in offer.block_hashes]
            present = session.present(group, account, hashes).tolist()
            start = 0
            for offer in batch:
                offer.present = present[start : start + len(offer.block_hashes)]
                start += len(offer.block_hashes)

    def _choose(
        self, offer: Offer, session: SessionView, key_room: int, step: StepDraft
    ) -> tuple[BlockRun | None, int]:
        """(what to store, how many blocks of the offer are dealt with)."""
        request, group = offer.request, offer.group
        width = self._groups[group].blocks_per_block
        # A request-level store must be whole: there the daemon decides about room, and says so.
        room = key_room if request.request_level else self._room[group]
        room = 0 if self._jobs.is_full else min(room, key_room)
        first = offer.first_block
        count = len(offer.block_hashes)
        if count <= room and not self._needs_choice(offer, session.store_threshold > 1):
            self._room[group] -= count
            return BlockRun(group, first, offer.block_hashes, offer.engine_blocks), count
        hashes: list[bytes] = []
        blocks: list[int] = []
        sighted: list[bytes] = []  # known: there already, or kept out by the reuse filter
        done = 0
        for place, block_hash in enumerate(offer.block_hashes):
            if done >= key_room:
                break
            if self._needs_no_copy(offer, place, session):
                sighted.append(block_hash)
            elif self._is_wanted(offer, place):
                if len(hashes) >= room:
                    break
                first = first if hashes else offer.first_block + place
                hashes.append(block_hash)
                blocks += offer.engine_blocks[place * width : (place + 1) * width]
            done += 1
        self._room[group] -= len(hashes)
        if sighted:
            # No copy, but the daemon's policy and its reuse filter shall know of the sighting.
            step.touches.append((request.context, BlockRun(group, offer.first_block, sighted)))
        return (BlockRun(group, first, hashes, blocks) if hashes else None), done

    def _needs_choice(self, offer: Offer, filtered: bool) -> bool:
        """Whether some of the offer's blocks may not be wanted; mostly all are."""
        if offer.request.request_level:
            return False
        if filtered or any(offer.present):
            return True
        run = BlockRun(offer.group, 0, offer.block_hashes, offer.engine_blocks)
        return self._jobs.touches(offer.request.account, run)

    def _needs_no_copy(self, offer: Offer, place: int, session: SessionView) -> bool:
        """Whether the daemon has the block, or has said that it would not store it yet."""
        if offer.request.request_level:
            return False
        if offer.present[place] or session.store_threshold <= 1:
            return offer.present[place]
        return not self._desk.admitted(offer.request, offer.group, offer.first_block + place)

    def _is_wanted(self, offer: Offer, place: int) -> bool:
        request, group = offer.request, offer.group
        if request.request_level:
            return True
        if self._jobs.is_storing(group, request.account, offer.block_hashes[place]):
            return False
        width = self._groups[group].blocks_per_block
        rows = offer.engine_blocks[place * width : (place + 1) * width]
        return not self._jobs.readers(group, rows)

    def _add_job(
        self, request: Request, runs: list[BlockRun], step: StepDraft, generation: int
    ) -> int:
        draft = JobDraft(self._jobs.next_id(), request.context, runs, request.request_level)
        self._jobs.add(Job(draft, Kind.STORE, request.request_id, request.account, generation))
        request.store_jobs.add(draft.job_id)
        step.stores.append(draft)
        return draft.job_id
