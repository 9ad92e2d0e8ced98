"""Which blocks a hit needs, and which are worth storing for one: checked block by block."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_client import Group, GroupKind
from kvd_client.scheduler.hits import boundaries_between, loaded_blocks, longest_hit
from kvd_client.scheduler.retention import Retention
from tests.client.engine_rig import namespace

LENGTH_TOKENS = 96  # a multiple of every width


@st.composite
def group_lists(draw: st.DrawFn) -> tuple[Group, ...]:
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        parts = draw(st.sampled_from([1, 2, 4]))
        kind = draw(st.sampled_from(GroupKind))
        recurrent = kind is GroupKind.RECURRENT_STATE
        groups.append(
            Group(
                tokens_per_block=draw(st.sampled_from([2, 4])) * (1 if recurrent else parts),
                shard_bytes=(64,),
                kind=kind,
                blocks_per_block=1 if recurrent else parts,
                sliding_window_tokens=draw(st.integers(1, 20)) * (kind is GroupKind.SLIDING_WINDOW),
                drafter=draw(st.booleans()),
            )
        )
    return tuple(groups)


def needed(group: Group, computed: int, hit: int) -> set[int] | None:
    """Blocks of the group that a hit of so many tokens needs, token by token; None: impossible."""
    width = group.tokens_per_block
    match group.kind:
        case GroupKind.FULL_ATTENTION:
            tokens = range(computed, hit)
        case GroupKind.SLIDING_WINDOW:
            tokens = range(max(hit - group.sliding_window_tokens + 1, computed), hit)
        case GroupKind.RECURRENT_STATE:
            if hit % width:
                return None
            tokens = range(hit - 1, hit)
    proof = {hit // width} if group.drafter else set()
    return {token // width for token in tokens} | proof


def suits(groups: tuple[Group, ...], usable: list[list[bool]], computed: int, hit: int) -> bool:
    for group, row in zip(groups, usable, strict=True):
        blocks = needed(group, computed, hit)
        if blocks is None or not all(block < len(row) and row[block] for block in blocks):
            return False
    return True


@given(groups=group_lists(), computed=st.integers(0, 40), more=st.integers(1, 40))
def test_a_load_brings_what_its_hit_needs_and_nothing_that_the_device_has(
    groups: tuple[Group, ...], computed: int, more: int
) -> None:
    step = namespace(*groups).boundary_tokens
    computed, hit = computed // step * step, (computed // step + more) * step
    for group in groups:
        proof = {hit // group.tokens_per_block} if group.drafter else set()
        wanted = needed(group, computed, hit)
        if wanted is not None:
            loaded = set(loaded_blocks(group, computed, hit))
            assert loaded - proof == wanted - proof


@given(groups=group_lists(), computed=st.integers(0, 40), source=st.randoms(use_true_random=False))
def test_groups_of_all_kinds_agree_on_the_longest_hit_that_suits_each(
    groups: tuple[Group, ...], computed: int, source: Random
) -> None:
    chance = source.random
    usable = [
        [chance() < 0.8 for _ in range(LENGTH_TOKENS // group.tokens_per_block)] for group in groups
    ]
    step = namespace(*groups).boundary_tokens
    computed = computed // step * step
    ends = [end for end in range(computed + 1, LENGTH_TOKENS) if end % step == 0]
    wanted = max((e for e in ends if suits(groups, usable, computed, e)), default=computed)
    boundaries = boundaries_between(computed, LENGTH_TOKENS - 1, step)
    flags = [np.array(row, dtype=np.bool_) for row in usable]
    assert longest_hit(groups, flags, computed, boundaries) == wanted


@given(groups=group_lists())
def test_the_mask_keeps_what_some_hit_needs_and_nothing_else(groups: tuple[Group, ...]) -> None:
    retention = Retention(groups, namespace(*groups).boundary_tokens)
    ends = [
        end
        for end in range(1, LENGTH_TOKENS * 2)
        if end % namespace(*groups).boundary_tokens == 0
        and all(needed(group, 0, end) is not None for group in groups)
    ]
    for number, group in enumerate(groups):
        used = {block for end in ends for block in needed(group, 0, end) or ()}
        for block in range(LENGTH_TOKENS // group.tokens_per_block):
            if block in used:
                assert retention.holds(number, block, ())
            elif not retention.keeps_all(number):
                assert not retention.holds(number, block, ())


@given(groups=group_lists(), times=st.integers(0, 3), tokens=st.integers(1, LENGTH_TOKENS))
def test_a_thinned_out_mask_keeps_what_hits_at_its_boundaries_need(
    groups: tuple[Group, ...], times: int, tokens: int
) -> None:
    full = Retention(groups, namespace(*groups).boundary_tokens)
    step = next(each for each in range(1, 1000) if full.ends(each))
    retention = Retention(groups, step, times * step)
    ends = retention.ends(tokens)
    kept = [end for end in range(1, LENGTH_TOKENS) if times and end % (times * step) == 0] + ends
    for number, group in enumerate(groups):
        for end in kept:
            for block in needed(group, 0, end) or ():
                assert retention.holds(number, block, ends)


def test_a_retention_between_boundaries_is_refused() -> None:
    group = Group(tokens_per_block=16, shard_bytes=(64,))
    with pytest.raises(ValueError, match="multiple of 16"):
        Retention([group], 16, 24)
