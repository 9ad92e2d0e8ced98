"""The KV tensor in shared memory, and its description in kvd's words."""

from __future__ import annotations

import gc
import mmap
import os
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)

from kvd_client.integrations.vllm.rank.memory import (
    BlockRows,
    SharedAllocation,
    SharedBuffer,
    device_spans,
    lay_out,
    rank_kv,
    shared_tensor,
)
from kvd_client.worker import DeviceSpan, Fragment, SharedMemory

SIZE = 3 * mmap.PAGESIZE + 40


def buffer(address: int, num_bytes: int, fd: int = 7) -> SharedBuffer:
    return SharedBuffer(fd, address, num_bytes, lambda: True)


def test_another_mapping_of_the_file_sees_the_tensors_bytes() -> None:
    tensor, made = shared_tensor(SIZE)
    assert tensor.shape == (SIZE,)
    assert not tensor.any()
    tensor[-1] = 77
    with mmap.mmap(made.fd, made.bytes) as seen:
        assert seen[SIZE - 1] == 77
        seen[0] = 11
    assert tensor[0] == 11


def test_the_tensor_begins_on_a_memory_page_and_its_file_is_whole_pages() -> None:
    tensor, made = shared_tensor(SIZE)
    assert tensor.data_ptr() == made.address
    assert made.address % mmap.PAGESIZE == 0
    assert made.bytes == os.fstat(made.fd).st_size == 4 * mmap.PAGESIZE


def test_the_file_is_not_inherited_and_cannot_be_resized() -> None:
    tensor, made = shared_tensor(SIZE)
    assert not os.get_inheritable(made.fd)
    for size in (mmap.PAGESIZE, 100 * mmap.PAGESIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(made.fd, size)
    del tensor


def test_file_and_mapping_go_with_the_last_view_of_the_tensor() -> None:
    tensor, made = shared_tensor(SIZE)
    inode = os.fstat(made.fd).st_ino
    view = tensor.view(torch.int8)[100:200]
    del tensor
    gc.collect()
    assert made.lives()
    assert os.fstat(made.fd).st_ino == inode
    del view
    gc.collect()
    assert not made.lives()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made.fd)


def test_only_large_enough_host_tensors_are_made_in_shared_memory() -> None:
    allocation = SharedAllocation(least_bytes=4096)
    with allocation:
        small = torch.zeros(4095, dtype=torch.int8)
        elsewhere = torch.zeros(4096, device="meta")
        grown = torch.ones(4096)
        exact = torch.zeros(4096, dtype=torch.int8, device=torch.device("cpu"))
        shaped = torch.zeros((2, 16, 128), dtype=torch.float32)
        unset = torch.empty(8192, dtype=torch.int8)
    outside = torch.zeros(4096, dtype=torch.int8)
    addresses = {made.address for made in allocation.buffers()}
    assert addresses == {exact.data_ptr(), shaped.data_ptr(), unset.data_ptr()}
    assert elsewhere.device.type == "meta"
    assert (shaped.shape, shaped.dtype) == ((2, 16, 128), torch.float32)
    assert not exact.any()
    assert not shaped.any()
    assert grown.all()
    assert {small.data_ptr(), outside.data_ptr()}.isdisjoint(addresses)


def test_memory_that_is_gone_is_not_offered() -> None:
    allocation = SharedAllocation(least_bytes=4096)
    with allocation:
        kept = torch.zeros(4096, dtype=torch.int8)
        dropped = torch.zeros(8192, dtype=torch.int8)
    del dropped
    gc.collect()
    assert [made.address for made in allocation.buffers()] == [kept.data_ptr()]


def test_layers_that_lie_one_after_the_other_are_a_fragment_each() -> None:
    rows = [BlockRows(0x10000 + layer * 10 * 256, 10, 256) for layer in range(3)]
    kv = lay_out(rows, [[(0, 256), (1, 256), (2, 240)]], [buffer(0x10000, 8192)], 2)
    (group,) = kv.groups
    assert group.num_blocks == 10
    assert group.blocks_per_block == 2
    assert list(group.fragments) == [
        Fragment(0, 0, 256, 256),
        Fragment(0, 2560, 256, 256),
        Fragment(0, 5120, 256, 240),
    ]
    assert kv.regions == (SharedMemory(7, 0, 8192),)
    assert kv.shard_bytes == (752,)


def test_layers_interleaved_in_a_block_may_end_with_the_memory() -> None:
    rows = [BlockRows(0x10000 + layer * 64, 4, 128) for layer in range(2)]
    kv = lay_out(rows, [[(0, 64), (1, 64)]], [buffer(0x10000, 512)], 1)
    assert list(kv.groups[0].fragments) == [Fragment(0, 0, 128, 64), Fragment(0, 64, 128, 64)]


def test_groups_may_name_the_same_bytes_in_their_own_order() -> None:
    rows = [BlockRows(0x10000 + layer * 1024, 8, 128) for layer in range(2)]
    kv = lay_out(rows, [[(0, 128), (1, 128)], [(1, 64), (0, 128)]], [buffer(0x10000, 4096)], 1)
    assert list(kv.groups[0].fragments) == [Fragment(0, 0, 128, 128), Fragment(0, 1024, 128, 128)]
    assert list(kv.groups[1].fragments) == [Fragment(0, 1024, 128, 64), Fragment(0, 0, 128, 128)]
    assert kv.shard_bytes == (256, 192)


def test_memory_in_several_files_is_several_regions_and_unused_ones_are_none() -> None:
    rows = [BlockRows(0x30000, 4, 64), BlockRows(0x10000, 4, 64)]
    buffers = [buffer(0x10000, 4096, fd=5), buffer(0x20000, 4096, fd=6), buffer(0x30000, 4096)]
    kv = lay_out(rows, [[(0, 64), (1, 64)]], buffers, 1)
    assert kv.regions == (SharedMemory(5, 0, 4096), SharedMemory(7, 0, 4096))
    assert [fragment.memory for fragment in kv.groups[0].fragments] == [1, 0]


@pytest.mark.parametrize(("unpadded", "copied"), [(62, 64), (64, 64), (57, 64), (56, 56)])
def test_a_block_that_ends_amid_a_word_is_copied_with_its_padding(
    unpadded: int, copied: int
) -> None:
    tensor, made = shared_tensor(4 * 64)
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor.view(4, 64), page_size_bytes=64)],
        [[CanonicalKVCacheRef(0, unpadded)]],
    )
    assert rank_kv(caches, [made], 1).shard_bytes == (copied,)


@pytest.mark.parametrize(
    ("row", "num_bytes"),
    [
        (BlockRows(0x10004, 4, 64), 64),
        (BlockRows(0x10000, 4, 60), 56),
        (BlockRows(0x10000, 4, 64), 62),
    ],
)
def test_a_layout_in_odd_bytes_is_refused_with_the_fix(row: BlockRows, num_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"multiples of 8\. Choose a --block-size"):
        lay_out([row], [[(0, num_bytes)]], [buffer(0x10000, 4096)], 1)


@pytest.mark.parametrize("address", [0x9000, 0x11000, 0x10F20])
def test_memory_that_was_not_made_here_is_refused_with_the_fix(address: int) -> None:
    with pytest.raises(ValueError, match=r"can't map this engine's KV cache.*vLLM 0\.32 and 0\.33"):
        lay_out([BlockRows(address, 4, 64)], [[(0, 64)]], [buffer(0x10000, 4096)], 1)


def block_tensor(storage: torch.Tensor, first: int, num_blocks: int, stride: int, size: int) -> Any:
    """One of vLLM's block tensors: a view [num_blocks, size] of a storage of bytes."""
    view = storage.as_strided((num_blocks, size), (stride, 1), first)
    return CanonicalKVCacheTensor(view, page_size_bytes=size)


def test_gpu_memory_is_registered_as_the_storages_under_the_views_each_once() -> None:
    one, other = (torch.zeros(size, dtype=torch.int8) for size in (4096, 1030))
    caches = CanonicalKVCaches(
        [
            block_tensor(one, 0, 8, 256, 256),
            block_tensor(one, 2048, 8, 256, 256),
            block_tensor(other, 16, 8, 120, 120),
        ],
        [[CanonicalKVCacheRef(0, 256), CanonicalKVCacheRef(2, 120)], [CanonicalKVCacheRef(1, 200)]],
    )
    spans = device_spans(caches)
    assert spans == [DeviceSpan(one.data_ptr(), 4096), DeviceSpan(other.data_ptr(), 1024)]
    kv = rank_kv(caches, spans, 1)
    assert kv.regions == tuple(spans)
    assert list(kv.groups[0].fragments) == [Fragment(0, 0, 256, 256), Fragment(1, 16, 120, 120)]
    assert list(kv.groups[1].fragments) == [Fragment(0, 2048, 256, 200)]
    assert kv.shard_bytes == (376, 200)


def test_blocks_that_hold_all_layers_keep_their_stride_in_gpu_memory() -> None:
    storage = torch.zeros(4 * 640, dtype=torch.int8)
    parts = [block_tensor(storage, layer * 160, 4, 640, 160) for layer in range(4)]
    refs = [CanonicalKVCacheRef(layer, 152) for layer in range(4)]
    caches = CanonicalKVCaches(parts, [refs])
    (group,) = rank_kv(caches, device_spans(caches), 2).groups
    assert group.num_blocks == 4
    assert [(f.base, f.stride, f.bytes) for f in group.fragments] == [
        (layer * 160, 640, 152) for layer in range(4)
    ]
