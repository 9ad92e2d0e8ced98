"""Which stretches of GPU memory go to the daemon, and where blocks lie in them: no GPU needed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_client import CudaMemoryRefused, DeviceSpan, Fragment, GroupLayout, SharedMemory
from kvd_client.worker.cuda_refusals import FIXES, CudaRefusal
from kvd_client.worker.rank_memory import take_memory
from kvd_client.worker.regions import IpcRegion, VmmRegion
from kvd_client.worker.spans import Allocation, check_fragments, cover, relocated, span_of

BASE = 0x7F00_0000_0000


@dataclass(frozen=True)
class Device:
    type: str
    index: int = 0


@dataclass(frozen=True)
class Tensor:
    """As torch's, with no memory behind it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address: int = BASE
    element_bytes: int = 2
    device: Device = Device("cuda")

    def data_ptr(self) -> int:
        return self.address

    def element_size(self) -> int:
        return self.element_bytes

    def stride(self) -> Sequence[int]:
        return self.strides

    def elements(self) -> Iterator[int]:
        """Each element's address."""
        for place in itertools.product(*map(range, self.shape)):
            steps = sum(i * s for i, s in zip(place, self.strides, strict=True))
            yield self.address + steps * self.element_bytes


# -- spans of tensors -----------------------------------------------------------------------------


def test_a_tensors_span_reaches_from_its_first_byte_to_its_last() -> None:
    assert span_of(Tensor((2, 8, 4), (32, 4, 1))) == DeviceSpan(BASE, 2 * 8 * 4 * 2)


def test_a_transposed_tensor_with_holes_spans_its_holes_too() -> None:
    assert span_of(Tensor((4, 2), (1, 100))) == DeviceSpan(BASE, 208)  # (3 + 100 + 1) elements


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((0, 4), (4, 1)), ((5, 4), (0, 1)), ((5, 4), (2, 1)), ((3, 3), (1, 1))],
)
def test_a_tensor_that_is_empty_or_overlaps_itself_is_refused(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    with pytest.raises(CudaMemoryRefused, match="storage") as refused:
        span_of(Tensor(shape, strides))
    assert refused.value.reason is CudaRefusal.SHAPE


def test_a_tensor_that_starts_within_a_word_is_refused() -> None:
    with pytest.raises(CudaMemoryRefused) as refused:
        span_of(Tensor((64,), (1,), address=BASE + 2))
    assert refused.value.reason is CudaRefusal.SHAPE


def test_a_tensor_smaller_than_a_word_is_refused() -> None:
    with pytest.raises(CudaMemoryRefused) as refused:
        span_of(Tensor((3,), (1,)))
    assert refused.value.reason is CudaRefusal.SHAPE


@pytest.mark.parametrize("kind", ["cpu", "meta", "xpu"])
def test_a_tensor_that_is_not_on_cuda_is_refused(kind: str) -> None:
    with pytest.raises(CudaMemoryRefused, match=kind) as refused:
        span_of(Tensor((64,), (1,), device=Device(kind)))
    assert refused.value.reason is CudaRefusal.NOT_ON_CUDA


def test_a_device_that_is_only_a_name_will_do() -> None:
    tensor = Tensor((64,), (1,), device="cuda:1")  # type: ignore[arg-type]
    assert span_of(tensor) == DeviceSpan(BASE, 128)


@st.composite
def tensors_with_holes(draw: st.DrawFn) -> Tensor:
    """Elements apart from one another, dimensions in any order."""
    dimensions, extent = [], 1
    for _ in range(draw(st.integers(1, 3))):
        length, stride = draw(st.integers(1, 4)), extent + draw(st.integers(0, 9))
        dimensions.append((length, stride))
        extent += (length - 1) * stride
    shape, strides = zip(*draw(st.permutations(dimensions)), strict=True)
    return Tensor(shape, strides, element_bytes=draw(st.sampled_from([8, 16])))


@given(tensors_with_holes())
def test_a_span_ends_with_a_tensors_last_element(tensor: Tensor) -> None:
    span, addresses = span_of(tensor), list(tensor.elements())
    assert len(set(addresses)) == len(addresses)
    assert span.address == min(addresses)
    assert span.end == max(addresses) + tensor.element_bytes


def test_a_last_word_that_is_not_whole_is_left_out() -> None:
    assert span_of(Tensor((7,), (1,))) == DeviceSpan(BASE, 8)


@pytest.mark.parametrize(("address", "nbytes"), [(BASE + 4, 8), (BASE, 12), (BASE, 0), (0, 8)])
def test_a_span_that_is_not_made_of_words_is_refused(address: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        DeviceSpan(address, nbytes)


# -- stretches of allocations ---------------------------------------------------------------------


def test_many_tensors_in_one_allocation_become_one_stretch() -> None:
    allocation = Allocation(BASE, 1 << 20)
    spans = [DeviceSpan(BASE + 4096 * n, 1024) for n in (5, 2, 9)]
    stretches, places = cover(spans, [allocation] * 3)
    assert [(s.allocation, s.offset, s.bytes) for s in stretches] == [
        (allocation, 2 * 4096, 7 * 4096 + 1024)
    ]
    assert [(place.region, place.offset) for place in places] == [
        (0, 3 * 4096),
        (0, 0),
        (0, 7 * 4096),
    ]


def test_stretches_come_in_the_order_in_which_allocations_are_first_named() -> None:
    first, second = Allocation(BASE + (1 << 30), 4096), Allocation(BASE, 4096)
    spans = [DeviceSpan(first.base, 8), DeviceSpan(second.base, 8), DeviceSpan(first.base + 8, 8)]
    stretches, places = cover(spans, [first, second, first])
    assert [stretch.allocation for stretch in stretches] == [first, second]
    assert [place.region for place in places] == [0, 1, 0]


def test_more_allocations_than_can_be_registered_are_refused() -> None:
    allocations = [Allocation(BASE + n * 4096, 4096) for n in range(257)]
    spans = [DeviceSpan(allocation.base, 8) for allocation in allocations]
    cover(spans[:256], allocations[:256])
    with pytest.raises(CudaMemoryRefused) as refused:
        cover(spans, allocations)
    assert refused.value.reason is CudaRefusal.TOO_MANY_ALLOCATIONS


@st.composite
def spans_in_allocations(draw: st.DrawFn) -> tuple[list[DeviceSpan], list[Allocation]]:
    """Spans, overlapping at will, and the allocation of each."""
    sizes = draw(st.lists(st.integers(1, 64), min_size=1, max_size=4))
    allocations, at = [], BASE
    for size in sizes:
        allocations.append(Allocation(at, size * 8))
        at += size * 8  # neighbours: nothing may be taken for its neighbour's
    spans, theirs = [], []
    for number in draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=8)):
        size = sizes[number]
        first = draw(st.integers(0, size - 1))
        length = draw(st.integers(1, size - first))
        spans.append(DeviceSpan(allocations[number].base + first * 8, length * 8))
        theirs.append(allocations[number])
    return spans, theirs


@given(spans_in_allocations())
def test_stretches_cover_their_spans_and_nothing_further(
    given_spans: tuple[list[DeviceSpan], list[Allocation]],
) -> None:
    spans, allocations = given_spans
    stretches, places = cover(spans, allocations)
    assert len({stretch.allocation for stretch in stretches}) == len(stretches)
    for number, stretch in enumerate(stretches):
        inside = [s for s, p in zip(spans, places, strict=True) if p.region == number]
        first = stretch.allocation.base + stretch.offset
        assert first == min(span.address for span in inside)
        assert first + stretch.bytes == max(span.end for span in inside)
        assert stretch.offset >= 0
        assert stretch.offset + stretch.bytes <= stretch.allocation.bytes
    for span, allocation, place in zip(spans, allocations, places, strict=True):
        stretch = stretches[place.region]
        assert stretch.allocation == allocation
        assert allocation.base + stretch.offset + place.offset == span.address


@given(spans_in_allocations(), st.data())
def test_relocated_fragments_name_the_same_bytes(
    given_spans: tuple[list[DeviceSpan], list[Allocation]], draws: st.DataObject
) -> None:
    spans, allocations = given_spans
    stretches, places = cover(spans, allocations)
    fragments = []
    for memory, span in enumerate(spans):
        words = span.bytes // 8
        base = draws.draw(st.integers(0, words - 1))
        length = draws.draw(st.integers(1, words - base))
        fragments.append(Fragment(memory, base * 8, length * 8, length * 8))
    groups = [GroupLayout(1, fragments, 3), GroupLayout(1, fragments[:1])]
    check_fragments(groups, [span.bytes for span in spans])
    for before, after in zip(groups, relocated(groups, places), strict=True):
        assert (after.num_blocks, after.blocks_per_block) == (
            before.num_blocks,
            before.blocks_per_block,
        )
        for old, new in zip(before.fragments, after.fragments, strict=True):
            stretch = stretches[new.memory]
            address = stretch.allocation.base + stretch.offset + new.base
            assert address == spans[old.memory].address + old.base
            assert (new.stride, new.bytes) == (old.stride, old.bytes)
            assert new.base + new.bytes <= stretch.bytes


def test_a_block_beyond_its_tensor_is_refused_though_the_neighbour_would_have_room() -> None:
    groups = [GroupLayout(4, [Fragment(1, 0, 64, 64)])]
    check_fragments(groups, [4096, 256])
    with pytest.raises(ValueError, match="ends at byte 256 of memory 1, which has 192"):
        check_fragments(groups, [4096, 192])


# -- what is taken, and how it goes on the wire ---------------------------------------------------


def test_host_and_gpu_memory_in_one_rank_are_refused() -> None:
    with pytest.raises(CudaMemoryRefused) as refused:
        take_memory([SharedMemory(0, 0, 4096), DeviceSpan(BASE, 4096)], [])
    assert refused.value.reason is CudaRefusal.MIXED_MEMORY


def test_what_is_no_memory_is_refused_by_its_type() -> None:
    with pytest.raises(ValueError, match="a str is no memory"):
        take_memory(["cuda:0"], [])  # type: ignore[list-item]


def test_a_fragment_of_a_memory_that_was_not_given_is_refused() -> None:
    groups = [GroupLayout(1, [Fragment(1, 0, 8, 8)])]
    with pytest.raises(ValueError, match="not in the list"):
        take_memory([DeviceSpan(BASE, 4096)], groups)


def test_every_refusal_says_what_to_change() -> None:
    assert set(FIXES) == set(CudaRefusal)
    for reason in CudaRefusal:
        refused = CudaMemoryRefused(reason, "the memory")
        assert str(refused) == f"the memory [{reason}]. To fix it: {FIXES[reason]}."


def test_a_legacy_allocation_goes_by_its_handle_and_needs_no_descriptor() -> None:
    region = IpcRegion(bytes(range(64)), 512, 4096, "GPU-1")
    handle = region.to_proto(3).cuda_ipc
    assert (handle.handle, handle.offset, handle.bytes) == (bytes(range(64)), 512, 4096)
    assert handle.gpu_uuid == "GPU-1"
    assert region.fd is None


def test_an_exported_allocation_goes_by_the_number_of_its_descriptor() -> None:
    region = VmmRegion(7, 512, 4096, 2 << 20, "GPU-1")
    handle = region.to_proto(3).vmm_fd
    assert (handle.memory_token, handle.offset, handle.bytes) == (3, 512, 4096)
    assert (handle.allocation_bytes, handle.gpu_uuid) == (2 << 20, "GPU-1")
    assert region.fd == 7
