"""What a daemon asks of memory on a GPU before any driver sees it, and without one."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvd.control.access.peers import Credentials, Peer, Role
from kvd.control.registration.gpu_capacity import MAX_GPUS, GpuCapacity, GpuTerms
from kvd.control.registration.memories import MAX_HOST_BYTES
from kvd.control.services.worker import require_kept
from kvd.core.errors import InvalidArgument, UnknownRegistration
from kvd.core.keys import MoverId
from kvd.mover import registration_errors
from kvd.mover.facts import GpuFacts
from kvd.mover.layout import CudaRegion, MoverConfig
from kvd.processes.mappings import ExtentFiles
from kvd_client.companion import CompanionRefused
from kvd_proto.v1 import worker_pb2 as pb
from tests.control.daemon_rig import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    RawWorker,
    RunningDaemon,
    daemon,
    group_layout,
    memory,
    refusal,
)
from tests.waiting import wait_until

GIB = 1 << 30
MIB = 1 << 20
UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"
OTHER = "GPU-ffffffff-89ab-cdef-0123-456789abcdef"
ROOM = pb.GpuMemory(free_bytes=2 * GIB, total_bytes=80 * GIB)
BYTES = NUM_BLOCKS * BLOCK_BYTES
DEVICE_TOKEN = 9  # offered as device memory by every worker here


def ipc(**changes: Any) -> pb.MemoryHandle:
    fields: dict[str, Any] = {"handle": bytes(64), "bytes": BYTES, "gpu_uuid": UUID}
    return pb.MemoryHandle(cuda_ipc=pb.CudaIpc(**{**fields, **changes}))


def vmm(**changes: Any) -> pb.MemoryHandle:
    fields: dict[str, Any] = {
        "memory_token": DEVICE_TOKEN,
        "bytes": BYTES,
        "gpu_uuid": UUID,
        "allocation_bytes": 2 * MIB,
    }
    return pb.MemoryHandle(vmm_fd=pb.VmmFd(**{**fields, **changes}))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """A daemon that has no CuPy, wherever the tests run."""
    site = tmp_path_factory.mktemp("site")
    (site / "cupy.py").write_text("raise ModuleNotFoundError(name='cupy')")
    with daemon("--pool-bytes", "32MiB", environment={"PYTHONPATH": str(site)}) as started:
        yield started


@pytest.fixture
def worker(running: RunningDaemon) -> Iterator[RawWorker]:
    made = RawWorker(running.socket)
    fd = os.open("/dev/null", os.O_RDWR)  # a character device, as drivers export by
    made.companion.offer_memory(DEVICE_TOKEN, fd, device_memory=True)
    os.close(fd)
    yield made
    made.close()


HANDLES: list[tuple[dict[str, Any], str]] = [
    ({"memories": [ipc(handle=bytes(63))]}, "memories[0].handle"),
    ({"memories": [ipc(handle=b"")]}, "memories[0].handle"),
    ({"memories": [ipc(handle=bytes(65))]}, "memories[0].handle"),
    ({"memories": [ipc(offset=4)]}, "memories[0].offset"),
    ({"memories": [ipc(bytes=0)]}, "memories[0].bytes"),
    ({"memories": [ipc(bytes=12)]}, "memories[0].bytes"),
    ({"memories": [ipc(offset=80 * GIB)]}, "memories[0].bytes"),
    ({"memories": [ipc(offset=(1 << 64) - 8)]}, "memories[0].bytes"),
    ({"memories": [ipc(gpu_uuid="")]}, "memories[0].gpu_uuid"),
    ({"memories": [ipc(gpu_uuid="0")]}, "memories[0].gpu_uuid"),
    ({"memories": [ipc(gpu_uuid=UUID[:-1])]}, "memories[0].gpu_uuid"),
    ({"memories": [ipc(gpu_uuid=UUID + "\n")]}, "memories[0].gpu_uuid"),
    ({"memories": [ipc(gpu_uuid=f"{UUID},{OTHER}")]}, "memories[0].gpu_uuid"),
    ({"memories": [ipc(), ipc(gpu_uuid=OTHER)]}, "memories[1].gpu_uuid"),
    ({"memories": [ipc(), vmm(gpu_uuid=OTHER)]}, "memories[1].gpu_uuid"),
    ({"memories": [ipc(), memory()]}, "memories[1]"),
    ({"memories": [memory(), vmm()]}, "memories[1]"),
    ({"memories": [memory(memory_token=DEVICE_TOKEN)]}, "memories[0].memory_token"),
    ({"memories": [vmm(memory_token=8)]}, "memories[0].memory_token"),
    ({"memories": [vmm(memory_token=7)]}, "memories[0].memory_token"),
    ({"memories": [vmm(allocation_bytes=0)]}, "memories[0].allocation_bytes"),
    ({"memories": [vmm(allocation_bytes=81 * GIB)]}, "memories[0].allocation_bytes"),
    ({"memories": [vmm(allocation_bytes=BYTES - 8)]}, "memories[0].bytes"),
    ({"memories": [vmm(offset=2 * MIB)]}, "memories[0].bytes"),
    ({"memories": [ipc()], "gpu_memory": None}, "gpu_memory"),
    ({"memories": [ipc()], "gpu_memory": pb.GpuMemory()}, "gpu_memory.total_bytes"),
    (
        {"memories": [ipc()], "gpu_memory": pb.GpuMemory(free_bytes=2, total_bytes=1)},
        "gpu_memory.total_bytes",
    ),
    ({"memories": [ipc()], "groups": [group_layout(num_blocks=65)]}, "groups[0].fragments[0].base"),
]


@pytest.mark.parametrize(("changes", "named"), HANDLES)
def test_memory_that_can_not_be_is_refused_with_the_field_named(
    worker: RawWorker, changes: dict[str, Any], named: str
) -> None:
    code, reason, field = refusal(lambda: worker.register(**{"gpu_memory": ROOM, **changes}))
    assert (code, reason, field) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT", named)


def test_a_gpus_name_is_looked_at_only_where_it_is_short(worker: RawWorker) -> None:
    memories = [ipc(gpu_uuid="GPU-" + "\u0130" * 2_000_000)]
    said = refusal(lambda: worker.register(memories=memories, gpu_memory=ROOM))
    assert said == ("INVALID_ARGUMENT", "STRING_TOO_LONG", "memories[0].gpu_uuid")


def test_a_mig_instance_is_refused_for_what_it_is(worker: RawWorker) -> None:
    memories = [ipc(gpu_uuid="MIG-01234567-89ab-cdef-0123-456789abcdef")]
    said = refusal(lambda: worker.register(memories=memories, gpu_memory=ROOM))
    assert said == ("FAILED_PRECONDITION", "GPU_MODE_UNSUPPORTED", "memories[0].gpu_uuid")


# -- room -------------------------------------------------------------------------------------


def short_of_memory(worker: RawWorker, free_bytes: int) -> str:
    """What the daemon says to so little free memory."""
    room = pb.GpuMemory(free_bytes=free_bytes, total_bytes=80 * GIB)
    with pytest.raises(Exception, match="--gpu-memory-utilization") as caught:
        worker.register(memories=[ipc()], gpu_memory=room)
    (said, field) = refusal(lambda: worker.register(memories=[ipc()], gpu_memory=room))[1:]
    assert (said, field) == ("GPU_MEMORY_SHORT", "gpu_memory.free_bytes")
    return str(caught.value)


def test_too_little_free_memory_is_refused_with_how_much_the_engine_must_leave(
    worker: RawWorker,
) -> None:
    assert "by 0.01 " in short_of_memory(worker, 639 * MIB)  # of 640 MiB, and 1 MiB is 0.00001
    assert f"{UUID}: 0 MiB of 81920 MiB are free" in short_of_memory(worker, 0)


def test_the_assumed_context_is_the_operators_to_set() -> None:
    with daemon("--pool-bytes", "32MiB", "--gpu-context-bytes", "2GiB") as started:
        worker = RawWorker(started.socket)
        assert "takes 2048 MiB (assumed, by gpu_context_bytes)" in short_of_memory(worker, 0)
        assert "by 0.03 " in short_of_memory(worker, 0)  # 2 of 80 GiB are 0.025
        worker.close()


def gpu_facts(context_bytes: int) -> GpuFacts:
    return GpuFacts(UUID, "NVIDIA H100", "580", context_bytes)


def test_what_a_mover_measured_counts_instead_of_what_was_assumed() -> None:
    room = GpuCapacity(GpuTerms(context_bytes=512 * MIB))
    free = pb.GpuMemory(free_bytes=450 * MIB, total_bytes=80 * GIB)
    with pytest.raises(InvalidArgument, match=r"takes 512 MiB \(assumed"):
        room.config(UUID, free)
    room.measured(gpu_facts(400 * MIB))
    assert room.config(UUID, free).free_bytes_before == 450 * MIB
    room.measured(gpu_facts(3 * GIB))  # an engine captured its graphs meanwhile
    assert room.config(UUID, free).uuid == UUID
    assert room.context_bytes(OTHER) == 512 * MIB


def test_what_an_engine_allocated_while_its_mover_started_bars_nobody_for_ever() -> None:
    room = GpuCapacity(GpuTerms(context_bytes=512 * MIB))
    room.measured(gpu_facts(3 * GIB))  # most of it the engine's graphs; no mover may follow
    enough = pb.GpuMemory(free_bytes=GIB, total_bytes=80 * GIB)
    assert room.config(UUID, enough).free_bytes_before == GIB
    with pytest.raises(InvalidArgument, match=r"takes 512 MiB \(assumed"):
        room.config(UUID, pb.GpuMemory(free_bytes=511 * MIB, total_bytes=80 * GIB))


@pytest.mark.parametrize("measured", [0, MIB, 30 * GIB])
def test_a_measurement_that_can_be_no_context_is_not_kept(measured: int) -> None:
    room = GpuCapacity(GpuTerms())
    room.measured(gpu_facts(measured))
    assert room.context_bytes(UUID) == 640 * MIB


def test_figures_of_so_many_gpus_are_kept() -> None:
    room = GpuCapacity(GpuTerms(context_bytes=512 * MIB))
    for number in range(MAX_GPUS + 1):
        room.measured(replace(gpu_facts(400 * MIB), uuid=str(number)))
    assert room.context_bytes(str(MAX_GPUS - 1)) == 400 * MIB
    assert room.context_bytes(str(MAX_GPUS)) == 512 * MIB
    room.measured(replace(gpu_facts(300 * MIB), uuid="0"))
    assert room.context_bytes("0") == 300 * MIB, "it goes on being measured"


def test_what_an_earlier_mover_of_the_rank_gives_back_counts_as_free() -> None:
    room = GpuCapacity(GpuTerms())
    free = pb.GpuMemory(free_bytes=240 * MIB, total_bytes=80 * GIB)
    assert room.config(UUID, free, returning_bytes=400 * MIB).uuid == UUID
    with pytest.raises(InvalidArgument) as refused:
        room.config(UUID, free, returning_bytes=399 * MIB)
    assert refused.value.reason == registration_errors.GPU_MEMORY_SHORT


# -- a daemon without CUDA ----------------------------------------------------------------------


@pytest.mark.parametrize("memories", [[ipc()], [vmm()], [ipc(), vmm()]])
def test_a_daemon_without_cupy_says_what_to_install_and_leaves_no_mover(
    running: RunningDaemon, worker: RawWorker, memories: list[pb.MemoryHandle]
) -> None:
    with pytest.raises(Exception, match=r"pip install \./client '\.\[cuda12\]'"):
        worker.register(memories=memories, gpu_memory=ROOM)
    said = refusal(lambda: worker.register(memories=memories, gpu_memory=ROOM))
    assert said[:2] == ("INVALID_ARGUMENT", "TRANSPORT_UNSUPPORTED")
    wait_until(lambda: not running.movers(), "the movers' end")


def test_a_worker_that_was_refused_for_its_gpu_may_register_host_memory(worker: RawWorker) -> None:
    refusal(lambda: worker.register(memories=[ipc()], gpu_memory=ROOM))
    assert worker.register()


def test_holes_without_end_are_no_ranks_memory(worker: RawWorker) -> None:
    """Its mover would look at each page: for days, at what a file of no pages may be long."""
    sparse = os.memfd_create("holes")
    os.ftruncate(sparse, MAX_HOST_BYTES + BYTES)
    worker.companion.offer_memory(5, sparse)
    os.close(sparse)
    whole = [memory(memory_token=5, bytes=MAX_HOST_BYTES)]
    for memories in (
        [memory(memory_token=5, bytes=MAX_HOST_BYTES + 8)],
        [*whole, memory(memory_token=5, bytes=8)],
    ):
        said = refusal(partial(worker.register, memories=memories))
        field = f"memories[{len(memories) - 1}].bytes"
        assert said == ("INVALID_ARGUMENT", "INVALID_ARGUMENT", field)
    assert worker.register(memories=whole)


# -- descriptors --------------------------------------------------------------------------------


def test_an_export_of_device_memory_is_taken_though_it_shows_no_size(worker: RawWorker) -> None:
    a_device = os.open("/dev/null", os.O_RDWR)
    for fd in (a_device, os.memfd_create("export")):
        worker.companion.offer_memory(3, fd, device_memory=True)
        os.close(fd)


def test_what_can_be_no_export_of_device_memory_is_refused(worker: RawWorker) -> None:
    one, two = socket.socketpair()
    reading, writing = os.pipe()
    main, terminal = os.openpty()
    fds = [
        *(one.detach(), two.detach(), reading, writing, terminal, main),
        os.open("/proc/self/status", os.O_RDONLY),
        os.open("/usr", os.O_RDONLY),
        os.open("/usr", os.O_PATH),
    ]
    for fd in fds:
        with pytest.raises(CompanionRefused, match="no export of device memory"):
            worker.companion.offer_memory(3, fd, device_memory=True)
        os.close(fd)
    said = refusal(lambda: worker.register(memories=[vmm(memory_token=3)], gpu_memory=ROOM))
    assert said[2] == "memories[0].memory_token"


def test_an_anonymous_inode_that_no_driver_made_is_refused_by_name(worker: RawWorker) -> None:
    with select.epoll() as poll:
        fds = {
            "eventpoll": os.dup(poll.fileno()),
            "eventfd": os.eventfd(0),
            "pidfd": os.pidfd_open(os.getpid()),
        }
    for name, fd in fds.items():
        with pytest.raises(CompanionRefused, match=f"is of kind {name}, and so no export"):
            worker.companion.offer_memory(3, fd, device_memory=True)
        os.close(fd)


def test_a_memory_taken_back_during_a_registration_reaches_no_mover() -> None:
    peer = Peer(Credentials(0, 0, 0, None), Role.WORKER, "test", lambda _message, _fds: None)
    peer.offer(DEVICE_TOKEN, os.memfd_create("first"), is_device=True)
    first = peer.memories[DEVICE_TOKEN]
    by_handle = CudaRegion(0, BYTES, handle=bytes(64))
    by_descriptor = CudaRegion(0, BYTES, fd=first.fd, allocation_bytes=BYTES)
    regions = (by_handle, by_descriptor)
    config = MoverConfig(MoverId(1), regions, (), ExtentFiles(Path("/pool/extents"), 0, 4096))
    require_kept(config, peer)
    other = os.memfd_create("keeps the number of the first from coming again")
    peer.offer(DEVICE_TOKEN, os.dup(other), is_device=True)
    with pytest.raises(InvalidArgument, match="taken back") as refused:
        require_kept(config, peer)
    assert refused.value.field == "memories[1]"
    peer.end()
    os.close(other)


def test_no_mover_starts_for_handles_of_a_worker_that_ended_meanwhile() -> None:
    peer = Peer(Credentials(0, 0, 0, None), Role.WORKER, "test", lambda _message, _fds: None)
    by_handle = CudaRegion(0, BYTES, handle=bytes(64))
    config = MoverConfig(MoverId(1), (by_handle,), (), ExtentFiles(Path("/pool/extents"), 0, 4096))
    require_kept(config, peer)
    peer.end()
    with pytest.raises(UnknownRegistration, match="ended meanwhile"):
        require_kept(config, peer)
