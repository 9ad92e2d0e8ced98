"""A large call cut into pieces means the same as the whole."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvd.core.actions import Answer
from kvd.core.events import LeaseMode, Query, RequestContext, Run, StoreRequested
from kvd.core.keys import JobId, KeyBatch, LeaseId, RequestId, SessionId
from kvd.runtime.batching import (
    GROUPS_TOGETHER,
    LOOKUP_PIECE_KEYS,
    PIECE_KEYS,
    PIECE_QUERIES,
    RUNS_TOGETHER,
    SMALL_STORE_KEYS,
    STORES_TOGETHER,
    PiecewiseAnswers,
    answer_in_pieces,
    query_pieces,
    run_pieces,
    stores_together,
)

HIT, MISS = b"\x01", b"\x00"


def query(count: int, mode: LeaseMode = LeaseMode.PREFIX) -> Query:
    words = np.arange(count * 4, dtype=np.uint64).reshape(count, 4)
    return Query(RequestContext(RequestId("r")), 0, KeyBatch(words, 32), mode)


@given(st.lists(st.integers(0, 3 * LOOKUP_PIECE_KEYS), min_size=1, max_size=6))
def test_pieces_hold_every_key_once_in_order(counts: list[int]) -> None:
    queries = [query(count) for count in counts]
    pieces = list(query_pieces(queries))
    assert all(sum(len(p.query.keys) for p in piece) <= LOOKUP_PIECE_KEYS for piece in pieces)
    for number, whole in enumerate(queries):
        parts = [p.query.keys.words for piece in pieces for p in piece if p.number == number]
        assert parts, "an empty query still has an answer"
        assert np.array_equal(np.concatenate(parts), whole.keys.words)


@given(st.lists(st.integers(0, 3 * LOOKUP_PIECE_KEYS), min_size=2, max_size=6))
def test_each_piece_has_as_large_a_part_of_each_group(counts: list[int]) -> None:
    pieces = list(query_pieces([query(count) for count in counts]))
    come = [0] * len(counts)
    for done, piece in enumerate(pieces, 1):
        for each in piece:
            come[each.number] += len(each.query.keys)
        assert come == [count * done // len(pieces) for count in counts]


@given(st.lists(st.integers(1, PIECE_QUERIES), min_size=1, max_size=9))
def test_the_groups_of_a_request_that_fits_are_in_one_piece(groups: list[int]) -> None:
    """However many requests are asked for in one call."""
    queries = [
        replace(query(3), context=RequestContext(RequestId(str(number))))
        for number, count in enumerate(groups)
        for _ in range(count)
    ]
    where: dict[RequestId, set[int]] = {}
    for number, piece in enumerate(query_pieces(queries)):
        assert len(piece) <= PIECE_QUERIES
        for each in piece:
            where.setdefault(each.query.context.request, set()).add(number)
    assert [len(pieces) for pieces in where.values()] == [1] * len(groups)


@given(st.lists(st.integers(0, 3 * PIECE_KEYS), min_size=1, max_size=4))
def test_runs_keep_their_keys_blocks_and_places(counts: list[int]) -> None:
    runs = [
        Run(g, query(n).keys, np.arange(n, dtype=np.uint32).reshape(n, 1), first_block=7)
        for g, n in enumerate(counts)
    ]
    cut = [run for piece in run_pieces(runs) for run in piece]
    for whole in runs:
        parts = [run for run in cut if run.group == whole.group]
        at = 0
        for part in parts:
            assert part.first_block == whole.first_block + at
            assert np.array_equal(part.keys.words, whole.keys.words[at : at + len(part.keys)])
            assert part.engine_blocks[:, 0].tolist() == list(range(at, at + len(part.keys)))
            at += len(part.keys)
        assert at == len(whole.keys)


def store(number: int, keys: int = 1, runs: int = 1, account: str = "") -> StoreRequested:
    cut = np.array_split(np.arange(keys), runs)
    offered = tuple(Run(0, query(len(c)).keys, c.astype(np.uint32)[:, None]) for c in cut)
    context = RequestContext(RequestId("r"), account)
    return StoreRequested(SessionId(1), JobId(number), context, offered, ready_together=1)


@given(
    st.lists(
        st.builds(
            store,
            st.just(1),
            st.sampled_from([0, 1, 1, 1, SMALL_STORE_KEYS, SMALL_STORE_KEYS + 1]),
            st.sampled_from([1, 1, 1, 2, 30, 70]),
            st.sampled_from(["", "", "", "salt"]),
        ),
        max_size=150,
    ),
    st.sets(st.integers(0, 149)),
    st.dictionaries(st.integers(0, 149), st.sampled_from([0, 2])),
)
def test_only_small_stores_begin_together(
    stores: list[StoreRequested], waiting: set[int], ready: dict[int, int]
) -> None:
    stores = [
        replace(each, request_level=n in waiting, ready_together=ready.get(n, 1))
        for n, each in enumerate(stores)
    ]
    cut = list(stores_together(stores))
    assert [each for few in cut for each in few] == stores
    for few in cut:
        if len(few) == 1:
            continue
        assert len(few) <= STORES_TOGETHER
        assert sum(len(each.runs) for each in few) <= RUNS_TOGETHER
        assert {each.ready_together for each in few} == {few[0].ready_together}
        assert few[0].ready_together > 0
        assert not any(each.request_level for each in few)
        assert all(sum(len(r.keys) for r in each.runs) <= SMALL_STORE_KEYS for each in few)


def test_as_many_as_may_begin_together() -> None:
    many = [store(n) for n in range(2 * STORES_TOGETHER + 1)]
    assert [len(few) for few in stores_together(many)] == [STORES_TOGETHER, STORES_TOGETHER, 1]
    large = store(0, SMALL_STORE_KEYS + 1)
    assert [len(few) for few in stores_together([*many[:3], large, *many[:2]])] == [3, 1, 2]


def of_groups(*groups: int) -> StoreRequested:
    """A store of a block of each of these groups."""
    made = store(0, len(groups), len(groups))
    runs = zip(made.runs, groups, strict=True)
    return replace(made, runs=tuple(replace(run, group=group) for run, group in runs))


def test_of_many_groups_some_begin_together() -> None:
    all_of_them = range(GROUPS_TOGETHER)
    alike = [of_groups(*all_of_them)] * 3
    assert [len(few) for few in stores_together(alike)] == [3]
    each_its_own = [of_groups(group) for group in range(2 * GROUPS_TOGETHER + 1)]
    cut = [len(few) for few in stores_together(each_its_own)]
    assert cut == [GROUPS_TOGETHER, GROUPS_TOGETHER, 1]
    too_many = of_groups(*all_of_them, GROUPS_TOGETHER)
    cut = [len(few) for few in stores_together([too_many, too_many, *alike])]
    assert cut == [1, 1, 3]


def test_a_prefix_lease_goes_on_through_pieces_and_stops_at_the_first_miss() -> None:
    (first, second, third) = query_pieces([query(3 * LOOKUP_PIECE_KEYS)])
    answers = PiecewiseAnswers(1)
    assert answers.continue_in(first)[0].query.extends is None
    answers.take(first, [Answer(HIT * LOOKUP_PIECE_KEYS, LeaseId(5))])
    again = answers.continue_in(second)[0].query
    assert (again.lease, again.extends) == (LeaseMode.PREFIX, 5)
    answers.take(second, [Answer(HIT + MISS * (LOOKUP_PIECE_KEYS - 1), LeaseId(5))])
    assert answers.continue_in(third)[0].query.lease is LeaseMode.NONE
    answers.take(third, [Answer(HIT * LOOKUP_PIECE_KEYS, None)])
    (whole,) = answers.whole()
    assert len(whole.statuses) == 3 * LOOKUP_PIECE_KEYS
    assert whole.lease == 5
    assert whole.sources == b""


def test_sources_of_one_piece_stand_at_their_keys_places() -> None:
    (first, second) = query_pieces([query(2 * LOOKUP_PIECE_KEYS)])
    answers = PiecewiseAnswers(1)
    answers.take(first, [Answer(HIT * LOOKUP_PIECE_KEYS, None)])
    answers.take(second, [Answer(HIT * LOOKUP_PIECE_KEYS, None, b"\x02" * LOOKUP_PIECE_KEYS)])
    (whole,) = answers.whole()
    assert whole.sources == bytes(LOOKUP_PIECE_KEYS) + b"\x02" * LOOKUP_PIECE_KEYS


@given(st.lists(st.integers(0, 2 * LOOKUP_PIECE_KEYS), min_size=1, max_size=4))
def test_a_call_that_fits_into_a_piece_is_asked_in_one_go(counts: list[int]) -> None:
    asked: list[int] = []

    def ask(queries: tuple[Query, ...]) -> tuple[Answer, ...]:
        asked.append(sum(len(query.keys) for query in queries))
        return tuple(Answer(HIT * len(query.keys), None) for query in queries)

    async def let_others_in() -> None:
        pass

    queries = [query(count) for count in counts]
    answers = asyncio.run(answer_in_pieces(queries, ask, let_others_in))
    assert [len(answer.statuses) for answer in answers] == counts
    assert max(asked) <= LOOKUP_PIECE_KEYS
    assert len(asked) <= max(1, -(-sum(counts) // (LOOKUP_PIECE_KEYS - len(counts))))
