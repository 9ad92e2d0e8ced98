"""`kvd size`: bytes of a token by a model's config.json, and the curve of a running daemon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvd.__main__ import main
from kvd.cli import size, status
from kvd.core.blocks.extent_fit import wasted_share
from kvd.core.blocks.row_grants import slots_per_row
from kvd.core.spec import GroupSpec
from kvd.pool.config import chosen_extent_bytes
from kvd_proto.groups import GroupKind
from kvd_proto.v1 import operator_pb2 as pb

LLAMA_3_8B = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3 = {
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "torch_dtype": "float32"}
GEMMA = {"text_config": {**LLAMA_3_8B, "head_dim": 256}}
HYBRID = {**LLAMA_3_8B, "layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8}


@pytest.mark.parametrize(
    ("config", "ranks", "attention", "token_bytes"),
    [
        (LLAMA_3_8B, 1, "GQA", 131072),
        (LLAMA_3_8B, 8, "GQA", 131072),
        (LLAMA_3_8B, 16, "GQA", 262144),
        (DEEPSEEK_V3, 8, "MLA", 61 * 576 * 2),
        (GPT2, 1, "MHA", 12 * 2 * 768 * 2),
        (GEMMA, 1, "GQA", 262144),
        (HYBRID, 1, "GQA", 32768),
        ({**LLAMA_3_8B, "num_key_value_heads": 1}, 1, "MQA", 16384),
    ],
    ids=["llama", "eight ranks", "sixteen ranks", "deepseek", "gpt2", "nested", "hybrid", "mqa"],
)
def test_a_token_takes_what_its_layers_and_heads_take(
    config: dict[str, Any], ranks: int, attention: str, token_bytes: int
) -> None:
    found = size.model_size(config, "bfloat16", ranks)
    assert (found.attention, found.token_bytes) == (attention, token_bytes)


@pytest.mark.parametrize("shards", [1, 2, 8])
@pytest.mark.parametrize("block_bytes", [3000, 600 << 10, 1098 << 10, 2 << 20, 23 << 20])
@pytest.mark.parametrize("blocks", [1, 100, 125_000])
def test_the_pool_holds_so_many_blocks_in_its_extents_and_takes_them(
    blocks: int, block_bytes: int, shards: int
) -> None:
    pool_bytes = size.pool_for(blocks, block_bytes, shards)
    extent_bytes = chosen_extent_bytes(pool_bytes)
    part = max(-(-block_bytes // shards), 4096)
    group = GroupSpec(GroupKind.FULL_ATTENTION, 1, (part,) * shards)
    assert wasted_share(group, extent_bytes) <= 0.1 or extent_bytes == 64 << 20
    held = pool_bytes // extent_bytes // shards * slots_per_row(group, extent_bytes)
    assert held >= blocks
    assert size.blocks_in(pool_bytes, block_bytes, shards) == held


def test_the_pool_for_so_many_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    assert main(["size", str(tmp_path), "--tokens", "1000001", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["blocks"], said["block_bytes"]) == (62501, 2 << 20)
    assert said["pool_bytes"] == 1954 * (64 << 20)  # 32 blocks an extent
    assert said["longest_prompt_tokens"] == 1954 * 32 // 4 * 16
    words = ["size", str(tmp_path / "config.json"), "--kv-dtype", "fp8", "--pool-bytes", "1GiB"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "holds 16384 tokens" in shown
    assert "one request can load 4096 tokens of it" in shown


@pytest.mark.parametrize("text", ["{}", "[]", "no JSON", '{"num_hidden_layers": 2}'])
def test_a_config_that_says_too_little_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert main(["size", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err or text[0] == "{"
    assert main(["size", str(tmp_path / "none")]) == 2


@pytest.mark.parametrize(
    "more",
    [
        {"torch_dtype": ["float16"]},
        {"layer_types": ["linear_attention"] * 32},
        {"layer_types": [["full_attention"]]},
        {"head_dim": -5},
        {"num_key_value_heads": -8},
        {"num_key_value_heads": [8]},
        {"hidden_size": 16},
        {"num_key_value_heads": float("inf")},
        {"num_hidden_layers": 10**400},
    ],
    ids=[
        *("dtype", "no KV", "layer types", "head", "no heads", "heads", "width"),
        *("no end", "too many"),
    ],
)
def test_a_config_that_cannot_be_is_refused(
    more: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B | more))
    assert main(["size", str(tmp_path), "--pool-bytes", "1GiB"]) == 2
    assert "kvd: " in capsys.readouterr().err


@pytest.mark.parametrize("part", [None, 5])
def test_a_part_of_a_config_that_is_no_object_is_as_if_it_were_not_there(part: object) -> None:
    config = LLAMA_3_8B | {"text_config": part}
    assert size.model_size(config, "bfloat16").token_bytes == 131072


def test_a_config_without_end_is_no_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert main(["size", str(tmp_path)]) == 2
    assert "no JSON" in capsys.readouterr().err


def test_the_curve_of_a_daemon_says_what_more_memory_gives(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = pb.StatusResponse()
    answer.pool.bytes = 40 << 30
    monkeypatch.setattr(status, "look", lambda _given: answer)
    assert main(["size"]) == 1
    assert "no engine has used" in capsys.readouterr().err
    for pools, ratio in ((0.5, 0.4), (1, 0.5), (2, 0.75)):
        answer.curve.points.add(pools=pools, hit_ratio=ratio)
    answer.curve.uses = 1000
    assert main(["size"]) == 0
    shown = capsys.readouterr().out
    assert "80.0 GiB  75.0%      +25.0%" in shown
    assert main(["size", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["curve"]["uses"] == 1000


def test_a_models_name_on_the_hub_is_told_from_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "Qwen/Qwen3-0.6B", "--tokens", "1000"]) == 2
    assert "MODEL is a config.json on this machine" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--tokens", "--pool-bytes"])
def test_what_only_a_model_answers_is_not_answered_by_a_daemon(
    capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    assert main(["size", flag, "10000000"]) == 2
    assert f"{flag} needs MODEL" in capsys.readouterr().err


def test_a_request_loads_no_more_than_the_pool_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A block of 16 MiB in extents of 4 MiB: the pool holds none."""
    shape = {"num_hidden_layers": 64, "num_attention_heads": 64, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert main(["size", str(tmp_path), "--pool-bytes", "64MiB", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["tokens_in_pool"], said["longest_prompt_tokens"]) == (0, 0)


@pytest.mark.parametrize("size", ["0", "1", "4MB"])
def test_a_pool_of_less_than_an_extent_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str
) -> None:
    assert main(["size", str(tmp_path), "--pool-bytes", size]) == 2
    assert "must be 4MiB, one extent, or more" in capsys.readouterr().err
