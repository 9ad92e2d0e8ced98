"""The rooms whose mutants can be asked for, each with the tests that are asked about it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.tidy.source import ROOT

SLOW_S = 0.5
"""Of the processor, while its lines are traced: a test that takes longer counts as one that runs
every line, and comes last; first of these come those that ran the line within that time."""
LONG_S = 60.0
"""The same where tests wait for processes, by the wall clock: what they run is told whole."""


@dataclass(frozen=True)
class Room:
    """Modules and tests, from the repository's root."""

    name: str
    modules: tuple[str, ...]  # files, and directories with all that is in them
    tests: tuple[str, ...]
    has_processes: bool = True
    """Its tests start processes, which run the mutant too, and wait for them: times are of the
    wall clock. Else they are of the processor, and only the trial's own process runs the mutant."""

    def paths(self) -> list[Path]:
        return [ROOT / module for module in self.modules]

    @property
    def suffix(self) -> str:
        """Of the files that keep what is known of it."""
        return "" if self.name == "core" else f"-{self.name}"

    @property
    def slow_s(self) -> float:
        return LONG_S if self.has_processes else SLOW_S

    def has(self, file: str) -> bool:
        """Whether an absolute path is one of its modules'."""
        return file.startswith(self._starts)

    @cached_property
    def _starts(self) -> tuple[str, ...]:
        return tuple(f"{path}/" if path.is_dir() else str(path) for path in self.paths())


def _modules(directory: str, names: str) -> tuple[str, ...]:
    return tuple(f"{directory}/{name}.py" for name in names.split())


def _tests(directory: str, names: str) -> tuple[str, ...]:
    return tuple(f"tests/{directory}/test_{name}.py" for name in names.split())


CORE = Room(
    "core",
    ("kvd/core",),
    (
        "tests/core",
        *_tests("contract", "auto_policy eviction_policy_contract slot_queue turns_policy"),
    ),
    has_processes=False,
)
POOL = Room(
    "pool",
    ("kvd/pool",),
    (
        *_tests("contract", "registry generations page_levels index_page pool pool_checksums"),
        *_tests("contract", "pool_crash pool_damage pool_extent_sizes pool_extents_directory"),
        *_tests("contract", "pool_nodes pool_ownership pool_space"),
        *_tests("control", "verify"),
        *_tests("native", "key_index tag_tables"),
    ),
)
MOVER = Room(
    "mover",  # of host memory
    (
        *_modules("kvd/mover", "host_shm child process checksums facts frames layout presence"),
        *_modules("kvd/mover", "ranges rows streams transfers"),
    ),
    (
        *_tests("contract", "mover_facts copies_at_once channel_to_control copy_runs checksums"),
        *_tests("contract", "memory_holes copy_engine_contract ready_jobs"),
        *_tests("control", "mover_process mover_faults mover_checksums mover_shares"),
        *_tests("fuzz", "parsers"),
    ),
)
DISK = Room(
    "disk",
    ("kvd/tiers/disk",),
    (
        *_tests("tiers", "disk_contract disk_damage disk_faults disk_left disk_model"),
        *_tests("tiers", "disk_native disk_recency sizes tier_config tier_sums"),
    ),
)
SCHEDULER = Room(
    "scheduler",
    ("client/src/kvd_client/scheduler",),
    (
        *_tests("client", "backoff batches bounds contexts deferrals failed_stores few_calls"),
        *_tests("client", "first_blocks found_counts hand_offs hits large_jobs lifecycle loads"),
        *_tests("client", "lookup messages patience scheduler_stats sent_jobs shared_loads"),
        *_tests("client", "store_pause stores tier_answers trusted_page windows"),
    ),
)
WORKER = Room(
    "worker",
    ("client/src/kvd_client/worker",),
    (
        *_tests("client", "cuda_kinds cuda_memory worker large_jobs batches patience real_daemon"),
        *_tests("gpu", "worker_register worker_sleep stream_end registration"),
    ),
)
PROTO = Room(
    "proto",
    _modules("client/src/kvd_proto", "board groups key_status layout page ring tags"),
    (
        *_tests("contract", "board_ring page_levels index_page ready_jobs checksums"),
        *_tests("native", "key_index tag_tables"),
        *_tests("client", "trusted_page patience worker messages"),
        *_tests("fuzz", "parsers"),
    ),
)
ACCESS = Room(
    "access",  # who may ask, and how much of it at once
    ("kvd/control/access",),
    (
        *_tests("control", "calls_at_once calls_in_line companion_socket first_contact gate"),
        *_tests("control", "given_up_calls half_messages intake lost_tenants peer_credentials"),
        *_tests("control", "peer_limits policy_of_tenants reload share_of_connections trust"),
        *_tests("control", "shares_of_first_contact slow_clients unread_descriptors"),
    ),
)
RUNTIME = Room(
    "runtime",
    ("kvd/runtime",),
    (
        *_tests("control", "driver event_log few_threads given_up_calls mending mover_shares"),
        *_tests("control", "pending_jobs pieces record recovery_in_pieces small_bounds"),
        *_tests("control", "store_and_load told_lookups told_rows turns verify"),
        *_tests("client", "tier_events"),
        *_tests("simulation", "whole"),
        *_tests("tiers", "departures seam tier_churn tier_faults tier_recovery told_by_tiers"),
    ),
)
VALKEY = Room(
    "valkey",
    ("kvd/tiers/valkey",),
    (
        *_tests("tiers", "valkey_addresses valkey_contract valkey_faults valkey_late_writes"),
        *_tests("tiers", "valkey_line"),
        *_tests("tiers", "valkey_moves valkey_process valkey_refusals valkey_turns tier_config"),
    ),
)
ROOMS = {
    room.name: room
    for room in (CORE, POOL, MOVER, DISK, SCHEDULER, WORKER, PROTO, ACCESS, RUNTIME, VALKEY)
}
