"""How many tokens of a prompt can be had, by group and over all groups. Pure numpy.

Each group says of every candidate boundary whether a hit may end there; the longest boundary
that suits every group is the answer. That is where shortening by one group after another, as
engines do it, would converge, found in one pass.

full attention     every block from the device's own prefix on, up to the boundary
sliding window     every block that the window before the boundary touches
recurrent state    the one block whose end is the boundary: the last state
any of a drafter   also the block that holds the token at the boundary: a drafter's KV of a token
                   is made with the token after it, so that one must be known to agree. It is
                   asked for and not loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvd_client.identity import Group
from kvd_proto.groups import GroupKind
from kvd_proto.key_status import MISS, STATUS_BITS

Flags = npt.NDArray[np.bool_]
Statuses = npt.NDArray[np.uint8]
Boundaries = npt.NDArray[np.int64]


def used_blocks(group: Group, computed_tokens: int, hit_tokens: int) -> range:
    """Blocks of the group that must be there for a hit of `hit_tokens`."""
    loaded = loaded_blocks(group, computed_tokens, hit_tokens)
    if not group.drafter:
        return loaded
    proof = hit_tokens // group.tokens_per_block
    return range(loaded.start if loaded else proof, proof + 1)


def uses(groups: Sequence[Group], statuses: Sequence[Statuses], status: int, tokens: range) -> bool:
    """Whether a hit of these tokens needs a block with this status."""
    if not tokens:
        return False
    for group, row in zip(groups, statuses, strict=True):
        used = used_blocks(group, tokens.start, tokens.stop)
        if (row[used.start : used.stop] == status).any():
            return True
    return False


def make_misses(statuses: Sequence[Statuses], status: int) -> bool:
    """Take what has this status as a miss; whether there was any."""
    had_any = False
    for row in statuses:
        late = (row & np.uint8(STATUS_BITS)) == status
        had_any |= bool(late.any())
        row[late] = MISS
    return had_any


def loaded_blocks(group: Group, computed_tokens: int, hit_tokens: int) -> range:
    """Blocks of the group that a hit of `hit_tokens` loads: those not already on the device."""
    width = group.tokens_per_block
    end = -(-hit_tokens // width)
    match group.kind:
        case GroupKind.FULL_ATTENTION:
            return range(computed_tokens // width, end)
        case GroupKind.SLIDING_WINDOW:
            # The next token attends to itself and the window - 1 tokens before it.
            first = max(hit_tokens - group.sliding_window_tokens + 1, computed_tokens)
            return range(min(first // width, end) if first < hit_tokens else end, end)
        case GroupKind.RECURRENT_STATE:
            return range(end - 1, end)


def longest_hit(
    groups: Sequence[Group], usable: Sequence[Flags], computed_tokens: int, boundaries: Boundaries
) -> int:
    """The largest boundary at which every group has what it needs; `computed_tokens` if none.

    `usable[g]` flags the blocks of group g; `boundaries` ascend, beyond `computed_tokens`.
    """
    reach = min(
        (
            _unbroken_tokens(group, flags, computed_tokens)
            for group, flags in zip(groups, usable, strict=True)
            if group.kind is GroupKind.FULL_ATTENTION
        ),
        default=None,
    )
    if reach is not None:
        boundaries = boundaries[: boundaries.searchsorted(reach, side="right")]
    for group, flags in zip(groups, usable, strict=True):
        if len(boundaries) and group.kind is not GroupKind.FULL_ATTENTION:
            boundaries = boundaries[_suits(group, flags, computed_tokens, boundaries)]
    return int(boundaries[-1]) if len(boundaries) else computed_tokens


def boundaries_between(computed_tokens: int, cap_tokens: int, step: int) -> Boundaries:
    """Multiples of `step` beyond `computed_tokens`, up to and with `cap_tokens`."""
    return np.arange(computed_tokens // step + 1, cap_tokens // step + 1, dtype=np.int64) * step


def _unbroken_tokens(group: Group, usable: Flags, computed_tokens: int) -> int:
    """How far a hit may go by the blocks that follow the device's own prefix without a gap."""
    width = group.tokens_per_block
    first = computed_tokens // width
    wanted = usable[first:]
    count = len(wanted) if wanted.all() else int(wanted.argmin())
    # A drafter's also has the block that holds the token at the boundary.
    return (first + count) * width - group.drafter


def _suits(group: Group, usable: Flags, computed_tokens: int, boundaries: Boundaries) -> Flags:
    """At which boundaries a group that needs some blocks only has them."""
    width = group.tokens_per_block
    last = -(-boundaries // width) - 1
    end = boundaries // width if group.drafter else last
    known = end < len(usable)
    if not known.any():
        return known
    end = np.minimum(end, len(usable) - 1)
    match group.kind:
        case GroupKind.SLIDING_WINDOW:
            tokens = np.maximum(boundaries - group.sliding_window_tokens + 1, computed_tokens)
            first = np.where(tokens < boundaries, tokens // width, last + 1)
        case GroupKind.RECURRENT_STATE:
            known &= boundaries % width == 0
            first = last
    if group.drafter:
        first = np.minimum(first, end)
    places = np.arange(len(usable), dtype=np.int64)
    last_gap = np.maximum.accumulate(np.where(usable, -1, places))
    return np.asarray(known & (last_gap[end] < first))
