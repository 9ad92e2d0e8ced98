"""A rank's memory on a GPU as it goes to the daemon: an allocation's handle, or its descriptor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvd_client.worker.memory import SharedMemory
from kvd_proto.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class IpcRegion:
    """A stretch of an allocation of cudaMalloc, in bytes from that allocation's first."""

    handle: bytes  # of cuIpcGetMemHandle; valid as long as the allocation
    offset: int
    bytes: int
    gpu_uuid: str
    fd: ClassVar[None] = None

    def to_proto(self, memory_token: int) -> worker_pb2.MemoryHandle:  # noqa: ARG002 - as the others
        return worker_pb2.MemoryHandle(
            cuda_ipc=worker_pb2.CudaIpc(
                handle=self.handle, offset=self.offset, bytes=self.bytes, gpu_uuid=self.gpu_uuid
            )
        )


@dataclass(frozen=True, slots=True)
class VmmRegion:
    """A stretch of a physical allocation that was exported as a descriptor, which is ours."""

    fd: int
    offset: int
    bytes: int
    allocation_bytes: int
    gpu_uuid: str

    def to_proto(self, memory_token: int) -> worker_pb2.MemoryHandle:
        return worker_pb2.MemoryHandle(
            vmm_fd=worker_pb2.VmmFd(
                memory_token=memory_token,
                offset=self.offset,
                bytes=self.bytes,
                gpu_uuid=self.gpu_uuid,
                allocation_bytes=self.allocation_bytes,
            )
        )


Region = SharedMemory | IpcRegion | VmmRegion
