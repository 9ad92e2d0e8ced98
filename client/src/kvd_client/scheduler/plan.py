"""What passes between an engine, its scheduler side and its workers in one step.

Plain numbers and strings in tuples: small and cheap to pickle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class ScheduledRequest(NamedTuple):
    """One request of a step, as it will be after the step. Nothing is copied, and `block_hashes`
    alone are kept: the engine may append to its lists, and must not change them otherwise.

    `block_ids` is the request's whole block table, by group: entry i of a group's list is the
    engine block that holds tokens i * engine_block_tokens and on (of a recurrent group, the
    state after them), or the null block: also where the engine has let go of a block that
    slid out of the window. Tables grow at their end; else an entry only ever becomes null.
    `num_computed_tokens_after` counts the tokens whose KV exists once the step has run; drafts
    that may be rejected don't count.
    `block_hashes`, by group, one for each kvd block that is known so far; None = as before.
    """

    request_id: str
    block_ids: Sequence[Sequence[int]]
    num_computed_tokens_after: int
    block_hashes: Sequence[Sequence[bytes]] | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's orders to every worker: job ids only."""

    flush: tuple[int, ...] = ()  # wait for these stores before any block is overwritten
    loads: tuple[int, ...] = ()
    stores: tuple[int, ...] = ()  # of blocks that this step computes
    computed_stores: tuple[int, ...] = ()  # of blocks that earlier steps computed
    forget: tuple[int, ...] = ()  # have ended otherwise: report nothing of them

    @property
    def is_empty(self) -> bool:
        return not (self.flush or self.loads or self.stores or self.computed_stores or self.forget)


class JobReport(NamedTuple):
    """One job's end on one rank."""

    job_id: int
    done: bool
    bytes_copied: int = 0
    duration_ns: int = 0
    left: bool = False  # done, but some keys were left to other stores, which may yet fail
    given_up: bool = False  # a store at a mover that seems to hang


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What ended on one rank since the report before. Each job is reported once by each rank."""

    rank: int
    ended: tuple[JobReport, ...] = ()


class StoredKeys(NamedTuple):
    """Blocks that every rank has stored: readable by every engine of the namespace."""

    request_id: str
    group: int
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What the workers' reports mean for the engine.

    A request in `finished_loads` has its tokens; one in `failed_loads` must compute them, and
    its later lookups miss. Both may have their blocks written or freed from now on; an engine
    that takes a failed request's blocks back lists it as preempted in the next step.
    """

    finished_loads: tuple[str, ...] = ()
    failed_loads: tuple[str, ...] = ()
    stored: tuple[StoredKeys, ...] = ()
