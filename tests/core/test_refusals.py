"""What is refused: with which words, which field and which reason, and that nothing changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvd.core import errors
from kvd.core import events as ev
from kvd.core.claims.hand_off import MAX_HAND_OFF_NS
from kvd.core.keys import JobId, KeyBatch, MoverId, NamespaceId, SessionId, TenantId
from kvd.core.model.state import MAX_ENGINE_BLOCKS, MAX_SESSION_ENGINE_BLOCKS, MAX_SESSIONS
from kvd.core.spec import MAX_PART_BYTES, GroupSpec, NamespaceSpec
from kvd_proto.groups import GroupKind
from tests.core.bench import BLOCK, Bench, context, engine_blocks, keys, small, spec

HERE = SessionId(1)
GROUPS = spec(shards=2, groups=2)
INVALID, LAYOUT, LIMIT = errors.InvalidArgument, errors.LayoutMismatch, errors.LimitExceeded
Refusal = tuple[type[errors.KvdError], str, str, str]


@pytest.fixture
def bench() -> Bench:
    """One session whose first rank is there, with 64 engine blocks in each group."""
    bench = small(extents=16)
    bench.open(1, GROUPS, ranks=2, attach=False)
    bench.attach(1, 0, blocks=(64, 64))
    return bench


def refused(bench: Bench, event: ev.Event) -> Refusal:
    before = bench.machine.statistics()
    with pytest.raises(errors.KvdError) as caught:
        bench.feed(event)
    assert bench.machine.statistics() == before, "a refusal changed something"
    error = caught.value
    return type(error), str(error), error.field, error.reason


def opened(
    session: int = 2, named: NamespaceSpec = GROUPS, *, epoch: str = "", ranks: int = 2
) -> ev.Event:
    return ev.SessionOpened(SessionId(session), named, epoch, ranks)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (opened(1), (INVALID, "session 1 is open", "session_id", "INVALID_ARGUMENT")),
        *(
            (
                opened(ranks=ranks),
                (INVALID, f"world_size is {ranks}, must be 1..256", "world_size", "RANK_COUNT"),
            )
            for ranks in (0, 257)
        ),
        (
            opened(epoch="e" * 257),
            (INVALID, "epoch is longer than 256 bytes", "epoch", "STRING_TOO_LONG"),
        ),
        (
            opened(named=spec(shards=2)),
            (
                LAYOUT,
                "another engine opened this fingerprint with other groups",
                "groups",
                "LAYOUT_MISMATCH",
            ),
        ),
        (
            opened(named=spec("large", groups=1, block_bytes=2**20)),
            (
                INVALID,
                (
                    "a block's part of 1048576 bytes is larger than an extent of 65536 bytes:"
                    " raise extent_bytes, to 1MiB or more"
                ),
                "groups[0]",
                "INVALID_ARGUMENT",
            ),
        ),
    ],
)
def test_a_session_is_refused_in_words(bench: Bench, event: ev.Event, expected: Refusal) -> None:
    assert refused(bench, event) == expected


def test_names_and_ranks_at_their_bounds_are_taken() -> None:
    bench = small()
    bench.open(1, spec(), epoch="e" * 256)
    bench.open(2, spec(), ranks=256, attach=False)


def test_one_session_too_many_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.core.upkeep.session.MAX_SESSIONS", 2)
    bench = small()
    bench.open(1)
    bench.open(2)
    words = "2 sessions are open"
    assert refused(bench, opened(3, spec())) == (LIMIT, words, "session_id", "LIMIT_EXCEEDED")
    assert MAX_SESSIONS > 2


def attached(
    rank: int = 1,
    shard: int = 1,
    *,
    mover: int = 7,
    session: int = 1,
    blocks: tuple[int, ...] = (),
) -> ev.Event:
    return ev.RankAttached(
        SessionId(session), MoverId(mover), rank, shard, True, engine_blocks=blocks
    )


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (
            attached(session=9),
            (errors.UnknownSession, "no session 9", "session_id", "UNKNOWN_SESSION"),
        ),
        (
            attached(mover=100),
            (INVALID, "mover 100 is attached", "registration_id", "INVALID_ARGUMENT"),
        ),
        (attached(rank=2), (INVALID, "rank 2 of 2", "rank", "RANK_COUNT")),
        (attached(rank=-1), (INVALID, "rank -1 of 2", "rank", "RANK_COUNT")),
        (attached(rank=0), (INVALID, "rank 0 is registered", "rank", "INVALID_ARGUMENT")),
        (attached(shard=2), (LAYOUT, "shard 2 of 2", "shard", "LAYOUT_MISMATCH")),
        (attached(shard=-1), (LAYOUT, "shard -1 of 2", "shard", "LAYOUT_MISMATCH")),
        (
            attached(shard=0),
            (LAYOUT, "shard 0 has another writer", "writer", "LAYOUT_MISMATCH"),
        ),
        (
            attached(blocks=(1, MAX_ENGINE_BLOCKS + 1)),
            (
                LIMIT,
                "group 1 has 4194305 engine blocks, at most 4194304",
                "groups[1].num_blocks",
                "LIMIT_EXCEEDED",
            ),
        ),
    ],
)
def test_a_rank_is_refused_in_words(bench: Bench, event: ev.Event, expected: Refusal) -> None:
    assert refused(bench, event) == expected
    bench.attach(1, 1)  # and nothing of it is kept


def test_engine_blocks_beyond_an_engine_s_and_a_tenant_s_bound_are_refused_in_words() -> None:
    bench = small(extents=32)
    five = spec("five", groups=5)
    most = (MAX_ENGINE_BLOCKS,) * 4
    for session in (1, 2, 3):
        bench.open(session, five, attach=False)
    assert refused(bench, attached(0, 0, blocks=(*most, 1))) == (
        LIMIT,
        (
            f"{MAX_SESSION_ENGINE_BLOCKS + 1} engine blocks in all groups of an engine,"
            f" at most {MAX_SESSION_ENGINE_BLOCKS}"
        ),
        "groups.num_blocks",
        "LIMIT_EXCEEDED",
    )
    bench.attach(1, blocks=most)
    bench.attach(2, blocks=most)
    assert refused(bench, attached(0, 0, session=3, blocks=(1,))) == (
        LIMIT,
        "33554433 engine blocks in all groups of all engines of tenant 'tenant', at most 33554432",
        "groups.num_blocks",
        "LIMIT_EXCEEDED",
    )


def run(
    numbers: Sequence[int] = (1,), *, group: int = 0, blocks: Sequence[int] | None = None
) -> ev.Run:
    return ev.Run(group, keys(*numbers), engine_blocks(numbers if blocks is None else blocks))


NULL_KEYS = KeyBatch(np.zeros((8193, 4), np.uint64), 32)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (run(group=2), ("group 2 of 2", "group", "GROUP_COUNT")),
        (run(group=-1), ("group -1 of 2", "group", "GROUP_COUNT")),
        (
            ev.Run(0, keys(1, hash_bytes=16), engine_blocks([1])),
            ("hashes of 16 bytes in a namespace of 32", "hashes", "HASH_BYTES"),
        ),
        (
            ev.Run(0, NULL_KEYS, engine_blocks([0] * 8193)),
            ("8193 keys in one message, at most 8192: send several", "hashes", "TOO_MANY_KEYS"),
        ),
        (
            run([1, 2], blocks=[1]),
            ("engine blocks of shape (1, 1), must be (2, 1)", "engine_blocks", "INVALID_ARGUMENT"),
        ),
        (
            run([1, 2], group=1, blocks=[63, 64]),
            (
                (
                    "engine block 64 of group 1, which has 64 as its ranks registered it:"
                    " ids are below that"
                ),
                "engine_blocks",
                "INVALID_ARGUMENT",
            ),
        ),
    ],
)
def test_a_run_is_refused_in_words_by_stores_and_loads(
    bench: Bench, wanted: ev.Run, expected: tuple[str, str, str]
) -> None:
    for kind in (ev.StoreRequested, ev.LoadRequested):
        event = kind(HERE, JobId(1), context(), (wanted,))
        assert refused(bench, event) == (INVALID, *expected)


def test_a_job_is_refused_in_words(bench: Bench) -> None:
    bench.attach(1, 1, blocks=(64, 64))
    for kind in (ev.StoreRequested, ev.LoadRequested):
        assert refused(bench, kind(HERE, JobId(0), context(), (run(),))) == (
            (INVALID, "job ids start at 1", "job_id", "INVALID_ARGUMENT")
        )
    assert refused(bench, ev.StoreRequested(HERE, JobId(1), context("a" * 257), (run(),))) == (
        (INVALID, "account is longer than 256 bytes", "account", "STRING_TOO_LONG")
    )
    bench.store([1], job=1)
    for kind in (ev.StoreRequested, ev.LoadRequested):
        assert refused(bench, kind(HERE, JobId(1), context(), (run([2]),))) == (
            (errors.DuplicateJob, "job 1 is in flight", "job_id", "DUPLICATE_JOB")
        )


def test_one_job_too_many_is_refused_in_words(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.core.jobs.store.MAX_JOBS_IN_FLIGHT", 2)
    bench.attach(1, 1, blocks=(64, 64))
    for number in (1, 2):
        bench.store([number])
    for kind in (ev.StoreRequested, ev.LoadRequested):
        assert refused(bench, kind(HERE, JobId(9), context(), (run([9]),))) == (
            (LIMIT, "2 jobs are in flight: wait for the end of some", "job_id", "LIMIT_EXCEEDED")
        )


def test_a_load_of_more_than_a_state_is_refused_in_words() -> None:
    bench = small()
    recurrent = GroupSpec(GroupKind.RECURRENT_STATE, 2, (BLOCK // 2,))
    bench.open(1, replace(spec("recurrent"), groups=(recurrent,)))
    both = ev.Run(0, keys(1), np.array([[0, 1]], np.uint32))
    assert refused(bench, ev.LoadRequested(HERE, JobId(1), context(), (both,))) == (
        INVALID,
        (
            "a recurrent group's blocks keep their last state: all but the last engine block of"
            " a row must be null (0xFFFFFFFF) in a load"
        ),
        "engine_blocks",
        "INVALID_ARGUMENT",
    )


@pytest.mark.parametrize("lasting_ns", [0, MAX_HAND_OFF_NS + 1])
def test_a_hand_off_is_refused_in_words(bench: Bench, lasting_ns: int) -> None:
    event = ev.HandOffRequested(HERE, context(), 0, keys(1), lasting_ns)
    words = f"a hand-off of {lasting_ns} ns, must be 1..{MAX_HAND_OFF_NS}"
    assert refused(bench, event) == (INVALID, words, "deadline_ms", "INVALID_ARGUMENT")


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (
            ev.QuotaSet(1, TenantId("tenant"), -1),
            (INVALID, "a quota can't be negative", "quota_bytes", "INVALID_ARGUMENT"),
        ),
        (
            ev.NamespaceCleared(1, NamespaceId(9)),
            (errors.UnknownNamespace, "no namespace 9", "namespace_id", "UNKNOWN_NAMESPACE"),
        ),
        (
            ev.RankEnding(MoverId(5), "it is told to"),
            (
                errors.UnknownRegistration,
                "no mover 5",
                "registration_id",
                "UNKNOWN_REGISTRATION",
            ),
        ),
        (
            ev.EpochChanged(HERE, "e" * 257),
            (INVALID, "epoch is longer than 256 bytes", "epoch", "STRING_TOO_LONG"),
        ),
    ],
)
def test_an_operator_or_engine_is_refused_in_words(
    bench: Bench, event: ev.Event, expected: Refusal
) -> None:
    assert refused(bench, event) == expected


# -- a namespace's figures ----------------------------------------------------------------------

GOOD = spec(shards=2).groups[0]


def made_of(*groups: GroupSpec, hash_bytes: int = 32) -> NamespaceSpec:
    return replace(spec(), groups=groups, hash_bytes=hash_bytes)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        *(
            (
                made_of(GOOD, hash_bytes=count),
                (f"hash_bytes is {count}, not 1..64", "namespace.hash_bytes", "HASH_BYTES"),
            )
            for count in (0, 65)
        ),
        (made_of(), ("0 groups, not 1..64", "namespace.groups", "GROUP_COUNT")),
        (made_of(*[GOOD] * 65), ("65 groups, not 1..64", "namespace.groups", "GROUP_COUNT")),
        *(
            (
                made_of(GOOD, replace(GOOD, blocks_per_block=count)),
                (
                    f"namespace.groups[1].blocks_per_block is {count}, not 1..64",
                    "namespace.groups[1].blocks_per_block",
                    "BLOCKS_PER_BLOCK",
                ),
            )
            for count in (0, 65)
        ),
        *(
            (
                made_of(GOOD, replace(GOOD, shard_bytes=(8,) * count)),
                (
                    f"namespace.groups[1] has {count} shards, not 1..256",
                    "namespace.groups[1].shard_bytes",
                    "RANK_COUNT",
                ),
            )
            for count in (0, 257)
        ),
        *(
            (
                made_of(replace(GOOD, blocks_per_block=2, shard_bytes=(8, count))),
                (
                    (
                        f"namespace.groups[0].shard_bytes[1] is {count}: not a positive multiple"
                        f" of 8 of at most {MAX_PART_BYTES // 2}"
                    ),
                    "namespace.groups[0].shard_bytes",
                    "INVALID_ARGUMENT",
                ),
            )
            for count in (0, 12, MAX_PART_BYTES // 2 + 8)
        ),
        (
            made_of(GOOD, replace(GOOD, shard_bytes=(8,))),
            (
                "group 1 has 1 shards, group 0 has 2: a rank holds one shard of every group",
                "namespace.groups[1].shard_bytes",
                "RANK_COUNT",
            ),
        ),
    ],
)
def test_impossible_figures_are_refused_in_words(
    named: NamespaceSpec, expected: tuple[str, str, str]
) -> None:
    with pytest.raises(INVALID) as caught:
        named.check()
    assert (str(caught.value), caught.value.field, caught.value.reason) == expected


@pytest.mark.parametrize(
    "named",
    [
        *(made_of(GOOD, hash_bytes=count) for count in (1, 64)),
        made_of(*[GOOD] * 64),
        made_of(replace(GOOD, blocks_per_block=64)),
        *(made_of(replace(GOOD, shard_bytes=(8,) * count)) for count in (1, 256)),
        made_of(replace(GOOD, blocks_per_block=2, shard_bytes=(MAX_PART_BYTES // 2,))),
    ],
)
def test_figures_at_their_bounds_are_taken(named: NamespaceSpec) -> None:
    named.check()


def test_a_block_is_as_large_as_its_parts() -> None:
    group = GroupSpec(GroupKind.FULL_ATTENTION, 3, (8, 16))
    assert group.part_bytes == (24, 48)
    assert group.block_bytes == 72
