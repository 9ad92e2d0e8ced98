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
        places = range(used.start * width, used.stop * width)
        if spec.kind is GroupKind.RECURRENT_STATE:
            row = _row(tables[group], places, places, null_block)
            row = [b if n % width == width - 1 else NULL_ENGINE_BLOCK for n, b in enumerate(row)]
        else:
            wanted = range(request.computed_tokens // tokens, -(-hit_tokens // tokens))
            row = _row(tables[group], places, wanted, null_block)
        run = _run(group, request.hashes[group], used, row)
        if run.block_hashes:
            runs.append(run)
    return runs


def _run(group: int, hashes: Sequence[bytes], used: range, row: list[int]) -> BlockRun:
    """Those of the `used` blocks that have an engine block which is not null."""
    if NULL_ENGINE_BLOCK not in row:  # as it almost always is
        return BlockRun(group, used.start, hashes[used.start : used.stop], row)
    width = len(row) // len(used)
    kept: list[bytes] = []
    engine_blocks: list[int] = []
    first_block = used.start
    for block in used:
        at = (block - used.start) * width
        mine = row[at : at + width]
        if any(engine_block != NULL_ENGINE_BLOCK for engine_block in mine):
            first_block = first_block if kept else block
            kept.append(hashes[block])
            engine_blocks += mine
    return BlockRun(group, first_block, kept, engine_blocks)


def _row(table: Sequence[int], places: range, wanted: range, null_block: int) -> list[int]:
    """The engine blocks at these places, null where none is wanted."""
    first = min(max(places.start, wanted.start), places.stop)
    end = max(first, min(places.stop, wanted.stop, len(table)))
    row = [NULL_ENGINE_BLOCK] * (first - places.start)
    row.extend(table[first:end])  # += would add an array's elements to ours
    row += [NULL_ENGINE_BLOCK] * (places.stop - end)
    if null_block in row:
        return [NULL_ENGINE_BLOCK if block == null_block else block for block in row]
    return row
