"""A decoder of random weights over paged KV. Its answers mean nothing; its work is the real one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from examples.gpu.shape import Shape

MLP_ROWS = 8192  # computed at once; their intermediate takes rows * feed_forward values, twice
NORM_EPSILON = 1e-5


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor
    projection: Tensor  # queries, keys and values, one below the other
    output: Tensor
    mlp_norm: Tensor
    gate_and_up: Tensor
    down: Tensor


class Model:
    """One prompt at a time. The same tokens over the same KV give the same bits."""

    def __init__(self, shape: Shape, device: torch.device, seed: int) -> None:
        self.shape = shape
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)
        heads = shape.heads + 2 * shape.kv_heads
        self._embedding = self._random(shape.vocabulary, shape.hidden)
        self._head = self._random(shape.vocabulary, shape.hidden)
        self._layers = [
            _Layer(
                attention_norm=self._ones(),
                projection=self._random(heads * shape.head_dim, shape.hidden),
                output=self._random(shape.hidden, shape.heads * shape.head_dim),
                mlp_norm=self._ones(),
                gate_and_up=self._random(2 * shape.feed_forward, shape.hidden),
                down=self._random(shape.hidden, shape.feed_forward),
            )
            for _ in range(shape.layers)
        ]
        self._norm = self._ones()
        even = torch.arange(0, shape.head_dim, 2, dtype=torch.float64, device=device)
        self._frequencies = shape.rope_base ** (-even / shape.head_dim)

    def _random(self, rows: int, columns: int) -> Tensor:
        made = torch.empty(rows, columns, dtype=self.shape.dtype, device=self._device)
        return made.normal_(std=columns**-0.5, generator=self._generator)

    def _ones(self) -> Tensor:
        return torch.ones(self.shape.hidden, dtype=self.shape.dtype, device=self._device)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, first: int, blocks: Tensor, kv: list[Tensor]) -> Tensor:
        """Compute the tokens from position `first` on, and write their KV into the blocks.

        `blocks` is the prompt's whole table; what lies before `first` is read from there. Gives
        the next token, still on the device.
        """
        positions = torch.arange(first, first + len(tokens), device=self._device)
        size = self.shape.block_tokens
        slots = blocks[positions // size] * size + positions % size
        angles = (positions[:, None] * self._frequencies).float()
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        mask = self._mask(len(tokens), first) if first else None
        hidden = self._embedding[tokens]
        for layer, cache in zip(self._layers, kv, strict=True):
            query, key, value = self._project(layer, hidden, turn)
            flat = cache.flatten(1, 2)  # [2, slots, kv heads, head dim]
            flat[0].index_copy_(0, slots, key)
            flat[1].index_copy_(0, slots, value)
            if first:
                key, value = self._cached(cache, blocks, first + len(tokens))
            attended = self._attend(query, key, value, mask)
            hidden += functional.linear(attended, layer.output)
            for rows in torch.split(hidden, MLP_ROWS):
                rows.add_(self._feed_forward(layer, rows))
        last = self._normalise(hidden[-1:], self._norm)
        return functional.linear(last, self._head).argmax(-1)

    def _normalise(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(hidden, (self.shape.hidden,), weight, NORM_EPSILON)

    def _project(self, layer: _Layer, hidden: Tensor, turn: Tensor) -> tuple[Tensor, ...]:
        """Queries [tokens, heads, head dim], keys and values [tokens, kv heads, head dim]."""
        shape = self.shape
        normed = self._normalise(hidden, layer.attention_norm)
        joined = functional.linear(normed, layer.projection)
        joined = joined.view(len(hidden), -1, shape.head_dim)
        kinds = [shape.heads, shape.kv_heads, shape.kv_heads]
        query, key, value = torch.split(joined, kinds, dim=1)
        return _rotated(query, turn), _rotated(key, turn), value

    def _feed_forward(self, layer: _Layer, hidden: Tensor) -> Tensor:
        both = functional.linear(self._normalise(hidden, layer.mlp_norm), layer.gate_and_up)
        gate, up = both.chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, layer.down)

    def _mask(self, count: int, first: int) -> Tensor:
        """Which keys so many tokens from `first` on attend to: all up to themselves.

        On a GPU it only stands for the mask: flash attention needs none, and shares out long
        prefixes between the processors even where the tokens are few.
        """
        if self._device.type == "cuda":
            return causal_lower_right(count, first + count)
        return torch.ones(count, first + count, dtype=torch.bool).tril(first)

    def _cached(self, cache: Tensor, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of so many tokens, gathered: [tokens, kv heads, head dim] each."""
        used = blocks[: -(-length // self.shape.block_tokens)]
        # As elements of 16 bytes: the device has a thread for each, and eight times as many for
        # bfloat16.
        gathered = cache.view(torch.complex128).index_select(1, used).view(cache.dtype)
        key, value = gathered.flatten(1, 2)[:, :length]
        return key, value

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of tokens [tokens, heads, head dim] over themselves and all before them.

        Without a mask there are none before.
        """
        query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
        found = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return found[0].transpose(0, 1).flatten(1)


def _rotated(heads: Tensor, turn: Tensor) -> Tensor:
    """Neighbouring pairs turned by their position's angles."""
    pairs = torch.view_as_complex(heads.float().view(*heads.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2).to(heads.dtype)
