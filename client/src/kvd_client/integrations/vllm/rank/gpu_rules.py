"""What can't be served of vLLM on a GPU, said at its start with the flag that is in the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1

from kvd_client.worker import CudaMemoryRefused
from kvd_client.worker.cuda_refusals import CudaRefusal

WITHOUT_KVD = (
    "or start vLLM without the kvd connector (take --kv-transfer-config away), or with"
    ' "kv_connector": "OffloadingConnector", which is vLLM\'s own'
)
OTHER_DEVICE = (
    "kvd serves engines whose KV lies in host memory or on one NVIDIA GPU for each rank, and this"
    " rank's lies on {devices}: start vLLM without the kvd connector (take --kv-transfer-config"
    " away)"
)
NOT_SHARED = "kvd can't share this engine's KV cache with its daemon: {refusal}{flags} Do so, " + (
    WITHOUT_KVD
)
# vLLM's own allocator makes memory that can be shared on some GPUs and not on others, so it is
# the memory that is looked at, not the flag.
CUMEM_FLAGS = (
    " vLLM's KV cache is such memory under --enable-sleep-mode, --enable-cumem-allocator, or"
    " expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF."
)
FLAGS = {
    CudaRefusal.VMM_NOT_EXPORTABLE: CUMEM_FLAGS,
    CudaRefusal.SEVERAL_ALLOCATIONS: CUMEM_FLAGS,
    CudaRefusal.POOL_MEMORY: (
        " vLLM's KV cache is such memory with backend:cudaMallocAsync in PYTORCH_CUDA_ALLOC_CONF."
    ),
}
ZEROED_TOO_EARLY = (
    "vLLM's second model runner zeroes this model's blocks before kvd may end the stores that"
    " still read them, so a stored block could hold zeros. Set VLLM_USE_V2_MODEL_RUNNER=0 in"
    " vLLM's environment, " + WITHOUT_KVD
)
SLEEP_HOOK = "unregister_kv_caches"  # of vLLM's connectors, since 0.33
SLEEPS_UNTOLD = (
    "this vLLM frees its KV cache when it sleeps and does not tell the connector, so kvd's copies"
    " would go into freed memory. Take --enable-sleep-mode and --enable-cumem-allocator away, use"
    " vLLM 0.33 or later, " + WITHOUT_KVD
)


def check_step_order(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise ValueError where vLLM may overwrite a block before it lets kvd end what reads it.

    vLLM 0.32 and 0.33: of a model with recurrent layers, or with KV of several precisions, new
    blocks are zeroed, and states copied into them, ahead of the step. The first runner calls
    `handle_preemptions` before that, the second one after it. For other models neither runner
    writes a block before that call.
    """
    if kv_cache_config.needs_kv_cache_zeroing and vllm_config.use_v2_model_runner:
        raise ValueError(ZEROED_TOO_EARLY)


def check_sleep(vllm_config: Any) -> None:
    """Raise ValueError where vLLM may free the KV's memory without telling the connector.

    vLLM 0.32 has no hooks around sleep. The mover would go on copying into what was freed, or
    after waking lies elsewhere. Its CPU backend frees nothing when it sleeps. Any vLLM that has
    sleep mode's allocator can be told to sleep, also where sleep mode was not asked for.
    """
    from vllm.platforms import current_platform  # noqa: PLC0415 - finds out the platform

    model_config = vllm_config.model_config
    flags = ("enable_sleep_mode", "enable_cumem_allocator")
    sleeps = any(getattr(model_config, flag, False) for flag in flags)
    if sleeps and not current_platform.is_cpu() and not hasattr(KVConnectorBase_V1, SLEEP_HOOK):
        raise ValueError(SLEEPS_UNTOLD)


def check_devices(tensors: Mapping[str, torch.Tensor]) -> torch.device:
    """The one device of a rank's KV. Raises RuntimeError for one that kvd can't serve."""
    devices = {tensor.device for tensor in tensors.values()}
    (first, *others) = devices or {torch.device("cpu")}
    is_nvidia = first.type == "cuda" and torch.version.hip is None
    if others or not (first.type == "cpu" or is_nvidia):
        raise RuntimeError(OTHER_DEVICE.format(devices=", ".join(sorted(map(str, devices)))))
    return first


def start_up_error(refused: CudaMemoryRefused) -> RuntimeError:
    """What ends vLLM's start: the refusal, its fix with vLLM's flags, the way without kvd."""
    return RuntimeError(NOT_SHARED.format(refusal=refused, flags=FLAGS.get(refused.reason, "")))
