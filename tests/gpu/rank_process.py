"""An engine's worker process: it owns device memory and registers it, as it is told to.

The tests' side is RankProcess, which is an Exporter that can do more. Both sides are one file.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvd_client import (
    CudaMemoryRefused,
    DeviceSpan,
    EngineIdentity,
    Fragment,
    GroupLayout,
    JobReport,
    StepPlan,
    Worker,
    WorkerReport,
)
from kvd_client.worker.cuda_stream import stream_end
from tests.gpu.device_memory import POSIX_FD, Access
from tests.gpu.driver import ROOT, Driver, Exporter
from tests.gpu.exporter import Commands, serve

PLAN_FIELDS = ("flush", "loads", "stores", "computed_stores", "forget")


@dataclass(frozen=True)
class Device:
    """As torch.device."""

    type: str
    index: int


@dataclass(frozen=True)
class Tensor:
    """As a torch tensor on CUDA, over memory of ours."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element_bytes: int
    device: Device = Device("cuda", 0)

    def data_ptr(self) -> int:
        return self.address

    def element_size(self) -> int:
        return self.element_bytes

    def stride(self) -> Sequence[int]:
        return self.strides


def words(address: int, shape: Sequence[int]) -> dict[str, Any]:
    """A contiguous tensor of 2-byte elements, as `RankProcess.register` takes it."""
    strides = [1]
    for length in reversed(shape[1:]):
        strides.insert(0, strides[0] * length)
    return {"address": address, "shape": shape, "strides": strides, "element_bytes": 2}


class RankProcess(Exporter):
    """The worker process of one rank; what it raises comes out here as ExporterError."""

    def __init__(self, driver: Driver, **environment: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.rank_process", str(theirs.fileno())],
                cwd=ROOT,
                env=os.environ | driver.environment() | environment,
                pass_fds=[theirs.fileno()],
            )
        self._socket = ours
        self.pid = self._child.pid
        self.uuid: str = self._ask("uuid")

    def allocate_in_pieces(self, pieces: int) -> tuple[int, int]:
        """(address, bytes): exportable physical allocations, mapped side by side."""
        address, nbytes = self._ask("allocate_in_pieces", pieces)
        return int(address), int(nbytes)

    def allocate_on(self, device: int, nbytes: int) -> int:
        """Memory of another GPU."""
        return int(self._ask("allocate_on", device, nbytes))

    def make(self, daemon_socket: str, identity: EngineIdentity, *place: int) -> None:
        """Its Worker; `place` is its rank and the world's size."""
        self._ask("make", daemon_socket, identity.engine_id, identity.boot_nonce.hex(), *place)

    def register(
        self, memories: Sequence[tuple[int, int] | dict[str, Any]], groups: Sequence[GroupLayout]
    ) -> tuple[str, str] | None:
        """Register (address, bytes) or tensors. (reason, message) where they are refused."""
        told = [
            [
                group.num_blocks,
                [[f.memory, f.base, f.stride, f.bytes] for f in group.fragments],
                group.blocks_per_block,
            ]
            for group in groups
        ]
        refused = self._ask("register", memories, told)
        return None if refused is None else (refused[0], refused[1])

    def wait_registered(self, seconds: float = 30.0) -> bool:
        return bool(self._ask("wait_registered", seconds))

    @property
    def problem(self) -> str:
        return str(self._ask("problem"))

    def warnings(self) -> list[str]:
        """What the client logged so far."""
        return [str(line) for line in self._ask("warnings")]

    def exported(self) -> list[str]:
        """The handles as they were made, in words."""
        return [str(each) for each in self._ask("exported")]

    def descriptors(self) -> list[str]:
        """What its open descriptors are, but for sockets and what gRPC polls with."""
        return [str(each) for each in self._ask("descriptors")]

    def unregister(self, seconds: float = 20.0) -> bool:
        return bool(self._ask("unregister", seconds))

    def compute_later(self, address: int, content: bytes) -> None:
        """Launch on a stream of its own what writes these bytes, and don't wait for it."""
        self._ask("compute_later", address, content.hex())

    def flush_step(self, plan: StepPlan) -> None:
        self._ask("flush_step", [list(getattr(plan, name)) for name in PLAN_FIELDS])

    def start_loads(self, plan: StepPlan) -> None:
        self._ask("start_loads", [list(getattr(plan, name)) for name in PLAN_FIELDS])

    def finish_step(self, plan: StepPlan) -> None:
        """Its stores wait for what `compute_later` launched."""
        self._ask("finish_step", [list(getattr(plan, name)) for name in PLAN_FIELDS])

    def get_finished(self) -> WorkerReport:
        rank, ended = self._ask("get_finished")
        return WorkerReport(rank, tuple(JobReport(*job) for job in ended))

    def close_worker(self) -> None:
        self._ask("close_worker")


class RankCommands(Commands):
    """The child's side: the same calls, with what JSON has."""

    def __init__(self) -> None:
        super().__init__(0)
        self._worker: Worker | None = None
        self._stream: int | None = None
        self._warnings: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self._warnings.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("kvd_client").addHandler(handler)

    @property
    def worker(self) -> Worker:
        assert self._worker is not None, "make it first"
        return self._worker

    def allocate_in_pieces(self, pieces: int) -> tuple[int, int]:
        memory, zero = self._memory, ctypes.c_ulonglong(0)
        made = [memory._create(1, POSIX_FD) for _ in range(pieces)]
        nbytes = made[0][1]
        address, whole = ctypes.c_ulonglong(), ctypes.c_size_t(pieces * nbytes)
        memory.call(
            "cuMemAddressReserve", ctypes.byref(address), whole, ctypes.c_size_t(0), zero, zero
        )
        for number, (handle, size) in enumerate(made):
            at = ctypes.c_ulonglong(address.value + number * nbytes)
            memory.call(
                "cuMemMap", at, ctypes.c_size_t(size), zero, ctypes.c_ulonglong(handle), zero
            )
        access = Access(1, memory.device, 3)
        memory.call("cuMemSetAccess", address, whole, ctypes.byref(access), ctypes.c_size_t(1))
        return address.value, pieces * nbytes

    def allocate_on(self, device: int, nbytes: int) -> int:
        before = ctypes.c_void_p()
        self._memory.call("cuCtxGetCurrent", ctypes.byref(before))
        other = type(self._memory)(device)
        address = other.allocate(nbytes)
        self._memory.call("cuCtxSetCurrent", before)
        return address

    def make(self, daemon_socket: str, engine_id: str, nonce: str, *place: int) -> None:
        identity = EngineIdentity(engine_id, bytes.fromhex(nonce))
        self._worker = Worker(daemon_socket, identity, *place, flush_timeout_s=20.0)

    def register(
        self, memories: list[Any], groups: list[tuple[int, list[list[int]], int]]
    ) -> tuple[str, str] | None:
        layouts = [
            GroupLayout(blocks, [Fragment(*fragment) for fragment in fragments], width)
            for blocks, fragments, width in groups
        ]
        try:
            self.worker.register([_memory(each) for each in memories], layouts)
        except CudaMemoryRefused as refused:
            return refused.reason, str(refused)
        return None

    def wait_registered(self, seconds: float) -> bool:
        return self.worker.wait_registered(seconds)

    def problem(self) -> str:
        return self.worker.problem

    def warnings(self) -> list[str]:
        return self._warnings

    def exported(self) -> list[str]:
        registered = self.worker._memory
        assert registered is not None
        return [repr(region) for region in registered.regions]

    def descriptors(self) -> list[str]:
        found = []
        for link in Path("/proc/self/fd").iterdir():
            try:
                found.append(str(link.readlink()))
            except OSError:  # the directory's own, closed by now
                continue
        return sorted(each for each in found if not each.startswith(("socket:", "anon_inode:")))

    def unregister(self, seconds: float) -> bool:
        return self.worker.unregister(seconds)

    def compute_later(self, address: int, content: str) -> None:
        if self._stream is None:
            stream = ctypes.c_void_p()
            self._memory.call("cuStreamCreate", ctypes.byref(stream), 1)
            self._stream = stream.value
        nbytes, pinned = ctypes.c_size_t(len(content) // 2), ctypes.c_void_p()
        self._memory.call("cuMemAllocHost_v2", ctypes.byref(pinned), nbytes)  # until the end
        ctypes.memmove(pinned, bytes.fromhex(content), nbytes.value)
        stream = ctypes.c_void_p(self._stream)
        self._memory.call(
            "cuMemcpyHtoDAsync_v2", ctypes.c_ulonglong(address), pinned, nbytes, stream
        )

    def flush_step(self, plan: list[list[int]]) -> None:
        self.worker.flush_step(StepPlan(*map(tuple, plan)))

    def start_loads(self, plan: list[list[int]]) -> None:
        self.worker.start_loads(StepPlan(*map(tuple, plan)))

    def finish_step(self, plan: list[list[int]]) -> None:
        wait = None if self._stream is None else stream_end(self._stream)
        self.worker.finish_step(StepPlan(*map(tuple, plan)), wait)

    def get_finished(self) -> tuple[int, list[tuple[Any, ...]]]:
        report = self.worker.get_finished()
        return report.rank, [tuple(job) for job in report.ended]

    def close_worker(self) -> None:
        self.worker.close()


def _memory(told: list[int] | dict[str, Any]) -> DeviceSpan | Tensor:
    if isinstance(told, list):
        return DeviceSpan(*told)
    device = Device(told.get("device", "cuda"), 0)
    shape, strides = tuple(told["shape"]), tuple(told["strides"])
    return Tensor(told["address"], shape, strides, told["element_bytes"], device)


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        serve(connection, RankCommands())


if __name__ == "__main__":
    main()
