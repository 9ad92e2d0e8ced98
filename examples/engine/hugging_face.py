"""Writes a checkpoint as the folder that vLLM and transformers load: float32 safetensors.

Only numpy and the standard library are needed, so that it runs where vLLM is not installed.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from examples.engine.config import ModelConfig
from examples.engine.weights import (
    F32,
    Checkpoint,
    load_checkpoint,
    make_whole,
    random_checkpoint,
)

# The example engine's tiny model has heads of 8, which vLLM's attention on the CPU does not know.
TINY = ModelConfig(
    name="tiny",
    layers=3,
    hidden=128,
    heads=4,
    kv_heads=2,
    head_dim=32,
    feed_forward=256,
    vocabulary=256,
)
LONGEST = 8192  # tokens
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def model_folder(name: str, cache_dir: Path) -> Path:
    """The folder of "smollm2", or of "tiny" with seeded random weights; made on the first call."""
    target = cache_dir / f"{name}-hugging-face-v1"
    if target.exists():
        return target
    if name == "tiny":
        checkpoint = random_checkpoint(TINY, seed=0)
    else:
        checkpoint = load_checkpoint(name, str(cache_dir), seed=0)
    make_whole(target, lambda scratch: write_folder(checkpoint, scratch))
    return target


def write_folder(checkpoint: Checkpoint, folder: Path) -> None:
    """Configuration, tokenizer and weights of a checkpoint."""
    model = checkpoint.model
    tied = "output.weight" not in checkpoint.weights
    (folder / "config.json").write_text(json.dumps(_config(model, tied), indent=1))
    if checkpoint.directory is None:
        (folder / "tokenizer.json").write_text(json.dumps(_byte_tokenizer()))
        special = {}
    else:
        shutil.copy(checkpoint.directory / "tokenizer.json", folder)
        special = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": LONGEST}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | special))
    _write_safetensors(checkpoint, folder / "model.safetensors")


def _config(model: ModelConfig, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden,
        "intermediate_size": model.feed_forward,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocabulary,
        "rope_theta": model.rope_base,
        "rms_norm_eps": model.norm_epsilon,
        "hidden_act": "silu",
        "max_position_embeddings": LONGEST,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": list(model.end_tokens) or None,
        "torch_dtype": "float32",
    }


def _write_safetensors(checkpoint: Checkpoint, path: Path) -> None:
    """Length of the header, header, bytes: the format needs no library."""
    names = {_renamed(name): name for name in checkpoint.weights}
    header: dict[str, Any] = {}
    position = 0
    for renamed, name in names.items():
        shape = list(checkpoint.weights[name].shape)
        end = position + 4 * math.prod(shape)
        header[renamed] = {"dtype": "F32", "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in names.values():
            out.write(_halves(name, checkpoint.weights[name], checkpoint.model).tobytes())


def _renamed(name: str) -> str:
    """A gguf tensor's name in Llama's module tree."""
    match name.split("."):
        case ["token_embd", "weight"]:
            return "model.embed_tokens.weight"
        case ["output_norm", "weight"]:
            return "model.norm.weight"
        case ["output", "weight"]:
            return "lm_head.weight"
        case ["blk", number, part, "weight"]:
            return f"model.layers.{number}.{NAMES[part]}.weight"
    raise ValueError(f"no Llama has a tensor {name!r}")


def _halves(name: str, weight: F32, model: ModelConfig) -> F32:
    """Query and key rows in Llama's own order: gguf has each rotated pair side by side, Llama its
    first members and then its second ones.
    """
    if not name.endswith(("attn_q.weight", "attn_k.weight")):
        return np.ascontiguousarray(weight)
    pairs = weight.reshape(-1, model.head_dim // 2, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def _byte_tokenizer() -> dict[str, Any]:
    """One token a byte, with the byte as its number."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": False},
        "post_processor": None,
        "decoder": {**level, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: byte for byte, letter in enumerate(_byte_letters())},
            "merges": [],
        },
    }


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies: its own where it prints."""
    prints = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in prints else chr(next(spare)) for byte in range(0x100)]
