from kvd_proto.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GroupKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GROUP_KIND_UNSPECIFIED: _ClassVar[GroupKind]
    GROUP_KIND_FULL_ATTENTION: _ClassVar[GroupKind]
    GROUP_KIND_SLIDING_WINDOW: _ClassVar[GroupKind]
    GROUP_KIND_RECURRENT_STATE: _ClassVar[GroupKind]

class LeaseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_MODE_UNSPECIFIED: _ClassVar[LeaseMode]
    LEASE_MODE_PREFIX: _ClassVar[LeaseMode]
    LEASE_MODE_ALL: _ClassVar[LeaseMode]

class GivenUp(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GIVEN_UP_UNSPECIFIED: _ClassVar[GivenUp]
    GIVEN_UP_NO_SESSION: _ClassVar[GivenUp]
    GIVEN_UP_UNANSWERED: _ClassVar[GivenUp]
    GIVEN_UP_RETRY: _ClassVar[GivenUp]
    GIVEN_UP_PENDING: _ClassVar[GivenUp]
GROUP_KIND_UNSPECIFIED: GroupKind
GROUP_KIND_FULL_ATTENTION: GroupKind
GROUP_KIND_SLIDING_WINDOW: GroupKind
GROUP_KIND_RECURRENT_STATE: GroupKind
LEASE_MODE_UNSPECIFIED: LeaseMode
LEASE_MODE_PREFIX: LeaseMode
LEASE_MODE_ALL: LeaseMode
GIVEN_UP_UNSPECIFIED: GivenUp
GIVEN_UP_NO_SESSION: GivenUp
GIVEN_UP_UNANSWERED: GivenUp
GIVEN_UP_RETRY: GivenUp
GIVEN_UP_PENDING: GivenUp

class SessionRequest(_message.Message):
    __slots__ = ("open", "step", "lookup", "reset_cache", "close")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    RESET_CACHE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    open: OpenSession
    step: Step
    lookup: LookupCall
    reset_cache: ResetCache
    close: CloseSession
    def __init__(self, open: _Optional[_Union[OpenSession, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., lookup: _Optional[_Union[LookupCall, _Mapping]] = ..., reset_cache: _Optional[_Union[ResetCache, _Mapping]] = ..., close: _Optional[_Union[CloseSession, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("opened", "ranks_ready", "lookup", "step", "jobs_ended", "epoch", "rank_lost", "refused", "recording")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    RANKS_READY_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    JOBS_ENDED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_LOST_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    RECORDING_FIELD_NUMBER: _ClassVar[int]
    opened: SessionOpened
    ranks_ready: RanksReady
    lookup: LookupReply
    step: StepReply
    jobs_ended: JobsEnded
    epoch: EpochOpened
    rank_lost: RankLost
    refused: StepRefused
    recording: Recording
    def __init__(self, opened: _Optional[_Union[SessionOpened, _Mapping]] = ..., ranks_ready: _Optional[_Union[RanksReady, _Mapping]] = ..., lookup: _Optional[_Union[LookupReply, _Mapping]] = ..., step: _Optional[_Union[StepReply, _Mapping]] = ..., jobs_ended: _Optional[_Union[JobsEnded, _Mapping]] = ..., epoch: _Optional[_Union[EpochOpened, _Mapping]] = ..., rank_lost: _Optional[_Union[RankLost, _Mapping]] = ..., refused: _Optional[_Union[StepRefused, _Mapping]] = ..., recording: _Optional[_Union[Recording, _Mapping]] = ...) -> None: ...

class EngineIdentity(_message.Message):
    __slots__ = ("engine_id", "boot_nonce")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_NONCE_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    boot_nonce: bytes
    def __init__(self, engine_id: _Optional[str] = ..., boot_nonce: _Optional[bytes] = ...) -> None: ...

class NamespaceFields(_message.Message):
    __slots__ = ("tenant", "account", "model", "model_config_digest", "weights_id", "quantization", "kv_dtype", "kv_scale_source", "attention_backend", "kv_layout", "tokens_per_block", "parallel_shape", "lora_digest", "hash_algorithm", "hash_bytes", "groups", "unshared")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ID_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_SCALE_SOURCE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_SHAPE_FIELD_NUMBER: _ClassVar[int]
    LORA_DIGEST_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    HASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    UNSHARED_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    account: str
    model: str
    model_config_digest: str
    weights_id: str
    quantization: str
    kv_dtype: str
    kv_scale_source: str
    attention_backend: str
    kv_layout: str
    tokens_per_block: int
    parallel_shape: str
    lora_digest: str
    hash_algorithm: str
    hash_bytes: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupSpec]
    unshared: bool
    def __init__(self, tenant: _Optional[str] = ..., account: _Optional[str] = ..., model: _Optional[str] = ..., model_config_digest: _Optional[str] = ..., weights_id: _Optional[str] = ..., quantization: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., kv_scale_source: _Optional[str] = ..., attention_backend: _Optional[str] = ..., kv_layout: _Optional[str] = ..., tokens_per_block: _Optional[int] = ..., parallel_shape: _Optional[str] = ..., lora_digest: _Optional[str] = ..., hash_algorithm: _Optional[str] = ..., hash_bytes: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupSpec, _Mapping]]] = ..., unshared: bool = ...) -> None: ...

class GroupSpec(_message.Message):
    __slots__ = ("kind", "tokens_per_block", "blocks_per_block", "sliding_window_tokens", "shard_bytes", "drafter")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    kind: GroupKind
    tokens_per_block: int
    blocks_per_block: int
    sliding_window_tokens: int
    shard_bytes: _containers.RepeatedScalarFieldContainer[int]
    drafter: bool
    def __init__(self, kind: _Optional[_Union[GroupKind, str]] = ..., tokens_per_block: _Optional[int] = ..., blocks_per_block: _Optional[int] = ..., sliding_window_tokens: _Optional[int] = ..., shard_bytes: _Optional[_Iterable[int]] = ..., drafter: bool = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("identity", "namespace", "world_size", "capabilities", "epoch", "own_epoch", "unserved_seconds")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OWN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    UNSERVED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    identity: EngineIdentity
    namespace: NamespaceFields
    world_size: int
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    epoch: str
    own_epoch: bool
    unserved_seconds: float
    def __init__(self, identity: _Optional[_Union[EngineIdentity, _Mapping]] = ..., namespace: _Optional[_Union[NamespaceFields, _Mapping]] = ..., world_size: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ..., epoch: _Optional[str] = ..., own_epoch: bool = ..., unserved_seconds: _Optional[float] = ...) -> None: ...

class SessionOpened(_message.Message):
    __slots__ = ("session_id", "namespace_fingerprint", "namespace_id", "epoch", "capabilities", "lease_ttl_ms", "store_threshold", "isolated")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    STORE_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    ISOLATED_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    namespace_fingerprint: str
    namespace_id: int
    epoch: EpochOpened
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    lease_ttl_ms: int
    store_threshold: int
    isolated: bool
    def __init__(self, session_id: _Optional[int] = ..., namespace_fingerprint: _Optional[str] = ..., namespace_id: _Optional[int] = ..., epoch: _Optional[_Union[EpochOpened, _Mapping]] = ..., capabilities: _Optional[_Iterable[str]] = ..., lease_ttl_ms: _Optional[int] = ..., store_threshold: _Optional[int] = ..., isolated: bool = ...) -> None: ...

class EpochOpened(_message.Message):
    __slots__ = ("epoch", "group_seeds")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GROUP_SEEDS_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    group_seeds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[str] = ..., group_seeds: _Optional[_Iterable[int]] = ...) -> None: ...

class RanksReady(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankLost(_message.Message):
    __slots__ = ("rank", "reason")
    RANK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    rank: int
    reason: str
    def __init__(self, rank: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ResetCache(_message.Message):
    __slots__ = ("sequence", "epoch")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    epoch: str
    def __init__(self, sequence: _Optional[int] = ..., epoch: _Optional[str] = ...) -> None: ...

class CloseSession(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepRefused(_message.Message):
    __slots__ = ("sequence", "reason", "message")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    reason: str
    message: str
    def __init__(self, sequence: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Query(_message.Message):
    __slots__ = ("context", "run", "lease")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.ReqContext
    run: _common_pb2.KeyRun
    lease: LeaseMode
    def __init__(self, context: _Optional[_Union[_common_pb2.ReqContext, _Mapping]] = ..., run: _Optional[_Union[_common_pb2.KeyRun, _Mapping]] = ..., lease: _Optional[_Union[LeaseMode, str]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("statuses", "lease_id", "sources")
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    statuses: bytes
    lease_id: int
    sources: bytes
    def __init__(self, statuses: _Optional[bytes] = ..., lease_id: _Optional[int] = ..., sources: _Optional[bytes] = ...) -> None: ...

class LookupCall(_message.Message):
    __slots__ = ("call_id", "queries")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    queries: _containers.RepeatedCompositeFieldContainer[Query]
    def __init__(self, call_id: _Optional[int] = ..., queries: _Optional[_Iterable[_Union[Query, _Mapping]]] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("call_id", "answers", "reason", "message")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    answers: _containers.RepeatedCompositeFieldContainer[Answer]
    reason: str
    message: str
    def __init__(self, call_id: _Optional[int] = ..., answers: _Optional[_Iterable[_Union[Answer, _Mapping]]] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class StoreJob(_message.Message):
    __slots__ = ("job_id", "context", "runs", "request_level", "ready_together")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_LEVEL_FIELD_NUMBER: _ClassVar[int]
    READY_TOGETHER_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    context: _common_pb2.ReqContext
    runs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TransferRun]
    request_level: bool
    ready_together: int
    def __init__(self, job_id: _Optional[int] = ..., context: _Optional[_Union[_common_pb2.ReqContext, _Mapping]] = ..., runs: _Optional[_Iterable[_Union[_common_pb2.TransferRun, _Mapping]]] = ..., request_level: bool = ..., ready_together: _Optional[int] = ...) -> None: ...

class LoadJob(_message.Message):
    __slots__ = ("job_id", "context", "runs")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    context: _common_pb2.ReqContext
    runs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TransferRun]
    def __init__(self, job_id: _Optional[int] = ..., context: _Optional[_Union[_common_pb2.ReqContext, _Mapping]] = ..., runs: _Optional[_Iterable[_Union[_common_pb2.TransferRun, _Mapping]]] = ...) -> None: ...

class Touch(_message.Message):
    __slots__ = ("context", "runs")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.ReqContext
    runs: _containers.RepeatedCompositeFieldContainer[_common_pb2.KeyRun]
    def __init__(self, context: _Optional[_Union[_common_pb2.ReqContext, _Mapping]] = ..., runs: _Optional[_Iterable[_Union[_common_pb2.KeyRun, _Mapping]]] = ...) -> None: ...

class HandOff(_message.Message):
    __slots__ = ("context", "runs", "deadline_ms")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.ReqContext
    runs: _containers.RepeatedCompositeFieldContainer[_common_pb2.KeyRun]
    deadline_ms: int
    def __init__(self, context: _Optional[_Union[_common_pb2.ReqContext, _Mapping]] = ..., runs: _Optional[_Iterable[_Union[_common_pb2.KeyRun, _Mapping]]] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class LookupCounts(_message.Message):
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

class RequestLookup(_message.Message):
    __slots__ = ("request_id", "account", "prompt_tokens", "device_tokens", "found_tokens", "missed", "given_up", "prompt_hashes")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FOUND_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    GIVEN_UP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_HASHES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    account: str
    prompt_tokens: int
    device_tokens: int
    found_tokens: int
    missed: MissedBlock
    given_up: GivenUp
    prompt_hashes: bytes
    def __init__(self, request_id: _Optional[str] = ..., account: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., device_tokens: _Optional[int] = ..., found_tokens: _Optional[int] = ..., missed: _Optional[_Union[MissedBlock, _Mapping]] = ..., given_up: _Optional[_Union[GivenUp, str]] = ..., prompt_hashes: _Optional[bytes] = ...) -> None: ...

class Recording(_message.Message):
    __slots__ = ("prompts",)
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    prompts: bool
    def __init__(self, prompts: bool = ...) -> None: ...

class MissedBlock(_message.Message):
    __slots__ = ("group", "block", "hash", "status")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    group: int
    block: int
    hash: bytes
    status: int
    def __init__(self, group: _Optional[int] = ..., block: _Optional[int] = ..., hash: _Optional[bytes] = ..., status: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("sequence", "touches", "loads", "stores", "hand_offs", "released_leases", "preempted_request_ids", "finished_request_ids", "end_step", "lookups", "requests")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TOUCHES_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    HAND_OFFS_FIELD_NUMBER: _ClassVar[int]
    RELEASED_LEASES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    END_STEP_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    touches: _containers.RepeatedCompositeFieldContainer[Touch]
    loads: _containers.RepeatedCompositeFieldContainer[LoadJob]
    stores: _containers.RepeatedCompositeFieldContainer[StoreJob]
    hand_offs: _containers.RepeatedCompositeFieldContainer[HandOff]
    released_leases: _containers.RepeatedScalarFieldContainer[int]
    preempted_request_ids: _containers.RepeatedScalarFieldContainer[str]
    finished_request_ids: _containers.RepeatedScalarFieldContainer[str]
    end_step: bool
    lookups: LookupCounts
    requests: _containers.RepeatedCompositeFieldContainer[RequestLookup]
    def __init__(self, sequence: _Optional[int] = ..., touches: _Optional[_Iterable[_Union[Touch, _Mapping]]] = ..., loads: _Optional[_Iterable[_Union[LoadJob, _Mapping]]] = ..., stores: _Optional[_Iterable[_Union[StoreJob, _Mapping]]] = ..., hand_offs: _Optional[_Iterable[_Union[HandOff, _Mapping]]] = ..., released_leases: _Optional[_Iterable[int]] = ..., preempted_request_ids: _Optional[_Iterable[str]] = ..., finished_request_ids: _Optional[_Iterable[str]] = ..., end_step: bool = ..., lookups: _Optional[_Union[LookupCounts, _Mapping]] = ..., requests: _Optional[_Iterable[_Union[RequestLookup, _Mapping]]] = ...) -> None: ...

class JobVerdict(_message.Message):
    __slots__ = ("job_id", "kind", "accepted", "reason", "blocks", "message")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    kind: _common_pb2.JobKind
    accepted: bool
    reason: str
    blocks: int
    message: str
    def __init__(self, job_id: _Optional[int] = ..., kind: _Optional[_Union[_common_pb2.JobKind, str]] = ..., accepted: bool = ..., reason: _Optional[str] = ..., blocks: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class StepReply(_message.Message):
    __slots__ = ("sequence", "verdicts")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    verdicts: _containers.RepeatedCompositeFieldContainer[JobVerdict]
    def __init__(self, sequence: _Optional[int] = ..., verdicts: _Optional[_Iterable[_Union[JobVerdict, _Mapping]]] = ...) -> None: ...

class JobEnded(_message.Message):
    __slots__ = ("job_id", "kind", "status", "reason", "blocks", "bytes", "left")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    kind: _common_pb2.JobKind
    status: _common_pb2.JobStatus
    reason: str
    blocks: int
    bytes: int
    left: int
    def __init__(self, job_id: _Optional[int] = ..., kind: _Optional[_Union[_common_pb2.JobKind, str]] = ..., status: _Optional[_Union[_common_pb2.JobStatus, str]] = ..., reason: _Optional[str] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., left: _Optional[int] = ...) -> None: ...

class JobsEnded(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[JobEnded]
    def __init__(self, jobs: _Optional[_Iterable[_Union[JobEnded, _Mapping]]] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("session_id", "queries")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    queries: _containers.RepeatedCompositeFieldContainer[Query]
    def __init__(self, session_id: _Optional[int] = ..., queries: _Optional[_Iterable[_Union[Query, _Mapping]]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[Answer]
    def __init__(self, answers: _Optional[_Iterable[_Union[Answer, _Mapping]]] = ...) -> None: ...

class PrepareLoadRequest(_message.Message):
    __slots__ = ("session_id", "sequence", "job")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    sequence: int
    job: LoadJob
    def __init__(self, session_id: _Optional[int] = ..., sequence: _Optional[int] = ..., job: _Optional[_Union[LoadJob, _Mapping]] = ...) -> None: ...

class PrepareLoadResponse(_message.Message):
    __slots__ = ("verdict",)
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    verdict: JobVerdict
    def __init__(self, verdict: _Optional[_Union[JobVerdict, _Mapping]] = ...) -> None: ...

class PrepareStoreRequest(_message.Message):
    __slots__ = ("session_id", "sequence", "job")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    sequence: int
    job: StoreJob
    def __init__(self, session_id: _Optional[int] = ..., sequence: _Optional[int] = ..., job: _Optional[_Union[StoreJob, _Mapping]] = ...) -> None: ...

class PrepareStoreResponse(_message.Message):
    __slots__ = ("verdict",)
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    verdict: JobVerdict
    def __init__(self, verdict: _Optional[_Union[JobVerdict, _Mapping]] = ...) -> None: ...

class CompleteLoadRequest(_message.Message):
    __slots__ = ("session_id", "sequence", "context")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    sequence: int
    context: _common_pb2.ReqContext
    def __init__(self, session_id: _Optional[int] = ..., sequence: _Optional[int] = ..., context: _Optional[_Union[_common_pb2.ReqContext, _Mapping]] = ...) -> None: ...

class CompleteLoadResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TouchRequest(_message.Message):
    __slots__ = ("session_id", "sequence", "touch")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TOUCH_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    sequence: int
    touch: Touch
    def __init__(self, session_id: _Optional[int] = ..., sequence: _Optional[int] = ..., touch: _Optional[_Union[Touch, _Mapping]] = ...) -> None: ...

class TouchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("session_id", "sequence", "lease_ids")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    sequence: int
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[int] = ..., sequence: _Optional[int] = ..., lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseLeaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndStepRequest(_message.Message):
    __slots__ = ("session_id", "sequence", "preempted_request_ids", "finished_request_ids")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    sequence: int
    preempted_request_ids: _containers.RepeatedScalarFieldContainer[str]
    finished_request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_id: _Optional[int] = ..., sequence: _Optional[int] = ..., preempted_request_ids: _Optional[_Iterable[str]] = ..., finished_request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class EndStepResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("session_id", "job_ids", "deadline_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_IDS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    job_ids: _containers.RepeatedScalarFieldContainer[int]
    deadline_ms: int
    def __init__(self, session_id: _Optional[int] = ..., job_ids: _Optional[_Iterable[int]] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class FlushResponse(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[JobEnded]
    def __init__(self, jobs: _Optional[_Iterable[_Union[JobEnded, _Mapping]]] = ...) -> None: ...
