"""The memory that a rank registers: from handles on the wire to what a mover can reach.

Control opens nothing of a GPU here. It checks what can be checked without a driver; the mover
checks the rest against the allocation itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvd.control.access.peers import Memory, Peer
from kvd.control.namespace import check_string
from kvd.core.errors import InvalidArgument
from kvd.mover import registration_errors
from kvd.mover.layout import CudaRegion, Region
from kvd_proto.libcuda import IPC_HANDLE_BYTES
from kvd_proto.v1 import worker_pb2 as pb

MAX_HOST_BYTES = 1 << 44  # of one rank: a mover looks at every page before it is ready, or after
MAX_GPU_BYTES = 1 << 48  # of one GPU: more than any has, so that no sum overflows
_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of one rank: all its regions. `gpu_uuid` names its GPU, "" for host memory."""

    regions: tuple[Region, ...] | tuple[CudaRegion, ...]
    gpu_uuid: str = ""


def rank_memory(request: pb.RegisterRankRequest, peer: Peer) -> RankMemory:
    """The memories behind a registration's handles. What lies in them, `check_config` checks.

    Raises InvalidArgument, naming the field, unless all lie in host memory or all on one GPU.
    """
    kinds = [_kind(handle, f"memories[{n}]") for n, handle in enumerate(request.memories)]
    for number, kind in enumerate(kinds):
        if (kind == "host") != (kinds[0] == "host"):
            raise InvalidArgument(
                f"memories[{number}] is {kind} and memories[0] is {kinds[0]}: a rank's memories"
                " lie all in host memory or all on one GPU",
                f"memories[{number}]",
            )
    if kinds[0] == "host":
        return RankMemory(_all_host(request, peer))
    return _gpu(request, peer)


def _kind(handle: pb.MemoryHandle, where: str) -> str:
    kind: str | None = handle.WhichOneof("kind")
    if kind is None:
        raise InvalidArgument(f"{where} has no handle", where)
    return kind


# -- host memory ------------------------------------------------------------------------------


def _all_host(request: pb.RegisterRankRequest, peer: Peer) -> tuple[Region, ...]:
    regions = []
    left = MAX_HOST_BYTES
    for number, handle in enumerate(request.memories):
        where = f"memories[{number}]"
        regions.append(_host(handle.host, where, peer))
        left -= handle.host.bytes
        if left < 0:
            raise InvalidArgument(
                f"{where}: the memories up to this one have {MAX_HOST_BYTES - left} bytes; a rank"
                f" has at most {MAX_HOST_BYTES}",
                f"{where}.bytes",
            )
    return tuple(regions)


def _host(host: pb.HostSharedMemory, where: str, peer: Peer) -> Region:
    memory = _offered(host.memory_token, where, peer)
    if memory.is_device:
        raise InvalidArgument(
            f"{where}: memory {host.memory_token} was offered as device memory; name it by vmm_fd",
            f"{where}.memory_token",
        )
    if host.offset + host.bytes > memory.bytes:
        raise InvalidArgument(
            f"{where}: the region ends at {host.offset + host.bytes}, the file at {memory.bytes}",
            f"{where}.bytes",
        )
    return Region(memory.fd, host.offset, host.bytes)


def _offered(token: int, where: str, peer: Peer) -> Memory:
    memory = peer.memories.get(token)
    if memory is None:
        raise InvalidArgument(
            f"{where}: no memory {token} was offered on this worker's companion connection",
            f"{where}.memory_token",
        )
    return memory


# -- memory of a GPU --------------------------------------------------------------------------


def _gpu(request: pb.RegisterRankRequest, peer: Peer) -> RankMemory:
    total_bytes = _check_gpu_memory(request)
    first = ""
    regions = []
    for number, handle in enumerate(request.memories):
        where = f"memories[{number}]"
        if handle.WhichOneof("kind") == "cuda_ipc":
            uuid = _gpu_uuid(handle.cuda_ipc.gpu_uuid, where)
            regions.append(_cuda_ipc(handle.cuda_ipc, where, total_bytes))
        else:
            uuid = _gpu_uuid(handle.vmm_fd.gpu_uuid, where)
            regions.append(_vmm_fd(handle.vmm_fd, where, peer, total_bytes))
        first = first or uuid
        if uuid != first:
            raise InvalidArgument(
                f"{where} lies on {uuid}, memories[0] on {first}: a rank's memories lie on one"
                " GPU; register another rank for the other",
                f"{where}.gpu_uuid",
            )
    return RankMemory(tuple(regions), first)


def _check_gpu_memory(request: pb.RegisterRankRequest) -> int:
    """The GPU's size in bytes."""
    if not request.HasField("gpu_memory"):
        raise InvalidArgument(
            "gpu_memory is required for memory on a GPU: what cuMemGetInfo says there",
            "gpu_memory",
        )
    memory = request.gpu_memory
    if not 0 < memory.total_bytes <= MAX_GPU_BYTES or memory.free_bytes > memory.total_bytes:
        raise InvalidArgument(
            f"gpu_memory says {memory.free_bytes} of {memory.total_bytes} bytes are free",
            "gpu_memory.total_bytes",
        )
    return memory.total_bytes


def _gpu_uuid(text: str, where: str) -> str:
    """The UUID as the driver writes it."""
    check_string(text, f"{where}.gpu_uuid")  # to lower the case of some MiB holds up all others
    if text.startswith("MIG-"):
        raise InvalidArgument(
            f"{where} lies on a MIG instance ({text[:64]!r}): CUDA shares no memory there between"
            " processes; give the engine a whole GPU",
            f"{where}.gpu_uuid",
            registration_errors.GPU_MODE_UNSUPPORTED,
        )
    uuid = text[:4] + text[4:].lower()
    if _UUID.fullmatch(uuid) is None:
        raise InvalidArgument(
            f"{where}: {text[:64]!r} is no GPU's UUID; nvidia-smi -L shows them:"
            " GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx",
            f"{where}.gpu_uuid",
        )
    return uuid


def _cuda_ipc(ipc: pb.CudaIpc, where: str, total_bytes: int) -> CudaRegion:
    if len(ipc.handle) != IPC_HANDLE_BYTES:
        raise InvalidArgument(
            f"{where}: the handle has {len(ipc.handle)} bytes, not {IPC_HANDLE_BYTES}",
            f"{where}.handle",
        )
    _check_end(ipc, where, total_bytes, "the GPU")
    return CudaRegion(ipc.offset, ipc.bytes, handle=ipc.handle)


def _vmm_fd(vmm: pb.VmmFd, where: str, peer: Peer, total_bytes: int) -> CudaRegion:
    memory = _offered(vmm.memory_token, where, peer)
    if not memory.is_device:
        raise InvalidArgument(
            f"{where}: memory {vmm.memory_token} was not offered as device memory"
            " (OfferMemory.device_memory)",
            f"{where}.memory_token",
        )
    if not 0 < vmm.allocation_bytes <= total_bytes:
        raise InvalidArgument(
            f"{where}: an allocation of {vmm.allocation_bytes} bytes on a GPU of {total_bytes}",
            f"{where}.allocation_bytes",
        )
    _check_end(vmm, where, vmm.allocation_bytes, "the allocation")
    return CudaRegion(vmm.offset, vmm.bytes, fd=memory.fd, allocation_bytes=vmm.allocation_bytes)


def _check_end(handle: pb.CudaIpc | pb.VmmFd, where: str, end: int, of_what: str) -> None:
    if handle.offset + handle.bytes > end:
        raise InvalidArgument(
            f"{where}: the region ends at {handle.offset + handle.bytes}, {of_what} at {end}",
            f"{where}.bytes",
        )
