"""An engine's work without an engine: matrix products without end, timed by the device's clock."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.cuda import Cuda, Failed

IN_A_BATCH = 8
IDLE = "idle"
Marks = dict[str, tuple[float, float]]  # a round's phases: when each began and ended


class Products:
    """Products of square bf16 (CuPy: fp16) matrices in a thread of their own, until `end`."""

    def __init__(self, cuda: Cuda, width: int, with_torch: bool = True) -> None:
        self._cuda = cuda
        self.library, self._multiply, self._stream = _made(width, with_torch)
        self._ending = threading.Event()
        self._samples: list[list[float]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._cuda.use_in_this_thread()
        before = self._cuda.event()
        after = self._cuda.event()
        for number in range(1 << 40):
            self._cuda.call("cuEventRecord", before, self._stream)
            for _ in range(IN_A_BATCH):
                self._multiply()
            self._cuda.call("cuEventRecord", after, self._stream)
            self._cuda.call("cuEventSynchronize", after)
            took = self._cuda.milliseconds(before, after)
            if number > 2:
                self._samples.append([time.monotonic(), took])
            if self._ending.is_set():
                return

    def end(self) -> list[list[float]]:
        """Stop after the batch in hand; (when it had ended, its milliseconds) of each batch."""
        self._ending.set()
        self._thread.join()
        return self._samples


def _made(width: int, with_torch: bool) -> tuple[str, Any, int]:
    """Library, a call that queues one product, and the stream that it goes to."""
    for make in (_made_by_torch, _made_by_cupy) if with_torch else (_made_by_cupy,):
        try:
            return make(width)
        except (ImportError, AttributeError) as error:
            reason = error
    raise Failed(f"nothing here multiplies on the device: {reason}")


def _made_by_torch(width: int) -> tuple[str, Any, int]:
    import torch  # noqa: PLC0415 - seconds, and only here

    if not torch.cuda.is_available():
        raise ImportError(f"torch {torch.__version__} has no CUDA device")
    left, right = (torch.randn(width, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    torch.cuda.synchronize()
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]

    def multiply() -> None:
        with torch.cuda.stream(stream):
            torch.mm(left, right, out=out)

    return f"torch {torch.__version__}", multiply, stream.cuda_stream


def _made_by_cupy(width: int) -> tuple[str, Any, int]:
    import cupy  # noqa: PLC0415 - seconds, and only here

    matrix = cupy.random.standard_normal((width, width), dtype="float32").astype("float16")
    cupy.cuda.runtime.deviceSynchronize()
    stream = cupy.cuda.Stream(non_blocking=True)

    def multiply() -> None:
        with stream:
            cupy.matmul(matrix, matrix)

    return f"cupy {cupy.__version__}", multiply, stream.ptr


def by_phase(
    rounds: Sequence[Marks], samples: Sequence[Sequence[float]]
) -> dict[str, dict[str, list[Any]]]:
    """By phase: the median milliseconds of each round's batches that lie wholly in it (None where
    none does), and its ratio to that of the same round's phase `idle`."""
    found: dict[str, dict[str, list[Any]]] = {}
    for marks in rounds:
        medians = {}
        for name, (began, ended) in marks.items():
            inside = [took for at, took in samples if began + took / 1e3 <= at <= ended]
            medians[name] = statistics.median(inside) if inside else None
        idle = medians.get(IDLE)
        for name, median in medians.items():
            row = found.setdefault(name, {"ms": [], "ratio": []})
            row["ms"].append(median)
            if median is not None and idle is not None:
                row["ratio"].append(median / idle)
    return found
