"""In place of `vllm._C_stable_libtorch`: the few of vLLM's own operators that its Python can't do
without, in torch. What it asks whether it has, it hears that it has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

SUPPORTS = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
)
_library: Any = torch.library.Library("_C", "DEF")  # type: ignore[no-untyped-call]


def _define(schema: str, call: Callable[..., object]) -> None:
    _library.define(schema)
    _library.impl(schema.partition("(")[0], call, "CompositeExplicitAutograd")


def _silu_and_mul(out: torch.Tensor, values: torch.Tensor) -> None:
    gate, up = values.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


for _name in SUPPORTS:
    _define(f"{_name}(int capability) -> bool", lambda _capability: False)
_define("silu_and_mul(Tensor! out, Tensor input) -> ()", _silu_and_mul)
