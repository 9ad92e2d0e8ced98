"""Which stretches of GPU memory a rank's KV covers, and where fragments lie in them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvd_client.worker.cuda_refusals import CudaMemoryRefused, CudaRefusal
from kvd_client.worker.memory import ALIGNMENT, CudaTensor, DeviceSpan, GroupLayout
from kvd_proto.limits import MAX_REGIONS


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation of the CUDA driver's, by its first address."""

    base: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """Part of an allocation; `offset` and `bytes` are multiples of 8."""

    allocation: Allocation
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SpanPlace:
    """Where a span is: in which stretch, and how far from the stretch's first byte."""

    region: int
    offset: int


def span_of(tensor: CudaTensor) -> DeviceSpan:
    """The memory from a tensor's first byte to its last, holes included.

    CudaMemoryRefused for a tensor that is not on CUDA, is empty, or has elements that share
    memory. A last word that is not whole is left out: no fragment can lie in it.
    """
    kind = getattr(tensor.device, "type", None) or str(tensor.device).partition(":")[0]
    if kind != "cuda":
        raise CudaMemoryRefused(CudaRefusal.NOT_ON_CUDA, f"a tensor is on {tensor.device}")
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    if 0 in shape:
        raise CudaMemoryRefused(CudaRefusal.SHAPE, f"a tensor of shape {shape} is empty")
    elements = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length == 1:
            continue
        if stride < elements:
            raise CudaMemoryRefused(
                CudaRefusal.SHAPE,
                f"a tensor of strides {strides} and shape {shape} overlaps itself",
            )
        elements += (length - 1) * stride
    address, size = tensor.data_ptr(), elements * tensor.element_size()
    if address % ALIGNMENT or size < ALIGNMENT:
        raise CudaMemoryRefused(
            CudaRefusal.SHAPE,
            f"a tensor of {size} bytes at {address:#x} has no whole words of {ALIGNMENT} bytes",
        )
    return DeviceSpan(address, size - size % ALIGNMENT)


def cover(
    spans: Sequence[DeviceSpan], allocations: Sequence[Allocation]
) -> tuple[list[Stretch], list[SpanPlace]]:
    """The smallest stretch of each allocation that covers its spans, and each span's place.

    allocations[i] is the one that spans[i] lies in. Stretches come in the order in which the
    allocations first do.
    """
    numbers: dict[Allocation, int] = {}
    bounds: list[tuple[int, int]] = []
    for span, allocation in zip(spans, allocations, strict=True):
        number = numbers.setdefault(allocation, len(bounds))
        if number == len(bounds):
            bounds.append((span.address, span.end))
        else:
            first, end = bounds[number]
            bounds[number] = (min(first, span.address), max(end, span.end))
    if len(bounds) > MAX_REGIONS:
        raise CudaMemoryRefused(
            CudaRefusal.TOO_MANY_ALLOCATIONS,
            f"the KV lies in {len(bounds)} allocations, at most {MAX_REGIONS} can be registered",
        )
    stretches = [
        Stretch(allocation, first - allocation.base, end - first)
        for allocation, (first, end) in zip(numbers, bounds, strict=True)
    ]
    places = [
        SpanPlace(numbers[allocation], span.address - bounds[numbers[allocation]][0])
        for span, allocation in zip(spans, allocations, strict=True)
    ]
    return stretches, places


def check_fragments(groups: Sequence[GroupLayout], sizes: Sequence[int]) -> None:
    """Raise ValueError unless every block lies inside its memory; sizes[m] is memory m's, in bytes.

    Only here can this be seen: what is sent covers the neighbours too.
    """
    for number, group in enumerate(groups):
        for fragment in group.fragments:
            end = fragment.base + (group.num_blocks - 1) * fragment.stride + fragment.bytes
            if end > sizes[fragment.memory]:
                raise ValueError(
                    f"group {number}: block {group.num_blocks - 1} ends at byte {end} of memory"
                    f" {fragment.memory}, which has {sizes[fragment.memory]}; give the right"
                    " num_blocks, base and stride"
                )


def relocated(
    groups: Sequence[GroupLayout], places: Sequence[SpanPlace]
) -> tuple[GroupLayout, ...]:
    """The groups with fragments that count from the stretches' first bytes."""
    return tuple(
        replace(
            group,
            fragments=tuple(
                replace(
                    fragment,
                    memory=places[fragment.memory].region,
                    base=fragment.base + places[fragment.memory].offset,
                )
                for fragment in group.fragments
            ),
        )
        for group in groups
    )
