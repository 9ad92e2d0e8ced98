"""Blocks of which the engine holds only a part: no null engine block ever lies under a key."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.errors import InvalidArgument
from kvd.core.keys import JobId, SessionId
from kvd_proto.groups import GroupKind
from kvd_proto.layout import NULL_ENGINE_BLOCK as NULL
from tests.core.bench import Bench, context, keys, only, small, spec

WIDTH = 3
ROWS = {1: (0, 1, 2), 2: (NULL, 3, 4), 3: (5, NULL, 6), 4: (7, 8, NULL), 5: (NULL, NULL, 9)}


def opened(kind: GroupKind) -> Bench:
    bench = small()
    namespace = spec(blocks_per_block=WIDTH, block_bytes=WIDTH * 4096)
    bench.open(namespace=replace(namespace, groups=(replace(namespace.groups[0], kind=kind),)))
    return bench


def run_of(*numbers: int) -> ev.Run:
    rows = np.array([ROWS[number] for number in numbers], dtype=np.uint32)
    return ev.Run(0, keys(*numbers), rows)


def store_all(bench: Bench, *, request_level: bool = False) -> str:
    """What a store of all rows leaves to be found."""
    runs = (run_of(*ROWS),)
    stored = ev.StoreRequested(
        SessionId(1), JobId(50), context(), runs, request_level=request_level
    )
    bench.finish(bench.feed(stored))
    return bench.statuses(list(ROWS))


@pytest.mark.parametrize("kind", [GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW])
@pytest.mark.parametrize("request_level", [False, True])
def test_a_block_with_any_null_is_not_stored(kind: GroupKind, request_level: bool) -> None:
    assert store_all(opened(kind), request_level=request_level) == "HMMMM"


def test_of_a_recurrent_block_only_the_last_state_must_be_there() -> None:
    assert store_all(opened(GroupKind.RECURRENT_STATE)) == "HHHMH"


def test_a_load_that_wants_more_of_a_recurrent_block_is_refused() -> None:
    bench = opened(GroupKind.RECURRENT_STATE)
    store_all(bench)
    with pytest.raises(InvalidArgument, match="last state"):
        bench.feed(ev.LoadRequested(SessionId(1), JobId(51), context(), (run_of(1),)))
    last = ev.LoadRequested(SessionId(1), JobId(52), context(), (run_of(5),))
    assert only(bench.feed(last), act.StartTransfer)
