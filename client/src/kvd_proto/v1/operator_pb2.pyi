from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyPart(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERIFY_PART_UNSPECIFIED: _ClassVar[VerifyPart]
    VERIFY_PART_ACCOUNTS: _ClassVar[VerifyPart]
    VERIFY_PART_BLOCKS: _ClassVar[VerifyPart]
    VERIFY_PART_EXTENTS: _ClassVar[VerifyPart]
    VERIFY_PART_REGISTRY: _ClassVar[VerifyPart]

class MissCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISS_CAUSE_UNSPECIFIED: _ClassVar[MissCause]
    MISS_CAUSE_NEVER_STORED: _ClassVar[MissCause]
    MISS_CAUSE_EVICTED: _ClassVar[MissCause]
    MISS_CAUSE_ROW_TAKEN: _ClassVar[MissCause]
    MISS_CAUSE_QUOTA_LOWERED: _ClassVar[MissCause]
    MISS_CAUSE_CLEARED: _ClassVar[MissCause]
    MISS_CAUSE_UNUSABLE: _ClassVar[MissCause]
    MISS_CAUSE_DAMAGED: _ClassVar[MissCause]
    MISS_CAUSE_FILTERED: _ClassVar[MissCause]
    MISS_CAUSE_REFUSED: _ClassVar[MissCause]
    MISS_CAUSE_FAILED: _ClassVar[MissCause]
    MISS_CAUSE_EPOCH: _ClassVar[MissCause]
    MISS_CAUSE_NAMESPACE_CLEARED: _ClassVar[MissCause]
    MISS_CAUSE_PENDING: _ClassVar[MissCause]
    MISS_CAUSE_LEASES: _ClassVar[MissCause]
    MISS_CAUSE_NO_SESSION: _ClassVar[MissCause]
    MISS_CAUSE_UNANSWERED: _ClassVar[MissCause]
    MISS_CAUSE_NOT_TAKEN: _ClassVar[MissCause]
VERIFY_PART_UNSPECIFIED: VerifyPart
VERIFY_PART_ACCOUNTS: VerifyPart
VERIFY_PART_BLOCKS: VerifyPart
VERIFY_PART_EXTENTS: VerifyPart
VERIFY_PART_REGISTRY: VerifyPart
MISS_CAUSE_UNSPECIFIED: MissCause
MISS_CAUSE_NEVER_STORED: MissCause
MISS_CAUSE_EVICTED: MissCause
MISS_CAUSE_ROW_TAKEN: MissCause
MISS_CAUSE_QUOTA_LOWERED: MissCause
MISS_CAUSE_CLEARED: MissCause
MISS_CAUSE_UNUSABLE: MissCause
MISS_CAUSE_DAMAGED: MissCause
MISS_CAUSE_FILTERED: MissCause
MISS_CAUSE_REFUSED: MissCause
MISS_CAUSE_FAILED: MissCause
MISS_CAUSE_EPOCH: MissCause
MISS_CAUSE_NAMESPACE_CLEARED: MissCause
MISS_CAUSE_PENDING: MissCause
MISS_CAUSE_LEASES: MissCause
MISS_CAUSE_NO_SESSION: MissCause
MISS_CAUSE_UNANSWERED: MissCause
MISS_CAUSE_NOT_TAKEN: MissCause

class StatusRequest(_message.Message):
    __slots__ = ("after_session_id", "after_namespace_id")
    AFTER_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    after_session_id: int
    after_namespace_id: int
    def __init__(self, after_session_id: _Optional[int] = ..., after_namespace_id: _Optional[int] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("version", "incarnation", "uptime_seconds", "state", "pool", "sessions", "tenants", "namespaces", "policy", "recovered_blocks", "process_id", "event_sequence", "more_sessions", "more_namespaces", "tiers", "blocks_evicted", "blocks_stored", "blocks_loaded", "curve", "blocks_not_leased")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    RECOVERED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    EVENT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MORE_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MORE_NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_EVICTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_STORED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_LOADED_FIELD_NUMBER: _ClassVar[int]
    CURVE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_NOT_LEASED_FIELD_NUMBER: _ClassVar[int]
    version: str
    incarnation: bytes
    uptime_seconds: float
    state: str
    pool: PoolStatus
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStatus]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantStatus]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStatus]
    policy: str
    recovered_blocks: int
    process_id: int
    event_sequence: int
    more_sessions: bool
    more_namespaces: bool
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    blocks_evicted: int
    blocks_stored: int
    blocks_loaded: int
    curve: ReuseCurve
    blocks_not_leased: int
    def __init__(self, version: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., uptime_seconds: _Optional[float] = ..., state: _Optional[str] = ..., pool: _Optional[_Union[PoolStatus, _Mapping]] = ..., sessions: _Optional[_Iterable[_Union[SessionStatus, _Mapping]]] = ..., tenants: _Optional[_Iterable[_Union[TenantStatus, _Mapping]]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceStatus, _Mapping]]] = ..., policy: _Optional[str] = ..., recovered_blocks: _Optional[int] = ..., process_id: _Optional[int] = ..., event_sequence: _Optional[int] = ..., more_sessions: bool = ..., more_namespaces: bool = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., blocks_evicted: _Optional[int] = ..., blocks_stored: _Optional[int] = ..., blocks_loaded: _Optional[int] = ..., curve: _Optional[_Union[ReuseCurve, _Mapping]] = ..., blocks_not_leased: _Optional[int] = ...) -> None: ...

class ReuseCurve(_message.Message):
    __slots__ = ("points", "uses", "sampled_share")
    POINTS_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_SHARE_FIELD_NUMBER: _ClassVar[int]
    points: _containers.RepeatedCompositeFieldContainer[CurvePoint]
    uses: int
    sampled_share: float
    def __init__(self, points: _Optional[_Iterable[_Union[CurvePoint, _Mapping]]] = ..., uses: _Optional[int] = ..., sampled_share: _Optional[float] = ...) -> None: ...

class CurvePoint(_message.Message):
    __slots__ = ("pools", "hit_ratio")
    POOLS_FIELD_NUMBER: _ClassVar[int]
    HIT_RATIO_FIELD_NUMBER: _ClassVar[int]
    pools: float
    hit_ratio: float
    def __init__(self, pools: _Optional[float] = ..., hit_ratio: _Optional[float] = ...) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("name", "serving", "problem", "blocks", "bytes", "capacity_bytes", "hits", "misses", "blocks_promoted", "blocks_failed", "blocks_given_up", "blocks_written", "blocks_unwritten", "blocks_dropped", "bytes_down", "bytes_up", "notes", "blocks_too_slow", "blocks_refused", "answer_seconds", "read_seconds", "short_lives", "namespaces_undeleted", "all_undeleted")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PROMOTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FAILED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_GIVEN_UP_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_UNWRITTEN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOO_SLOW_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    ANSWER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    READ_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SHORT_LIVES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_UNDELETED_FIELD_NUMBER: _ClassVar[int]
    ALL_UNDELETED_FIELD_NUMBER: _ClassVar[int]
    name: str
    serving: bool
    problem: str
    blocks: int
    bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    blocks_promoted: int
    blocks_failed: int
    blocks_given_up: int
    blocks_written: int
    blocks_unwritten: int
    blocks_dropped: int
    bytes_down: int
    bytes_up: int
    notes: _containers.RepeatedScalarFieldContainer[str]
    blocks_too_slow: int
    blocks_refused: int
    answer_seconds: float
    read_seconds: float
    short_lives: int
    namespaces_undeleted: int
    all_undeleted: bool
    def __init__(self, name: _Optional[str] = ..., serving: bool = ..., problem: _Optional[str] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., blocks_promoted: _Optional[int] = ..., blocks_failed: _Optional[int] = ..., blocks_given_up: _Optional[int] = ..., blocks_written: _Optional[int] = ..., blocks_unwritten: _Optional[int] = ..., blocks_dropped: _Optional[int] = ..., bytes_down: _Optional[int] = ..., bytes_up: _Optional[int] = ..., notes: _Optional[_Iterable[str]] = ..., blocks_too_slow: _Optional[int] = ..., blocks_refused: _Optional[int] = ..., answer_seconds: _Optional[float] = ..., read_seconds: _Optional[float] = ..., short_lives: _Optional[int] = ..., namespaces_undeleted: _Optional[int] = ..., all_undeleted: bool = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("directory", "bytes", "extent_bytes", "extents", "extents_free", "slots_free", "slots_reserved", "slots_ready", "slots_quarantined", "bytes_ready", "checksums", "checksums_reason")
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    EXTENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FREE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FREE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_RESERVED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_READY_FIELD_NUMBER: _ClassVar[int]
    SLOTS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    BYTES_READY_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_REASON_FIELD_NUMBER: _ClassVar[int]
    directory: str
    bytes: int
    extent_bytes: int
    extents: int
    extents_free: int
    slots_free: int
    slots_reserved: int
    slots_ready: int
    slots_quarantined: int
    bytes_ready: int
    checksums: bool
    checksums_reason: str
    def __init__(self, directory: _Optional[str] = ..., bytes: _Optional[int] = ..., extent_bytes: _Optional[int] = ..., extents: _Optional[int] = ..., extents_free: _Optional[int] = ..., slots_free: _Optional[int] = ..., slots_reserved: _Optional[int] = ..., slots_ready: _Optional[int] = ..., slots_quarantined: _Optional[int] = ..., bytes_ready: _Optional[int] = ..., checksums: bool = ..., checksums_reason: _Optional[str] = ...) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ("session_id", "engine_id", "namespace_id", "uid", "world_size", "ranks", "jobs_in_flight", "leases", "usable")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    JOBS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    USABLE_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    engine_id: str
    namespace_id: int
    uid: int
    world_size: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatus]
    jobs_in_flight: int
    leases: int
    usable: bool
    def __init__(self, session_id: _Optional[int] = ..., engine_id: _Optional[str] = ..., namespace_id: _Optional[int] = ..., uid: _Optional[int] = ..., world_size: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankStatus, _Mapping]]] = ..., jobs_in_flight: _Optional[int] = ..., leases: _Optional[int] = ..., usable: bool = ...) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("rank", "mover_pid", "worker_pid", "transport", "bytes_stored", "bytes_loaded", "store_bytes_per_second", "load_bytes_per_second", "gpu", "copier", "copier_note")
    RANK_FIELD_NUMBER: _ClassVar[int]
    MOVER_PID_FIELD_NUMBER: _ClassVar[int]
    WORKER_PID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_STORED_FIELD_NUMBER: _ClassVar[int]
    BYTES_LOADED_FIELD_NUMBER: _ClassVar[int]
    STORE_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LOAD_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    COPIER_FIELD_NUMBER: _ClassVar[int]
    COPIER_NOTE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    mover_pid: int
    worker_pid: int
    transport: str
    bytes_stored: int
    bytes_loaded: int
    store_bytes_per_second: float
    load_bytes_per_second: float
    gpu: GpuStatus
    copier: str
    copier_note: str
    def __init__(self, rank: _Optional[int] = ..., mover_pid: _Optional[int] = ..., worker_pid: _Optional[int] = ..., transport: _Optional[str] = ..., bytes_stored: _Optional[int] = ..., bytes_loaded: _Optional[int] = ..., store_bytes_per_second: _Optional[float] = ..., load_bytes_per_second: _Optional[float] = ..., gpu: _Optional[_Union[GpuStatus, _Mapping]] = ..., copier: _Optional[str] = ..., copier_note: _Optional[str] = ...) -> None: ...

class GpuStatus(_message.Message):
    __slots__ = ("uuid", "name", "driver_version", "context_bytes", "registered_bytes", "unregistered_extents", "staged_bytes", "numa_node")
    UUID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DRIVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNREGISTERED_EXTENTS_FIELD_NUMBER: _ClassVar[int]
    STAGED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODE_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    name: str
    driver_version: str
    context_bytes: int
    registered_bytes: int
    unregistered_extents: int
    staged_bytes: int
    numa_node: int
    def __init__(self, uuid: _Optional[str] = ..., name: _Optional[str] = ..., driver_version: _Optional[str] = ..., context_bytes: _Optional[int] = ..., registered_bytes: _Optional[int] = ..., unregistered_extents: _Optional[int] = ..., staged_bytes: _Optional[int] = ..., numa_node: _Optional[int] = ...) -> None: ...

class LookupFigures(_message.Message):
    __slots__ = ("requests", "requests_found", "blocks", "blocks_found", "tokens", "tokens_found")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FOUND_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FOUND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FOUND_FIELD_NUMBER: _ClassVar[int]
    requests: int
    requests_found: int
    blocks: int
    blocks_found: int
    tokens: int
    tokens_found: int
    def __init__(self, requests: _Optional[int] = ..., requests_found: _Optional[int] = ..., blocks: _Optional[int] = ..., blocks_found: _Optional[int] = ..., tokens: _Optional[int] = ..., tokens_found: _Optional[int] = ...) -> None: ...

class TenantStatus(_message.Message):
    __slots__ = ("tenant", "bytes_used", "quota_bytes", "bytes_leased", "bytes_reserved", "bytes_evictable", "lookups")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_LEASED_FIELD_NUMBER: _ClassVar[int]
    BYTES_RESERVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_EVICTABLE_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    bytes_used: int
    quota_bytes: int
    bytes_leased: int
    bytes_reserved: int
    bytes_evictable: int
    lookups: LookupFigures
    def __init__(self, tenant: _Optional[str] = ..., bytes_used: _Optional[int] = ..., quota_bytes: _Optional[int] = ..., bytes_leased: _Optional[int] = ..., bytes_reserved: _Optional[int] = ..., bytes_evictable: _Optional[int] = ..., lookups: _Optional[_Union[LookupFigures, _Mapping]] = ...) -> None: ...

class NamespaceStatus(_message.Message):
    __slots__ = ("namespace_id", "fingerprint", "tenant", "fields", "blocks", "bytes", "sessions", "differs", "wasted_shares", "lookups")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class DiffersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    DIFFERS_FIELD_NUMBER: _ClassVar[int]
    WASTED_SHARES_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    fingerprint: str
    tenant: str
    fields: _containers.ScalarMap[str, str]
    blocks: int
    bytes: int
    sessions: int
    differs: _containers.ScalarMap[str, str]
    wasted_shares: _containers.RepeatedScalarFieldContainer[float]
    lookups: LookupFigures
    def __init__(self, namespace_id: _Optional[int] = ..., fingerprint: _Optional[str] = ..., tenant: _Optional[str] = ..., fields: _Optional[_Mapping[str, str]] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., sessions: _Optional[int] = ..., differs: _Optional[_Mapping[str, str]] = ..., wasted_shares: _Optional[_Iterable[float]] = ..., lookups: _Optional[_Union[LookupFigures, _Mapping]] = ...) -> None: ...

class ListNamespacesRequest(_message.Message):
    __slots__ = ("after_namespace_id",)
    AFTER_NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    after_namespace_id: int
    def __init__(self, after_namespace_id: _Optional[int] = ...) -> None: ...

class ListNamespacesResponse(_message.Message):
    __slots__ = ("namespaces", "more")
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStatus]
    more: bool
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceStatus, _Mapping]]] = ..., more: bool = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("namespace_id",)
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    def __init__(self, namespace_id: _Optional[int] = ...) -> None: ...

class ClearResponse(_message.Message):
    __slots__ = ("blocks_removed",)
    BLOCKS_REMOVED_FIELD_NUMBER: _ClassVar[int]
    blocks_removed: int
    def __init__(self, blocks_removed: _Optional[int] = ...) -> None: ...

class SetQuotaRequest(_message.Message):
    __slots__ = ("tenant", "quota_bytes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    quota_bytes: int
    def __init__(self, tenant: _Optional[str] = ..., quota_bytes: _Optional[int] = ...) -> None: ...

class SetQuotaResponse(_message.Message):
    __slots__ = ("blocks_evicted",)
    BLOCKS_EVICTED_FIELD_NUMBER: _ClassVar[int]
    blocks_evicted: int
    def __init__(self, blocks_evicted: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline_ms",)
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    deadline_ms: int
    def __init__(self, deadline_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("jobs_left",)
    JOBS_LEFT_FIELD_NUMBER: _ClassVar[int]
    jobs_left: int
    def __init__(self, jobs_left: _Optional[int] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("part", "after", "with_bytes")
    PART_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    WITH_BYTES_FIELD_NUMBER: _ClassVar[int]
    part: VerifyPart
    after: int
    with_bytes: bool
    def __init__(self, part: _Optional[_Union[VerifyPart, str]] = ..., after: _Optional[int] = ..., with_bytes: bool = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("findings", "more_findings", "next_part", "next_after", "blocks", "bytes", "unsettled")
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    MORE_FINDINGS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PART_FIELD_NUMBER: _ClassVar[int]
    NEXT_AFTER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    UNSETTLED_FIELD_NUMBER: _ClassVar[int]
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    more_findings: int
    next_part: VerifyPart
    next_after: int
    blocks: int
    bytes: int
    unsettled: int
    def __init__(self, findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ..., more_findings: _Optional[int] = ..., next_part: _Optional[_Union[VerifyPart, str]] = ..., next_after: _Optional[int] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., unsettled: _Optional[int] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("invariant", "place", "problem")
    INVARIANT_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    invariant: str
    place: str
    problem: str
    def __init__(self, invariant: _Optional[str] = ..., place: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UndrainResponse(_message.Message):
    __slots__ = ("was_draining",)
    WAS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    was_draining: bool
    def __init__(self, was_draining: bool = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[ExplainedRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[ExplainedRequest, _Mapping]]] = ...) -> None: ...

class ExplainedRequest(_message.Message):
    __slots__ = ("request_id", "engine_id", "tenant", "namespace_id", "epoch", "account", "age_seconds", "prompt_tokens", "device_tokens", "found_tokens", "missed_group", "missed_block", "missed_hash", "cause", "reason", "cause_seconds", "unused_seconds", "by_namespace_id", "by_tenant", "all_known", "elsewhere")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FOUND_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISSED_GROUP_FIELD_NUMBER: _ClassVar[int]
    MISSED_BLOCK_FIELD_NUMBER: _ClassVar[int]
    MISSED_HASH_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UNUSED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BY_NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    BY_TENANT_FIELD_NUMBER: _ClassVar[int]
    ALL_KNOWN_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    engine_id: str
    tenant: str
    namespace_id: int
    epoch: str
    account: str
    age_seconds: float
    prompt_tokens: int
    device_tokens: int
    found_tokens: int
    missed_group: int
    missed_block: int
    missed_hash: bytes
    cause: MissCause
    reason: str
    cause_seconds: float
    unused_seconds: float
    by_namespace_id: int
    by_tenant: str
    all_known: bool
    elsewhere: _containers.RepeatedCompositeFieldContainer[FoundElsewhere]
    def __init__(self, request_id: _Optional[str] = ..., engine_id: _Optional[str] = ..., tenant: _Optional[str] = ..., namespace_id: _Optional[int] = ..., epoch: _Optional[str] = ..., account: _Optional[str] = ..., age_seconds: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., device_tokens: _Optional[int] = ..., found_tokens: _Optional[int] = ..., missed_group: _Optional[int] = ..., missed_block: _Optional[int] = ..., missed_hash: _Optional[bytes] = ..., cause: _Optional[_Union[MissCause, str]] = ..., reason: _Optional[str] = ..., cause_seconds: _Optional[float] = ..., unused_seconds: _Optional[float] = ..., by_namespace_id: _Optional[int] = ..., by_tenant: _Optional[str] = ..., all_known: bool = ..., elsewhere: _Optional[_Iterable[_Union[FoundElsewhere, _Mapping]]] = ...) -> None: ...

class FoundElsewhere(_message.Message):
    __slots__ = ("namespace_id", "epoch", "other_account", "differs")
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OTHER_ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    DIFFERS_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    epoch: str
    other_account: bool
    differs: str
    def __init__(self, namespace_id: _Optional[int] = ..., epoch: _Optional[str] = ..., other_account: bool = ..., differs: _Optional[str] = ...) -> None: ...

class RecordRequest(_message.Message):
    __slots__ = ("namespace_id",)
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    namespace_id: int
    def __init__(self, namespace_id: _Optional[int] = ...) -> None: ...

class RecordResponse(_message.Message):
    __slots__ = ("requests", "lost")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RecordedRequest]
    lost: int
    def __init__(self, requests: _Optional[_Iterable[_Union[RecordedRequest, _Mapping]]] = ..., lost: _Optional[int] = ...) -> None: ...

class RecordedRequest(_message.Message):
    __slots__ = ("at_ms", "namespace_id", "epoch", "account", "prompt_tokens", "hash_bytes", "hashes")
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    at_ms: int
    namespace_id: int
    epoch: str
    account: str
    prompt_tokens: int
    hash_bytes: int
    hashes: bytes
    def __init__(self, at_ms: _Optional[int] = ..., namespace_id: _Optional[int] = ..., epoch: _Optional[str] = ..., account: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., hash_bytes: _Optional[int] = ..., hashes: _Optional[bytes] = ...) -> None: ...
