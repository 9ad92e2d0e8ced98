"""SGLang's host pools as the daemon sees them: memory files, and where each page's bytes lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvd_client.worker import Fragment, GroupLayout, SharedMemory

ALIGNMENT = 8
NO_FILES = (
    "its memory is not in shared memory files: the pool {name} can't be handed to the daemon. Start"
    ' SGLang with "allocator": "shm" in --hicache-storage-backend-extra-config, written out in that'
    " flag: of an @file, or of an attach to a running server, SGLang does not heed it"
)


class Extent(NamedTuple):
    """One piece of every page: page p's is at address + p * stride."""

    address: int
    stride: int
    bytes: int


class MappedFile(NamedTuple):
    """A memory file of SGLang's allocator, as it is mapped here."""

    fd: int
    address: int
    bytes: int


class HostPool:
    """One of SGLang's host pools: its pages, and the files that they lie in.

    Raises ValueError for a pool that the daemon can't copy from and to.
    """

    def __init__(self, name: str, pool: Any) -> None:
        self.name = name
        self.pool = pool
        self.page_tokens = int(pool.page_size)  # as its indices count
        self.num_pages = int(pool.size) // self.page_tokens
        self.extents = _extents(name, pool, self.page_tokens, self.num_pages)
        self.files = _files(name, pool)
        self.page_bytes = sum(extent.bytes for extent in self.extents)
        self._fragments = [self._fragment(extent) for extent in self.extents]

    def _fragment(self, extent: Extent) -> Fragment:
        number, base = self._place(extent)
        if any(value % ALIGNMENT for value in (base, extent.stride, extent.bytes)):
            raise ValueError(
                f"kvd: pages of the pool {self.name} have pieces of {extent.bytes} bytes every"
                f" {extent.stride}: kvd moves multiples of {ALIGNMENT} bytes. Choose another"
                " --page-size"
            )
        return Fragment(number, base, extent.stride, extent.bytes)

    def _place(self, extent: Extent) -> tuple[int, int]:
        """The file that holds this piece of every page, and where page 0's begins in it."""
        end = extent.address + (self.num_pages - 1) * extent.stride + extent.bytes
        for number, file in enumerate(self.files):
            if file.address <= extent.address and end <= file.address + file.bytes:
                return number, extent.address - file.address
        raise ValueError(f"kvd: {NO_FILES.format(name=self.name)}")

    def layout(self, first_memory: int) -> GroupLayout:
        """Where its pages are, with its files numbered from `first_memory` on."""
        fragments = [
            Fragment(first_memory + each.memory, each.base, each.stride, each.bytes)
            for each in self._fragments
        ]
        return GroupLayout(self.num_pages, fragments, blocks_per_block=1)

    def memories(self) -> list[SharedMemory]:
        return [SharedMemory(file.fd, 0, file.bytes) for file in self.files]

    def describe(self) -> list[Any]:
        """What two engines must have alike for a page of one to be a page of the other."""
        pool = self.pool
        figures = [
            str(getattr(pool, name, ""))
            for name in ("layout", "dtype", "layer_num", "head_num", "head_dim", "kv_cache_dim")
        ]
        layers = [getattr(pool, "start_layer", None), getattr(pool, "end_layer", None)]
        return [
            self.name,
            type(pool).__name__,
            self.page_tokens,
            *figures,
            layers,
            [extent.bytes for extent in self.extents],
            str(getattr(pool, "storage_format_tag", None)),
            _dtypes(pool),
            _device_layouts(pool),
        ]

    def pages(self, host_indices: torch.Tensor | None, count: int) -> npt.NDArray[np.uint32] | None:
        """The numbers of the `count` pages that these indices are; None where they are none."""
        if host_indices is None and not count:
            return np.empty(0, dtype=np.uint32)
        if host_indices is None or host_indices.numel() != count * self.page_tokens:
            return None
        firsts = host_indices[:: self.page_tokens].numpy(force=True)
        pages, within = np.divmod(firsts, self.page_tokens)
        if within.any() or (count and (pages.min() < 0 or pages.max() >= self.num_pages)):
            return None
        numbers: npt.NDArray[np.uint32] = pages.astype(np.uint32)
        return numbers


def _dtypes(pool: Any) -> list[str]:
    """Of all its tables: a pool of states has several, and of the same width."""
    named = {name: each for name, each in vars(pool).items() if isinstance(each, torch.dtype)}
    beside = [table.dtype for table in getattr(pool, "slot_state_buffers", None) or ()]
    return [f"{name} {named[name]}" for name in sorted(named)] + [str(each) for each in beside]


def _device_layouts(pool: Any) -> list[str]:
    """In which order the device tables hold tokens and heads (NHD, HND, ...): the host pool takes
    whole pages of them as they are."""
    tables = [getattr(each, "buffers", None) for each in getattr(pool, "_buffer_infos", None) or ()]
    return [str(getattr(each, "layout", None)) for each in tables]


def holds_bytes(pool: Any) -> bool:
    """False for an anchor that only gives indices away (DeepSeek V4)."""
    return getattr(pool, "kv_buffer", pool) is not None or getattr(pool, "size_per_token", 1) != 0


def _extents(name: str, pool: Any, page_tokens: int, num_pages: int) -> list[Extent]:
    """The pieces of page 0, and how far those of the next are; checked on the last page."""
    first = _pieces(name, pool, 0)
    second = _pieces(name, pool, page_tokens) if num_pages > 1 else first
    last = _pieces(name, pool, (num_pages - 1) * page_tokens)
    extents = []
    for (address, size), (after, _), (end, _) in zip(first, second, last, strict=True):
        stride = after - address if num_pages > 1 else size
        if stride < size or end != address + (num_pages - 1) * stride:
            raise ValueError(f"kvd: pages of the pool {name} do not follow each other evenly")
        extents.append(Extent(address, stride, size))
    if not extents:
        raise ValueError(f"kvd: the pool {name} has no bytes")
    return extents


def _pieces(name: str, pool: Any, index: int) -> list[tuple[int, int]]:
    """Address and size of each piece of the page that begins at this index."""
    indices = torch.arange(index, index + int(pool.page_size), dtype=torch.int64)
    try:
        addresses, sizes = pool.get_page_buffer_meta(indices)
    except (ValueError, NotImplementedError) as error:
        views = getattr(pool, "_iter_page_tensors", None)  # Mamba's, for the layouts that it has
        if views is None:
            raise ValueError(
                f"kvd: the pool {name} does not say where its pages are: {error}"
            ) from error
        return [piece for view in views(index) for piece in _pieces_of(view)]
    return [(int(a), int(s)) for a, s in zip(addresses, sizes, strict=True) if s]


def _pieces_of(view: torch.Tensor) -> list[tuple[int, int]]:
    """Address and size of the contiguous pieces of a view of one page."""
    if not view.numel():
        return []
    if view.is_contiguous():
        return [(view.data_ptr(), view.numel() * view.element_size())]
    return [piece for part in view for piece in _pieces_of(part)]


def _files(name: str, pool: Any) -> list[MappedFile]:
    allocator = getattr(pool, "allocator", None)
    fds: Sequence[int] = getattr(allocator, "fds", None) or ()
    maps: Sequence[Any] = getattr(allocator, "mms", None) or ()
    if not fds or len(fds) != len(maps):
        raise ValueError(f"kvd: {NO_FILES.format(name=name)}")
    files = []
    for fd, mapped in zip(fds, maps, strict=True):
        seen = np.frombuffer(mapped, dtype=np.uint8)
        files.append(MappedFile(fd, seen.ctypes.data, seen.nbytes))
    return files
