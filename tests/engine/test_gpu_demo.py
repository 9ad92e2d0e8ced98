"""`make demo-gpu` on a CPU: the same code over host shared memory, with a model of toy size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples.gpu import __main__ as demo
from examples.gpu import shape
from examples.gpu.engine import block_hashes
from examples.gpu.model import Model
from examples.gpu.paged_kv import PagedKv
from examples.gpu.shape import LLAMA_8B, TINY

pytestmark = pytest.mark.engine
CPU = torch.device("cpu")
SMALL = ["--device", "cpu", "--shape", "tiny", "--repeats", "2", "--prompts", "64,320"]


@pytest.fixture
def kv() -> Iterator[PagedKv]:
    made = PagedKv(TINY, 16, CPU)
    yield made
    made.close()


@pytest.mark.parametrize("more", [[], ["--contiguous"]])
def test_the_demo_loads_all_but_the_last_block_and_finds_it_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    assert demo.main([*SMALL, *more, "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "ttft-tiny-cpu.json").read_text())
    assert result["blocks"] == ("contiguous" if more else "scattered")
    assert [row["prompt_tokens"] for row in result["prompts"]] == [64, 320]
    for row in result["prompts"]:
        blocks = row["prompt_tokens"] // 16 - 1
        assert row["failures"] == []
        assert row["loaded_tokens"] == blocks * 16
        assert row["loaded_bytes"] == blocks * result["block_bytes"]
        assert len(row["load_all_s"]) == len(row["recompute_all_s"]) == 2
    assert "the first tokens are the same" in capsys.readouterr().out


def test_a_wrong_byte_fails_the_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = PagedKv.equal

    def damaged(kv: PagedKv, one: list[int], other: list[int]) -> bool:
        kv.layers[-1][1, other[0], 3, 0, 5] += 1
        return whole(kv, one, other)

    monkeypatch.setattr(PagedKv, "equal", damaged)
    assert demo.main([*SMALL, "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "FAILED: 64 tokens: other KV bytes in turn 0" in said
    assert "are the same" not in said


def test_without_a_gpu_the_demo_says_how_to_try_it_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert demo.main([]) == 1
    said = capsys.readouterr().err
    assert "no GPU" in said
    assert "-m examples.gpu --device cpu --shape tiny" in said


@pytest.mark.parametrize("length", ["16", "100", "no"])
def test_a_prompt_that_is_no_whole_blocks_is_refused(
    length: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        demo.main(["--prompts", f"64,{length}"])
    assert "--prompts" in capsys.readouterr().err


def test_a_pool_that_does_not_fit_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(demo.EXTENT_BYTES, "tiny", 1 << 50)
    assert demo.main(SMALL) == 1
    assert "give fewer or shorter --prompts" in capsys.readouterr().err


def test_an_engine_that_the_daemon_refuses_is_told_so_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shape.Shape, "block_bytes", 16)  # its memory says something else
    assert demo.main(SMALL) == 1
    said = capsys.readouterr().err
    assert "FAILED: the daemon does not serve this engine: " in said
    assert "12288 bytes" in said


def test_computing_in_two_parts_gives_what_one_part_gives(kv: PagedKv) -> None:
    model = Model(TINY, CPU, seed=3)
    tokens = torch.randint(256, (64,), generator=torch.Generator().manual_seed(1))
    whole, parts = torch.tensor([9, 2, 5, 11]), torch.tensor([1, 8, 4, 12])
    token = model.forward(tokens, 0, whole, kv.layers)
    model.forward(tokens[:41], 0, parts, kv.layers)
    assert torch.equal(token, model.forward(tokens[41:], 41, parts, kv.layers))
    for layer in kv.layers:
        torch.testing.assert_close(layer[:, parts], layer[:, whole])


def test_blocks_that_are_wiped_no_longer_equal_the_others(kv: PagedKv) -> None:
    for number, layer in enumerate(kv.layers):
        layer[:, 3] = layer[:, 7] = number + 1
    assert kv.equal([3, 1], [7, 2])
    kv.wipe([7])
    assert not kv.equal([3, 1], [7, 2])


def test_a_block_is_named_by_all_tokens_before_it() -> None:
    tokens = torch.arange(48)
    other = tokens.clone()
    other[20] = 0
    first, second = block_hashes(tokens, 16), block_hashes(other, 16)
    assert len(first) == 3
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert first[2] != second[2]
    assert block_hashes(tokens[:47], 16) == first[:2]


def test_the_large_shape_is_that_of_llama_8b() -> None:
    assert LLAMA_8B.weight_bytes // 2 == pytest.approx(8.03e9, rel=0.001)
    assert LLAMA_8B.block_bytes == 2 << 20
    assert LLAMA_8B.side_bytes == 32 << 10
