"""Joins vLLM's transfer jobs with their engine blocks: the runs that the daemon copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadKey

from kvd_client.draft import BlockRun, stretches
from kvd_client.integrations.vllm.scheduling.requests import OffloadGroups
from kvd_client.integrations.vllm.scheduling.stores import BlocksSpec
from kvd_proto.layout import NULL_ENGINE_BLOCK

VLLM_NULL_BLOCK = 0

EngineBlocks = npt.NDArray[np.uint32]


@dataclass(slots=True)
class AdjacentBlocks(LoadStoreSpec):
    """Blocks to store where there is one group, one after the other: the first one's number, and
    an engine block for each."""

    first_block: int
    engine_blocks: list[int]


def adjacent_run(source: AdjacentBlocks, target: BlocksSpec) -> list[BlockRun]:
    """The run of a store of such blocks."""
    return [BlockRun(0, source.first_block, target.parts[0][1], source.engine_blocks)]


def load_runs(
    groups: OffloadGroups, source: BlocksSpec, target: GPULoadStoreSpec
) -> list[BlockRun]:
    """One run for each group: its blocks follow each other, its engine blocks may begin and end
    within one.
    """
    starts = np.cumsum([0, *target.group_sizes])
    runs = []
    for vllm_index, hashes in source.parts:
        index, width = groups[vllm_index].index, groups[vllm_index].blocks_per_block
        ids = target.block_ids[starts[index] : starts[index + 1]]
        first_block, offset = divmod(int(target.block_indices[index]), width)
        row = np.full(len(hashes) * width, NULL_ENGINE_BLOCK, dtype=np.uint32)
        row[offset : offset + len(ids)] = _nulled(ids)
        runs.append(BlockRun(index, first_block, hashes, _sequence(row)))
    return runs


def store_runs(
    groups: OffloadGroups,
    source: GPULoadStoreSpec,
    target: BlocksSpec,
    positions: Mapping[OffloadKey, int],
) -> list[BlockRun]:
    """Runs of consecutive blocks. `positions` has the end of each key's tokens in its request."""
    starts = np.cumsum([0, *source.group_sizes])
    runs: list[BlockRun] = []
    first_key = 0
    for vllm_index, hashes in target.parts:
        group = groups[vllm_index]
        keys = target.keys[first_key : first_key + len(hashes)]
        first_key += len(hashes)
        blocks = _block_numbers(keys, positions, group.tokens_per_block)
        ids = source.block_ids[starts[group.index] : starts[group.index + 1]]  # none of them null
        if len(ids) != len(hashes) * group.blocks_per_block:
            ids = _last_states(ids, len(hashes), group.blocks_per_block)
        for start, end in stretches(blocks):
            row = ids[start * group.blocks_per_block : end * group.blocks_per_block]
            runs.append(BlockRun(group.index, blocks[start], hashes[start:end], _sequence(row)))
    return runs


def _block_numbers(
    keys: Sequence[OffloadKey], positions: Mapping[OffloadKey, int], width_tokens: int
) -> Sequence[int]:
    first = (positions[keys[0]] - 1) // width_tokens
    last = (positions[keys[-1]] - 1) // width_tokens
    if last - first == len(keys) - 1:
        return range(first, last + 1)
    return [(positions[key] - 1) // width_tokens for key in keys]


def _last_states(ids: npt.NDArray[np.int32], blocks: int, width: int) -> EngineBlocks:
    """Rows of which only the last engine block is there, as vLLM stores a recurrent state.

    Anything else is no whole block: nulls, which nobody stores.
    """
    rows = np.full((blocks, width), NULL_ENGINE_BLOCK, dtype=np.uint32)
    if len(ids) == blocks:
        rows[:, -1] = ids
    return rows.reshape(-1)


def _nulled(ids: npt.NDArray[np.int64]) -> EngineBlocks:
    row: EngineBlocks = ids.astype(np.uint32)
    row[ids == VLLM_NULL_BLOCK] = NULL_ENGINE_BLOCK
    return row


def _sequence(row: EngineBlocks | npt.NDArray[np.int32]) -> Sequence[int]:
    blocks: Sequence[int] = row  # type: ignore[assignment]  # an array is all that it is used as
    return blocks
