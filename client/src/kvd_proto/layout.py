"""Layouts of the memory that the daemon shares with its clients. All numbers little-endian.

Three kinds, each a memfd handed over on the companion socket:

index page   daemon writes, clients map read-only (sealed against shrinking and growing; of the
             daemon's own user)
board        mover and control write, the rank's worker maps read-only (sealed likewise)
ready ring   the rank's worker writes, its mover reads (sealed against shrinking and growing)

Aligned 64-bit stores are atomic and ordered on x86-64, which is why `require_ordered_stores`
refuses every other processor: the fences they need are not in.
"""

from __future__ import annotations

import platform

import numpy as np

LAYOUT_VERSION = 1
HEADER_BYTES = 4096
NULL_ENGINE_BLOCK = 0xFFFFFFFF

# -- index page -------------------------------------------------------------------------------
# header: u64 magic, u64 version, u64 table, u64 closed, u64 top level, u64 below (not 0: a tier may
# hold blocks that the page doesn't show), then at ROOM_OFFSET one u64 for each group (64 at most):
# blocks that a store could get now, free or by eviction. 0 = no room.
# After the header lie tables, those of all levels one after the other: 2^level buckets x 8 u64
# words, each 0 or the tag of one readable block. The table word's low bits are the level whose
# table counts, the others count the changes: who reads the same table word before and after a
# probe has seen a table that counted all the time. The others are holes, or on their way.
PAGE_MAGIC = int.from_bytes(b"KVDPAGE1", "little")
PAGE_VERSION = 2
PAGE_BUCKET_WORDS = 8
PAGE_TABLE_OFFSET = 16
PAGE_CLOSED_OFFSET = 24
PAGE_TOP_OFFSET = 32
PAGE_BELOW_OFFSET = 40
PAGE_LEVEL_BITS = 8
PAGE_SMALLEST_LEVEL = 6  # a table of 4096 bytes
PAGE_LARGEST_LEVEL = 40
PAGE_ROOM_OFFSET = 64
PAGE_ROOM_GROUPS = 64

# -- ready ring -------------------------------------------------------------------------------
# header: u64 magic, u64 version, u64 entries; u64 tail at RING_TAIL_OFFSET (worker writes),
# u64 head at RING_HEAD_OFFSET (mover writes), u64 leave at RING_LEAVE_OFFSET (worker writes; not
# zero: the mover ends itself when it next looks). After the header: RING_ENTRIES job ids (u64),
# then RING_ENTRIES abandon words (u64): word job_id % RING_ENTRIES >= job_id means that the
# worker gave that store up, or a younger one that shares the word (job ids rise: at worst the
# elder fails in vain); the mover looks after the last byte. Word 0 begins as 2^64-1, or job 0
# would be born abandoned. Entry i of the stream lies at i % RING_ENTRIES. The eventfd is written
# after the tail.
RING_MAGIC = int.from_bytes(b"KVDRING1", "little")
RING_ENTRIES = 8192
RING_TAIL_OFFSET = 64
RING_HEAD_OFFSET = 128
RING_LEAVE_OFFSET = 192
RING_BYTES = HEADER_BYTES + 2 * RING_ENTRIES * 8

# -- board ------------------------------------------------------------------------------------
# header: u64 magic, u64 version, u64 records per lane; u64 tail of lane 0 (the mover's) at
# BOARD_TAIL_OFFSETS[0], of lane 1 (control's) at [1]. After the header: lane 0's records, then
# lane 1's. Record i of a lane lies at i % BOARD_RECORDS; it is written before the tail moves.
# A reader more than BOARD_RECORDS behind has lost records and must register again.
BOARD_MAGIC = int.from_bytes(b"KVDBORD1", "little")
BOARD_LANES = 2
LANE_MOVER = 0
LANE_CONTROL = 1
BOARD_RECORDS = 8192
BOARD_TAIL_OFFSETS = (64, 128)
BOARD_RECORD = np.dtype(
    [
        ("job_id", "<u8"),
        ("kind", "<u4"),  # JobKind of kvd.v1
        ("status", "<u4"),  # JobStatus of kvd.v1
        ("bytes", "<u8"),  # this rank's bytes copied
        ("duration_ns", "<u8"),  # of the copy itself
    ]
)
BOARD_BYTES = HEADER_BYTES + BOARD_LANES * BOARD_RECORDS * BOARD_RECORD.itemsize


def page_table_span(level: int) -> tuple[int, int]:
    """Where in an index page the table of a level lies: its offset, its bytes."""
    size = (PAGE_BUCKET_WORDS * 8) << level
    return HEADER_BYTES + size - ((PAGE_BUCKET_WORDS * 8) << PAGE_SMALLEST_LEVEL), size


def page_level(buckets: int) -> int:
    """The smallest level whose table has so many buckets."""
    return max(PAGE_SMALLEST_LEVEL, (max(1, buckets) - 1).bit_length())


def page_bytes(top: int) -> int:
    """The size of an index page whose tables go up to that level."""
    return sum(page_table_span(top))


def why_other_header(what: str, found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Why memory that begins with these words is none of ours; empty where it is.

    Both are the header's first words: the kind's magic, the layout's version, and others.
    """
    if found == expected:
        return ""
    if found[:1] != expected[:1]:
        return f"not {what}: its magic is {found[0] if found else 0:#x}"
    if found[1:2] != expected[1:2]:
        return (
            f"{what} of layout {found[1]}, where this client reads {expected[1]}:"
            " install the kvd-client of the daemon's release, or that release of the daemon"
        )
    return f"not {what} of layout {expected[1]}: it begins with {found}, not with {expected}"


def require_ordered_stores() -> None:
    """Raise RuntimeError where 64-bit stores may become visible out of order."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise RuntimeError(
            f"kvd shares memory without fences and needs x86-64, not {platform.machine()}"
        )
