"""The decoder's forward pass over paged KV, float32 on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from examples.engine.config import ModelConfig, Shard
from examples.engine.messages import Span
from examples.engine.weights import Checkpoint


class SumOverRanks(Protocol):
    """Adds up the ranks' partial results; every rank gets the same bits."""

    def __call__(self, part: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class _Layer:
    attention_norm: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class Decoder:
    """One rank's part of the model: its KV heads, their query heads, its slice of the MLP."""

    def __init__(self, checkpoint: Checkpoint, shard: Shard, sum_over_ranks: SumOverRanks) -> None:
        model = self.model = checkpoint.model
        self._sum = sum_over_ranks
        self._kv_heads = shard.local_kv_heads
        self._queries_per_kv = model.heads // model.kv_heads
        weights = {name: torch.from_numpy(array) for name, array in checkpoint.weights.items()}
        self._embedding = weights["token_embd.weight"]
        self._head = weights.get("output.weight", self._embedding)
        self._norm = weights["output_norm.weight"]
        self._layers = [_cut_layer(weights, model, shard, n) for n in range(model.layers)]
        pairs = torch.arange(0, model.head_dim, 2, dtype=torch.float64) / model.head_dim
        self._frequencies = model.rope_base**-pairs

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span], kv: Sequence[Tensor]) -> Tensor:
        """Compute the spans and write their KV; returns the state after each span's end.

        Shape [len(spans), hidden], the same on every rank.
        """
        tokens = torch.tensor([token for span in spans for token in span.tokens])
        positions = torch.cat(
            [torch.arange(span.first, span.first + len(span.tokens)) for span in spans]
        )
        block_tokens = kv[0].shape[2]
        places = torch.cat(
            [
                torch.tensor(span.blocks)[
                    torch.arange(span.first, span.first + len(span.tokens)) // block_tokens
                ]
                for span in spans
            ]
        )
        rotation = self._rotation(positions)
        hidden = self._embedding[tokens]
        for layer, cache in zip(self._layers, kv, strict=True):
            normed = self._normalise(hidden, layer.attention_norm)
            query, key, value = self._project(layer, normed, rotation)
            cache[places, :, positions % block_tokens] = torch.cat([key, value], dim=-1)
            attended = self._attend(query, spans, cache)
            hidden = hidden + self._sum(functional.linear(attended, layer.output))
            normed = self._normalise(hidden, layer.mlp_norm)
            gated = functional.silu(functional.linear(normed, layer.gate))
            gated *= functional.linear(normed, layer.up)
            hidden = hidden + self._sum(functional.linear(gated, layer.down))
        ends = torch.tensor([len(span.tokens) for span in spans]).cumsum(0) - 1
        return self._normalise(hidden[ends], self._norm)

    @torch.inference_mode()
    def logits(self, last: Tensor) -> Tensor:
        """Scores of the next token, [len(spans), vocabulary]."""
        return functional.linear(last, self._head)

    def _normalise(self, hidden: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.model.norm_epsilon)
        return hidden * scale * weight

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.double()[:, None] * self._frequencies
        return angles.cos().float()[:, None], angles.sin().float()[:, None]

    def _project(
        self, layer: _Layer, hidden: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        def heads(weight: Tensor) -> Tensor:
            flat = functional.linear(hidden, weight)
            return flat.view(len(hidden), -1, self.model.head_dim)

        query, key, value = heads(layer.query), heads(layer.key), heads(layer.value)
        return _rotate(query, rotation), _rotate(key, rotation), value

    def _attend(self, query: Tensor, spans: Sequence[Span], cache: Tensor) -> Tensor:
        """Causal attention of each span over its whole sequence, read from its blocks."""
        parts = []
        start = 0
        for span in spans:
            count = len(span.tokens)
            length = span.first + count
            used = -(-length // cache.shape[2])
            paged = cache[torch.tensor(span.blocks[:used])]  # [used, heads, tokens, 2 * dim]
            joined = paged.transpose(0, 1).flatten(1, 2)[:, :length]
            joined = joined.repeat_interleave(self._queries_per_kv, dim=0)
            key, value = torch.split(joined, self.model.head_dim, dim=-1)
            mask = None
            if count > 1:
                mask = torch.ones(count, length, dtype=torch.bool).tril(span.first)
            part = functional.scaled_dot_product_attention(
                query[start : start + count].transpose(0, 1)[None],
                key[None],
                value[None],
                attn_mask=mask,
            )
            parts.append(part[0].transpose(0, 1).flatten(1))
            start += count
        return torch.cat(parts)


def _rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate neighbouring pairs, the order in which gguf keeps Llama's query and key rows."""
    cosine, sine = rotation
    even, odd = heads[..., 0::2], heads[..., 1::2]
    turned = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], dim=-1)
    return turned.flatten(-2)


def _cut_layer(weights: dict[str, Tensor], model: ModelConfig, shard: Shard, number: int) -> _Layer:
    """This rank's slices: rows of what it projects to, columns of what it projects from."""
    first, last = (head * model.head_dim for head in shard.kv_heads)
    group = model.heads // model.kv_heads
    mlp = slice(*shard.feed_forward)

    def weight(name: str) -> Tensor:
        return weights[f"blk.{number}.{name}.weight"]

    return _Layer(
        attention_norm=weight("attn_norm"),
        query=weight("attn_q")[first * group : last * group],
        key=weight("attn_k")[first:last],
        value=weight("attn_v")[first:last],
        output=weight("attn_output")[:, first * group : last * group].contiguous(),
        mlp_norm=weight("ffn_norm"),
        gate=weight("ffn_gate")[mlp],
        up=weight("ffn_up")[mlp],
        down=weight("ffn_down")[:, mlp].contiguous(),
    )
