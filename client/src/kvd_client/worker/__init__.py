"""The engine-neutral worker side, one for each rank."""

from kvd_client.worker.memory import Fragment, GroupLayout, SharedMemory
from kvd_client.worker.worker import Worker

__all__ = ["Fragment", "GroupLayout", "SharedMemory", "Worker"]
