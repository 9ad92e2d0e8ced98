"""A rank may say that its blocks lie in thousands of fragments; nobody else waits for that."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kvd.control.services.worker import MAX_FRAGMENTS_IN_ALL, check_rank, fragments_of
from kvd.core.errors import InvalidArgument
from kvd.core.keys import MoverId
from kvd.mover import frames
from kvd.mover.layout import (
    FRAGMENTS_AT_ONCE,
    MAX_FRAGMENTS,
    FragmentSpec,
    GroupMap,
    MoverConfig,
    Region,
    checks_of,
)
from kvd.processes.mappings import ExtentFiles
from kvd.runtime.turns import FairQueue, Pace
from kvd_proto.limits import MAX_GROUPS
from kvd_proto.v1 import worker_pb2

GROUPS = MAX_FRAGMENTS_IN_ALL // MAX_FRAGMENTS
BYTES = 8 * MAX_FRAGMENTS
PIECES = MAX_FRAGMENTS_IN_ALL // FRAGMENTS_AT_ONCE


def largest_request() -> worker_pb2.RegisterRankRequest:
    fragments = [
        worker_pb2.Fragment(memory=0, base=8 * n, stride=BYTES, bytes=8)
        for n in range(MAX_FRAGMENTS)
    ]
    groups = [
        worker_pb2.GroupLayout(group=number, num_blocks=1, fragments=fragments)
        for number in range(GROUPS)
    ]
    return worker_pb2.RegisterRankRequest(groups=groups)


def largest_config() -> MoverConfig:
    fragments = tuple(FragmentSpec(0, 8 * n, BYTES, 8) for n in range(MAX_FRAGMENTS))
    group = GroupMap(1, 1, BYTES, fragments)
    files = ExtentFiles(Path("extents"), 1, BYTES)
    return MoverConfig(MoverId(1), (Region(3, 0, BYTES),), (group,) * GROUPS, files)


async def test_others_have_turns_while_fragments_are_read() -> None:
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.ensure_future(turn())
    found = await fragments_of(largest_request(), Pace(FairQueue(), 1))
    other.cancel()
    assert turns >= PIECES
    assert tuple(found) == tuple(group.fragments for group in largest_config().groups)


LATER_FIELD = b"\xfa\x07\x01x"  # number 127, a string


@pytest.mark.parametrize("part", ["group", "fragment"])
async def test_a_layout_with_a_field_of_a_later_release_is_refused(part: str) -> None:
    """Its bytes may lie elsewhere than this daemon thinks."""
    request = largest_request()
    group = request.groups[-1]
    (group if part == "group" else group.fragments[-1]).MergeFromString(LATER_FIELD)
    with pytest.raises(InvalidArgument, match=r"groups\[3\] has fields .* of a later release"):
        await fragments_of(request, Pace(FairQueue(), 1))


def test_a_memory_with_a_field_of_a_later_release_is_refused() -> None:
    request = worker_pb2.RegisterRankRequest(world_size=1, groups=[worker_pb2.GroupLayout()])
    request.memories.add().MergeFromString(LATER_FIELD)
    with pytest.raises(InvalidArgument, match=r"memories\[0\] has fields .* of a later release"):
        check_rank(request)


def test_they_are_checked_in_pieces_and_to_the_last() -> None:
    config = largest_config()
    assert sum(1 for _ in checks_of(config)) == PIECES
    *whole, _ = config.groups[-1].fragments
    bad = replace(config.groups[-1], fragments=(*whole, FragmentSpec(1, 0, BYTES, 8)))
    with pytest.raises(InvalidArgument, match=r"groups\[3\].fragments\[4095\]"):
        list(checks_of(replace(config, groups=(*config.groups[:-1], bad))))


def test_many_small_groups_are_checked_in_pieces_too() -> None:
    few = tuple(FragmentSpec(0, 8 * n, BYTES, 8) for n in range(FRAGMENTS_AT_ONCE - 1))
    group = GroupMap(1, 1, 8 * len(few), few)
    config = replace(largest_config(), groups=(group,) * MAX_GROUPS)
    assert sum(1 for _ in checks_of(config)) == len(few) * MAX_GROUPS // FRAGMENTS_AT_ONCE


def test_a_mover_is_told_all_of_them() -> None:
    config = largest_config()
    packed = frames.pack_config(config, 4, 5, 6)
    assert frames.unpack_config(packed) == (config, (4, 5, 6))
