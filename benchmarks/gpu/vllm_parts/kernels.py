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


class _Shown:
    """A pinned tensor's bytes as CUDA's array interface tells them, by the same address."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # which must outlive what shows it
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "strides": None,
        }


def _define(schema: str, call: Callable[..., object]) -> None:
    _library.define(schema)
    _library.impl(schema.partition("(")[0], call, "CompositeExplicitAutograd")


def _silu_and_mul(out: torch.Tensor, values: torch.Tensor) -> None:
    gate, up = values.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def _gelu_tanh_and_mul(out: torch.Tensor, values: torch.Tensor) -> None:
    gate, up = values.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.gelu(gate, approximate="tanh") * up)


def _cuda_view(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.is_pinned(), "the device sees pinned memory alone"
    assert tensor.is_contiguous(), "one range of bytes"
    shown = torch.as_tensor(_Shown(tensor), device="cuda")
    return shown.view(tensor.dtype).view(tensor.shape)


for _name in SUPPORTS:
    _define(f"{_name}(int capability) -> bool", lambda _capability: False)
_define("silu_and_mul(Tensor! out, Tensor input) -> ()", _silu_and_mul)
_define("gelu_tanh_and_mul(Tensor! out, Tensor input) -> ()", _gelu_tanh_and_mul)
_define("get_cuda_view_from_cpu_tensor(Tensor cpu_tensor) -> Tensor", _cuda_view)
# A graph's outputs are held, where vLLM's own operator lets go of them: more memory, same bytes.
_define("weak_ref_tensor(Tensor(a) input) -> Tensor(a)", lambda tensor: tensor.view_as(tensor))
