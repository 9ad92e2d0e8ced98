"""The engine-neutral scheduler side."""

from kvd_client.scheduler.params import NULL_BLOCK, RequestParams, SchedulerOptions, StoreMode
from kvd_client.scheduler.plan import (
    JobReport,
    ScheduledRequest,
    StepOutcome,
    StepPlan,
    StoredKeys,
    WorkerReport,
)
from kvd_client.scheduler.scheduler import Scheduler
from kvd_client.scheduler.stats import SchedulerStats

__all__ = [
    "NULL_BLOCK",
    "JobReport",
    "RequestParams",
    "ScheduledRequest",
    "Scheduler",
    "SchedulerOptions",
    "SchedulerStats",
    "StepOutcome",
    "StepPlan",
    "StoreMode",
    "StoredKeys",
    "WorkerReport",
]
