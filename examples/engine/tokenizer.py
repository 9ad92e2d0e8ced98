"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from examples.engine.weights import Checkpoint

CONTROL_TOKEN = 3  # gguf's token type of <|im_start|> and its like
SYSTEM_TURN = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class TextCodec(Protocol):
    """What the demo needs from a model's tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


def build_tokenizer(
    tokens: Sequence[str], merges: Sequence[str], token_types: Sequence[int]
) -> Tokenizer:
    """SmolLM2's byte-level BPE from a gguf file's vocabulary: digits are split one by one."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, token_types, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return tokenizer


class BpeCodec:
    """A model's own tokenizer."""

    def __init__(self, path: str) -> None:
        self._tokenizer = Tokenizer.from_file(path)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


class ByteCodec:
    """One token a byte: the tiny model's language."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


def codec_of(checkpoint: Checkpoint) -> TextCodec:
    """The tokenizer that goes with a checkpoint."""
    if checkpoint.directory is None:
        return ByteCodec()
    return BpeCodec(str(checkpoint.directory / "tokenizer.json"))


def chat_turn(role: str, text: str) -> str:
    """One finished turn in SmolLM2's chat markup."""
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def chat_answer_start() -> str:
    """The markup after which the model answers."""
    return "<|im_start|>assistant\n"
