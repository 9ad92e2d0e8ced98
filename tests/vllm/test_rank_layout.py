"""A rank's account of its layout: what shapes the bytes of a block, as a worker finds it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from kvd_client.integrations.vllm.identity.kv_layout import KvLayout, describe_rank
from tests.vllm.configurations import (
    BLOCK_TOKENS,
    LAYERS,
    Configuration,
    cache_of,
    configure,
    full_attention,
)

pytestmark = pytest.mark.usefixtures("model")  # its maker, a process, outlives this module


@pytest.fixture(scope="module")
def base(model: Path) -> Configuration:
    return configure(model)


def layer(backend: str) -> SimpleNamespace:
    named = SimpleNamespace(get_name=lambda: backend)
    return SimpleNamespace(get_attn_backend=lambda: named)


def test_text_and_parts_are_each_others_inverse() -> None:
    parts = KvLayout("LBHNC", "CPU_ATTN,MAMBA", "avx512/vec")
    assert KvLayout.parse(str(parts)) == parts
    assert KvLayout.parse("free text") == KvLayout("free text", "", "")


def test_backends_are_those_of_the_cached_layers(
    base: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = {f"0.{name}": layer("CPU_ATTN") for name in LAYERS}
    layers[f"1.{LAYERS[0]}"] = layer("OTHER")
    layers["not cached"] = layer("UNSEEN")
    context = base.vllm.compilation_config
    monkeypatch.setattr(context, "static_forward_context", layers)
    described = describe_rank(base.vllm, cache_of(full_attention(), full_attention()))
    assert described.backends == "CPU_ATTN,OTHER"


def test_the_processor_is_named_with_the_form_it_gives_to_blocks(
    base: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert describe_rank(base.vllm, base.cache).processor == "avx512/vec"  # float32
    monkeypatch.setattr(base.vllm.model_config, "dtype", torch.bfloat16)
    assert describe_rank(base.vllm, base.cache).processor == "avx512/amx"
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: False)
    assert describe_rank(base.vllm, base.cache).processor == "avx2/vec"


def test_the_layouts_name_is_vllms(base: Configuration, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base.vllm.cache_config, "kv_cache_layout", "LBHNC")
    assert describe_rank(base.vllm, base.cache).layout == "LBHNC"
    monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")
    assert describe_rank(base.vllm, base.cache).layout == "LBHNC+shuffled"


def split_by(size: int, backend: str = "SPLITS") -> SimpleNamespace:
    """A layer whose kernel knows blocks of one size only."""
    named = SimpleNamespace(
        get_name=lambda: backend,
        get_supported_kernel_block_sizes=lambda *_: [size],
        supports_block_size=lambda tokens, *_: tokens == size,
    )
    return SimpleNamespace(get_attn_backend=lambda: named)


def test_kernel_blocks_smaller_than_the_engines_are_part_of_the_layout(
    base: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base.vllm.cache_config, "kv_cache_layout", "LBHNC")
    names = [f"0.{name}" for name in LAYERS]
    cache = cache_of(full_attention())
    layouts = []
    for size in (BLOCK_TOKENS, BLOCK_TOKENS // 2):
        layers = dict.fromkeys(names, split_by(size))
        monkeypatch.setattr(base.vllm.compilation_config, "static_forward_context", layers)
        layouts.append(describe_rank(base.vllm, cache).layout)
    assert layouts == ["LBHNC", f"LBHNC+kernel{BLOCK_TOKENS // 2}"]


def test_on_a_gpu_the_processor_is_its_compute_capability(
    base: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(
        current_platform, "get_device_capability", lambda _device: DeviceCapability(9, 0)
    )
    assert describe_rank(base.vllm, base.cache).processor == "sm9.0"
