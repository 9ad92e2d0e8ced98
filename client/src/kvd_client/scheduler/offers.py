"""What a request's progress offers to be stored: whole blocks, computed, that a hit could use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvd_client.draft import BlockRun, stretches
from kvd_client.identity import NamespaceFields
from kvd_client.scheduler.params import SchedulerOptions
from kvd_client.scheduler.request import Request
from kvd_client.scheduler.retention import Retention
from kvd_proto import layout
from kvd_proto.groups import GroupKind

BlockTables = Sequence[Sequence[int]]


@dataclass(slots=True)
class BlockOffer:
    """Computed blocks of one request in one group, next to each other, none of them null."""

    request: Request
    group: int
    first_block: int
    block_hashes: Sequence[bytes]
    engine_blocks: Sequence[int]
    computed: bool = False  # by an earlier step
    present: Sequence[bool] = field(default_factory=list)
    advances: bool = True  # next_store follows what becomes of it
    passed_over: int = 0  # blocks behind it that are not offered, now or later
    is_dealt_with: bool = False
    is_last: bool = False  # its request has ended: no later step can offer it

    def was_offered(self, place: int) -> bool:
        """Whether a step has offered this one of its blocks before, and it comes once more."""
        return self.advances and self.first_block + place < self.request.offered[self.group]

    def dealt_with(self, blocks: int) -> None:
        """So many of its blocks need no other offer."""
        self.is_dealt_with = blocks == len(self.block_hashes)
        if not self.advances:
            return
        if blocks == len(self.block_hashes):
            blocks += self.passed_over
        self.request.next_store[self.group] = self.first_block + blocks


class OfferPlanner:
    """Decides which blocks of a request each group offers to store."""

    def __init__(self, namespace: NamespaceFields, options: SchedulerOptions) -> None:
        self._groups = namespace.groups
        self._options = options
        self._retention = Retention(
            self._groups, namespace.boundary_tokens, options.retention_tokens
        )
        self._nulls = {options.null_block, layout.NULL_ENGINE_BLOCK}

    def computed(
        self, request: Request, tables: BlockTables, computed_tokens: int
    ) -> list[BlockOffer]:
        """Blocks that a step makes whole, or an earlier one did, and that were not offered yet.

        What has a null engine block, what no hit could use, and a state that no step ended on
        are passed over for good.
        """
        if request.stores_end:
            return []
        limit_tokens = self._limit_tokens(request, computed_tokens)
        ends = self._kept_ends(request.num_tokens - 1, request.num_tokens)
        offers: list[BlockOffer] = []
        thresholds = []
        for group in range(len(self._groups)):
            thresholds.append(self._threshold_tokens(request, group))
            if limit_tokens < thresholds[-1]:
                continue
            first = request.next_store[group]
            end = self._whole_count(request, group, tables[group], limit_tokens)
            if self._is_volatile(request, group, limit_tokens):
                end = min(end, limit_tokens // self._groups[group].tokens_per_block - 1)
            blocks = self._lasting(group, range(first, end), computed_tokens)
            found = self._whole_blocks(request, group, blocks, tables[group], ends)
            if not found:
                request.next_store[group] = max(first, end)
            offers += found
        request.offer_at = min(thresholds)
        return offers

    def final(
        self, request: Request, tables: BlockTables, computed_tokens: int | None
    ) -> tuple[list[BlockOffer], list[BlockRun]]:
        """What an ended request still has to offer, and all that it leaves to be stored.

        The latter are its whole blocks, loaded or computed, that the engine still holds, in one
        run for each group. `computed_tokens` None means as its last step said; then a block
        counts only if its hash was known to that step: the slot of the last sampled token,
        whose hash may be known by now, has no KV, or a rejected draft's.
        """
        known = None
        if computed_tokens is None:
            computed_tokens, known = request.computed_after, request.known_hashes
        if request.stores_end or not computed_tokens:
            return [], []
        limit_tokens = self._limit_tokens(request, computed_tokens)
        ends = self._kept_ends(request.num_tokens - 1, request.num_tokens, limit_tokens)
        offers: list[BlockOffer] = []
        held: list[BlockRun] = []
        for group, table in enumerate(tables):
            end = self._whole_count(request, group, table, limit_tokens)
            end = end if known is None else min(end, known[group])
            first = request.next_store[group]
            if ends and not self._retention.keeps_all(group):
                # Blocks were passed over that a hit at the request's end uses.
                first = min(first, *(self._retention.first_block(group, each) for each in ends))
            blocks = self._lasting(group, range(first, end), computed_tokens)
            offers += self._whole_blocks(request, group, blocks, table, ends)
            whole = self._whole_blocks(request, group, range(end), table, ends)
            hashes = [block_hash for offer in whole for block_hash in offer.block_hashes]
            if hashes:
                held.append(BlockRun(group, whole[0].first_block, hashes))
        for offer in offers:
            offer.computed, offer.advances, offer.is_last = True, False, True
        return offers, held

    # -- how far ------------------------------------------------------------------------------

    def _limit_tokens(self, request: Request, computed_tokens: int) -> int:
        limit_tokens = computed_tokens
        if self._options.prompt_only:
            limit_tokens = min(limit_tokens, request.prompt_tokens)
        if request.params.max_store_tokens is not None:
            limit_tokens = min(limit_tokens, request.params.max_store_tokens)
        return limit_tokens

    def _threshold_tokens(self, request: Request, group: int) -> int:
        """With fewer tokens than this the group has nothing new to offer."""
        spec = self._groups[group]
        end = (request.next_store[group] + 1) * spec.tokens_per_block
        if spec.drafter and end > request.num_tokens:
            end += spec.tokens_per_block
        return end

    def _is_volatile(self, request: Request, group: int, limit_tokens: int) -> bool:
        """Whether a rejected draft may still rewrite the group's last whole block.

        While a prompt is computed the token after it is known, and with it the block.
        """
        return self._groups[group].drafter and limit_tokens > request.num_tokens

    def _whole_count(
        self, request: Request, group: int, table: Sequence[int], limit_tokens: int
    ) -> int:
        spec = self._groups[group]
        return min(
            limit_tokens // spec.tokens_per_block,
            len(request.hashes[group]),
            len(table) // spec.blocks_per_block,
        )

    # -- which --------------------------------------------------------------------------------

    def _kept_ends(self, *tokens: int) -> list[int]:
        """Boundaries at a request's ends; where every boundary is kept they need no mention."""
        return self._retention.ends(*tokens) if self._retention.is_thinned else []

    def _lasting(self, group: int, blocks: range, computed_tokens: int) -> range:
        """Of a recurrent group only the state on which the step ended: others were passed by."""
        spec = self._groups[group]
        if spec.kind is not GroupKind.RECURRENT_STATE or self._options.keeps_every_state:
            return blocks
        whole, rest = divmod(computed_tokens, spec.tokens_per_block)
        if rest or whole - 1 not in blocks:
            return range(blocks.stop, blocks.stop)
        return range(whole - 1, whole)

    def _whole_blocks(
        self,
        request: Request,
        group: int,
        blocks: range,
        table: Sequence[int],
        ends: Iterable[int],
    ) -> list[BlockOffer]:
        if not blocks:
            return []
        width = self._groups[group].blocks_per_block
        hashes = request.hashes[group]
        rows = list(table[blocks.start * width : blocks.stop * width])
        if self._retention.keeps_all(group) and self._nulls.isdisjoint(rows):
            return [
                BlockOffer(request, group, blocks.start, hashes[blocks.start : blocks.stop], rows)
            ]
        wanted = [
            block
            for place, block in enumerate(blocks)
            if self._nulls.isdisjoint(rows[place * width : (place + 1) * width])
            and self._retention.holds(group, block, ends)
        ]
        offers: list[BlockOffer] = []
        following = blocks.stop
        for start, end in reversed(stretches(wanted)):
            run = range(wanted[start], wanted[end - 1] + 1)
            row = list(table[run.start * width : run.stop * width])
            offer = BlockOffer(request, group, run.start, hashes[run.start : run.stop], row)
            offer.passed_over = following - run.stop
            following = run.start
            offers.insert(0, offer)
        return offers
