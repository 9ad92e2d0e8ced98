"""`kvd replay`: what a policy would have found on a trace, by the daemon's own core.

One engine of one rank talks to the machine as a real one does, and copies take no time: a
request looks its blocks up and leases the leading ones, loads them and lets go of the lease,
stores the others as far as there is room, and ends: the calls of kvd's own client. Each block
is one slot of a pool of exactly the capacity.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvd.cli.replay import belady
from kvd.cli.replay.trace import BlockIds, TraceError, TraceRequest, read_trace
from kvd.core import actions, events
from kvd.core.keys import JobId, KeyBatch, LeaseId, MoverId, RequestId, SessionId, TenantId
from kvd.core.machine import Machine, MachineConfig
from kvd.core.policy import POLICY_NAMES
from kvd.core.spec import GroupSpec, NamespaceSpec
from kvd_proto.groups import GroupKind

BELADY = "belady"
BLOCK_BYTES = 4096  # the smallest that fills a slot; no byte of it exists
HASH_BYTES = 8
TRACKER_BLOCKS = 65536
PROGRESS_INTERVAL_S = 2.0
NS_PER_MS = 1_000_000

_STATUS_MASK = 3
_HIT = 1
_SESSION = SessionId(1)
_MOVER = MoverId(1)

Progress = Callable[[int], None]


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
    seconds: float


def replay(
    requests: Sequence[TraceRequest],
    policy: str,
    capacity_blocks: int,
    store_threshold: int = 1,
    progress: Progress = lambda _: None,
) -> ReplayResult:
    """Drive the trace through the core, or through Belady's MIN for policy "belady"."""
    started = time.monotonic()
    found = stored = evicted = without_room = 0
    if policy == BELADY:
        found = sum(belady.leading_hits(requests, capacity_blocks, progress))
    else:
        engine = ReplayEngine(policy, capacity_blocks, store_threshold)
        for number, request in enumerate(requests):
            found += engine.serve(request)
            progress(number + 1)
        stored, evicted = engine.blocks_stored, engine.blocks_evicted
        without_room = engine.blocks_without_room
    offered = sum(request.blocks.size for request in requests)
    return ReplayResult(
        hit_ratio=found / offered if offered else 0.0,
        policy=policy,
        trace="",
        capacity_blocks=capacity_blocks,
        store_threshold=store_threshold,
        requests=len(requests),
        blocks_offered=offered,
        blocks_distinct=distinct_blocks(requests),
        blocks_found=found,
        blocks_stored=stored,
        blocks_evicted=evicted,
        blocks_without_room=without_room,
        seconds=round(time.monotonic() - started, 3),
    )


def distinct_blocks(requests: Sequence[TraceRequest]) -> int:
    return int(np.unique(np.concatenate([request.blocks for request in requests])).size)


class ReplayEngine:
    """An engine of one rank, and a mover whose copies end at once."""

    def __init__(self, policy: str, capacity_blocks: int, store_threshold: int) -> None:
        group = GroupSpec(GroupKind.FULL_ATTENTION, 1, (BLOCK_BYTES,))
        spec = NamespaceSpec("replay", TenantId("replay"), HASH_BYTES, (group,))
        config = MachineConfig(
            extents=1,
            extent_bytes=capacity_blocks * BLOCK_BYTES,
            policy=policy,
            store_threshold=store_threshold,
            tracker_blocks=TRACKER_BLOCKS,
            lease_share=1.0,
            spare_bytes=0,
            tag_secret=bytes(16),
        )
        self._machine = Machine(config)
        self._now_ns = 0
        self._requests = 0
        self._job = 0
        self.blocks_stored = 0
        self.blocks_evicted = 0
        self.blocks_without_room = 0
        self._drive(events.PoolRecovered())
        accepted = self._ask(events.SessionOpened(_SESSION, spec, "", 1))
        assert isinstance(accepted, actions.SessionAccepted)
        self._namespace = accepted.namespace
        self._drive(events.RankAttached(_SESSION, _MOVER, rank=0, shard=0, writer=True))

    def serve(self, request: TraceRequest) -> int:
        """Run one request through; how many of its leading blocks were found."""
        self._now_ns = max(self._now_ns, request.timestamp_ms * NS_PER_MS)
        self._requests += 1
        name = RequestId(str(self._requests))
        context = events.RequestContext(name)
        present, lease = self._look_up(context, request.blocks)
        found = int(present.size if present.all() else present.argmin())
        if found:
            self._load(context, request.blocks[:found])
        if lease is not None:
            self._drive(events.LeasesReleased(_SESSION, (lease,)))
        if found < present.size:
            room = self._machine.room(self._namespace)[0] - found  # its own head stays
            self._store(context, request.blocks, present, room)
        self._drive(events.RequestsEnded(_SESSION, (name,)))
        self._drive(events.StepEnded(_SESSION))
        return found

    def _look_up(
        self, context: events.RequestContext, blocks: BlockIds
    ) -> tuple[np.ndarray[tuple[int], np.dtype[np.bool_]], LeaseId | None]:
        query = events.Query(context, 0, _keys(blocks), events.LeaseMode.PREFIX)
        answers = self._ask(events.LookupRequested(_SESSION, (query,)))
        statuses = np.frombuffer(answers[0].statuses, np.uint8) & _STATUS_MASK
        present = statuses == _HIT
        return present, answers[0].lease

    def _load(self, context: events.RequestContext, blocks: BlockIds) -> None:
        verdict = self._ask(
            events.LoadRequested(_SESSION, self._next_job(), context, (_run(blocks),))
        )
        assert verdict.accepted, f"a leased block could not be loaded: {verdict.reason}"

    def _store(
        self,
        context: events.RequestContext,
        blocks: BlockIds,
        present: np.ndarray[tuple[int], np.dtype[np.bool_]],
        room: int,
    ) -> None:
        """Touch what is there behind the hole; store the rest, head first, while it fits."""
        found = int(present.argmin())
        self._touch(context, blocks[found:][present[found:]])
        missing = blocks[~present]
        self.blocks_without_room += max(0, missing.size - room)
        missing = missing[:room]
        if missing.size == 0:
            return
        verdict = self._ask(
            events.StoreRequested(_SESSION, self._next_job(), context, (_run(missing, found),))
        )
        assert verdict.accepted, f"a store within the room was refused: {verdict.reason}"
        self.blocks_stored += verdict.blocks

    def _touch(self, context: events.RequestContext, blocks: BlockIds) -> None:
        if blocks.size:
            self._drive(events.Touched(_SESSION, context, 0, _keys(blocks)))

    def _ask(self, event: events.Event) -> Any:
        """Drive an event; the payload of the reply to it."""
        replies = [a.payload for a in self._drive(event) if isinstance(a, actions.Reply)]
        assert len(replies) == 1
        return replies[0]

    def _drive(self, event: events.Event) -> list[actions.Action]:
        """Hand an event to the core, and end at once every copy that it orders."""
        ordered = self._machine.handle(event, self._now_ns)
        for action in ordered:
            match action:
                case actions.StartTransfer():
                    blocks = sum(part.slots.size for part in action.parts)
                    self._drive(
                        events.TransferFinished(
                            action.mover,
                            action.transfer,
                            events.TransferOutcome.DONE,
                            blocks * BLOCK_BYTES,
                            duration_ns=0,
                        )
                    )
                case actions.WriteFree():
                    self.blocks_evicted += int(action.slots.size)
                case _:
                    pass
        return ordered

    def _next_job(self) -> JobId:
        self._job += 1
        return JobId(self._job)


def _keys(blocks: BlockIds) -> KeyBatch:
    return KeyBatch(blocks.astype(np.uint64).reshape(-1, 1), HASH_BYTES)


def _run(blocks: BlockIds, first_block: int = 0) -> events.Run:
    engine_blocks = np.arange(blocks.size, dtype=np.uint32).reshape(-1, 1)
    return events.Run(0, _keys(blocks), engine_blocks, first_block)


# -- the command ------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kvd replay`."""
    parser.description = (
        "Replay a trace of requests through the daemon's core, and tell how many blocks an eviction"
        " policy would find in a pool of the given size."
    )
    parser.add_argument(
        "--trace",
        type=Path,
        required=True,
        metavar="FILE",
        help="the trace: JSON lines, plain or gzip",
    )
    parser.add_argument(
        "--policy",
        choices=(*POLICY_NAMES, BELADY),
        default="lru",
        help="eviction policy (default: lru); belady knows the future and is the bound",
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument(
        "--capacity-blocks", type=_positive, metavar="N", help="size of the pool in blocks"
    )
    size.add_argument(
        "--capacity-fraction",
        type=_share,
        metavar="F",
        help="size of the pool as a part of the trace's distinct blocks, such as 0.1",
    )
    parser.add_argument(
        "--store-threshold",
        type=_positive,
        default=1,
        metavar="N",
        help="store a block only when it comes for the N-th time (default: 1; belady ignores it)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Replay and print; 2 when the trace can't be used."""
    try:
        requests = read_trace(args.trace)
    except TraceError as error:
        print(f"kvd replay: {error}", file=sys.stderr)
        return 2
    capacity_blocks = args.capacity_blocks or capacity_of(requests, args.capacity_fraction)
    progress = _reporter(args.policy, len(requests))
    result = replay(requests, args.policy, capacity_blocks, args.store_threshold, progress)
    fields = asdict(result) | {"trace": str(args.trace)}
    if args.json:
        print(json.dumps(fields))
    else:
        print("\n".join(f"{name.replace('_', ' '):<20} {_shown(fields[name])}" for name in fields))
    return 0


def capacity_of(requests: Sequence[TraceRequest], fraction: float) -> int:
    """So much of the distinct blocks, at least one."""
    return max(1, round(distinct_blocks(requests) * fraction))


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _reporter(policy: str, requests: int) -> Progress:
    """Says on stderr how far a long replay is, every few seconds."""
    last = time.monotonic()

    def progress(done: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_INTERVAL_S:
            last = time.monotonic()
            print(f"{policy}: {done:,} of {requests:,} requests", file=sys.stderr, flush=True)

    return progress


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value
