"""An engine of several groups in memory, as careless with its blocks as engines are.

It frees blocks the moment that it may, lets windows slide, keeps a running state in place,
speculates and is wrong, preempts and aborts. Its KV is labels: the KV of a token is the tokens
up to it, a drafter's also the token after it, a state the tokens that went into it.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from kvd_client import (
    NULL_BLOCK,
    Group,
    GroupKind,
    RequestParams,
    ScheduledRequest,
    Scheduler,
    SchedulerOptions,
    StepPlan,
    StoreMode,
    WorkerReport,
)
from kvd_client.session import Connection
from tests.client.copying_daemon import Content
from tests.client.fake_daemon import HASH_BYTES

BLOCKS = 60  # of each group: scarce
DRAFTS = 3
Tokens = tuple[int, ...]


@dataclass
class Sequence:
    name: str
    tokens: list[int]
    most: int  # tokens when it ends
    prompt: int
    hashes: list[list[bytes]]  # known to the scheduler side as they grow
    tables: list[list[int]] = field(default_factory=list)
    computed: int = 0
    loading: int = 0  # tokens, once the load has ended
    runs: bool = False


class Device(Protocol):
    def write(self, group: int, block: int, offset: int, label: object, /) -> None: ...

    def holds(self, group: int, block: int, offset: int, label: object, /) -> bool: ...


class Side(Protocol):
    """The daemon and the worker, as the engine meets them."""

    @property
    def connection(self) -> Connection: ...

    @property
    def device(self) -> Device: ...

    def clock(self) -> float: ...

    def start_step(self, plan: StepPlan, /) -> None: ...

    def finish_step(self, plan: StepPlan, /) -> WorkerReport: ...


class PagedEngine:
    """`run` steps it; whatever goes wrong with a byte is an AssertionError."""

    def __init__(self, side: Side, options: SchedulerOptions, seed: int, speculates: bool) -> None:
        self.side = side
        self.device = side.device
        self.groups = side.connection.namespace.groups
        self.source = random.Random(seed)
        self.lazy = options.store_mode is StoreMode.LAZY
        self.speculates = speculates
        self.meaning: dict[tuple[int, bytes], Tokens] = {}
        self.scheduler = Scheduler(side.connection, options, side.clock)
        self.free = [deque(range(BLOCKS)) for _ in self.groups]
        self.users = [[0] * BLOCKS for _ in self.groups]
        self.sequences: dict[str, Sequence] = {}
        self.held: dict[str, Sequence] = {}  # aborted while loading
        self.bases = [self._random_tokens(40) for _ in range(2)]
        self.arrived = 0
        self.preempted: list[str] = []
        self.tokens_loaded = 0

    def _random_tokens(self, count: int) -> list[int]:
        return [self.source.randrange(3) for _ in range(count)]

    # -- what keys and bytes mean -----------------------------------------------------------

    def extend(self, hashes: list[list[bytes]], tokens: list[int]) -> None:
        """Name the whole blocks that have no name yet."""
        for number, (group, row) in enumerate(zip(self.groups, hashes, strict=True)):
            while (end := (len(row) + 1) * group.tokens_per_block) <= len(tokens):
                prefix = tuple(tokens[:end])
                digest = hashlib.sha256(repr((number, prefix)).encode()).digest()[:HASH_BYTES]
                self.meaning[number, digest] = prefix
                row.append(digest)

    def expected(self, number: int, block_hash: bytes) -> Content:
        group, prefix = self.groups[number], self.meaning[number, block_hash]
        if group.kind is GroupKind.RECURRENT_STATE:
            return {0: prefix}
        start = len(prefix) - group.tokens_per_block
        # A drafter's last token was made with a token that the block's hash doesn't cover.
        end = len(prefix) - group.drafter
        return {at - start: self.label(group, list(prefix), at) for at in range(start, end)}

    def label(self, group: Group, tokens: list[int], at: int) -> Tokens:
        return tuple(tokens[: at + 1 + group.drafter])

    # -- the step ---------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if len(self.sequences) < 5 and self.source.random() < 0.4:
                self._arrive()
            self.take_step()
        for name in [*self.sequences]:
            if not self.sequences[name].loading:
                self._finish(name)
        deadline = self.side.clock() + 60
        while self.scheduler.has_pending_work():
            assert self.side.clock() < deadline, "work stays pending"
            self._step()

    def take_step(self) -> None:
        self._preempt()
        self._admit()
        self._step()

    def _arrive(self) -> None:
        base = self.source.choice(self.bases)
        tokens = base[: self.source.randrange(5, 40)] + self._random_tokens(
            self.source.randrange(1, 5)
        )
        self.arrive_with(tokens)

    def arrive_with(self, tokens: list[int]) -> str:
        """A request of this prompt; its name."""
        name = f"r{self.arrived}"
        self.arrived += 1
        most = len(tokens) + self.source.randrange(1, 30)
        hashes: list[list[bytes]] = [[] for _ in self.groups]
        self.extend(hashes, tokens)
        self.sequences[name] = Sequence(name, tokens, most, len(tokens), hashes)
        self.scheduler.on_new_request(name, len(tokens), hashes, self._parameters())
        return name

    def _parameters(self) -> RequestParams | None:
        """What the next request asks of the cache."""
        return None

    def _preempt(self) -> None:
        running = [s for s in self.sequences.values() if s.runs]
        if running and self.source.random() < 0.05:
            self._take_blocks_back(self.source.choice(running))

    def _take_blocks_back(self, victim: Sequence) -> None:
        self._release(victim)
        victim.runs = False
        self.preempted.append(victim.name)

    def _release(self, sequence: Sequence) -> None:
        for number, table in enumerate(sequence.tables):
            for block in reversed(table):
                self._let_go(number, block)
        sequence.tables = []
        sequence.computed = 0

    def _let_go(self, number: int, block: int) -> None:
        if block == NULL_BLOCK:
            return
        self.users[number][block] -= 1
        if not self.users[number][block]:
            self.free[number].append(block)

    def _take(self, number: int) -> int:
        block = self.free[number].popleft()
        self.users[number][block] += 1
        return block

    def _grow(self, sequence: Sequence, tokens: int) -> None:
        """Blocks for so many tokens; what slid out of a window gets none."""
        for number, (group, table) in enumerate(zip(self.groups, sequence.tables, strict=True)):
            first = self._first_needed(group, sequence.computed)
            while len(table) * group.engine_block_tokens < tokens:
                at = len(table)
                if group.kind is GroupKind.RECURRENT_STATE:
                    table.append(self._next_state(sequence, number, table))
                elif (at + 1) * group.engine_block_tokens <= first:
                    table.append(NULL_BLOCK)
                else:
                    table.append(self._take(number))

    def _next_state(self, sequence: Sequence, number: int, table: list[int]) -> int:
        """The running state's block: kept in place or copied, as chance wants it."""
        runs_on = sequence.computed > 0 and bool(table) and table[-1] != NULL_BLOCK
        if runs_on and self.source.random() < 0.5:
            block = table[-1]
            table[-1] = NULL_BLOCK
            return block
        return self._take(number)

    def _first_needed(self, group: Group, computed: int) -> int:
        if group.kind is GroupKind.SLIDING_WINDOW:
            return max(0, computed - group.sliding_window_tokens + 1)
        return 0

    def _admit(self) -> None:
        for sequence in self.sequences.values():
            if sequence.runs or sequence.loading or sequence.name in self.preempted:
                continue
            if min(map(len, self.free)) < 25:
                return
            found = self._matched(sequence.name)
            if found is None:
                continue
            assert found < len(sequence.tokens), "nothing is left to compute"
            sequence.tables = [[] for _ in self.groups]
            sequence.computed = found  # as if: so that windows get only their own blocks
            self._grow(sequence, found)
            sequence.computed = 0
            self.scheduler.update_state_after_alloc(sequence.name, sequence.tables, found)
            sequence.loading = found
            sequence.runs = not found

    def _matched(self, name: str) -> int | None:
        return self.scheduler.get_num_new_matched_tokens(name, 0)

    def _step(self) -> None:
        scheduled, work = [], []
        for sequence in self.sequences.values():
            if not sequence.runs or min(map(len, self.free)) < 12:
                continue
            left = len(sequence.tokens) - sequence.computed
            count = self.source.randrange(1, left + 1) if left > 1 else 1
            decodes = sequence.computed + count == len(sequence.tokens)
            drafts = self._random_tokens(DRAFTS) if decodes and self.speculates else []
            end = sequence.computed + count
            self._grow(sequence, end + len(drafts))
            # It counts its drafts too, though it shouldn't: no wrong byte may come of it.
            after = end + len(drafts)
            scheduled.append(ScheduledRequest(sequence.name, sequence.tables, after))
            work.append((sequence, count, drafts))
        near = [(g, block) for g, free in enumerate(self.free) for block in [*free][:6]]
        preempted, self.preempted = self.preempted, []
        plan = self.scheduler.build_step(scheduled, preempted, near if self.lazy else ())
        self.side.start_step(plan)
        for sequence, count, drafts in work:
            self._compute(sequence, count, drafts)
        self._take_outcome(self.side.finish_step(plan))

    # -- the model --------------------------------------------------------------------------

    def _compute(self, sequence: Sequence, count: int, drafts: list[int]) -> None:
        """Write KV of `count` tokens and of the drafts; sample, accept some drafts."""
        start, end = sequence.computed, sequence.computed + count
        guess = sequence.tokens + drafts + [9]
        for number, group in enumerate(self.groups):
            self._check_history(sequence, number)
            if group.kind is GroupKind.RECURRENT_STATE:
                self._write_state(sequence, number, end)
                continue
            first = max(0, start - 1) if group.drafter else start  # made anew, its token is known
            for at in range(first, end + len(drafts)):
                self._write(sequence, number, at, self.label(group, guess, at))
        sequence.computed = end
        if end < len(sequence.tokens):
            return
        accepted = self.source.randrange(len(drafts) + 1)
        sequence.tokens += [*drafts[:accepted], self.source.randrange(3)]
        self.extend(sequence.hashes, sequence.tokens)
        if not self._is_hybrid:
            sequence.computed += accepted
        if len(sequence.tokens) >= sequence.most:
            self._finish(sequence.name)
        else:
            self._slide(sequence)

    @property
    def _is_hybrid(self) -> bool:
        """A running state can't take drafts back: such an engine computes them once more."""
        return any(group.kind is GroupKind.RECURRENT_STATE for group in self.groups)

    def _write(self, sequence: Sequence, number: int, at: int, label: Tokens) -> None:
        place, offset = divmod(at, self.groups[number].engine_block_tokens)
        block = sequence.tables[number][place]
        if block != NULL_BLOCK:
            self.device.write(number, block, offset, label)

    def _write_state(self, sequence: Sequence, number: int, end: int) -> None:
        """Only the state after the step's last token is ever in memory."""
        block = self._state_block(sequence, number, end)
        self.device.write(number, block, 0, tuple(sequence.tokens[:end]))

    def _state_block(self, sequence: Sequence, number: int, tokens: int) -> int:
        """Where the state after so many tokens is: further on, where it moved in place."""
        first = (tokens - 1) // self.groups[number].tokens_per_block
        return next(block for block in sequence.tables[number][first:] if block != NULL_BLOCK)

    def _check_history(self, sequence: Sequence, number: int) -> None:
        """What the model is about to read is what was computed for these very tokens."""
        group, table = self.groups[number], sequence.tables[number]
        computed = sequence.computed
        if not computed:
            return
        if group.kind is GroupKind.RECURRENT_STATE:
            block = self._state_block(sequence, number, computed)
            assert self.device.holds(number, block, 0, tuple(sequence.tokens[:computed]))
            return
        width = group.engine_block_tokens
        for at in range(self._first_needed(group, computed), computed - group.drafter):
            if group.drafter and (at + 1) % group.tokens_per_block == 0:
                continue  # made with whichever token followed in the request that stored it
            wanted = self.label(group, sequence.tokens, at)
            assert self.device.holds(number, table[at // width], at % width, wanted), (number, at)

    def _slide(self, sequence: Sequence) -> None:
        for number, (group, table) in enumerate(zip(self.groups, sequence.tables, strict=True)):
            if group.kind is not GroupKind.SLIDING_WINDOW:
                continue
            first = self._first_needed(group, sequence.computed) // group.engine_block_tokens
            for at in range(min(first, len(table))):
                self._let_go(number, table[at])
                table[at] = NULL_BLOCK

    # -- ends -------------------------------------------------------------------------------

    def _finish(self, name: str) -> None:
        sequence = self.sequences.pop(name)
        sequence.runs = False
        exact = sequence.computed if self.source.random() < 0.5 else None
        known = [list(table) for table in sequence.tables] or [[] for _ in self.groups]
        if self.scheduler.request_finished(name, known, exact):
            self.held[name] = sequence
        else:
            self._release(sequence)

    def _has_loaded(self, name: str) -> None:
        """Its load is done."""

    def _take_outcome(self, report: WorkerReport) -> None:
        outcome = self.scheduler.update_from_workers([report])
        for name in (*outcome.finished_loads, *outcome.failed_loads):
            if name in self.held:
                self._release(self.held.pop(name))
                continue
            sequence = self.sequences[name]
            sequence.computed, sequence.loading = sequence.loading, 0
            sequence.runs = True
            if name in outcome.finished_loads:
                self.tokens_loaded += sequence.computed
                self._has_loaded(name)
            else:
                self._take_blocks_back(sequence)
        for name in [*self.sequences]:
            if self.source.random() < 0.01:
                self._finish(name)
