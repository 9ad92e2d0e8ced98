"""What kvd's copies are held against, all in the engine's own process and without IPC: one large
pinned copy, one cudaMemcpyAsync a fragment, one batch call, and a gather by torch with a copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.cuda import Cuda
from benchmarks.gpu.mover_side import halves
from benchmarks.gpu.probing.copying import Copying

GATHER_BLOCKS = 64  # gathered and copied at a time: 128 MiB of staging on the device
Pass = Callable[[], float]  # moves everything once; seconds


class DeviceMemory:
    """An engine's KV: a torch tensor where torch has the device, else memory of the driver's."""

    def __init__(self, cuda: Cuda, size: int, with_torch: bool = True) -> None:
        self.bytes, self._cuda = size, cuda
        self.tensor: Any = None
        if with_torch:
            self.tensor = _torch_bytes(size)
        self.is_torch = self.tensor is not None
        self.address: int = self.tensor.data_ptr() if self.is_torch else cuda.allocate(size)

    def free(self) -> None:
        """Give it back to the device."""
        if self.is_torch:
            import torch  # noqa: PLC0415 - it is loaded already

            self.tensor = None
            torch.cuda.empty_cache()
        else:
            self._cuda.call("cuMemFree_v2", self.address)


def _torch_bytes(size: int) -> Any:
    try:
        import torch  # noqa: PLC0415 - seconds, and not everywhere
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    return torch.ones(size, dtype=torch.uint8, device="cuda")


class Peers:
    """Passes over `memory` and as much pinned memory of this process's own."""

    def __init__(self, cuda: Cuda, memory: DeviceMemory, host: int) -> None:
        self._cuda, self._memory, self._host = cuda, memory, host
        self._copying = Copying(cuda)

    def passes(self, kinds: list[str], fragment: int, total: int) -> dict[str, Pass]:
        """Every peer's pass over the first `total` bytes, by name."""
        found = {way: self._by_copies(way, kinds, fragment, total) for way in ("large", "plain")}
        if self._cuda.has("cuMemcpyBatchAsync") or self._cuda.has("cuMemcpyBatchAsync_v2"):
            found["batch"] = self._by_copies("batch", kinds, fragment, total)
        if self._memory.is_torch:
            found["gather"] = self._by_gather(kinds, fragment, total)
        return found

    def _by_copies(self, way: str, kinds: list[str], fragment: int, total: int) -> Pass:
        """Each direction moves its share on a stream of its own; both are submitted first."""
        lanes = []
        for number, (kind, (begin, end)) in enumerate(halves(kinds).items()):
            at = int(total * begin)
            case = {"way": way, "is_store": kind == "store", "fragment": fragment}
            case |= {"host": self._host + at, "device": self._memory.address + at}
            stream = self._copying.stream(number)
            submit = self._copying.submitter(case | {"total": int(total * (end - begin))}, stream)
            lanes.append((submit, stream))

        def run() -> float:
            began = time.perf_counter()
            for submit, _ in lanes:
                submit()
            for _, stream in lanes:
                self._cuda.call("cuStreamSynchronize", stream)
            return time.perf_counter() - began

        return run

    def _by_gather(self, kinds: list[str], fragment: int, total: int) -> Pass:
        """What engines' own connectors do: index the KV on the device, copy what that gives."""
        import torch  # noqa: PLC0415 - it is loaded already

        block = max(fragment, 2 << 20)
        blocks, height = total // block, block // fragment
        kv = self._memory.tensor[:total].view(torch.int64).view(height, blocks, fragment // 8)
        pinned = torch.empty((blocks * block) // 8, dtype=torch.int64, pin_memory=True)
        lanes = []
        for kind, (begin, end) in halves(kinds).items():
            order = torch.randperm(blocks, device=kv.device)[
                int(blocks * begin) : int(blocks * end)
            ]
            lanes.append((kind, order, int(blocks * begin), torch.cuda.Stream()))  # type: ignore[no-untyped-call, unused-ignore]

        def run() -> float:
            began = time.perf_counter()
            for kind, order, first, stream in lanes:
                with torch.cuda.stream(stream):
                    for at in range(0, len(order), GATHER_BLOCKS):
                        ids = order[at : at + GATHER_BLOCKS]
                        words = slice(
                            (first + at) * block // 8, (first + at + len(ids)) * block // 8
                        )
                        host = pinned[words].view(height, len(ids), fragment // 8)
                        if kind == "store":
                            host.copy_(kv.index_select(1, ids), non_blocking=True)
                        else:
                            kv.index_copy_(1, ids, host.to(kv.device, non_blocking=True))
            for *_, stream in lanes:
                stream.synchronize()
            return time.perf_counter() - began

        return run

    def seconds_of_one(self, kind: str, size: int, count: int) -> list[float]:
        """Seconds of each of `count` plain copies of `size` bytes, submitted and waited for."""
        case = {"way": "large", "is_store": kind == "store", "fragment": size, "total": size}
        case |= {"host": self._host, "device": self._memory.address}
        return self._copying.time(repeats=count, **case)["wall_s"]
