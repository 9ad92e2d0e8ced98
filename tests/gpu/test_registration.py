"""Ranks on a GPU at a real daemon, by bare calls: what they are told, and what is refused."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvd.control.registration.gpu_capacity import GpuTerms
from kvd_proto.v1 import common_pb2
from kvd_proto.v1 import worker_pb2 as pb
from tests.control.daemon_rig import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    RawScheduler,
    RawWorker,
    RunningDaemon,
    block,
    daemon,
    details_of,
    identity,
    load_job,
    refusal,
    store_job,
)
from tests.control.mover_rig import proc_text
from tests.forked import run
from tests.gpu.driver import Driver, Exporter
from tests.ports import free_port
from tests.waiting import wait_until

MIB = 1 << 20
KV_BYTES = NUM_BLOCKS * BLOCK_BYTES
ALLOCATION_BYTES = 4 * MIB
OTHER_GPU = "GPU-ffffffff-ffff-ffff-ffff-ffffffffffff"


class GpuWorker(RawWorker):
    """A worker's calls, for KV that an exporter owns: at an offset in an allocation of its."""

    def __init__(self, path: str, exporter: Exporter, driver: Driver) -> None:
        super().__init__(path)
        self.path = path
        self.exporter = exporter
        self.driver = driver
        self.address = exporter.allocate(ALLOCATION_BYTES) + MIB
        self.handle, self.offset, _size = exporter.ipc_handle(self.address)
        self.answer = pb.RegisterRankResponse()

    def ipc(self, **changes: Any) -> pb.MemoryHandle:
        fields: dict[str, Any] = {
            "handle": self.handle,
            "offset": self.offset,
            "bytes": KV_BYTES,
            "gpu_uuid": self.exporter.uuid,
        }
        return pb.MemoryHandle(cuda_ipc=pb.CudaIpc(**{**fields, **changes}))

    def room(self) -> pb.GpuMemory:
        free = self.driver.free_bytes()
        return pb.GpuMemory(free_bytes=free, total_bytes=max(free, 8 << 30))

    def request(self, **changes: Any) -> pb.RegisterRankRequest:
        ours: dict[str, Any] = {"memories": [self.ipc()], "gpu_memory": self.room()}
        return super().request(**{**ours, **changes})

    def register(self, **changes: Any) -> int:
        self.answer = self.call(self.worker.RegisterRank, self.request(**changes))
        self.registration = self.answer.registration_id
        self._descriptors += self.companion.rank_channel(self.registration)
        return self.answer.mover_pid

    def write(self, number: int, content: bytes) -> None:
        self.exporter.write(self.address + number * BLOCK_BYTES, content)

    def read(self, number: int) -> bytes:
        return self.exporter.read(self.address + number * BLOCK_BYTES, BLOCK_BYTES)


@contextmanager
def scheduler_of(worker: GpuWorker, name: str = "e0") -> Iterator[RawScheduler]:
    """The open session of an engine whose only rank this worker has registered."""
    scheduler = RawScheduler(worker.path, identity=identity(name))
    try:
        assert scheduler.opened.session_id
        scheduler.next("ranks_ready")
        yield scheduler
    finally:
        scheduler.close()


PORT = free_port()


@pytest.fixture(scope="module")
def running(driver: Driver) -> Iterator[RunningDaemon]:
    flags = ("--pool-bytes", "32MiB", "--http-port", str(PORT))
    with daemon(*flags, environment=driver.environment()) as started:
        yield started


@pytest.fixture
def worker(running: RunningDaemon, exporter: Exporter, driver: Driver) -> Iterator[GpuWorker]:
    made = GpuWorker(running.socket, exporter, driver)
    yield made
    made.close()
    wait_until(lambda: not running.movers(), "the movers' end")


@pytest.fixture
def only_fake(driver: Driver) -> None:
    if not driver.is_fake:
        pytest.skip("nothing can be injected into a real driver")


def status(running: RunningDaemon, *more: str) -> str:
    shown = run("status", "--socket", running.socket, *more)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


def metric_lines(name: str) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=25) as answer:
        text = answer.read().decode()
    return [line for line in text.splitlines() if line.startswith(name + "{")]


def refused(worker: GpuWorker, **changes: Any) -> tuple[str, str, str]:
    """(reason, field, message) of a registration; no mover and no device memory is left.

    A real GPU's memory is looked at in test_deaths, which runs alone: here others take theirs.
    """
    free_before = worker.driver.free_bytes() if worker.driver.is_fake else 0
    with pytest.raises(grpc.RpcError) as caught:
        worker.register(**changes)
    details = details_of(caught.value)
    wait_until(lambda: worker.driver.free_bytes() >= free_before, "the mover's device memory")
    return details.reason, details.metadata["field"], caught.value.details() or ""


# -- what a rank is told ------------------------------------------------------------------------


def test_a_rank_hears_its_transport_and_what_its_mover_takes(
    running: RunningDaemon, worker: GpuWorker, driver: Driver
) -> None:
    worker.register()
    assert worker.answer.transport == "cuda-ipc"
    assert worker.answer.gpu_context_bytes > 0
    if driver.is_fake:
        assert worker.answer.gpu_context_bytes >= driver.setting("context_bytes.bytes")
    line = [text for text in running.log.read_text().splitlines() if "cuda-ipc on" in text][-1]
    assert worker.exporter.uuid in line
    assert "copied by batch" in line


def offered(worker: GpuWorker, address: int) -> pb.MemoryHandle:
    """Exported memory, whose descriptor the daemon has."""
    fd = worker.exporter.export_fd(address)
    worker.companion.offer_memory(9, fd, device_memory=True)
    os.close(fd)
    where: dict[str, Any] = {"gpu_uuid": worker.exporter.uuid}
    where["allocation_bytes"] = ALLOCATION_BYTES
    return pb.MemoryHandle(vmm_fd=pb.VmmFd(memory_token=9, bytes=KV_BYTES, **where))


def test_memory_by_descriptor_is_reached_and_said_so(worker: GpuWorker, exporter: Exporter) -> None:
    memory = offered(worker, exporter.allocate(ALLOCATION_BYTES, "vmm_exportable"))
    worker.register(memories=[memory])
    assert worker.answer.transport == "cuda-vmm"


def test_memory_by_descriptor_is_nobodys_once_its_rank_is_unregistered(
    worker: GpuWorker, exporter: Exporter
) -> None:
    memory = offered(worker, exporter.allocate(ALLOCATION_BYTES, "vmm_exportable"))
    worker.register(memories=[memory])
    ending = pb.UnregisterRankRequest(registration_id=worker.registration)
    worker.call(worker.worker.UnregisterRank, ending)
    _, field, message = refused(worker, memories=[memory])
    assert (field, "no memory 9 was offered" in message) == ("memories[0].memory_token", True)


def test_control_itself_never_loads_cuda(running: RunningDaemon, worker: GpuWorker) -> None:
    mover = worker.register()
    maps = {pid: Path(f"/proc/{pid}/maps").read_text() for pid in (running.pid, mover)}
    assert "libcuda.so" in maps[mover]
    assert "libcuda.so" not in maps[running.pid]


def visible_gpus(pid: int) -> str:
    variables = dict(v.split("=", 1) for v in proc_text(pid, "environ").split("\0") if v)
    return variables["CUDA_VISIBLE_DEVICES"]


def test_a_mover_sees_the_one_gpu_of_its_rank_or_none(
    running: RunningDaemon, worker: GpuWorker
) -> None:
    on_gpu = worker.register(world_size=2)
    on_host = RawWorker(running.socket)
    beside = on_host.register(world_size=2, rank=1, shard=1)
    assert (visible_gpus(on_gpu), visible_gpus(beside)) == (worker.exporter.uuid, "")
    on_host.close()


def test_bytes_of_a_gpu_come_back_by_bare_calls(running: RunningDaemon, worker: GpuWorker) -> None:
    worker.register()
    contents = [block(number) for number in range(NUM_BLOCKS)]
    for number, content in enumerate(contents):
        worker.write(number, content)
    with scheduler_of(worker) as scheduler:
        run_job(scheduler, worker, stores=[store_job(1, [1, 2], [3, 4])])
        run_job(scheduler, worker, loads=[load_job(2, [2, 1], [40, 63])])
    expected = [*contents[:40], contents[4], *contents[41:63], contents[3]]
    assert [worker.read(number) for number in range(NUM_BLOCKS)] == expected


def run_job(scheduler: RawScheduler, worker: GpuWorker, **parts: Any) -> None:
    (verdict,) = scheduler.step(end_step=True, **parts).verdicts
    assert verdict.accepted, verdict
    worker.ready(verdict.job_id)
    (ended,) = scheduler.next("jobs_ended").jobs
    assert ended.status == common_pb2.JOB_STATUS_DONE, ended


def test_two_engines_on_one_gpu_stand_apart_in_status_and_metrics(
    running: RunningDaemon, worker: GpuWorker, exporter: Exporter, driver: Driver
) -> None:
    with closing(GpuWorker(running.socket, exporter, driver)) as other:
        worker.register(identity=identity("one"))
        other.register(identity=identity("two"))
        with scheduler_of(worker, "one") as one, scheduler_of(other, "two") as two:
            told = json.loads(status(running, "--json"))
            shown = metric_lines("kvd_mover_context_bytes")
            transports = metric_lines("kvd_rank_transport_info")
            table = status(running)
            sessions = (one.id, two.id)
    gpus = {s["engine_id"]: s["ranks"][0]["gpu"] for s in told["sessions"]}
    assert gpus["one"]["uuid"] == gpus["two"]["uuid"] == exporter.uuid
    assert gpus["one"]["context_bytes"] > 0
    assert len(shown) == len(transports) == 2
    for session in sessions:
        (line,) = [text for text in shown if f'session="{session}"' in text]
        assert exporter.uuid in line
    assert all('transport="cuda-ipc"' in line for line in transports)
    assert sum(exporter.uuid in line for line in table.splitlines()) == 2


def test_a_second_live_start_of_an_engine_is_refused_on_a_gpu_too(
    running: RunningDaemon, worker: GpuWorker, exporter: Exporter, driver: Driver
) -> None:
    worker.register()
    with closing(GpuWorker(running.socket, exporter, driver)) as second:
        reason, field, _ = refused(second, identity=identity(nonce=b"m" * 16))
    assert (reason, field) == ("ENGINE_ALREADY_LIVES", "identity.engine_id")


@pytest.mark.usefixtures("only_fake")
def test_extents_that_can_not_be_pinned_are_warned_of_and_still_copied(
    running: RunningDaemon, worker: GpuWorker, driver: Driver
) -> None:
    worker.register()
    driver.inject("register_fails_after", bytes=MIB)  # no extent can be, from now on
    worker.write(0, block(3))
    with scheduler_of(worker) as scheduler:
        run_job(scheduler, worker, stores=[store_job(1, [3], [0])])
        run_job(scheduler, worker, loads=[load_job(2, [3], [9])])
        wait_until(lambda: gpu_of(worker).staged_bytes > BLOCK_BYTES, "the mover's word")
        table = status(running)
        (staged,) = metric_lines("kvd_mover_staged_bytes_total")
        (unpinned,) = metric_lines("kvd_mover_unregistered_extents")
    assert worker.read(9) == block(3)
    assert "WARNING" in table
    assert "can't be pinned" in table
    assert float(staged.split()[-1]) >= 2 * BLOCK_BYTES
    assert float(unpinned.split()[-1]) > 0


def gpu_of(worker: GpuWorker) -> Any:
    """What status says of the GPU of the one rank."""
    (session,) = worker.status().sessions
    return session.ranks[0].gpu


# -- what is refused ----------------------------------------------------------------------------


def test_a_gpu_that_the_daemon_does_not_see_is_named(worker: GpuWorker) -> None:
    reason, field, message = refused(worker, memories=[worker.ipc(gpu_uuid=OTHER_GPU)])
    assert (reason, field) == ("GPU_UNKNOWN", "memories[0]")
    assert OTHER_GPU in message


def test_too_little_free_memory_is_refused_before_a_mover_starts(worker: GpuWorker) -> None:
    room = pb.GpuMemory(free_bytes=1 * MIB, total_bytes=80 << 30)
    reason, field, message = refused(worker, gpu_memory=room)
    assert (reason, field) == ("GPU_MEMORY_SHORT", "gpu_memory.free_bytes")
    assert "--gpu-memory-utilization by 0.01" in message


def test_what_a_mover_took_is_what_the_next_one_is_expected_to_take(
    running: RunningDaemon, worker: GpuWorker
) -> None:
    worker.register()
    taken = worker.answer.gpu_context_bytes // MIB
    worker.unregister()
    wait_until(lambda: not running.movers(), "the mover's end")
    room = pb.GpuMemory(free_bytes=1 * MIB, total_bytes=80 << 30)
    _, _, message = refused(worker, gpu_memory=room)
    assert "(measured)" in message or taken >= GpuTerms().context_bytes // MIB
    if (
        worker.driver.is_fake
    ):  # on a real GPU others may let go meanwhile, where NVML counts nothing
        assert int(message.split("context takes ")[1].split()[0]) <= taken


@pytest.mark.usefixtures("only_fake")
def test_a_mover_that_finds_no_room_for_its_context_says_so(
    worker: GpuWorker, driver: Driver
) -> None:
    driver.inject("context_fails", code=2)
    reason, _, message = refused(worker)
    assert reason == "GPU_MEMORY_SHORT"
    assert "gpu_memory_utilization" in message


def test_a_handle_of_memory_that_is_gone_is_refused(
    running: RunningDaemon, worker: GpuWorker, driver: Driver
) -> None:
    gone = Exporter(driver)
    handle, offset, _ = gone.ipc_handle(gone.allocate(ALLOCATION_BYTES))
    gone.kill()
    memories = [worker.ipc(handle=handle, offset=offset)]
    reason, field, _ = refused(worker, memories=memories)
    assert reason == "GPU_HANDLE_REFUSED"
    assert field.startswith("memories[0]")


def test_a_descriptor_that_is_no_export_is_refused(worker: GpuWorker, exporter: Exporter) -> None:
    with Path("/dev/null").open("rb+") as nothing:
        worker.companion.offer_memory(9, nothing.fileno(), device_memory=True)
    vmm = pb.VmmFd(
        memory_token=9, bytes=KV_BYTES, gpu_uuid=exporter.uuid, allocation_bytes=KV_BYTES
    )
    reason, field, _ = refused(worker, memories=[worker.ipc(), pb.MemoryHandle(vmm_fd=vmm)])
    assert reason == "GPU_HANDLE_REFUSED"
    assert field.startswith("memories[1]")


def test_a_region_that_its_allocation_does_not_hold_is_refused(worker: GpuWorker) -> None:
    reason, field, _ = refused(worker, memories=[worker.ipc(offset=1 << 32)])
    assert (reason, field) == ("INVALID_ARGUMENT", "memories[0].bytes")


@pytest.mark.usefixtures("only_fake")
@pytest.mark.parametrize(
    ("fault", "values", "fix"),
    [
        ("mps", {"on": True}, "MPS"),
        ("compute_mode", {"mode": 3}, "nvidia-smi"),
        ("compute_mode", {"mode": 2}, "nvidia-smi"),
    ],
)
def test_modes_that_are_not_proved_safe_are_refused(
    worker: GpuWorker, driver: Driver, fault: str, values: dict[str, int], fix: str
) -> None:
    driver.inject(fault, **values)
    with pytest.raises(grpc.RpcError, match=fix):
        worker.register()
    code, reason, _field = refusal(worker.register)
    assert (code, reason) == ("FAILED_PRECONDITION", "GPU_MODE_UNSUPPORTED")


def test_a_refused_rank_may_register_once_it_is_mended(worker: GpuWorker) -> None:
    refused(worker, memories=[worker.ipc(gpu_uuid=OTHER_GPU)])
    worker.register()
    assert worker.answer.transport == "cuda-ipc"
