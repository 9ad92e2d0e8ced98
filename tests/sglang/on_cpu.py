"""SGLang's copies between device and host pools by plain indexing, in place of its CUDA kernels.

With these, and with nothing pinned, SGLang's caches run whole where its device is the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.pool_host import base, common, mamba, mha, mla


def _copy(target: torch.Tensor, to: torch.Tensor, source: torch.Tensor, rows: torch.Tensor) -> None:
    """Rows of one layer; a table of four dimensions has its rows in pages."""
    target[_places(target, to)] = source[_places(source, rows)]


def _places(table: torch.Tensor, rows: torch.Tensor) -> Any:
    rows = rows.to(torch.int64)
    return rows if table.dim() < 4 else (rows // table.shape[1], rows % table.shape[1])


def _load_mha(
    pool: Any, _: Any, host: torch.Tensor, device: torch.Tensor, layer: int, *__: Any, **___: Any
) -> None:
    if layer < len(pool.device_k_buffers):
        _copy(pool.device_k_buffers[layer], device, pool.k_data_refs[layer], host)
        _copy(pool.device_v_buffers[layer], device, pool.v_data_refs[layer], host)


def _back_up_mha(
    pool: Any, _: Any, host: torch.Tensor, device: torch.Tensor, *__: Any, **___: Any
) -> None:
    for layer in range(pool.layer_num):
        _copy(pool.k_data_refs[layer], host, pool.device_k_buffers[layer], device)
        _copy(pool.v_data_refs[layer], host, pool.device_v_buffers[layer], device)


def _load_mla(
    pool: Any, _: Any, host: torch.Tensor, device: torch.Tensor, layer: int, *__: Any, **___: Any
) -> None:
    _copy(pool.device_kv_buffers[layer], device, pool.data_refs[layer], host)


def _back_up_mla(
    pool: Any, _: Any, host: torch.Tensor, device: torch.Tensor, *__: Any, **___: Any
) -> None:
    for layer, buffer in enumerate(pool.device_kv_buffers):
        _copy(pool.data_refs[layer], host, buffer, device)


def _load_states(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    **_: Any,
) -> None:
    dst[dst_indices] = src[src_indices, layer_id, 0]


def _back_up_states(
    src_layers: Sequence[torch.Tensor],
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    **_: Any,
) -> None:
    for layer, states in enumerate(src_layers):
        dst[dst_indices, layer, 0] = states[src_indices]


def install() -> None:
    """From here on the host pools of MHA, MLA and Mamba copy without a GPU."""
    common._cuda_host_register = lambda *_, **__: None
    common._cuda_host_unregister = base._cuda_host_unregister = lambda *_, **__: None
    mha.MHATokenToKVPoolHost.load_to_device_per_layer = _load_mha
    mha.MHATokenToKVPoolHost.backup_from_device_all_layer = _back_up_mha
    mla.MLATokenToKVPoolHost.load_to_device_per_layer = _load_mla
    mla.MLATokenToKVPoolHost.backup_from_device_all_layer = _back_up_mla
    mamba.MambaPoolHost._copy_tensor_pf_lf = staticmethod(_load_states)
    mamba.MambaPoolHost._copy_tensor_all_layers_lf_pf = staticmethod(_back_up_states)
