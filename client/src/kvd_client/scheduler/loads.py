"""What a load copies: the blocks of a hit that the device does not have."""

from __future__ import annotations

from collections.abc import Sequence

from kvd_client.draft import BlockRun
from kvd_client.identity import Group
from kvd_client.scheduler.hits import loaded_blocks
from kvd_client.scheduler.request import Request
from kvd_proto.groups import GroupKind
from kvd_proto.layout import NULL_ENGINE_BLOCK


def load_runs(
    groups: Sequence[Group],
    request: Request,
    tables: Sequence[Sequence[int]],
    hit_tokens: int,
    null_block: int,
) -> list[BlockRun]:
    """One run for each group that has something to load.

    An engine block is null where the device has it already, where it lies beyond the hit, and
    where the engine wants none; of a recurrent block only the last state is kept, so that is all
    that is loaded. A block whose engine blocks are all null is left out.
    """
    runs = []
    for group, spec in enumerate(groups):
        used = loaded_blocks(spec, request.computed_tokens, hit_tokens)
        tokens, width = spec.engine_block_tokens, spec.blocks_per_block
        wanted = range(request.computed_tokens // tokens, -(-hit_tokens // tokens))
        hashes: list[bytes] = []
        engine_blocks: list[int] = []
        first_block = used.start
        for block in used:
            places = range(block * width, (block + 1) * width)
            if spec.kind is GroupKind.RECURRENT_STATE:
                wanted = range(places.stop - 1, places.stop)
            row = _row(tables[group], places, wanted, null_block)
            if any(engine_block != NULL_ENGINE_BLOCK for engine_block in row):
                first_block = first_block if hashes else block
                hashes.append(request.hashes[group][block])
                engine_blocks += row
        if hashes:
            runs.append(BlockRun(group, first_block, hashes, engine_blocks))
    return runs


def _row(table: Sequence[int], places: range, wanted: range, null_block: int) -> list[int]:
    row = [
        table[place] if place in wanted and place < len(table) else NULL_ENGINE_BLOCK
        for place in places
    ]
    return [NULL_ENGINE_BLOCK if block == null_block else block for block in row]
