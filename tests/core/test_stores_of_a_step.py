"""Small stores that begin in one event leave what each would leave by itself."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.core import actions as act
from kvd.core import events as ev
from kvd.core.jobs.together import BOARDS_TOLD
from kvd.core.keys import JobId, RequestId, ScopeId, SessionId
from tests.core.bench import Bench, context, engine_blocks, keys, only, small, spec


def stores(bench: Bench, asked: dict[str, Sequence[int]]) -> ev.StoresRequested:
    """For each of these requests, blocks that stand where their numbers say."""
    events = []
    for request, numbers in asked.items():
        run = ev.Run(0, keys(*numbers), engine_blocks(numbers), first_block=numbers[0])
        events.append(ev.StoreRequested(SessionId(1), bench._job(0), context("", request), (run,)))
    return ev.StoresRequested(SessionId(1), tuple(events))


def begun(made: Sequence[act.Action]) -> list[JobId]:
    """Jobs that began in the event."""
    (reply,) = only(made, act.Reply)
    assert isinstance(reply.payload, tuple)
    return [verdict.job for verdict in reply.payload if verdict is not None]


@pytest.mark.parametrize("is_joint", [True, False])
def test_slots_that_went_to_another_scope_are_no_longer_the_requests(*, is_joint: bool) -> None:
    """Else a request would release, at its end, what came there since."""
    bench = small(extents=1)
    bench.open()
    bench.finish(bench.feed(stores(bench, {"releases": range(4), "b": range(20, 24)})))
    bench.stored(range(200, 216), account="salt")  # takes every slot
    grown = stores(bench, {"releases": [4], "b": [24]})
    for event in [grown] if is_joint else grown.stores:
        bench.finish(bench.feed(event))
    bench.stored(range(100, 114))
    bench.feed(ev.RequestsEnded(SessionId(1), (RequestId("releases"),)))
    bench.now_ns += 1_000_000
    bench.stored(range(300, 302))
    assert bench.statuses(range(100, 114)) == "H" * 14


@pytest.mark.parametrize(("ranks", "together_now"), [(1, 32), (8, 32), (16, 16), (64, 4), (256, 0)])
def test_as_many_begin_as_boards_can_be_told_of_in_one_event(ranks: int, together_now: int) -> None:
    bench = small(extents=16)
    bench.open(namespace=spec(), ranks=ranks, attach=False)
    for rank in range(ranks):
        bench.attach(1, rank, shard=0, writer=rank == 0)
    made = bench.feed(stores(bench, {f"r{n}": [n] for n in range(32)}))
    assert len(begun(made)) == together_now
    posts = only(bench.finish(made), act.PostBoard)
    assert len(posts) == ranks * together_now <= BOARDS_TOLD


def test_tail_does_not_begin_before_a_head_that_begins_alone() -> None:
    """Else the head might find no room left, and the tail without it is of no use."""
    bench = small(extents=1)
    bench.open()
    bench.store([0])  # so that the head has to begin alone
    event = stores(bench, {"q": range(8), "r": [100], "s": [101]})
    run = ev.Run(0, keys(*range(8, 16)), engine_blocks(range(8, 16)), first_block=8)
    tail = ev.StoreRequested(SessionId(1), bench._job(0), context("", "q"), (run,))
    made = bench.feed(ev.StoresRequested(SessionId(1), (*event.stores, tail)))
    assert begun(made) == [event.stores[1].job, event.stores[2].job]


OFFERED = st.lists(
    st.tuples(
        st.sampled_from(["", "", "a", "b", "c"]),  # account
        st.integers(0, 1),  # group
        st.integers(0, 11),  # first key, and place in the prompt
        st.integers(1, 4),  # keys
    ),
    min_size=2,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(OFFERED, min_size=1, max_size=4))
def test_accounts_that_begin_together_leave_what_each_would_leave_alone(
    steps: list[list[tuple[str, int, int, int]]],
) -> None:
    joint, alone = (small(extents=12) for _ in range(2))  # room for all
    for bench in (joint, alone):
        bench.open(namespace=spec(groups=2))
    for number, step in enumerate(steps):
        events = [of_account(100 * number + n + 1, *offered) for n, offered in enumerate(step)]
        made = joint.feed(ev.StoresRequested(SessionId(1), tuple(events)))
        first = set(begun(made))
        assert len(first) != 1
        for event in events:
            if event.job not in first:
                joint.feed(event)
        joint.finish()
        for event in sorted(events, key=lambda each: each.job not in first):
            alone.feed(event)
        alone.finish()
        assert left_by(joint) == left_by(alone)


def of_account(job: int, account: str, group: int, first: int, count: int) -> ev.StoreRequested:
    """A store of keys that stand where their numbers say, from engine blocks of its own."""
    blocks = range(4 * job % 400, 4 * job % 400 + count)
    run = ev.Run(group, keys(*range(first, first + count)), engine_blocks(blocks), first)
    named = context(account, f"{account}-{job}")
    return ev.StoreRequested(SessionId(1), JobId(job), named, (run,))


def left_by(bench: Bench) -> object:
    """What anybody can find, whose scopes are whose, and what is counted."""
    state = bench.machine.state
    named = itertools.product(("", "a", "b", "c"), (0, 1))
    found = [bench.statuses(range(16), account=account, group=group) for account, group in named]
    blocks = Counter[tuple[str, int]]()
    for scope, count in state.scope_shares.blocks.items():
        known = state.scopes[ScopeId(scope)]
        blocks[known.account, known.group] += count
    open_ones = {(scope.account, scope.group) for scope in state.scopes.values()}
    tenants = [(t.tenant, t.used_bytes, t.tally.ready) for t in state.tenants.values()]
    return found, blocks, open_ones, tenants
