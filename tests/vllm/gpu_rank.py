"""Ranks of the connector whose KV lies on the GPU of a driver; no vLLM engine and no torch there.

vLLM's own code allocates the KV, views it and describes it, on the CPU. That copy is only looked at
by the tests: what the connector is given are the same views at the addresses of device memory.
"""

from __future__ import annotations

import ctypes

import torch
from vllm.v1.kv_cache_interface import KVCacheLayout
from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.worker.utils import allocate_kv_cache

from kvd_client.integrations.vllm.rank.worker import KvdConnectorWorker
from tests.gpu.device_memory import DeviceMemory
from tests.vllm.rank_rig import BLOCK_TOKENS, Rank

GPU = torch.device("cuda", 0)


class DeviceTensor:
    """As much of a CUDA tensor of bytes as the connector asks for."""

    device = GPU

    def __init__(self, view: torch.Tensor, address: int) -> None:
        """The view's twin in device memory, where the view's storage begins at `address`."""
        storage = view.untyped_storage()
        self.shape = view.shape
        self._view = view
        self._storage_address, self._storage_bytes = address, storage.nbytes()
        self._offset = view.data_ptr() - storage.data_ptr()

    def data_ptr(self) -> int:
        return self._storage_address + self._offset

    def element_size(self) -> int:
        return self._view.element_size()

    def stride(self, dimension: int) -> int:
        return self._view.stride(dimension)

    def untyped_storage(self) -> DeviceStorage:
        return DeviceStorage(self._storage_address, self._storage_bytes)


class DeviceStorage:
    """The allocation under the tensors."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self._address, self._bytes = address, num_bytes

    def data_ptr(self) -> int:
        return self._address

    def nbytes(self) -> int:
        return self._bytes


class DeviceWorker(KvdConnectorWorker):
    """vLLM's account of host tensors, taken for one of device memory at `address`."""

    address = 0

    def _init_worker(self, kv_caches: CanonicalKVCaches) -> None:
        twins = [
            CanonicalKVCacheTensor(
                DeviceTensor(each.tensor, self.address),
                each.page_size_bytes,
            )
            for each in kv_caches.tensors
        ]
        self._device = GPU
        super()._init_worker(CanonicalKVCaches(twins, kv_caches.group_data_refs))


class GpuRank(Rank):
    """A rank over device memory; `memory` is the test's copy of it, by `fetch` and `push`."""

    device: DeviceMemory  # this process's, of all ranks
    kind = "malloc"

    def allocate(self) -> None:
        assert isinstance(self.worker, DeviceWorker)
        self.kv = allocate_kv_cache(
            self.caches, torch.device("cpu"), KVCacheLayout.LBHNC, [BLOCK_TOKENS] * 8
        )
        first = next(iter(self.kv.values()))
        self.memory = torch.empty(0, dtype=torch.int8).set_(first.untyped_storage())
        self.memory.random_(generator=torch.Generator().manual_seed(self.worker._rank))
        self.worker.address = self.device.allocate(len(self.memory), self.kind)
        self.push()
        self.worker.register_kv_caches(self.kv)

    def fetch(self) -> torch.Tensor:
        """The device memory as it is now, a copy; `memory` is that too."""
        assert isinstance(self.worker, DeviceWorker)
        held = self.device.read(self.worker.address, len(self.memory))
        self.memory.copy_(torch.frombuffer(bytearray(held), dtype=torch.int8))
        return self.memory.clone()

    def push(self) -> None:
        """Make the device memory what `memory` is."""
        assert isinstance(self.worker, DeviceWorker)
        self.device.write(self.worker.address, self.memory.numpy().tobytes())

    def launch(self, stream: ctypes.c_void_p, content: torch.Tensor) -> int:
        """Have the stream make the device memory this, later. The address of other device memory,
        which has to stay allocated until then."""
        assert isinstance(self.worker, DeviceWorker)
        source = self.device.allocate(len(content))
        self.device.write(source, content.numpy().tobytes())
        self.device.call(
            "cuMemcpyDtoDAsync_v2",
            ctypes.c_ulonglong(self.worker.address),
            ctypes.c_ulonglong(source),
            ctypes.c_size_t(len(content)),
            stream,
        )
        return source
