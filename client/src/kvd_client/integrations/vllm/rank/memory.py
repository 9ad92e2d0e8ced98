"""A rank's KV memory: made where kvd can map it, and described as kvd wants it described.

vLLM makes one allocation for all layers and views it. On a CPU that allocation is put into a
memory file, whose descriptor the daemon's mover maps. On a GPU it is vLLM's own, and what is
registered is the storage under vLLM's views.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)

from kvd_client.worker import DeviceSpan, Fragment, GroupLayout, SharedMemory
from kvd_client.worker.cuda_stream import stream_end
from kvd_client.worker.memory import ALIGNMENT

MAKERS = (torch.zeros, torch.empty)
NOT_OURS = (
    "kvd can't map this engine's KV cache: it does not lie in the shared memory that the connector"
    " made for it. This version knows how vLLM 0.32 and 0.33 allocate it; use one of these, and"
    " beside it no other connector that brings its own memory"
)


class SharedBuffer(NamedTuple):
    """A mapped memory file. It and its descriptor live until the last tensor over it is gone."""

    fd: int
    address: int
    bytes: int
    lives: Callable[[], bool]


def shared_tensor(num_bytes: int) -> tuple[torch.Tensor, SharedBuffer]:
    """Zeros, page aligned, in a memory file of their own that can't be resized.

    File, mapping and descriptor go with the tensor's storage.
    """
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    fd = os.memfd_create("kvd-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        mapped = mmap.mmap(fd, size)
    except BaseException:
        os.close(fd)
        raise
    closing = weakref.finalize(mapped, os.close, fd)
    closing.atexit = False
    tensor = torch.frombuffer(mapped, dtype=torch.int8, count=num_bytes)
    # Touched here first, so that the memory is the engine's: its control group, its NUMA policy.
    tensor.zero_()
    return tensor, SharedBuffer(fd, tensor.data_ptr(), size, lambda: closing.alive)


class SharedAllocation(TorchFunctionMode):
    """While this is entered, the thread's large host tensors (`least_bytes`) are in memory files.

    So does vLLM's KV, which is one such tensor, whatever else is made beside it.
    """

    def __init__(self, least_bytes: int) -> None:
        super().__init__()
        self._least_bytes = least_bytes
        self._made: list[SharedBuffer] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in MAKERS or kwargs.get("out") is not None or kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        device = torch.device(kwargs.get("device") or torch.get_default_device())
        asked = func(*args, **(kwargs | {"device": "meta"}))
        if (
            device.type != "cpu"
            or asked.layout != torch.strided
            or asked.nbytes < self._least_bytes
        ):
            return func(*args, **kwargs)
        tensor, buffer = shared_tensor(asked.nbytes)
        self._made.append(buffer)
        return tensor.view(asked.dtype).view(asked.shape)

    def buffers(self) -> list[SharedBuffer]:
        """What was made and is still in use."""
        self._made = [buffer for buffer in self._made if buffer.lives()]
        return list(self._made)


def with_stand_ins(
    caches: CanonicalKVCaches, num_blocks: int, device: torch.device
) -> tuple[CanonicalKVCaches, list[SharedBuffer]]:
    """The account with a word a block for each group of which this rank has no layer.

    A pipeline stage may lack a group's layers, and a shard of no bytes is none to the daemon. Also
    returns the shared memory of these words, which lives as long as the account.
    """
    if all(caches.group_data_refs):
        return caches, []
    buffers = []
    if device.type == "cpu":
        words, buffer = shared_tensor(num_blocks * ALIGNMENT)
        buffers.append(buffer)
    else:
        words = torch.zeros(num_blocks * ALIGNMENT, dtype=torch.int8, device=device)
    stand_in = CanonicalKVCacheTensor(words.view(num_blocks, ALIGNMENT), ALIGNMENT)
    reference = CanonicalKVCacheRef(len(caches.tensors), ALIGNMENT)
    groups = [refs or [reference] for refs in caches.group_data_refs]
    return CanonicalKVCaches([*caches.tensors, stand_in], groups), buffers


class BlockRows(NamedTuple):
    """Where one of vLLM's block tensors lies: block b at `address + b * stride`; in bytes."""

    address: int
    num_blocks: int
    stride: int


@dataclass(frozen=True, slots=True)
class RankKv:
    """What a rank registers: its regions, and each group's layout in them."""

    regions: tuple[SharedMemory | DeviceSpan, ...]
    groups: tuple[GroupLayout, ...]

    @property
    def shard_bytes(self) -> tuple[int, ...]:
        """Bytes of one engine block of each group on this rank."""
        return tuple(sum(f.bytes for f in group.fragments) for group in self.groups)


def device_spans(caches: CanonicalKVCaches) -> list[DeviceSpan]:
    """The storages that vLLM's block tensors view, each once; for KV on a GPU."""
    storages = (each.tensor.untyped_storage() for each in caches.tensors)
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    # A last word that is not whole holds no fragment.
    return [DeviceSpan(address, size - size % ALIGNMENT) for address, size in sizes.items()]


def rank_kv(
    caches: CanonicalKVCaches,
    buffers: Sequence[SharedBuffer | DeviceSpan],
    blocks_per_block: int,
) -> RankKv:
    """Put vLLM's account of the KV in kvd's words: a fragment for each reference, in order.

    ValueError names the fix: for memory that kvd can't map, and for a layout that it can't copy.
    """
    rows = [_rows_of(tensor.tensor) for tensor in caches.tensors]
    padded = [tensor.page_size_bytes for tensor in caches.tensors]
    parts = [
        # Whole words, where padding behind the block has room for the last one's rest.
        [(r.tensor_idx, min(_whole_words(r.page_size_bytes), padded[r.tensor_idx])) for r in refs]
        for refs in caches.group_data_refs
    ]
    return lay_out(rows, parts, buffers, blocks_per_block)


def lay_out(
    rows: Sequence[BlockRows],
    groups: Sequence[Sequence[tuple[int, int]]],
    buffers: Sequence[SharedBuffer | DeviceSpan],
    blocks_per_block: int,
) -> RankKv:
    """As `rank_kv`, of plain numbers: `groups` has (row, bytes of a block) in order."""
    homes = [_home_of(row, buffers) for row in rows]
    used = sorted(set(homes))
    layouts = []
    for group, parts in enumerate(groups):
        fragments = []
        for index, num_bytes in parts:
            row, buffer = rows[index], buffers[homes[index]]
            base = row.address - buffer.address
            _check(group, base, row, num_bytes)
            if base + (row.num_blocks - 1) * row.stride + num_bytes > buffer.bytes:
                raise ValueError(NOT_OURS)
            fragments.append(Fragment(used.index(homes[index]), base, row.stride, num_bytes))
        num_blocks = min(rows[index].num_blocks for index, _ in parts)
        layouts.append(GroupLayout(num_blocks, tuple(fragments), blocks_per_block))
    regions = tuple(_region_of(buffers[home]) for home in used)
    return RankKv(regions, tuple(layouts))


def _region_of(buffer: SharedBuffer | DeviceSpan) -> SharedMemory | DeviceSpan:
    if isinstance(buffer, DeviceSpan):
        return buffer
    return SharedMemory(buffer.fd, 0, buffer.bytes)


def _whole_words(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _rows_of(tensor: torch.Tensor) -> BlockRows:
    return BlockRows(tensor.data_ptr(), tensor.shape[0], tensor.stride(0) * tensor.element_size())


def _home_of(row: BlockRows, buffers: Sequence[SharedBuffer | DeviceSpan]) -> int:
    """Which buffer a tensor lies in."""
    for number, buffer in enumerate(buffers):
        if buffer.address <= row.address < buffer.address + buffer.bytes:
            return number
    raise ValueError(NOT_OURS)


def _check(group: int, base: int, row: BlockRows, num_bytes: int) -> None:
    if base % ALIGNMENT or row.stride % ALIGNMENT or num_bytes % ALIGNMENT:
        raise ValueError(
            f"kvd can't copy this KV layout: a layer of group {group} begins at {base}, with"
            f" {num_bytes} bytes every {row.stride}, and all three must be multiples of"
            f" {ALIGNMENT}. Choose a --block-size of more tokens, or another --kv-cache-dtype"
        )


def compute_end(device: torch.device) -> Callable[[], None] | None:
    """What blocks until all that this thread launched on the device so far has run; None on a
    CPU, where vLLM's hooks come when it has.

    The wait sleeps. An event of `torch.Event` would spin for the whole step, on a core that
    vLLM's scheduler may need: torch does not carry its `blocking` out.
    """
    if device.type == "cpu":
        return None
    return stream_end(torch.cuda.current_stream(device))
