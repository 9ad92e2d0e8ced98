"""What vLLM can't be served with: refused at start, with the flag that is in the way."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

from kvd_client.integrations.vllm.connector import KvdConnector
from kvd_client.integrations.vllm.rank import worker as rank_side
from kvd_client.integrations.vllm.rank.gpu_rules import (
    SLEEP_HOOK,
    check_sleep,
    check_step_order,
    start_up_error,
)
from kvd_client.worker import CudaMemoryRefused, cuda_memory
from kvd_client.worker.cuda_refusals import CudaRefusal
from kvd_proto.libcuda import CudaUnavailable
from tests.vllm.configurations import cache_of, configure, full_attention
from tests.vllm.rank_rig import Rank, cache_config

RECURRENT = cache_of(
    full_attention(),
    MambaSpec(block_size=32, shapes=((1, 64),), dtypes=(torch.float32,)),
)
PLAIN = cache_of(full_attention(), full_attention())
MIXED = cache_of(full_attention(), full_attention(torch.bfloat16))


# -- the order within a step ------------------------------------------------------------------


@pytest.mark.parametrize("cache", [RECURRENT, MIXED])
@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_blocks_that_are_zeroed_before_the_flush_are_refused_with_the_variable(
    model: Path, monkeypatch: pytest.MonkeyPatch, cache: KVCacheConfig, role: KVConnectorRole
) -> None:
    made = configure(model, {"socket_path": "/nowhere/kvd.sock"}, cache)
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)  # here it would not start
    with pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER=0 in vLLM's environment"):
        KvdConnector(made.vllm, role, cache)


@pytest.mark.parametrize(
    ("second", "cache"), [(False, RECURRENT), (False, MIXED), (False, PLAIN), (True, PLAIN)]
)
def test_blocks_that_are_zeroed_after_the_flush_or_never_are_served(
    model: Path, monkeypatch: pytest.MonkeyPatch, second: bool, cache: KVCacheConfig
) -> None:
    made = configure(model, cache=cache)
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", second)
    check_step_order(made.vllm, cache)


def source_of(module: str, function: str) -> str:
    """The last method of that name as text: the module needs a GPU's compiler to be imported."""
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    text = Path(found.origin).read_text()
    parts = re.split(r"\n    (?=def |@)", text)
    *_, body = (part for part in parts if part.startswith(f"def {function}("))
    return body


def test_the_first_runner_of_this_vllm_flushes_before_it_zeroes() -> None:
    step = source_of("vllm.v1.worker.gpu_model_runner", "execute_model")
    assert "_zero_block_ids" in source_of("vllm.v1.worker.gpu_model_runner", "_update_states")
    assert step.index("handle_preemptions(") < step.index("_update_states(")


def test_the_second_runner_of_this_vllm_zeroes_before_it_flushes() -> None:
    """Once it no longer does, the refusal can go."""
    step = source_of("vllm.v1.worker.gpu.model_runner", "execute_model")
    assert "zero_block_ids" in source_of("vllm.v1.worker.gpu.model_runner", "update_requests")
    assert "handle_preemptions(" in source_of("vllm.v1.worker.gpu.kv_connector", "pre_forward")
    assert step.index("update_requests(") < step.index("kv_connector.pre_forward(")


# -- memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "flags"),
    [
        (CudaRefusal.VMM_NOT_EXPORTABLE, ["--enable-sleep-mode", "PYTORCH_CUDA_ALLOC_CONF"]),
        (CudaRefusal.SEVERAL_ALLOCATIONS, ["--enable-cumem-allocator", "expandable_segments:True"]),
        (CudaRefusal.POOL_MEMORY, ["backend:cudaMallocAsync in PYTORCH_CUDA_ALLOC_CONF"]),
        (CudaRefusal.MPS, ["CUDA_MPS_PIPE_DIRECTORY"]),
    ],
)
def test_a_refusal_names_what_to_change_of_vllm_and_the_way_without_kvd(
    reason: CudaRefusal, flags: list[str]
) -> None:
    said = str(start_up_error(CudaMemoryRefused(reason, "the KV can't be shared")))
    for flag in [*flags, reason.value, "--kv-transfer-config"]:
        assert flag in said


def test_a_rank_that_finds_no_driver_ends_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> NoReturn:
        raise CudaUnavailable("libcuda.so.1 can't be loaded")

    monkeypatch.setattr(cuda_memory, "libcuda", missing)
    monkeypatch.setattr(rank_side, "check_devices", lambda _: torch.device("cuda", 0))
    socket = str(tmp_path / "nobody.sock")
    with pytest.raises(RuntimeError, match=r"can't share this engine's KV cache.*libcuda\.so\.1"):
        Rank(0, 1, "alone", caches=cache_config(), socket_path=socket, register_wait_s=0.05)


# -- sleep ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "on_cpu", "told", "refused"),
    [
        ("enable_sleep_mode", False, False, True),
        ("enable_sleep_mode", False, True, False),
        ("enable_sleep_mode", True, False, False),
        ("enable_cumem_allocator", False, False, True),
        ("enable_cumem_allocator", False, True, False),
        ("", False, False, False),
    ],
)
def test_sleep_that_the_connector_is_not_told_of_is_refused_on_a_gpu(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    flag: str,
    on_cpu: bool,
    told: bool,
    refused: bool,
) -> None:
    made = configure(model)
    if flag:
        monkeypatch.setattr(made.vllm.model_config, flag, True)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: on_cpu)
    monkeypatch.delattr(KVConnectorBase_V1, SLEEP_HOOK, raising=False)
    if told:
        monkeypatch.setattr(KVConnectorBase_V1, SLEEP_HOOK, lambda self: None, raising=False)
    if not refused:
        check_sleep(made.vllm)
        return
    with pytest.raises(
        ValueError, match="Take --enable-sleep-mode and --enable-cumem-allocator away"
    ):
        check_sleep(made.vllm)
