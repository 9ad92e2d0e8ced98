"""`kvd replay`: what a policy would have found on a trace, by the daemon's own core.

One engine of one rank talks to the machine as a real one does, and copies take no time: a
request looks its blocks up and leases the leading ones, loads them and lets go of the lease,
stores the others as far as there is room, and ends: the calls of kvd's own client. Each block
is one slot of a pool of exactly the capacity.

With device memory before it (`device.py`), the pool is asked for what that lacks only.

With tiers below, a request that is told to wait asks again at each end of a step until it knows.
A tier's copies take no time either, or as long as its rate says.
"""

from __future__ import annotations

import errno
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import click
import numpy as np

from kvd.cli.exits import EXIT_FAILED, EXIT_MISUSED, Failure
from kvd.cli.options import Checked, FilePath, json_option
from kvd.cli.replay import belady
from kvd.cli.replay.compute import compute_ratio
from kvd.cli.replay.device import EAGER, EVERYTHING, STORES, StoreRule
from kvd.cli.replay.engine import BLOCK_BYTES, ReplayEngine
from kvd.cli.replay.tiers import ReplayTiers, TierResult, TierSpec
from kvd.cli.replay.trace import Progress, TraceError, TraceRequest, read_trace
from kvd.config.tiers import REUSE, WRITES
from kvd.config.values import number, one_of, parse_size, read_threshold, whole_number
from kvd.core.policy import POLICY_NAMES
from kvd.pool.config import MAX_POOL_BYTES
from kvd_proto.limits import MAX_TIERS

BELADY = "belady"
PROGRESS_INTERVAL_S = 2.0
MAX_BLOCK_BYTES = 1 << 30
_ALIGN = 4096


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay found, as `--json` prints it."""

    hit_ratio: float  # leading blocks found / blocks offered
    policy: str
    trace: str
    capacity_blocks: int
    store_threshold: int
    requests: int
    blocks_offered: int
    blocks_distinct: int
    blocks_found: int  # leading ones
    blocks_stored: int
    blocks_evicted: int
    blocks_without_room: int  # not stored, since everything else was in use
    block_bytes: int
    host_ratio: float  # of blocks that were in host memory when they were asked for
    infinite_ratio: float  # of a cache that never evicts
    reachable_ratio: float  # the same, where no request can load more than host memory holds
    seconds: float
    bytes_stored: int = 0
    device_blocks: int = 0  # of the engine's own memory; 0: it keeps nothing
    store: str = EAGER
    device_ratio: float = 0.0  # of leading blocks that the device still held
    compute_ratio: float = 0.0  # found / offered, each block by what it costs to compute
    external_ratio: float = 0.0  # found of those that the device lacked
    tiers: tuple[TierResult, ...] = ()


def replay(
    requests: Sequence[TraceRequest],
    policy: str,
    capacity_blocks: int,
    rule: StoreRule = EVERYTHING,
    progress: Progress = lambda _: None,
    below: ReplayTiers | None = None,
) -> ReplayResult:
    """Drive the trace through the core, or through Belady's MIN for policy "belady".

    Belady's has no tiers below, and no device before it.
    """
    started = time.monotonic()
    below = ReplayTiers((), BLOCK_BYTES) if below is None else below
    stored = evicted = without_room = on_device = 0
    each: list[int] = []
    tiers: tuple[TierResult, ...] = ()
    offered = sum(request.blocks.size for request in requests)
    if policy == BELADY:
        assert not len(below), "MIN is a bound for one cache"
        assert not rule.device_blocks, "MIN is a bound for one cache"
        each = list(belady.leading_hits(requests, capacity_blocks, progress))
    else:
        engine = ReplayEngine(policy, capacity_blocks, rule, below)
        for place, request in enumerate(requests):
            each.append(engine.serve(request))
            progress(place + 1)
        stored, evicted = engine.blocks_stored, engine.blocks_evicted
        without_room, on_device = engine.blocks_without_room, engine.found_on_device
        tiers = below.results(engine.found_in, engine.dropped, offered)
    found = sum(each)
    infinite, reachable = _seen_before(requests, capacity_blocks + rule.device_blocks)
    from_tiers = sum(tier.blocks_found for tier in tiers)
    return ReplayResult(
        hit_ratio=_ratio(found, offered),
        policy=policy,
        trace="",
        capacity_blocks=capacity_blocks,
        store_threshold=rule.threshold,
        requests=len(requests),
        blocks_offered=offered,
        blocks_distinct=distinct_blocks(requests),
        blocks_found=found,
        blocks_stored=stored,
        blocks_evicted=evicted,
        blocks_without_room=without_room,
        block_bytes=below.block_bytes,
        host_ratio=_ratio(found - from_tiers - on_device, offered),
        infinite_ratio=_ratio(infinite, offered),
        reachable_ratio=_ratio(reachable, offered),
        seconds=round(time.monotonic() - started, 3),
        bytes_stored=stored * below.block_bytes,
        device_blocks=rule.device_blocks,
        store=rule.store,
        device_ratio=_ratio(on_device, offered),
        compute_ratio=compute_ratio(requests, each),
        external_ratio=_ratio(found - on_device, offered - on_device),
        tiers=tiers,
    )


def _ratio(blocks: int, offered: int) -> float:
    return blocks / offered if offered else 0.0


def _seen_before(requests: Sequence[TraceRequest], most: int) -> tuple[int, int]:
    """Leading blocks found by an infinite cache, and where a request gets `most` at most."""
    seen: set[int] = set()
    infinite = reachable = 0
    for request in requests:
        blocks = request.blocks.tolist()
        leading = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
        infinite += leading
        reachable += min(leading, most)
        seen.update(blocks[leading:])
    return infinite, reachable


def distinct_blocks(requests: Sequence[TraceRequest]) -> int:
    return int(np.unique(np.concatenate([request.blocks for request in requests])).size)


# -- the command ------------------------------------------------------------------------------


def _block_bytes(text: str) -> int:
    size = _plain_size(text)
    if size % _ALIGN or not 0 < size <= MAX_BLOCK_BYTES:
        raise ValueError(f"a multiple of {_ALIGN} up to 1GiB")
    return size


MOST_CACHE_BLOCKS = 1 << 27  # of a pool, a tier or a device
_COUNT = Checked(whole_number(1, MOST_CACHE_BLOCKS), "count")


@click.command("replay")
@click.option(
    "--trace",
    type=FilePath(),
    required=True,
    metavar="FILE",
    help="The trace: JSON lines, plain or gzip.",
)
@click.option(
    "--policy",
    type=click.Choice([*POLICY_NAMES, BELADY]),
    default="lru",
    help="Eviction policy (default: lru); belady knows the future and is the bound.",
)
@click.option("--capacity-blocks", type=_COUNT, metavar="N", help="Size of the pool in blocks.")
@click.option(
    "--capacity-fraction",
    type=Checked(number(1e-9, 1), "share"),
    metavar="F",
    help="Size of the pool as a part of the trace's distinct blocks, such as 0.1.",
)
@click.option(
    "--store-threshold",
    type=Checked(read_threshold, "count"),
    default=1,
    metavar="N",
    help="Store a block only when it comes for the N-th time (default: 1; belady ignores it).",
)
@click.option(
    "--device-blocks",
    type=_COUNT,
    metavar="N",
    help="Blocks that the engine keeps in its own memory, before the pool (default: none).",
)
@click.option(
    "--store",
    type=click.Choice(STORES),
    default=EAGER,
    help="With --device-blocks, what is stored: eager: what was computed (default); lazy: what"
    " leaves the device; second: what comes for the second time, as with --store-threshold 2.",
)
@click.option(
    "--tier",
    multiple=True,
    metavar="NAME=VALUE,...",
    help="A tier below, again for each further one: blocks=N or fraction=F of the distinct"
    " blocks; policy=P; write=through, demotion or reuse; reuse=N; rate=SIZE that it reads in a"
    " second, and writes (default: copies take no time); deadline=SECONDS.",
)
@click.option(
    "--block-bytes",
    type=Checked(_block_bytes, "size"),
    default=BLOCK_BYTES,
    metavar="SIZE",
    help="Bytes of a block, such as 2MiB: bounds and what tiers move go by it (default: 4096).",
)
@json_option
def command(**flags: Any) -> int:
    """Tell how much of a trace an eviction policy would find.

    The trace's requests go through the daemon's core, with a pool of the given size and tiers
    below it.
    """
    given = SimpleNamespace(**flags)
    if (given.capacity_blocks is None) == (given.capacity_fraction is None):
        raise click.UsageError("give one of --capacity-blocks and --capacity-fraction")
    return run(given)


def run(args: SimpleNamespace) -> int:
    """Replay and print; a misuse when the trace, the device or a tier can't be used."""
    try:
        _refuse_together(args)
        tiers = [_read_tier(text) for text in args.tier]
        requests = read_trace(args.trace, _reporter(str(args.trace), "lines read"))
        specs = [_spec_of(tier, requests) for tier in tiers]
        rule = _store_rule_of(args, requests)
        capacity_blocks = _capacity_of(args, requests)
    except (TraceError, _OptionError) as error:
        print(f"kvd replay: {error}", file=sys.stderr)
        return EXIT_MISUSED
    progress = _reporter(args.policy, f"of {len(requests):,} requests")
    below = ReplayTiers(specs, args.block_bytes)
    try:
        result = replay(requests, args.policy, capacity_blocks, rule, progress, below)
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        raise Failure(
            f"this machine has too little memory for what a daemon knows of a pool of"
            f" {capacity_blocks:,} blocks of {args.block_bytes} bytes. Fix: a smaller pool, or"
            " smaller --block-bytes",
            EXIT_FAILED,
        ) from None
    fields = asdict(result) | {"trace": str(args.trace)}
    if args.json:
        print(json.dumps(fields))
        return 0
    del fields["tiers"]
    print("\n".join(f"{name.replace('_', ' '):<20} {_shown(fields[name])}" for name in fields))
    if result.tiers:
        print("\n" + _levels(result))
    return 0


_LEVEL_COLUMNS = (
    "level", "blocks", "policy", "write", "ratio", "found", "written", "read", "evicted", "dropped",
)  # fmt: skip


def _levels(result: ReplayResult) -> str:
    """Host memory and each tier, and all together beside an infinite cache."""
    host = {
        "level": "host memory",
        "blocks": _shown(result.capacity_blocks),
        "policy": result.policy,
        "ratio": _shown(result.host_ratio),
        "found": _shown(result.blocks_found - sum(tier.blocks_found for tier in result.tiers)),
        "evicted": _shown(result.blocks_evicted),
    }
    together = {
        "level": "together",
        "ratio": _shown(result.hit_ratio),
        "found": _shown(result.blocks_found),
    }
    infinite = {"level": "infinite cache", "ratio": _shown(result.infinite_ratio)}
    reachable = {"level": "reachable of it", "ratio": _shown(result.reachable_ratio)}
    tiers = [_tier_level(place, tier) for place, tier in enumerate(result.tiers, 1)]
    header = {name: name for name in _LEVEL_COLUMNS}
    lines = [
        [line.get(name, "") for name in _LEVEL_COLUMNS]
        for line in (header, host, *tiers, together, infinite, reachable)
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _tier_level(place: int, tier: TierResult) -> dict[str, str]:
    return {
        "level": f"tier {place}",
        "blocks": _shown(tier.capacity_blocks),
        "policy": tier.policy,
        "write": tier.write,
        "ratio": _shown(tier.hit_ratio),
        "found": _shown(tier.blocks_found),
        "written": _size_shown(tier.bytes_written),
        "read": _size_shown(tier.bytes_read),
        "evicted": _shown(tier.blocks_evicted),
        "dropped": _shown(tier.blocks_dropped),
    }


def _size_shown(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def capacity_of(requests: Sequence[TraceRequest], fraction: float) -> int:
    """So much of the distinct blocks, at least one."""
    return max(1, round(distinct_blocks(requests) * fraction))


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _reporter(title: str, of_what: str) -> Progress:
    """Says on stderr how far it is, every few seconds."""
    last = time.monotonic()

    def progress(done: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_INTERVAL_S:
            last = time.monotonic()
            print(f"{title}: {done:,} {of_what}", file=sys.stderr, flush=True)

    return progress


# -- device and tiers -------------------------------------------------------------------------


class _OptionError(Exception):
    """A tier, or the device, can't be used as it was given; names the field and what would do."""


def _refuse_together(args: SimpleNamespace) -> None:
    """_OptionError where one option forbids or needs another, whatever the trace has."""
    if args.device_blocks is None and args.store != EAGER:
        raise _OptionError(f"--store {args.store} needs --device-blocks. Fix: give it")
    if len(args.tier) > MAX_TIERS:
        raise _OptionError(f"{len(args.tier)} tiers; at most {MAX_TIERS} may be")
    if args.policy != BELADY:
        return
    if args.device_blocks is not None:
        raise _OptionError("belady is a bound for one cache. Fix: no --device-blocks")
    if args.tier:
        raise _OptionError("belady is a bound for one cache. Fix: no --tier, or another --policy")


def _capacity_of(args: SimpleNamespace, requests: Sequence[TraceRequest]) -> int:
    """Blocks of the pool. _OptionError where no daemon has so large a one."""
    blocks: int = args.capacity_blocks or capacity_of(requests, args.capacity_fraction)
    most = MAX_POOL_BYTES // args.block_bytes
    if blocks > most and args.policy != BELADY:
        raise _OptionError(
            f"--block-bytes {args.block_bytes}: a pool of {blocks:,} such blocks has 8 TiB or more,"
            f" and no daemon's has. Fix: smaller blocks, or a pool of at most {most:,}"
        )
    return blocks


def _store_rule_of(args: SimpleNamespace, requests: Sequence[TraceRequest]) -> StoreRule:
    if args.device_blocks is None:
        return StoreRule(args.store_threshold)
    longest = max(request.blocks.size for request in requests)
    if longest > args.device_blocks:
        raise _OptionError(
            f"--device-blocks {args.device_blocks}: a request has {longest:,} blocks, and an engine"
            f" computes it in its own memory. Fix: {longest} or more"
        )
    return StoreRule.of(args.device_blocks, args.store, args.store_threshold)


def _plain_size(text: str) -> int:
    """Bytes, that are no share of anything."""
    size = parse_size(text, None)
    if size < 1:
        raise ValueError("1 byte or more")
    return size


_TIER_FIELDS: dict[str, Callable[[str], Any]] = {
    "blocks": whole_number(1, MOST_CACHE_BLOCKS),
    "fraction": number(1e-6, 1),
    "policy": one_of(*POLICY_NAMES),
    "write": one_of(*WRITES),
    "reuse": whole_number(2, 255),
    "rate": _plain_size,
    "deadline": number(0.05, 600),
}


def _read_tier(text: str) -> dict[str, Any]:
    """The fields of one --tier. _OptionError where one can't be."""
    given: dict[str, Any] = {}
    for field in text.split(","):
        name, _, value = field.partition("=")
        if name not in _TIER_FIELDS or name in given:
            known = ", ".join(_TIER_FIELDS)
            raise _OptionError(f"--tier {text}: {name!r}. Fix: NAME=VALUE, each once, of {known}")
        try:
            given[name] = _TIER_FIELDS[name](value)
        except ValueError as error:
            raise _OptionError(f"--tier {text}: {name} must be {error}") from None
    if ("blocks" in given) == ("fraction" in given):
        raise _OptionError(f"--tier {text}: needs one of blocks and fraction. Fix: set one")
    if "reuse" in given and given.get("write") != REUSE:
        raise _OptionError(f"--tier {text}: reuse counts only with write=reuse. Fix: set that")
    if "deadline" in given:
        given["deadline_s"] = given.pop("deadline")
    return given


def _spec_of(given: dict[str, Any], requests: Sequence[TraceRequest]) -> TierSpec:
    """The tier, of so many blocks or of a part of the trace's."""
    if "fraction" in given:
        given["blocks"] = capacity_of(requests, given.pop("fraction"))
    return TierSpec(given.pop("blocks"), **given)
