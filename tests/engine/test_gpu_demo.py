"""`make demo-gpu` on a CPU: the same code over host shared memory, with a model of toy size."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples.gpu import __main__ as demo
from examples.gpu import graphs, shape
from examples.gpu.bars import verdicts_of
from examples.gpu.engine import block_hashes, steps_of
from examples.gpu.measure import PromptResult
from examples.gpu.model import Model
from examples.gpu.paged_kv import PagedKv
from examples.gpu.shape import LLAMA_8B, TINY

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("own_environment")]
CPU = torch.device("cpu")
ONE = ["--device", "cpu", "--shape", "tiny", "--repeats", "1", "--prompts", "2048"]
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


def test_a_prompt_is_loaded_whole_however_much_of_all_that_is_stored_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one request finds is held for it, and is a quarter of the pool at most."""
    monkeypatch.setitem(demo.EXTENT_BYTES, "tiny", 1 << 20)
    assert demo.main([*ONE, "--out", str(tmp_path)]) == 0
    [row] = json.loads((tmp_path / "ttft-tiny-cpu.json").read_text())["prompts"]
    assert row["loaded_tokens"] == 2048 - 16
    assert 0 < row["found_s"] < row["loaded_s"] < row["load_s"]


def test_blocks_that_were_not_stored_are_counted_and_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(demo.EXTENT_BYTES, "tiny", 1 << 20)
    monkeypatch.setattr(demo, "pool_bytes", lambda _: 1 << 20)
    assert demo.main([*ONE, "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert re.search(r"FAILED: 2048 tokens: \d+ of 128 blocks were not stored: \w+", said)
    assert re.search(r"FAILED: 2048 tokens: only \d+ of 2032 tokens loaded in turn 0", said)
    assert "other KV bytes" not in said


def test_a_prompt_is_computed_in_steps_and_its_last_block_on_its_own() -> None:
    assert list(steps_of(320, TINY)) == [(0, 128), (128, 256), (256, 304), (304, 320)]
    assert list(steps_of(32, TINY)) == [(0, 16), (16, 32)]
    assert list(steps_of(16384, LLAMA_8B))[-2:] == [(12288, 16368), (16368, 16384)]


def result(load_s: float, failures: list[str]) -> PromptResult:
    return PromptResult(
        prompt_tokens=16384,
        recompute_s=0.5,
        recompute_all_s=[0.5],
        load_s=load_s,
        load_all_s=[load_s],
        found_s=0.001,
        loaded_s=load_s - 0.01,
        loaded_tokens=16368,
        loaded_bytes=2 << 30,
        copy_s=0.03,
        ideal_copy_s=0.03,
        last_block_s=0.01,
        cuda_graphs=True,
        failures=failures,
    )


@pytest.mark.parametrize(
    ("load_s", "failures", "met"),
    [
        (0.0499, [], [True, True]),
        (0.0501, [], [False, False]),
        (0.0499, ["other KV bytes in turn 0"], [False, False]),
    ],
)
def test_a_bar_is_met_or_missed_by_what_was_measured(
    load_s: float, failures: list[str], met: list[bool]
) -> None:
    assert [each.is_met for each in verdicts_of([result(load_s, failures)], "cuda")] == met
    assert verdicts_of([result(load_s, failures)], "cpu") == []


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


def test_without_a_cuda_graph_both_sides_run_eagerly_and_it_is_said(
    kv: PagedKv, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = graphs.Passes(Model(TINY, CPU, seed=3), kv, CPU)
    monkeypatch.setattr(passes, "_side", object())

    def refuse(_model: Model, _kv: PagedKv, _side: object, span: tuple[int, int]) -> None:
        raise RuntimeError(f"no capture from {span[0]}\nand more")

    monkeypatch.setattr(graphs, "CapturedPass", refuse)
    passes.prepare(64)
    assert not passes.are_captured
    line = "no CUDA graphs of 64 tokens, both sides run eagerly: RuntimeError: no capture from 0\n"
    assert capsys.readouterr().out == line
    assert int(passes.run(torch.arange(64), 0, [9, 2, 5, 11])) in range(256)


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
