from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchEventsRequest(_message.Message):
    __slots__ = ("incarnation", "after_sequence", "namespace_id", "with_tiers")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    WITH_TIERS_FIELD_NUMBER: _ClassVar[int]
    incarnation: bytes
    after_sequence: int
    namespace_id: int
    with_tiers: bool
    def __init__(self, incarnation: _Optional[bytes] = ..., after_sequence: _Optional[int] = ..., namespace_id: _Optional[int] = ..., with_tiers: bool = ...) -> None: ...

class WatchEventsResponse(_message.Message):
    __slots__ = ("incarnation", "sequence", "snapshot", "snapshot_end", "events")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    incarnation: bytes
    sequence: int
    snapshot: bool
    snapshot_end: bool
    events: _containers.RepeatedCompositeFieldContainer[CacheEvent]
    def __init__(self, incarnation: _Optional[bytes] = ..., sequence: _Optional[int] = ..., snapshot: bool = ..., snapshot_end: bool = ..., events: _Optional[_Iterable[_Union[CacheEvent, _Mapping]]] = ...) -> None: ...

class CacheEvent(_message.Message):
    __slots__ = ("kind", "namespace_id", "epoch", "group", "hashes", "hash_bytes", "medium", "account", "locality", "tier")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[CacheEvent.Kind]
        KIND_STORED: _ClassVar[CacheEvent.Kind]
        KIND_REMOVED: _ClassVar[CacheEvent.Kind]
        KIND_CLEARED: _ClassVar[CacheEvent.Kind]
        KIND_TIER_LOST: _ClassVar[CacheEvent.Kind]
    KIND_UNSPECIFIED: CacheEvent.Kind
    KIND_STORED: CacheEvent.Kind
    KIND_REMOVED: CacheEvent.Kind
    KIND_CLEARED: CacheEvent.Kind
    KIND_TIER_LOST: CacheEvent.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    HASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    LOCALITY_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    kind: CacheEvent.Kind
    namespace_id: int
    epoch: str
    group: int
    hashes: bytes
    hash_bytes: int
    medium: str
    account: str
    locality: str
    tier: str
    def __init__(self, kind: _Optional[_Union[CacheEvent.Kind, str]] = ..., namespace_id: _Optional[int] = ..., epoch: _Optional[str] = ..., group: _Optional[int] = ..., hashes: _Optional[bytes] = ..., hash_bytes: _Optional[int] = ..., medium: _Optional[str] = ..., account: _Optional[str] = ..., locality: _Optional[str] = ..., tier: _Optional[str] = ...) -> None: ...
