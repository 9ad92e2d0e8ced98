"""`kvd replay`: what it reads, what it prints, and that it finds what a plain cache would."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvd.__main__ import main
from kvd.cli.replay import belady
from kvd.cli.replay import command as replay
from kvd.cli.replay.compute import EVEN_AT_TOKENS, compute_ratio
from kvd.cli.replay.device import StoreRule
from kvd.cli.replay.engine import ReplayEngine
from kvd.cli.replay.trace import MAX_BLOCKS, MAX_TIMESTAMP_MS, TraceError, TraceRequest, read_trace
from kvd.core.policy import POLICY_NAMES


def request(*blocks: int, at_ms: int = 0) -> TraceRequest:
    return TraceRequest(at_ms, 512 * len(blocks), 1, np.array(blocks, np.int64))


def conversations(seed: int, count: int = 80) -> list[TraceRequest]:
    """Conversations over a common head that grow turn by turn, interleaved at random."""
    rng = np.random.default_rng(seed)
    histories: list[list[int]] = [[0, 1, 2] for _ in range(12)]
    fresh = itertools.count(3)
    requests = []
    for number in range(count):
        history = histories[int(rng.integers(len(histories)))]
        history += itertools.islice(fresh, int(rng.integers(1, 6)))
        requests.append(request(*history, at_ms=1000 * number))
        if rng.random() < 0.05:
            del history[3:]
    return requests


def line(**changes: object) -> str:
    fields = {"timestamp": 5, "input_length": 900, "output_length": 7, "hash_ids": [1, 2]}
    return json.dumps({k: v for k, v in (fields | changes).items() if v is not None})


def write_trace(path: Path, requests: Sequence[TraceRequest]) -> Path:
    lines = [line(timestamp=r.timestamp_ms, hash_ids=r.blocks.tolist()) for r in requests]
    path.write_text("\n".join(lines) + "\n")
    return path


def plain_lru(requests: Sequence[TraceRequest], capacity: int) -> int:
    """Leading blocks found by an ordered dictionary that keeps the replay's rules."""
    cache: OrderedDict[int, None] = OrderedDict()
    found = 0
    for blocks in (r.blocks.tolist() for r in requests):
        head = list(itertools.takewhile(cache.__contains__, blocks))
        behind = [block for block in blocks[len(head) :] if block in cache]
        missing = [block for block in blocks if block not in cache][: capacity - len(head)]
        found += len(head)
        for block in [*reversed(head), *reversed(behind)]:
            cache.move_to_end(block)
        spare = capacity - len(cache)
        for victim in [b for b in cache if b not in head][: max(0, len(missing) - spare)]:
            del cache[victim]
        cache.update(dict.fromkeys(reversed(missing)))
        for block in reversed(head):
            cache.move_to_end(block)
    return found


@pytest.mark.parametrize("capacity", [1, 7, 40, 1000])
def test_lru_finds_exactly_what_an_ordered_dictionary_finds(capacity: int) -> None:
    requests = conversations(seed=3)
    assert replay.replay(requests, "lru", capacity).blocks_found == plain_lru(requests, capacity)


@pytest.mark.parametrize("capacity", [7, 40, 1000])
def test_what_goes_in_several_messages_is_found_as_in_one(
    capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = conversations(seed=3)
    monkeypatch.setattr("kvd.cli.replay.engine.MAX_KEYS_PER_MESSAGE", 3)
    assert replay.replay(requests, "lru", capacity).blocks_found == plain_lru(requests, capacity)


@pytest.mark.parametrize("more", [(), ("--device-blocks", str(MAX_BLOCKS), "--store", "lazy")])
def test_the_longest_request_that_a_trace_may_have_is_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    blocks = [request(*range(start, start + MAX_BLOCKS)) for start in (0, MAX_BLOCKS)]
    path = write_trace(tmp_path / "trace.jsonl", [*blocks, *blocks])
    flags = ["--capacity-blocks", "9000", "--tier", "fraction=1", *more]
    assert main(["replay", "--trace", str(path), "--json", *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["blocks_offered"] == 4 * MAX_BLOCKS
    assert 0 < result["blocks_found"] <= 2 * MAX_BLOCKS


@pytest.mark.parametrize("policy", [*POLICY_NAMES, replay.BELADY])
def test_everything_seen_before_is_found_when_all_fits(policy: str) -> None:
    requests = conversations(seed=1)
    result = replay.replay(requests, policy, replay.distinct_blocks(requests))
    assert result.blocks_found == result.blocks_offered - result.blocks_distinct
    assert result.blocks_evicted == result.blocks_without_room == 0


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("seed", range(2))
def test_no_policy_finds_more_than_belady(policy: str, seed: int) -> None:
    requests = conversations(seed)
    for capacity in (1, 10, 60):
        bound = replay.replay(requests, replay.BELADY, capacity).blocks_found
        assert replay.replay(requests, policy, capacity).blocks_found <= bound


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_capacity_is_exact(policy: str) -> None:
    """A request of n blocks comes back whole from n places, and short by one from n - 1."""
    requests = [request(*range(20)), request(*range(20), at_ms=1)]
    assert replay.replay(requests, policy, 20).blocks_found == 20
    short = replay.replay(requests, policy, 19)
    assert short.blocks_found == 19
    assert short.blocks_without_room == 2


def test_hit_ratio_counts_leading_blocks_over_blocks_offered() -> None:
    requests = [request(1, 2, 3, 4), request(1, 2, 8, 9), request(5, 2, 3)]
    result = replay.replay(requests, "lru", 100)
    assert result.hit_ratio == 2 / 11
    assert (result.requests, result.blocks_offered, result.blocks_distinct) == (3, 11, 7)


def test_block_far_back_in_a_prompt_counts_for_more_compute() -> None:
    """Tokens at position p cost 1 + p / E: half of E costs 0.5 + 0.125, all of it 1 + 0.5."""
    block = 512
    whole = int(EVEN_AT_TOKENS) // block
    request = TraceRequest(0, block * whole, 1, np.arange(whole))
    assert compute_ratio([request], [whole]) == 1
    assert compute_ratio([request], [whole // 2]) == pytest.approx(0.625 / 1.5)
    assert compute_ratio([request, request], [0, whole]) == pytest.approx(0.5)
    assert compute_ratio([], []) == 0
    nothing = TraceRequest(0, 0, 1, np.arange(0))
    assert compute_ratio([nothing], [0]) == 0


def test_replay_tells_the_compute_that_was_saved() -> None:
    prompt = TraceRequest(0, 512 * 64, 1, np.arange(64))
    longer = TraceRequest(1, 512 * 128, 1, np.arange(128))
    result = replay.replay([prompt, longer], "lru", 200)
    assert result.hit_ratio == pytest.approx(64 / 192)
    assert result.compute_ratio == pytest.approx(1.5 / (1.5 + 4))


def test_request_without_blocks_is_served() -> None:
    result = replay.replay([request(), request(1)], "lru", 10)
    assert (result.hit_ratio, result.blocks_stored) == (0.0, 1)


def test_store_threshold_keeps_what_is_seen_once_out() -> None:
    requests = [request(1, 2, at_ms=at) for at in range(4)]
    assert replay.replay(requests, "lru", 10, StoreRule(threshold=2)).blocks_found == 4
    assert replay.replay(requests, "lru", 10, StoreRule(threshold=3)).blocks_found == 2


def test_tail_of_a_prefix_leaves_before_its_head_across_requests() -> None:
    """The third request takes two places: the first conversation loses its newest blocks."""
    requests = [request(1, 2, 3), request(1, 2, 3, 4, 5), request(8, 9), request(1, 2, 3, 4, 5)]
    assert list(leading(requests, capacity=5)) == [0, 3, 0, 3]


def leading(requests: Sequence[TraceRequest], capacity: int) -> list[int]:
    engine = ReplayEngine("lru", capacity, StoreRule())
    return [engine.serve(r) for r in requests]


# -- Belady -----------------------------------------------------------------------------------


def best_possible(requests: Sequence[TraceRequest], capacity: int) -> int:
    """The most leading blocks that any choice of what to keep finds, by trying them all."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for blocks in (r.blocks.tolist() for r in requests):
        after: dict[frozenset[int], int] = {}
        for kept, found in states.items():
            hits = found + len(list(itertools.takewhile(kept.__contains__, blocks)))
            pool = sorted(kept | set(blocks))
            for choice in itertools.combinations(pool, min(capacity, len(pool))):
                key = frozenset(choice)
                after[key] = max(after.get(key, 0), hits)
        states = after
    return max(states.values())


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_belady_finds_the_most_that_any_choice_could(seed: int, capacity: int) -> None:
    rng = np.random.default_rng(seed)
    paths = [[1, 2, 3], [1, 2, 4], [1, 5], [6, 7], [6, 8, 9]]
    picks = [paths[int(rng.integers(len(paths)))] for _ in range(7)]
    requests = [request(*path[: int(rng.integers(1, len(path) + 1))]) for path in picks]
    assert sum(belady.leading_hits(requests, capacity)) == best_possible(requests, capacity)


# -- traces -----------------------------------------------------------------------------------


def test_gzip_and_plain_traces_read_the_same(tmp_path: Path) -> None:
    plain = write_trace(tmp_path / "trace.jsonl", conversations(seed=2, count=10))
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    first, second = read_trace(plain), read_trace(packed)
    assert [r.blocks.tolist() for r in first] == [r.blocks.tolist() for r in second]
    assert first[3].timestamp_ms == 3000


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_trace_is_read_from_a_pipe_whole(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    plain = write_trace(tmp_path / "trace.jsonl", conversations(seed=2, count=1000))
    reading, writing = os.pipe()
    writer = threading.Thread(target=_write_all, args=(writing, pack(plain.read_bytes())))
    writer.start()
    found = read_trace(Path(f"/dev/fd/{reading}"))
    os.close(reading)
    writer.join()
    assert len(found) == len(read_trace(plain))


def _write_all(pipe: int, content: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(pipe, "wb") as file:
        file.write(content)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ("\ud800".encode("utf-8", "surrogatepass"), "not JSON"),
        (line(timestamp=None), "field timestamp is missing"),
        (line(input_length=None), "field input_length is missing"),
        (line(hash_ids=None), "field hash_ids is missing"),
        (line(timestamp="5"), "field timestamp"),
        (line(timestamp=-1), "field timestamp"),
        (line(timestamp=True), "field timestamp"),
        (line(timestamp=1), "field timestamp: 1 comes after 5"),
        (line(output_length=0.5), "field output_length"),
        (line(hash_ids=7), "field hash_ids"),
        (line(hash_ids=[1, "2"]), "field hash_ids"),
        (line(hash_ids=[1, 2**63]), "field hash_ids"),
        (line(hash_ids=[1, 2, 1]), "field hash_ids: a block comes twice"),
        (line(hash_ids=list(range(16385))), "field hash_ids: 16385 blocks"),
        (line(hash_ids=["1" * 10_000]), "field hash_ids: '1111"),
        (line(hash_ids={"1": "1" * 10_000}), "field hash_ids: {"),
        (line(timestamp=1e308), "field timestamp: 1"),
        (line(timestamp=MAX_TIMESTAMP_MS + 1), "Fix: give it in milliseconds"),
    ],
)
def test_bad_line_is_named_with_file_line_field_and_fix(
    tmp_path: Path, bad: str | bytes, field: str
) -> None:
    path = tmp_path / "trace.jsonl"
    text = bad if isinstance(bad, bytes) else bad.encode()
    path.write_bytes(line().encode() + b"\n\n" + text + b"\n")
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}:3: ")
    assert field in str(error.value)
    assert "Fix: " in str(error.value)
    assert len(str(error.value)) < len(str(path)) + 300


def test_missing_empty_and_torn_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"No such file.*Fix: "):
        read_trace(tmp_path / "absent")
    (tmp_path / "empty").touch()
    with pytest.raises(TraceError, match=r"no requests.*Fix: "):
        read_trace(tmp_path / "empty")
    cut = tmp_path / "cut"
    cut.write_text(f"{line()}\n{{")
    with pytest.raises(TraceError, match=r":2: not JSON.*Fix: .*a last line that was cut"):
        read_trace(cut)
    torn = tmp_path / "torn.gz"
    torn.write_bytes(gzip.compress(f"{line()}\n".encode() * 1000)[:-20])
    with pytest.raises(TraceError, match=r"broken gzip.*Fix: "):
        read_trace(torn)


# -- the command ------------------------------------------------------------------------------


def command(*arguments: str) -> int:
    return main(["replay", *arguments])


def test_command_prints_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_trace(tmp_path / "trace.jsonl", conversations(seed=2)))
    assert command("--trace", path, "--policy", "arc", "--capacity-blocks", "60", "--json") == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["hit_ratio"] == fields["blocks_found"] / fields["blocks_offered"]
    assert (fields["policy"], fields["capacity_blocks"], fields["trace"]) == ("arc", 60, path)


def test_command_says_how_far_it_is_while_it_reads_and_while_it_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", conversations(seed=2, count=3))
    trace.write_bytes(b"\n" * 4 + trace.read_bytes())  # empty lines take time, too
    monkeypatch.setattr(replay, "PROGRESS_INTERVAL_S", 0.0)
    assert command("--trace", str(trace), "--policy", "lru", "--capacity-blocks", "9") == 0
    said = capsys.readouterr().err.splitlines()
    assert said[:7] == [f"{trace}: {number} lines read" for number in range(1, 8)]
    assert said[7:] == [f"lru: {number} of 3 requests" for number in range(1, 4)]


def test_capacity_fraction_is_of_the_distinct_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = conversations(seed=2)
    path = str(write_trace(tmp_path / "trace.jsonl", requests))
    assert command("--trace", path, "--policy", "belady", "--capacity-fraction", "0.1") == 0
    shown = f"capacity blocks      {round(replay.distinct_blocks(requests) * 0.1):,}\n"
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    "size",
    [
        [],
        ["--capacity-blocks", "5", "--capacity-fraction", "0.5"],
        ["--capacity-blocks", "0"],
        ["--capacity-blocks", str((1 << 27) + 1)],
        ["--capacity-fraction", "0"],
        ["--capacity-fraction", "1.5"],
        ["--capacity-fraction", "nan"],
    ],
)
def test_exactly_one_possible_capacity_is_asked_for(
    size: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--trace", "absent", *size) == 2
    assert "capacity" in capsys.readouterr().err


@pytest.mark.parametrize("threshold", ["0", "-1", "256", "1e3", str(1 << 62)])
def test_a_threshold_that_no_block_could_pass_is_refused(
    threshold: str, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ("--capacity-blocks", "5")
    assert command("--trace", "absent", *size, "--store-threshold", threshold) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--store-threshold" in said
    assert "a whole number from 1 to 255" in said


def test_unusable_trace_ends_the_command_with_a_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command("--trace", "absent", "--capacity-blocks", "5") == 2
    assert capsys.readouterr().err.startswith("kvd replay: absent: ")
