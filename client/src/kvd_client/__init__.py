"""The client of kvd, for engines to embed: keep KV blocks in the node's daemon.

An engine's scheduler process has one `SchedulerConnection` and one `Scheduler`, each of its
worker processes one `Worker`. All of them survive a daemon that is absent, slow or killed:
the engine computes what it can't load. examples/embed_engine.py is a complete engine.
"""

from kvd_client.connection import SchedulerConnection
from kvd_client.identity import EngineIdentity, Group, NamespaceFields
from kvd_client.scheduler import (
    NULL_BLOCK,
    JobReport,
    RequestParams,
    ScheduledRequest,
    Scheduler,
    SchedulerOptions,
    SchedulerStats,
    StepOutcome,
    StepPlan,
    StoredKeys,
    StoreMode,
    WorkerReport,
)
from kvd_client.worker import (
    CudaMemoryRefused,
    DeviceSpan,
    Fragment,
    GroupLayout,
    SharedMemory,
    Worker,
)
from kvd_proto.groups import GroupKind

__all__ = [
    "NULL_BLOCK",
    "CudaMemoryRefused",
    "DeviceSpan",
    "EngineIdentity",
    "Fragment",
    "Group",
    "GroupKind",
    "GroupLayout",
    "JobReport",
    "NamespaceFields",
    "RequestParams",
    "ScheduledRequest",
    "Scheduler",
    "SchedulerConnection",
    "SchedulerOptions",
    "SchedulerStats",
    "SharedMemory",
    "StepOutcome",
    "StepPlan",
    "StoreMode",
    "StoredKeys",
    "Worker",
    "WorkerReport",
]
