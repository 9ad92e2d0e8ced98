"""How one rank lays keys and values out in its memory, as text for the fingerprint."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

SEPARATOR = ";"
SHUFFLE_VARIABLE = "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT"  # another order within the same layout


class KvLayout(NamedTuple):
    """What shapes the bytes of a block beside the model; `parse` is the inverse of `str()`."""

    layout: str  # vLLM's name of the order of layers, blocks, heads, tokens
    backends: str  # attention backends of the cached layers
    processor: str  # instruction set that shapes the bytes; on a GPU its compute capability

    def __str__(self) -> str:
        return SEPARATOR.join(self)

    @classmethod
    def parse(cls, text: str) -> KvLayout:
        """The parts of `str()`; of other text the whole is the layout."""
        parts = text.split(SEPARATOR)
        return cls(*parts) if len(parts) == 3 else cls(text, "", "")


def describe_rank(vllm_config: Any, kv_cache_config: Any) -> KvLayout:
    """This process's layout. A worker knows its attention backends once the model is loaded."""
    name = getattr(kv_cache_config, "kv_cache_layout", None) or getattr(
        vllm_config.cache_config, "kv_cache_layout", None
    )
    shuffled = os.environ.get(SHUFFLE_VARIABLE, "").lower() in ("1", "true")
    sizes = _kernel_block_sizes(vllm_config, kv_cache_config)
    parts = [str(name or ""), *(["shuffled"] if shuffled else []), *([sizes] if sizes else [])]
    return KvLayout(
        layout="+".join(parts),
        backends=",".join(_backends(vllm_config, kv_cache_config)),
        processor=_processor(vllm_config, kv_cache_config),
    )


def sees_layers(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether the model is loaded in this process, so that its backends are known."""
    return bool(_cached_layers(vllm_config, kv_cache_config))


def _cached_layers(vllm_config: Any, kv_cache_config: Any) -> list[Any]:
    layers = vllm_config.compilation_config.static_forward_context
    names = (name for group in kv_cache_config.kv_cache_groups for name in group.layer_names)
    return [layers[name] for name in names if name in layers]


def _backends(vllm_config: Any, kv_cache_config: Any) -> list[str]:
    """Names of the backends of all cached layers, each once; without layers what was asked for."""
    layers = _cached_layers(vllm_config, kv_cache_config)
    if layers:
        return sorted({_backend_name(layer) for layer in layers})
    asked = getattr(vllm_config.attention_config, "backend", None)
    return [str(getattr(asked, "name", asked or ""))]


def _backend_name(layer: Any) -> str:
    try:
        return str(layer.get_attn_backend().get_name())
    except (AttributeError, NotImplementedError):
        return type(layer).__name__


def _kernel_block_sizes(vllm_config: Any, kv_cache_config: Any) -> str:
    """Tokens of a kernel's block where it is smaller than the engine's; else empty.

    An engine block is several of the kernel's then, one after the other, each laid out by itself.
    """
    layers = vllm_config.compilation_config.static_forward_context
    sizes = []
    for group in kv_cache_config.kv_cache_groups:
        engine = group.kv_cache_spec.block_size
        kernel = _kernel_block_size(engine, [layers[n] for n in group.layer_names if n in layers])
        sizes.append(engine if kernel is None else kernel)
    whole = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
    return "" if sizes == whole else "kernel" + ",".join(map(str, sizes))


def _kernel_block_size(block_tokens: int, layers: list[Any]) -> int | None:
    """As vLLM chooses it for a group's layers; None for layers that have no such choice."""
    try:
        from vllm.v1.worker.utils import select_common_block_size  # noqa: PLC0415 - vLLM's own

        backends = [layer.get_attn_backend() for layer in layers]
        return int(select_common_block_size(block_tokens, backends)) if backends else None
    except (ImportError, AttributeError, NotImplementedError, TypeError, ValueError):
        return None


def _processor(vllm_config: Any, kv_cache_config: Any) -> str:
    """The CPU's instruction set, and the form vLLM chose by it for each group; or what the GPU
    can do, by which kernels differ in what they compute.
    """
    import torch  # noqa: PLC0415 - only where vLLM has it anyway
    from vllm.platforms import current_platform  # noqa: PLC0415 - finds out the platform

    if not current_platform.is_cpu():
        has_begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        capability = current_platform.get_device_capability(
            torch.cuda.current_device() if has_begun else 0
        )
        return "" if capability is None else f"sm{capability.major}.{capability.minor}"

    if torch.cpu._is_avx512_supported():
        widest = "avx512"
    else:
        widest = "avx2"
    forms = {
        _attention_form(vllm_config, group.kv_cache_spec)
        for group in kv_cache_config.kv_cache_groups
    }
    return "/".join([widest, *sorted(form for form in forms if form)])


def _attention_form(vllm_config: Any, spec: Any) -> str:
    """Which of its CPU kernels vLLM chooses: each has its own order of bytes in a block."""
    head_size = getattr(spec, "head_size", None)
    if head_size is None:
        return ""
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415 - CPU only

        dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
        return str(_get_attn_isa(dtype, spec.block_size, head_size, cache_dtype))
    except (ImportError, TypeError, NotImplementedError):
        import torch  # noqa: PLC0415 - as above

        return "amx" if torch.cpu._is_amx_tile_supported() else "vec"
