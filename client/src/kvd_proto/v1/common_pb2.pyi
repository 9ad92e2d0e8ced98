from google.protobuf import struct_pb2 as _struct_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]
    TIER_CLUSTER: _ClassVar[Tier]

class JobKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_KIND_UNSPECIFIED: _ClassVar[JobKind]
    JOB_KIND_STORE: _ClassVar[JobKind]
    JOB_KIND_LOAD: _ClassVar[JobKind]

class JobStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATUS_UNSPECIFIED: _ClassVar[JobStatus]
    JOB_STATUS_DONE: _ClassVar[JobStatus]
    JOB_STATUS_FAILED: _ClassVar[JobStatus]
    JOB_STATUS_REFUSED: _ClassVar[JobStatus]
    JOB_STATUS_PARTIAL: _ClassVar[JobStatus]
TIER_UNSPECIFIED: Tier
TIER_HOST: Tier
TIER_DISK: Tier
TIER_CLUSTER: Tier
JOB_KIND_UNSPECIFIED: JobKind
JOB_KIND_STORE: JobKind
JOB_KIND_LOAD: JobKind
JOB_STATUS_UNSPECIFIED: JobStatus
JOB_STATUS_DONE: JobStatus
JOB_STATUS_FAILED: JobStatus
JOB_STATUS_REFUSED: JobStatus
JOB_STATUS_PARTIAL: JobStatus

class ReqContext(_message.Message):
    __slots__ = ("request_id", "priority", "kv_transfer_params", "hints", "tiers_allowed", "account")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_PARAMS_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    TIERS_ALLOWED_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    priority: int
    kv_transfer_params: _struct_pb2.Struct
    hints: _struct_pb2.Struct
    tiers_allowed: _containers.RepeatedScalarFieldContainer[Tier]
    account: str
    def __init__(self, request_id: _Optional[str] = ..., priority: _Optional[int] = ..., kv_transfer_params: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., hints: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., tiers_allowed: _Optional[_Iterable[_Union[Tier, str]]] = ..., account: _Optional[str] = ...) -> None: ...

class KeyRun(_message.Message):
    __slots__ = ("group", "hashes", "first_block")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    group: int
    hashes: bytes
    first_block: int
    def __init__(self, group: _Optional[int] = ..., hashes: _Optional[bytes] = ..., first_block: _Optional[int] = ...) -> None: ...

class TransferRun(_message.Message):
    __slots__ = ("group", "hashes", "engine_blocks", "first_block")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    ENGINE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    group: int
    hashes: bytes
    engine_blocks: bytes
    first_block: int
    def __init__(self, group: _Optional[int] = ..., hashes: _Optional[bytes] = ..., engine_blocks: _Optional[bytes] = ..., first_block: _Optional[int] = ...) -> None: ...
