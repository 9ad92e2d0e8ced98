"""How a rank's bytes move is in status, metrics and log, and nothing slower stays silent."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvd.cli.status import as_json, as_text
from kvd.control.registration.gpu_capacity import in_words
from kvd.core.engines.layouts import RankPlacement
from kvd.core.keys import NamespaceId, SessionId
from kvd.mover.facts import CUDA_IPC, GpuFacts, MoverFacts
from kvd.observability.metrics import Metrics
from kvd.runtime.fleet import AttachedMover
from kvd_proto.v1 import operator_pb2 as pb

UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"
GIB = 1 << 30
MIB = 1 << 20
GPU = GpuFacts(UUID, "NVIDIA H100", "580", 410 * MIB, 62 * GIB)
FACTS = MoverFacts(CUDA_IPC, "batch", GPU)


@dataclass
class Process:
    """A mover process, for what is read of it here."""

    facts: MoverFacts


def attached(session: int, rank: int, facts: MoverFacts) -> AttachedMover:
    process: Any = Process(facts)
    placement = RankPlacement(rank, rank, writer=True)
    return AttachedMover(process, placement, SessionId(session), NamespaceId(1))


def samples(*movers: AttachedMover) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What a scrape reads, by name and sorted labels; no series comes twice."""
    metrics = Metrics("1")
    metrics.watch_ranks(lambda: movers)
    found = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            place = (sample.name, tuple(sorted(sample.labels.items())))
            assert place not in found, f"{place} comes twice"
            found[place] = sample.value
    return found


def of_rank(session: int, rank: int, gpu: str, **more: str) -> tuple[tuple[str, str], ...]:
    labels = {"session": str(session), "rank": str(rank), "gpu": gpu, **more}
    return tuple(sorted(labels.items()))


def test_two_engines_and_two_ranks_on_one_gpu_are_told_apart_in_metrics() -> None:
    other = replace(FACTS, gpu=replace(GPU, context_bytes=500 * MIB))
    read = samples(attached(1, 0, FACTS), attached(1, 1, FACTS), attached(2, 0, other))
    contexts = {k[1]: v for k, v in read.items() if k[0] == "kvd_mover_context_bytes"}
    assert contexts == {
        of_rank(1, 0, UUID): 410 * MIB,
        of_rank(1, 1, UUID): 410 * MIB,
        of_rank(2, 0, UUID): 500 * MIB,
    }


def test_metrics_say_how_a_rank_is_reached_and_what_did_not_go_as_it_should() -> None:
    slow = replace(FACTS, gpu=replace(GPU, unregistered_extents=3, staged_bytes=5 * MIB))
    read = samples(attached(4, 2, slow), attached(5, 0, MoverFacts()))
    here = of_rank(4, 2, UUID)
    info = {"transport": "cuda-ipc", "copier": "batch"}
    assert read["kvd_rank_transport_info", of_rank(4, 2, UUID, **info)] == 1
    assert read["kvd_mover_registered_bytes", here] == 62 * GIB
    assert read["kvd_mover_unregistered_extents", here] == 3
    assert read["kvd_mover_staged_bytes_total", here] == 5 * MIB


def test_a_rank_in_host_memory_has_a_transport_and_nothing_of_a_gpu() -> None:
    read = samples(attached(5, 0, MoverFacts()))
    host = {"transport": "host-shm", "copier": "memcpy"}
    ours = [place for place in read if place[0].startswith(("kvd_rank", "kvd_mover_"))]
    assert ours == [("kvd_rank_transport_info", of_rank(5, 0, "", **host))]


# -- kvd status -------------------------------------------------------------------------------


def rank_status(rank: int, **gpu: Any) -> pb.RankStatus:
    fields: dict[str, Any] = {
        "uuid": UUID,
        "name": "NVIDIA H100",
        "driver_version": "580",
        "context_bytes": 410 * MIB,
        "registered_bytes": 62 * GIB,
        "numa_node": 1,
    }
    return pb.RankStatus(
        rank=rank,
        transport="cuda-ipc",
        copier="batch",
        gpu=pb.GpuStatus(**{**fields, **gpu}),
    )


def status_of(*ranks: pb.RankStatus) -> pb.StatusResponse:
    session = pb.SessionStatus(session_id=7, ranks=ranks, world_size=len(ranks))
    return pb.StatusResponse(sessions=[session])


def test_status_shows_what_a_rank_on_a_gpu_takes_and_by_what_it_copies() -> None:
    lines = list(as_text(status_of(rank_status(0), rank_status(1, numa_node=-1))))
    assert [line.split()[4] for line in lines if "cuda-ipc" in line] == ["cuda-ipc", "cuda-ipc"]
    assert all("batch" in line for line in lines if "cuda-ipc" in line)
    heads = next(n for n, line in enumerate(lines) if "PINNED" in line)
    assert lines[heads + 1].split() == ["7", "0", UUID, "410.0", "MiB", "62.0", "GiB", "1"]
    assert lines[heads + 2].split()[-1] == "unknown"
    assert not any("WARNING" in line for line in lines)


def test_status_says_what_copies_and_why_it_is_not_faster() -> None:
    why = "there is no compiler"
    slow = pb.RankStatus(rank=1, transport="host-shm", copier="numpy", copier_note=why)
    fast = pb.RankStatus(rank=0, transport="host-shm", copier="native-avx2")
    lines = list(as_text(status_of(fast, slow)))
    assert [line for line in lines if "copies by" in line] == [
        "  session 7 rank 1 copies by numpy: there is no compiler"
    ]
    assert sum("native-avx2" in line for line in lines) == 1


def test_status_of_an_earlier_daemon_has_no_line_of_a_copier_without_a_name() -> None:
    earlier = pb.RankStatus(transport="host-shm", copier_note="no compiler was there")
    assert not [line for line in as_text(status_of(earlier)) if "copies by" in line]


def test_the_log_says_what_copies_and_why_it_is_not_faster() -> None:
    slow, fast = (MoverFacts.of_host_memory(level, "it is off") for level in (None, "avx512"))
    assert in_words(slow) == "host-shm, copied by numpy, since it is off"
    assert in_words(fast) == "host-shm, copied by native-avx512"


def test_status_warns_of_extents_that_are_not_pinned_and_of_staged_copies() -> None:
    slow = rank_status(1, unregistered_extents=2, staged_bytes=12 * MIB)
    warnings = [line for line in as_text(status_of(rank_status(0), slow)) if "WARNING" in line]
    assert len(warnings) == 2
    assert all("session 7 rank 1" in line for line in warnings)
    assert "2 extents can't be pinned" in warnings[0]
    assert "12.0 MiB went through the buffer" in warnings[1]


def test_status_of_ranks_in_host_memory_has_no_table_of_gpus() -> None:
    lines = list(as_text(status_of(pb.RankStatus(transport="host-shm"))))
    assert not any("GPU" in line or "WARNING" in line for line in lines)


def test_the_json_form_has_figures_as_numbers_and_a_drivers_version_as_text() -> None:
    told: Any = json.loads(json.dumps(as_json(status_of(rank_status(0)))))
    gpu = told["sessions"][0]["ranks"][0]["gpu"]
    assert (gpu["driver_version"], gpu["context_bytes"]) == ("580", 410 * MIB)
    assert gpu["staged_bytes"] == 0


# -- the log ----------------------------------------------------------------------------------


def test_the_line_of_a_registration_names_path_copier_and_context() -> None:
    assert in_words(FACTS) == (
        f"cuda-ipc on {UUID} (NVIDIA H100, driver 580); copied by batch; context 410 MiB"
    )
    assert in_words(MoverFacts()) == "host-shm, copied by memcpy"
    unknown = replace(FACTS, copier="plain", gpu=replace(GPU, context_bytes=0))
    assert "copied by plain; context of unknown size" in in_words(unknown)
