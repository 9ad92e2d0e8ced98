"""Where a rank's blocks lie: what a registration says, and what it must fulfil."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvd.core.errors import (
    BLOCKS_PER_BLOCK,
    GROUP_COUNT,
    TOO_MANY_PARTS,
    InvalidArgument,
    LayoutMismatch,
)
from kvd.core.keys import U32, U64, MoverId
from kvd.processes.mappings import ExtentFiles
from kvd_proto.layout import NULL_ENGINE_BLOCK
from kvd_proto.limits import MAX_BLOCKS_PER_BLOCK, MAX_GROUPS, MAX_REGIONS

Handle = bytes
WORD = 8  # every base, stride and size is a multiple: copies go word by word
MAX_FRAGMENTS = 4096  # per group
FRAGMENTS_AT_ONCE = 256  # looked at without letting others in


@dataclass(frozen=True, slots=True)
class Region:
    """A stretch of a shared-memory file that holds engine blocks."""

    fd: int
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class CudaRegion:
    """A stretch of one allocation on a GPU.

    The allocation is named by its legacy IPC handle of 64 bytes, or by the descriptor of an
    exported physical allocation, whose whole size is then known; never by both.
    """

    offset: int
    bytes: int
    handle: Handle = b""
    fd: int = -1
    allocation_bytes: int = 0  # of the physical allocation behind fd


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """The GPU that a rank's memory is on."""

    uuid: str
    staging_bytes: int = 16 << 20  # pinned, per direction, at least a part: for unpinned extents
    bind_to_node: bool = True  # threads stay on the GPU's NUMA node
    free_bytes_before: int = 0  # of the GPU, as the worker saw it before it registered; 0: not told


@dataclass(frozen=True, slots=True)
class FragmentSpec:
    """One fragment of every engine block: block b's is at base + b * stride of the region."""

    region: int
    base: int
    stride: int
    bytes: int


@dataclass(frozen=True, slots=True)
class GroupMap:
    """Where the engine blocks of one group are; `part_bytes`: of a slot, in this rank's shard."""

    num_blocks: int
    blocks_per_block: int
    part_bytes: int
    fragments: tuple[FragmentSpec, ...]

    @property
    def engine_block_bytes(self) -> int:
        """Bytes of one engine block: its fragments one after the other."""
        return sum(fragment.bytes for fragment in self.fragments)


@dataclass(frozen=True, slots=True)
class MoverConfig:
    """All that a mover must know at its start. `groups` are indexed by group number.

    All regions are CudaRegions of the one GPU, or all are host shared memory.
    """

    mover: MoverId
    regions: tuple[Region, ...] | tuple[CudaRegion, ...]
    groups: tuple[GroupMap, ...]
    extents: ExtentFiles
    checksums: bool = False  # of every slot's part: made by stores, compared by loads
    gpu: GpuConfig | None = None  # where the regions lie; None: in host shared memory


@dataclass(frozen=True, slots=True, eq=False)
class LocatedPart:
    """Blocks of one group, and where their slots' parts are.

    extents: extent number of each, shape [n]. offsets: bytes in the extent, [n].
    engine_blocks: [n, blocks_per_block], NULL_ENGINE_BLOCK allowed.
    checksums: what a load's parts must have, [n]; None, or NO_SUM, where nothing is compared.
    """

    group: int
    extents: U32
    offsets: U64
    engine_blocks: U32
    checksums: U64 | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        checksums = 0 if self.checksums is None else self.checksums.nbytes
        return self.extents.nbytes + self.offsets.nbytes + self.engine_blocks.nbytes + checksums

    def pieces(self, slots: int) -> Iterator[tuple[int, LocatedPart]]:
        """It, cut into parts of so many slots, at least one; each with its first slot's number."""
        step = max(1, slots)
        for start in range(0, len(self.extents), step):
            yield start, self.rows(slice(start, start + step))

    def rows(self, rows: slice) -> LocatedPart:
        """Some of its blocks."""
        checksums = None if self.checksums is None else self.checksums[rows]
        return LocatedPart(
            self.group, self.extents[rows], self.offsets[rows], self.engine_blocks[rows], checksums
        )


def check_config(config: MoverConfig) -> None:
    """Raise InvalidArgument or LayoutMismatch, naming the field, unless every engine block
    lies inside its regions and a slot's part is exactly its engine blocks' fragments."""
    for _ in checks_of(config):
        pass


def checks_of(config: MoverConfig) -> Iterator[None]:
    """The same in pieces of FRAGMENTS_AT_ONCE fragments, a fifth of a millisecond each."""
    if not 1 <= len(config.regions) <= MAX_REGIONS:
        raise InvalidArgument(
            f"{len(config.regions)} memories; 1 to {MAX_REGIONS} are allowed",
            "memories",
            TOO_MANY_PARTS,
        )
    check_group_count(len(config.groups))
    regions: Sequence[Region | CudaRegion] = config.regions
    for number, region in enumerate(regions):
        _check_region(region, f"memories[{number}]")
    looked_at = 0  # of all groups: many small ones take as long as a large one
    for number, group in enumerate(config.groups):
        for _ in _checks_of_group(group, config, f"groups[{number}]"):
            looked_at += 1
            if looked_at % FRAGMENTS_AT_ONCE == 0:
                yield


def check_group_count(count: int) -> None:
    """Raise InvalidArgument for none, and for more groups than anybody needs to look at."""
    if not 1 <= count <= MAX_GROUPS:
        raise InvalidArgument(f"{count} groups; 1 to {MAX_GROUPS}", "groups", GROUP_COUNT)


def _check_region(region: Region | CudaRegion, name: str) -> None:
    if region.offset < 0 or region.offset % WORD:
        raise InvalidArgument(
            f"{name}.offset {region.offset} is no multiple of 8", f"{name}.offset"
        )
    if region.bytes <= 0 or region.bytes % WORD:
        raise InvalidArgument(
            f"{name}.bytes {region.bytes} is no positive multiple of 8", f"{name}.bytes"
        )


def _checks_of_group(group: GroupMap, config: MoverConfig, name: str) -> Iterator[None]:
    """One for each fragment."""
    if not 1 <= group.num_blocks < NULL_ENGINE_BLOCK:
        raise InvalidArgument(
            f"{name}.num_blocks {group.num_blocks} is not in 1..{NULL_ENGINE_BLOCK - 1}",
            f"{name}.num_blocks",
        )
    if not 1 <= group.blocks_per_block <= MAX_BLOCKS_PER_BLOCK:
        raise InvalidArgument(
            f"{name}: {group.blocks_per_block} engine blocks per block; "
            f"1 to {MAX_BLOCKS_PER_BLOCK} are allowed",
            f"{name}.blocks_per_block",
            BLOCKS_PER_BLOCK,
        )
    if not 1 <= len(group.fragments) <= MAX_FRAGMENTS:
        raise InvalidArgument(
            f"{name}: {len(group.fragments)} fragments; 1 to {MAX_FRAGMENTS} are allowed",
            f"{name}.fragments",
            TOO_MANY_PARTS,
        )
    for number, fragment in enumerate(group.fragments):
        _check_fragment(fragment, group, config.regions, f"{name}.fragments[{number}]")
        yield
    whole = group.engine_block_bytes * group.blocks_per_block
    if whole != group.part_bytes:
        raise LayoutMismatch(
            f"{name}: the fragments of {group.blocks_per_block} engine blocks add up to {whole} "
            f"bytes, but a block's part is {group.part_bytes}",
            f"{name}.fragments",
        )
    if group.part_bytes > config.extents.extent_bytes:
        fitting = 1 << (group.part_bytes - 1).bit_length()
        raise LayoutMismatch(
            f"{name}: a part of {group.part_bytes} bytes does not fit an extent of "
            f"{config.extents.extent_bytes}: raise extent_bytes, to {fitting} or more",
            f"{name}.fragments",
        )


def _check_fragment(
    fragment: FragmentSpec, group: GroupMap, regions: Sequence[Region | CudaRegion], name: str
) -> None:
    if not 0 <= fragment.region < len(regions):
        raise InvalidArgument(f"{name}: there is no memory {fragment.region}", f"{name}.memory")
    for field in ("base", "stride", "bytes"):
        value = getattr(fragment, field)
        if value < 0 or value % WORD:
            raise InvalidArgument(f"{name}.{field} {value} is no multiple of 8", f"{name}.{field}")
    if fragment.bytes == 0:
        raise InvalidArgument(f"{name}.bytes is 0", f"{name}.bytes")
    if fragment.bytes > fragment.stride:
        raise InvalidArgument(
            f"{name}: {fragment.bytes} bytes overlap at a stride of {fragment.stride}",
            f"{name}.stride",
        )
    end = fragment.base + (group.num_blocks - 1) * fragment.stride + fragment.bytes
    if end > regions[fragment.region].bytes:
        raise InvalidArgument(
            f"{name}: block {group.num_blocks - 1} ends at byte {end}, the memory at "
            f"{regions[fragment.region].bytes}",
            f"{name}.base",
        )


def flaw_of_part(part: LocatedPart, config: MoverConfig) -> str:
    """Why the part can't be copied, or "". Its extents may still be unmapped."""
    if not 0 <= part.group < len(config.groups):
        return f"there is no group {part.group}"
    group = config.groups[part.group]
    blocks = len(part.extents)
    if (
        part.offsets.shape != (blocks,)
        or part.engine_blocks.shape
        != (
            blocks,
            group.blocks_per_block,
        )
        or (part.checksums is not None and part.checksums.shape != (blocks,))
    ):
        return f"arrays of group {part.group} don't run along"
    if blocks == 0:
        return ""
    real = part.engine_blocks[part.engine_blocks != NULL_ENGINE_BLOCK]
    if real.size and int(real.max()) >= group.num_blocks:
        return f"engine block {int(real.max())} of {group.num_blocks} in group {part.group}"
    last = config.extents.extent_bytes - group.part_bytes
    if int(part.offsets.max()) > last or (part.offsets % WORD).any():
        return f"an offset of group {part.group} is outside its extent"
    return ""
