"""`kvd replay --tier`: what is found in host memory and below it, and what that moves."""

from __future__ import annotations

import dataclasses
import json
import resource
from pathlib import Path

import numpy as np
import pytest

from kvd.cli.replay import command as replay
from kvd.cli.replay.tiers import ModelStore, ReplayTiers, TierSpec
from kvd.cli.replay.trace import MAX_TIMESTAMP_MS, read_trace
from kvd.core import actions, events
from kvd.core.keys import CopyId, KeyBatch, NamespaceId, ScopeName, TierId
from kvd.core.policy import POLICY_NAMES
from tests.core.test_replay import command, conversations, request, write_trace

BLOCK = 4096
REQUESTS = conversations(seed=5, count=120)
DISTINCT = replay.distinct_blocks(REQUESTS)
LONGEST = max(r.blocks.size for r in REQUESTS)


def below(*specs: TierSpec) -> ReplayTiers:
    return ReplayTiers(specs, BLOCK)


def keys(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.uint64).reshape(-1, 1)


@pytest.mark.parametrize("write", ["through", "demotion"])
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_with_all_of_it_below_small_host_memory_finds_what_an_infinite_cache_finds(
    policy: str, write: str
) -> None:
    """By demotion, where no request needs more room than is written ahead of it."""
    host = LONGEST + 5 if write == "through" else 12 * LONGEST
    tiers = below(TierSpec(DISTINCT, write=write))
    alone = replay.replay(REQUESTS, policy, host)
    result = replay.replay(REQUESTS, policy, host, below=tiers)
    assert result.hit_ratio == result.infinite_ratio == result.reachable_ratio
    if write == "through":
        assert alone.hit_ratio < result.infinite_ratio
        assert result.tiers[0].blocks_written == DISTINCT
    assert result.tiers[0].blocks_evicted == 0


def test_levels_add_up_and_bytes_are_those_of_the_blocks() -> None:
    tiers = below(TierSpec(DISTINCT // 4, policy="arc"), TierSpec(DISTINCT, write="reuse"))
    result = replay.replay(REQUESTS, "lru", LONGEST, below=tiers)
    by_tier = [tier.hit_ratio for tier in result.tiers]
    assert result.hit_ratio == pytest.approx(result.host_ratio + sum(by_tier))
    assert all(by_tier)
    for tier in result.tiers:
        assert tier.bytes_written == tier.blocks_written * BLOCK
        assert tier.bytes_read == tier.blocks_read * BLOCK >= tier.blocks_found * BLOCK
    assert result.tiers[0].blocks_evicted > 0


def test_a_request_can_load_no_more_than_host_memory_holds() -> None:
    requests = [request(*range(20)), request(*range(100, 110)), request(*range(20), at_ms=9000)]
    result = replay.replay(requests, "lru", 12, below=below(TierSpec(100)))
    assert result.infinite_ratio == 20 / 50
    assert result.reachable_ratio == 12 / 50
    assert result.hit_ratio == 12 / 50


def test_what_can_be_read_before_the_deadline_is_found_and_no_more() -> None:
    """Ten blocks are read in a second; a second copy of one block begins when the first ends."""
    requests = [
        request(*range(8)),
        request(*range(20, 36), at_ms=60_000),
        request(*range(8), at_ms=120_000),
    ]
    slow = replay.replay(
        requests, "lru", 16, below=below(TierSpec(99, rate=10 * BLOCK, deadline_s=0.5))
    )
    enough = replay.replay(
        requests, "lru", 16, below=below(TierSpec(99, rate=10 * BLOCK, deadline_s=5.0))
    )
    assert slow.blocks_found < 8
    assert enough.blocks_found == 8


def test_a_replay_with_tiers_is_the_same_each_time() -> None:
    first, second = (
        replay.replay(REQUESTS, "s3fifo", LONGEST, below=below(TierSpec(DISTINCT // 3)))
        for _ in range(2)
    )
    assert first.tiers == second.tiers
    assert first.blocks_found == second.blocks_found


@pytest.mark.parametrize("rate", [None, 10 * BLOCK])
def test_a_silence_of_years_changes_nothing_and_takes_no_time(rate: int | None) -> None:
    """One of an hour, which every tick can be made of, and one that none can."""
    hour, years = 3_600_000, 3_600_000 * 24 * 365 * 20

    def after(silence_ms: int) -> replay.ReplayResult:
        """It comes before all of the trace, and amid it."""
        middle = len(REQUESTS) // 2
        later = [
            dataclasses.replace(r, timestamp_ms=r.timestamp_ms + (1 + (n >= middle)) * silence_ms)
            for n, r in enumerate(REQUESTS)
        ]
        tiers = below(TierSpec(DISTINCT // 2, write="demotion", rate=rate))
        return dataclasses.replace(replay.replay(later, "lru", LONGEST, below=tiers), seconds=0)

    assert after(years) == after(hour)


def test_what_finds_no_room_beside_slow_copies_is_not_stored() -> None:
    """The request's own blocks and those that are being written leave less than it offers."""
    requests = conversations(seed=16, count=40)
    distinct = replay.distinct_blocks(requests)
    slow = TierSpec(distinct, write="demotion", rate=BLOCK, deadline_s=100.0)
    capacity = max(r.blocks.size for r in requests)
    result = replay.replay(requests, "lru", capacity, below=below(slow, TierSpec(distinct)))
    assert result.blocks_without_room > 0
    assert result.requests == len(requests)


def test_a_trace_may_begin_at_the_last_time_there_is(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", [request(1, 2, at_ms=MAX_TIMESTAMP_MS)] * 2)
    result = replay.replay(read_trace(trace), "lru", 2, below=below(TierSpec(2)))
    assert result.blocks_found == 2


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_modelled_store_holds_exactly_its_capacity(policy: str) -> None:
    store = ModelStore(10, policy)
    assert store.write(keys(*range(10)), 0).all()
    assert store.holds(keys(*range(10))).all()
    assert store.write(keys(50), 1).all()
    assert store.holds(keys(*range(10), 50)).sum() == 10
    assert store.holds(keys(50)).all()
    assert store.evicted == 1
    assert store.write(keys(*range(100, 115)), 2).sum() == 10  # of one batch, what fits


def test_a_modelled_store_keeps_what_was_read_lately() -> None:
    store = ModelStore(4, "lru")
    for block in range(4):
        store.write(keys(block), block)
    assert store.read(keys(0, 9), 5).tolist() == [True, False]
    store.write(keys(4), 6)
    assert store.holds(keys(0, 1, 2, 3, 4)).tolist() == [True, False, True, True, True]


def test_the_command_shows_each_level_beside_the_infinite_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_trace(tmp_path / "trace.jsonl", REQUESTS))
    size = ("--trace", path, "--capacity-blocks", str(LONGEST), "--block-bytes", "2MiB")
    tiers = ("--tier", "fraction=1,write=demotion,rate=20GB,deadline=3", "--tier", "blocks=50")
    assert command(*size, *tiers) == 0
    lines = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "level",
        "host memory",
        "tier 1",
        "tier 2",
        "together",
        "infinite cache",
        "reachable of it",
    ]
    assert lines[2].split()[2:5] == [f"{DISTINCT:,}", "lru", "demotion"]
    assert command(*size, *tiers, "--json") == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["block_bytes"] == 2 << 20
    assert [tier["write"] for tier in fields["tiers"]] == ["demotion", "through"]


@pytest.mark.parametrize(
    ("tier", "said"),
    [
        ("", "''. Fix: NAME=VALUE"),
        ("size=4", "'size'. Fix: NAME=VALUE"),
        ("blocks=4,blocks=5", "'blocks'. Fix: NAME=VALUE"),
        ("write=through", "needs one of blocks and fraction"),
        ("blocks=4,fraction=1", "needs one of blocks and fraction"),
        ("blocks=0", "blocks must be a whole number from 1"),
        ("fraction=1.5", "fraction must be a number"),
        ("fraction=nan", "fraction must be a number"),
        ("blocks=4,policy=belady", "policy must be one of lru"),
        ("blocks=4,write=never", "write must be one of through"),
        ("blocks=4,reuse=1", "reuse must be a whole number from 2"),
        ("blocks=4,reuse=3", "reuse counts only with write=reuse"),
        ("blocks=4,rate=0", "rate must be 1 byte or more"),
        ("blocks=4,rate=50%", "rate must be a size"),
        ("blocks=4,deadline=0", "deadline must be a number"),
    ],
)
def test_a_wrong_tier_is_named_with_what_would_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tier: str, said: str
) -> None:
    path = str(write_trace(tmp_path / "trace.jsonl", REQUESTS[:3]))
    assert command("--trace", path, "--capacity-blocks", "5", "--tier", tier) == 2
    assert f"kvd replay: --tier {tier}: {said}" in capsys.readouterr().err


def test_belady_and_too_many_tiers_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write_trace(tmp_path / "trace.jsonl", REQUESTS[:3]))
    size = ("--trace", path, "--capacity-blocks", "5")
    assert command(*size, "--policy", "belady", "--tier", "blocks=5") == 2
    assert "belady is a bound for one cache" in capsys.readouterr().err
    assert command(*size, *["--tier", "blocks=5"] * 9) == 2
    assert "9 tiers; at most 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--tier", "blocks=0"], "blocks must be"),
        (["--tier", "blocks=5"] * 9, "9 tiers"),
        (["--tier", "blocks=5", "--policy", "belady"], "one cache"),
        (["--device-blocks", "5", "--policy", "belady"], "one cache"),
        (["--store", "lazy"], "needs --device-blocks"),
    ],
)
def test_what_is_wrong_whatever_the_trace_has_is_said_before_it_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], said: str
) -> None:
    size = ("--trace", str(tmp_path / "is-not-there"), "--capacity-blocks", "5")
    assert command(*size, *given) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("size", ["5000", "0", "2GiB", "50%", "many"])
def test_a_block_of_an_impossible_size_is_refused(
    size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--trace", "absent", "--capacity-blocks", "5", "--block-bytes", size) == 2
    assert "--block-bytes" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["2MiB", "1GiB"])
def test_a_pool_larger_than_any_daemon_has_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str
) -> None:
    path = write_trace(tmp_path / "trace", REQUESTS[:3])
    flags = ("--trace", str(path), "--block-bytes", size, "--capacity-blocks", "4194304")
    assert command(*flags) == 2
    assert "--block-bytes" in capsys.readouterr().err
    assert command(*flags, "--policy", "belady") == 0


def test_a_pool_that_there_is_no_memory_for_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path / "trace", REQUESTS[:3])
    flags = ("--trace", str(path), "--block-bytes", "1GiB", "--capacity-blocks", "8191")
    room = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, room[1]))
    try:
        assert command(*flags) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_AS, room)
    assert "too little memory" in capsys.readouterr().err


def test_what_had_to_leave_a_tier_is_told_to_the_core_before_what_it_has() -> None:
    tiers = below(TierSpec(4))
    (rule,) = tiers.terms(1 << 30)
    assert rule.name == "tier-1"
    name = ScopeName(NamespaceId(1), "", "", 0, 0)
    heard = []
    for copy, numbers in enumerate(((1, 2, 3), (4, 5, 6)), 1):
        slots = np.arange(3)
        batch = KeyBatch(keys(*numbers), 8)
        tiers.give(actions.WriteToTier(TierId(0), CopyId(copy), name, batch, slots), 0)
        heard.append(tiers.end_next())
    assert [type(word) for word in heard[0]] == [events.TierCopyEnded]
    forgot, ended = heard[1]
    assert isinstance(forgot, events.TierForgot)
    assert isinstance(ended, events.TierCopyEnded)
    gone = set(forgot.keys.words.ravel().tolist())
    assert len(gone) == 2
    assert gone < {1, 2, 3}
