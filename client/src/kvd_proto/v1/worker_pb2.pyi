from kvd_proto.v1 import engine_pb2 as _engine_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MemoryHandle(_message.Message):
    __slots__ = ("host", "cuda_ipc", "vmm_fd")
    HOST_FIELD_NUMBER: _ClassVar[int]
    CUDA_IPC_FIELD_NUMBER: _ClassVar[int]
    VMM_FD_FIELD_NUMBER: _ClassVar[int]
    host: HostSharedMemory
    cuda_ipc: CudaIpc
    vmm_fd: VmmFd
    def __init__(self, host: _Optional[_Union[HostSharedMemory, _Mapping]] = ..., cuda_ipc: _Optional[_Union[CudaIpc, _Mapping]] = ..., vmm_fd: _Optional[_Union[VmmFd, _Mapping]] = ...) -> None: ...

class HostSharedMemory(_message.Message):
    __slots__ = ("memory_token", "offset", "bytes")
    MEMORY_TOKEN_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    memory_token: int
    offset: int
    bytes: int
    def __init__(self, memory_token: _Optional[int] = ..., offset: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class CudaIpc(_message.Message):
    __slots__ = ("handle", "offset", "bytes", "gpu_uuid")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    offset: int
    bytes: int
    gpu_uuid: str
    def __init__(self, handle: _Optional[bytes] = ..., offset: _Optional[int] = ..., bytes: _Optional[int] = ..., gpu_uuid: _Optional[str] = ...) -> None: ...

class VmmFd(_message.Message):
    __slots__ = ("memory_token", "offset", "bytes", "gpu_uuid", "allocation_bytes")
    MEMORY_TOKEN_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    ALLOCATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    memory_token: int
    offset: int
    bytes: int
    gpu_uuid: str
    allocation_bytes: int
    def __init__(self, memory_token: _Optional[int] = ..., offset: _Optional[int] = ..., bytes: _Optional[int] = ..., gpu_uuid: _Optional[str] = ..., allocation_bytes: _Optional[int] = ...) -> None: ...

class GpuMemory(_message.Message):
    __slots__ = ("free_bytes", "total_bytes")
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    free_bytes: int
    total_bytes: int
    def __init__(self, free_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class Fragment(_message.Message):
    __slots__ = ("memory", "base", "stride", "bytes")
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    memory: int
    base: int
    stride: int
    bytes: int
    def __init__(self, memory: _Optional[int] = ..., base: _Optional[int] = ..., stride: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class GroupLayout(_message.Message):
    __slots__ = ("group", "num_blocks", "fragments", "blocks_per_block")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    group: int
    num_blocks: int
    fragments: _containers.RepeatedCompositeFieldContainer[Fragment]
    blocks_per_block: int
    def __init__(self, group: _Optional[int] = ..., num_blocks: _Optional[int] = ..., fragments: _Optional[_Iterable[_Union[Fragment, _Mapping]]] = ..., blocks_per_block: _Optional[int] = ...) -> None: ...

class RegisterRankRequest(_message.Message):
    __slots__ = ("identity", "rank", "world_size", "shard", "writer", "memories", "groups", "gpu_memory")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    MEMORIES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    GPU_MEMORY_FIELD_NUMBER: _ClassVar[int]
    identity: _engine_pb2.EngineIdentity
    rank: int
    world_size: int
    shard: int
    writer: bool
    memories: _containers.RepeatedCompositeFieldContainer[MemoryHandle]
    groups: _containers.RepeatedCompositeFieldContainer[GroupLayout]
    gpu_memory: GpuMemory
    def __init__(self, identity: _Optional[_Union[_engine_pb2.EngineIdentity, _Mapping]] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., shard: _Optional[int] = ..., writer: bool = ..., memories: _Optional[_Iterable[_Union[MemoryHandle, _Mapping]]] = ..., groups: _Optional[_Iterable[_Union[GroupLayout, _Mapping]]] = ..., gpu_memory: _Optional[_Union[GpuMemory, _Mapping]] = ...) -> None: ...

class RegisterRankResponse(_message.Message):
    __slots__ = ("registration_id", "mover_pid", "transport", "gpu_context_bytes")
    REGISTRATION_ID_FIELD_NUMBER: _ClassVar[int]
    MOVER_PID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    GPU_CONTEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    registration_id: int
    mover_pid: int
    transport: str
    gpu_context_bytes: int
    def __init__(self, registration_id: _Optional[int] = ..., mover_pid: _Optional[int] = ..., transport: _Optional[str] = ..., gpu_context_bytes: _Optional[int] = ...) -> None: ...

class UnregisterRankRequest(_message.Message):
    __slots__ = ("registration_id",)
    REGISTRATION_ID_FIELD_NUMBER: _ClassVar[int]
    registration_id: int
    def __init__(self, registration_id: _Optional[int] = ...) -> None: ...

class UnregisterRankResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MarkReadyRequest(_message.Message):
    __slots__ = ("registration_id", "job_ids")
    REGISTRATION_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_IDS_FIELD_NUMBER: _ClassVar[int]
    registration_id: int
    job_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, registration_id: _Optional[int] = ..., job_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class MarkReadyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
