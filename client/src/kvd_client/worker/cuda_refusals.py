"""Why GPU memory can't be shared with the daemon, and what to change."""

from __future__ import annotations

import enum


class CudaRefusal(enum.StrEnum):
    """Why GPU memory can't be shared, as reasons that never change."""

    NO_DRIVER = "NO_DRIVER"
    NO_CONTEXT = "NO_CONTEXT"
    NOT_ON_CUDA = "NOT_ON_CUDA"
    MIXED_MEMORY = "MIXED_MEMORY"
    SEVERAL_GPUS = "SEVERAL_GPUS"
    SHAPE = "SHAPE"
    OUT_OF_ALLOCATION = "OUT_OF_ALLOCATION"
    SEVERAL_ALLOCATIONS = "SEVERAL_ALLOCATIONS"
    TOO_MANY_ALLOCATIONS = "TOO_MANY_ALLOCATIONS"
    HOST_MEMORY = "HOST_MEMORY"
    MANAGED_MEMORY = "MANAGED_MEMORY"
    POOL_MEMORY = "POOL_MEMORY"
    VMM_NOT_EXPORTABLE = "VMM_NOT_EXPORTABLE"
    NOT_SHAREABLE = "NOT_SHAREABLE"
    MIG = "MIG"
    COMPUTE_MODE = "COMPUTE_MODE"
    MPS = "MPS"


_DROP_VMM = (
    "With PyTorch, leave expandable segments off: PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF)"
    "=expandable_segments:False. With vLLM, drop --enable-sleep-mode, whose allocator makes"
    " such memory too"
)

FIXES = {
    CudaRefusal.NO_DRIVER: (
        "run where libcuda.so.1 of the GPU's driver is mounted and the GPU visible"
    ),
    CudaRefusal.NO_CONTEXT: (
        "register on the thread that allocated the KV, or make its GPU current first"
        " (torch.cuda.set_device)"
    ),
    CudaRefusal.NOT_ON_CUDA: (
        "move the KV to a CUDA device, or register SharedMemory for KV on the CPU"
    ),
    CudaRefusal.MIXED_MEMORY: "register either GPU memory or SharedMemory for one rank",
    CudaRefusal.SEVERAL_GPUS: "register each GPU's memory as a rank of its own",
    CudaRefusal.SHAPE: (
        "register the storage that the tensor is a view of, and say by fragments where its blocks"
        " lie"
    ),
    CudaRefusal.OUT_OF_ALLOCATION: "register no more bytes than were allocated at that address",
    CudaRefusal.SEVERAL_ALLOCATIONS: (
        "allocate each tensor of KV in one piece, or register its pieces apart. " + _DROP_VMM
    ),
    CudaRefusal.TOO_MANY_ALLOCATIONS: "allocate the KV in fewer pieces, such as one for all layers",
    CudaRefusal.HOST_MEMORY: "register KV in host memory as SharedMemory, made by memfd_create",
    CudaRefusal.MANAGED_MEMORY: "allocate the KV by cudaMalloc instead of cudaMallocManaged",
    CudaRefusal.POOL_MEMORY: (
        "allocate the KV by cudaMalloc instead of cudaMallocAsync; with PyTorch take"
        " backend:cudaMallocAsync out of PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF)"
    ),
    CudaRefusal.VMM_NOT_EXPORTABLE: (
        "allocate the KV by cudaMalloc, or by cuMemCreate with"
        " CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR requested. " + _DROP_VMM
    ),
    CudaRefusal.NOT_SHAREABLE: "register in the process that allocated the KV, by cudaMalloc",
    CudaRefusal.MIG: "use the whole GPU: CUDA IPC between MIG slices is not proved safe",
    CudaRefusal.COMPUTE_MODE: "set the GPU's compute mode back: nvidia-smi --compute-mode=DEFAULT",
    CudaRefusal.MPS: "run without MPS: stop its control daemon and unset CUDA_MPS_PIPE_DIRECTORY",
}


class CudaMemoryRefused(ValueError):
    """GPU memory that can't be shared. `reason` is stable, `fix` says what to change."""

    def __init__(self, reason: CudaRefusal, what: str) -> None:
        self.reason = reason
        self.fix = FIXES[reason]
        super().__init__(f"{what} [{reason}]. To fix it: {self.fix}.")
