"""Fences: stores that must end before the step overwrites what they read.

A store is fenced from its creation to its end, whatever becomes of its request: a finished or
preempted request's blocks, and those that slid out of a window, may have another owner in the
very next step. Loads are never fenced: the engine holds their blocks until they have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized

from kvd_client.draft import are_blocks
from kvd_client.identity import Group
from kvd_client.scheduler.device import DeviceBlocks
from kvd_client.scheduler.jobs import JobTable
from kvd_client.scheduler.request import Request
from kvd_proto.layout import NULL_ENGINE_BLOCK


class Fences:
    """Knows which stores read which engine blocks, and which the next plan must flush."""

    def __init__(
        self, groups: Sequence[Group], jobs: JobTable, device: DeviceBlocks, null_block: int
    ) -> None:
        self._groups = groups
        self._null_block = null_block
        self._jobs = jobs
        self._device = device
        self._flush: set[int] = set()
        self._given: list[tuple[int, Sequence[int]]] = []  # (group, blocks) of new owners

    def cover(self, request: Request, tables: Sequence[Sequence[int]]) -> None:
        """Blocks new to the request will be overwritten: stores that read them end first.

        ValueError for what can be no block, and for anything but a table for each group.
        """
        self.require_tables(request, tables)
        for group, table in enumerate(tables):
            seen = request.seen_blocks[group]
            if len(table) == seen:
                continue
            self.require_blocks(request, group, table[seen:])
            request.seen_blocks[group] = len(table)
            tokens = self._groups[group].engine_block_tokens
            new = table[max(seen, request.computed_tokens // tokens) :]
            self._flush |= self._jobs.readers(group, new)
            self._given.append((group, new))
            self._device.overwritten(group, new)

    def require_tables(self, request: Request, tables: Sequence[Sequence[int]]) -> None:
        """ValueError for anything but a table for each group."""
        of = f"request {request.request_id}: block_ids"
        if len(tables) != len(self._groups):
            raise ValueError(f"{of} has {len(tables)} tables for {len(self._groups)} groups")
        for group, table in enumerate(tables):
            if not isinstance(table, Sized):
                raise ValueError(f"{of}[{group}] is {table!r:.64}, needed is a list of blocks")  # noqa: TRY004

    def require_blocks(self, request: Request, group: int, blocks: Sequence[int]) -> None:
        """ValueError for what can be no block: no message could carry it, nor what lies beside."""
        if are_blocks(blocks):
            return
        for block in blocks:
            if block != self._null_block and not are_blocks([block]):
                raise ValueError(
                    f"request {request.request_id}: block_ids[{group}] has {block},"
                    f" allowed are whole numbers 0..{NULL_ENGINE_BLOCK}"
                )

    def flush(self, job_ids: Iterable[int]) -> None:
        """These must end before the next step."""
        self._flush.update(job_ids)

    def ended(self, job_id: int) -> None:
        self._flush.discard(job_id)

    def due(self, computed_stores: Sequence[int]) -> tuple[int, ...]:
        """The step's flush; `computed_stores` are its jobs for blocks of earlier steps.

        A finished request's blocks may have found their next owner in this very step.
        """
        for group, blocks in self._given:
            self._flush |= self._jobs.readers(group, blocks).intersection(computed_stores)
        return tuple(self._flush)

    def told(self) -> None:
        """The step's plan has what was due."""
        self._given.clear()
        self._flush.clear()
