"""Tiny models with random weights, made in seconds: real architectures, real tokenizer, no network.

The weights come from a fixed seed and are drawn wider than a trained model's, so that attention
looks at what is in the KV cache: bytes that are wrong there give other tokens.
"""

from __future__ import annotations

import random
import string
from pathlib import Path

VOCABULARY = 2048
SEED = 20_240
SPREAD = 0.12  # standard deviation of the weights
SLIDING_WINDOW = 64


def make_llama(directory: Path) -> None:
    """Four layers, one kind of attention: one KV cache group."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        initializer_range=SPREAD,
        bos_token_id=0,
        eos_token_id=1,
    )
    _save(LlamaForCausalLM, config, directory)


def make_gemma(directory: Path) -> None:
    """Layers of sliding-window and of full attention in turn: two KV cache groups."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        max_position_embeddings=4096,
        initializer_range=SPREAD,
        sliding_window=SLIDING_WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    _save(Gemma3ForCausalLM, config, directory)


def _save(architecture: type, config: object, directory: Path) -> None:
    import torch

    torch.manual_seed(SEED)
    model = architecture(config).to(torch.float32)
    model.save_pretrained(directory)
    _make_tokenizer(directory)


def _make_tokenizer(directory: Path) -> None:
    """A byte-pair tokenizer, trained on words that were thrown together."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    draw = random.Random(SEED)
    words = [
        "".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 9))) for _ in range(900)
    ]
    text = [" ".join(draw.choices(words, k=12)) for _ in range(2000)]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        text, vocab_size=VOCABULARY, special_tokens=["<s>", "</s>", "<pad>"], show_progress=False
    )
    PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(directory)
