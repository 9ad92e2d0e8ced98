"""The engine-neutral worker side, one for each rank."""

from kvd_client.worker.cuda_refusals import CudaMemoryRefused
from kvd_client.worker.memory import DeviceSpan, Fragment, GroupLayout, SharedMemory
from kvd_client.worker.worker import Worker

__all__ = [
    "CudaMemoryRefused",
    "DeviceSpan",
    "Fragment",
    "GroupLayout",
    "SharedMemory",
    "Worker",
]
