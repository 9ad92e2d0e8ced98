"""In place of `vllm.vllm_flash_attn`, whose kernels are compiled: there is none of any version."""

from __future__ import annotations

from typing import NoReturn

FA2_AVAILABLE = FA3_AVAILABLE = False


def flash_attn_varlen_func(*_told: object, **_named: object) -> NoReturn:
    raise RuntimeError("flash attention was not carried: name the attention backend TRITON_ATTN")


compile_flash_attn_varlen_func_from_specs = get_scheduler_metadata = flash_attn_varlen_func


def is_fa_version_supported(*_told: object, **_named: object) -> bool:
    return False


def fa_version_unsupported_reason(*_told: object, **_named: object) -> str:
    return "it was not carried"
