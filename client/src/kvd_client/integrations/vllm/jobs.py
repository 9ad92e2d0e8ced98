"""Joins vLLM's transfer jobs with their engine blocks: the runs that the daemon copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadKey

from kvd_client.draft import BlockRun
from kvd_client.integrations.vllm.requests import OffloadGroup, stretches
from kvd_client.integrations.vllm.stores import BlocksSpec
from kvd_proto.layout import NULL_ENGINE_BLOCK

VLLM_NULL_BLOCK = 0

EngineBlocks = npt.NDArray[np.uint32]


class GroupBlocks(Protocol):
    """A request's block table in one group, as vLLM's scheduler side keeps it."""

    block_ids: list[int]


@dataclass(slots=True)
class SingleBlock(LoadStoreSpec):
    """The source of a store of one block of the only group: its number, and its engine block."""

    block: int
    engine_block: int


def single_run(source: SingleBlock, target: BlocksSpec) -> list[BlockRun]:
    """The run of a store of one block."""
    return [BlockRun(0, source.block, target.parts[0][1], (source.engine_block,))]


def load_runs(
    groups: Sequence[OffloadGroup], source: BlocksSpec, target: GPULoadStoreSpec
) -> list[BlockRun]:
    """One run for each group: its blocks follow each other, its engine blocks may begin and end
    within one.
    """
    index_of = {group.vllm_index: index for index, group in enumerate(groups)}
    starts = np.cumsum([0, *target.group_sizes])
    runs = []
    for vllm_index, hashes in source.parts:
        index = index_of[vllm_index]
        width = groups[index].blocks_per_block
        ids = target.block_ids[starts[index] : starts[index + 1]]
        first_block, offset = divmod(int(target.block_indices[index]), width)
        row = np.full(len(hashes) * width, NULL_ENGINE_BLOCK, dtype=np.uint32)
        row[offset : offset + len(ids)] = _nulled(ids)
        runs.append(BlockRun(index, first_block, hashes, _sequence(row)))
    return runs


def store_runs(
    groups: Sequence[OffloadGroup],
    source: GPULoadStoreSpec,
    target: BlocksSpec,
    positions: Mapping[OffloadKey, int],
    tables: Sequence[GroupBlocks],
) -> list[BlockRun]:
    """Runs of consecutive blocks. `positions` has the end of each key's tokens in its request.

    Where a block has several engine blocks, some may be null, and vLLM's list leaves those out:
    they are taken from the request's block tables.
    """
    index_of = {group.vllm_index: index for index, group in enumerate(groups)}
    starts = np.cumsum([0, *source.group_sizes])
    runs: list[BlockRun] = []
    first_key = 0
    for vllm_index, hashes in target.parts:
        index = index_of[vllm_index]
        group = groups[index]
        keys = target.keys[first_key : first_key + len(hashes)]
        first_key += len(hashes)
        blocks = _block_numbers(keys, positions, group.tokens_per_block)
        ids = source.block_ids[starts[index] : starts[index + 1]]  # none of them null
        if group.blocks_per_block > 1:
            ids = _rows(tables[index].block_ids, blocks, group.blocks_per_block)
        for start, end in stretches(blocks):
            row = ids[start * group.blocks_per_block : end * group.blocks_per_block]
            runs.append(BlockRun(index, blocks[start], hashes[start:end], _sequence(row)))
    return runs


def _block_numbers(
    keys: Sequence[OffloadKey], positions: Mapping[OffloadKey, int], width_tokens: int
) -> Sequence[int]:
    first = (positions[keys[0]] - 1) // width_tokens
    last = (positions[keys[-1]] - 1) // width_tokens
    if last - first == len(keys) - 1:
        return range(first, last + 1)
    return [(positions[key] - 1) // width_tokens for key in keys]


def _rows(table: Sequence[int], blocks: Sequence[int], width: int) -> EngineBlocks:
    ids = [table[block * width : (block + 1) * width] for block in blocks]
    return _nulled(np.asarray(ids, dtype=np.int64).reshape(-1))


def _nulled(ids: npt.NDArray[np.int64]) -> EngineBlocks:
    row: EngineBlocks = ids.astype(np.uint32)
    row[ids == VLLM_NULL_BLOCK] = NULL_ENGINE_BLOCK
    return row


def _sequence(row: EngineBlocks | npt.NDArray[np.int32]) -> Sequence[int]:
    blocks: Sequence[int] = row  # type: ignore[assignment]  # an array is all that it is used as
    return blocks
