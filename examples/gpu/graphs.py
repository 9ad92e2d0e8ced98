"""A prompt's forward passes as CUDA graphs: one launch each, as engines have it.

Without, an eager pass over a few tokens is mostly PyTorch launching some hundreds of kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from examples.gpu.model import Model
from examples.gpu.paged_kv import PagedKv

WARM_UPS = 2  # before a capture, in which nothing may be loaded or compiled for the first time


class Passes:
    """Runs forward passes: what `prepare` has captured as a graph, all others eagerly."""

    def __init__(self, model: Model, kv: PagedKv, device: torch.device) -> None:
        self._model, self._kv, self._device = model, kv, device
        self._captured: dict[tuple[int, int], CapturedPass] = {}  # by first and end
        self._side: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def are_captured(self) -> bool:
        return bool(self._captured)

    def prepare(self, length: int) -> None:
        """Capture a prompt's whole pass, and that of its last block; forget those before.

        On a CPU nothing is captured. Where it fails neither is, and a line says so and why: what
        is compared with each other must be launched alike. Overwrites the KV's first blocks.
        """
        self.forget()
        if self._side is None:
            return
        try:
            for first in (0, length - self._model.shape.block_tokens):
                captured = CapturedPass(self._model, self._kv, self._side, (first, length))
                self._captured[first, length] = captured
        except RuntimeError as error:
            self.forget()
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"no CUDA graphs of {length} tokens, both sides run eagerly: {why}", flush=True)

    def run(self, tokens: Tensor, first: int, blocks: Sequence[int]) -> Tensor:
        """Compute the tokens from `first` on; the next token, on the device until the next run.

        On the current stream, like what is launched eagerly.
        """
        captured = self._captured.get((first, len(tokens)))
        if captured is not None:
            return captured.replay(tokens[first:], blocks)
        table = torch.tensor(blocks, device=self._device)
        return self._model.forward(tokens[first:], first, table, self._kv.layers)

    def forget(self) -> None:
        """Free the graphs and their memory."""
        if self._captured:
            torch.cuda.synchronize(self._device)
            while self._captured:
                self._captured.popitem()[1].reset()
            torch.cuda.empty_cache()


class CapturedPass:
    """The tokens from `first` to `end`, in whatever blocks: these and the tokens are inputs.

    Weights, KV and the two inputs must stay where they are. RuntimeError where a capture fails;
    the stream that was current then is so still.
    """

    def __init__(
        self, model: Model, kv: PagedKv, side: torch.cuda.Stream, span: tuple[int, int]
    ) -> None:
        first, end = span
        device = kv.layers[0].device
        self._tokens = torch.zeros(end - first, dtype=torch.int64, device=device)
        self._table = torch.arange(end // model.shape.block_tokens, device=device)
        self._graph = torch.cuda.CUDAGraph()

        def forward() -> Tensor:
            return model.forward(self._tokens, first, self._table, kv.layers)

        current = torch.cuda.current_stream(device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                forward()
        current.wait_stream(side)
        try:
            # The client's threads call CUDA too; what they do is no part of the capture.
            with torch.cuda.graph(self._graph, stream=side, capture_error_mode="thread_local"):
                self._next_token = forward()
        except RuntimeError:
            torch.cuda.set_stream(current)  # torch.cuda.graph leaves its own where its end fails
            raise

    def replay(self, tokens: Tensor, blocks: Sequence[int]) -> Tensor:
        self._tokens.copy_(tokens)
        self._table.copy_(torch.tensor(blocks))
        self._graph.replay()
        return self._next_token

    def reset(self) -> None:
        self._graph.reset()
