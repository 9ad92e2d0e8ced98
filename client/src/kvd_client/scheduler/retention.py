"""Which blocks a later hit could use: the rest are not worth storing.

A hit ends at a boundary that suits every group. Of a sliding window it needs the blocks that the
window before the boundary touches, of a recurrent group the state at the boundary; what no
boundary needs is passed over. Full attention needs every block.

Boundaries may be thinned out: with `retention_tokens` only every so many tokens one is kept, and
those at a request's ends, where the same prompt or a conversation's next turn will look.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kvd_client.identity import Group
from kvd_client.scheduler.hits import used_blocks
from kvd_proto.groups import GroupKind


class Retention:
    """Which blocks of a window some later hit could use.

    ValueError where `retention_tokens` is no multiple of the distance between boundaries.
    """

    def __init__(
        self, groups: Sequence[Group], boundary_tokens: int, retention_tokens: int | None = None
    ) -> None:
        states = [g.tokens_per_block for g in groups if g.kind is GroupKind.RECURRENT_STATE]
        self._groups = groups
        self._step = math.lcm(boundary_tokens, *states)
        self._interval = self._step if retention_tokens is None else retention_tokens
        if self._interval < 0 or self._interval % self._step:
            raise ValueError(
                f"retention_tokens is {retention_tokens}, needed is a multiple of {self._step}"
            )
        self.is_thinned = retention_tokens is not None
        self._keeps_all = [self._needs_all(group) for group in groups]

    def _needs_all(self, group: Group) -> bool:
        width = group.tokens_per_block
        match group.kind:
            case GroupKind.FULL_ATTENTION:
                return True
            case GroupKind.SLIDING_WINDOW:
                # So many boundaries' windows would touch a block, were each token one.
                near = width + group.sliding_window_tokens - 2
                return 0 < self._interval <= near
            case GroupKind.RECURRENT_STATE:
                return self._interval == width

    def keeps_all(self, group: int) -> bool:
        """Whether every block of the group can be of use."""
        return self._keeps_all[group]

    def ends(self, *tokens: int) -> list[int]:
        """The last boundary at or before each of these."""
        return [count // self._step * self._step for count in tokens if count >= self._step]

    def holds(self, group: int, block: int, ends: Iterable[int]) -> bool:
        """Whether a hit at a kept boundary, or at one of `ends`, uses the block."""
        if self._keeps_all[group]:
            return True
        spec = self._groups[group]
        candidates = list(ends)
        if self._interval:
            # The last boundary that still uses the block, if any does.
            beyond = 0
            if spec.kind is GroupKind.SLIDING_WINDOW:
                beyond = spec.sliding_window_tokens - 2
            last = (block + 1) * spec.tokens_per_block + beyond
            candidates.append(last // self._interval * self._interval)
        return any(end > 0 and block in used_blocks(spec, 0, end) for end in candidates)

    def first_block(self, group: int, end: int) -> int:
        """The first block of the group that a hit at `end` uses."""
        return used_blocks(self._groups[group], 0, end).start
