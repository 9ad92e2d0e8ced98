"""A rank's memory as it goes to the daemon: by descriptor, or by an allocation's handle."""

from __future__ import annotations

from dataclasses import dataclass

from kvd_client.worker.memory import SharedMemory
from kvd_proto.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class IpcRegion:
    """A stretch of an allocation of cudaMalloc, in bytes from that allocation's first."""

    handle: bytes  # of cuIpcGetMemHandle; valid as long as the allocation
    offset: int
    bytes: int
    gpu_uuid: str


@dataclass(frozen=True, slots=True)
class VmmRegion:
    """A stretch of a physical allocation that was exported as a descriptor, which is ours."""

    fd: int
    offset: int
    bytes: int
    allocation_bytes: int
    gpu_uuid: str


Region = SharedMemory | IpcRegion | VmmRegion


def descriptor_of(region: Region) -> int | None:
    """What has to go over the companion socket for it."""
    return None if isinstance(region, IpcRegion) else region.fd


def to_proto(region: Region, memory_token: int) -> worker_pb2.MemoryHandle:
    """The handle; `memory_token` is the number that its descriptor was offered under."""
    match region:
        case SharedMemory():
            return worker_pb2.MemoryHandle(
                host=worker_pb2.HostSharedMemory(
                    memory_token=memory_token, offset=region.offset, bytes=region.bytes
                )
            )
        case IpcRegion():
            return worker_pb2.MemoryHandle(
                cuda_ipc=worker_pb2.CudaIpc(
                    handle=region.handle,
                    offset=region.offset,
                    bytes=region.bytes,
                    gpu_uuid=region.gpu_uuid,
                )
            )
        case VmmRegion():
            return worker_pb2.MemoryHandle(
                vmm_fd=worker_pb2.VmmFd(
                    memory_token=memory_token,
                    offset=region.offset,
                    bytes=region.bytes,
                    gpu_uuid=region.gpu_uuid,
                    allocation_bytes=region.allocation_bytes,
                )
            )
