from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from examples.engine import demo
from examples.engine.process import Answer

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(("ranks", "turns"), [("1", "2"), ("2", "1")])
def test_the_demo_loads_back_what_it_computed(
    ranks: str, turns: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--model", "tiny", "--turns", turns, "--tp", ranks, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["failures"] == []
    assert result["same_tokens"]
    assert result["bytes_stored"][0] > 0
    for row in result["turns"]:
        assert row["cold"]["loaded"] == 0
        assert row["cold"]["computed"] == row["prompt_tokens"]
        for name in ("warm", "after_kill"):
            assert 0 < row[name]["computed"] <= 16
            assert row[name]["computed"] + row[name]["loaded"] == row["prompt_tokens"]


def test_the_demo_says_why_it_cannot_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "POOL_BYTES", 1 << 60)
    assert demo.main(["--model", "tiny"]) == 1
    told = capsys.readouterr().err
    assert "FAILED: the daemon ended at its start" in told
    assert "Traceback" not in told


def run_of(loaded: int, output: list[int], digest: str) -> demo.Run:
    """A one-turn run of 33 prompt tokens in blocks of 16, the first block loaded or not."""
    fields = {
        "computed": 33 - loaded,
        "loaded": loaded,
        "failed_loads": 0,
        "hashes": ["a", "b"],
        "digests": [digest, "digest-b"],
        "loaded_blocks": list(range(loaded // 16)),
    }
    return demo.Run(start_s=0.0, prompts=[33], answers=[Answer(output=output, fields=fields)])


COLD = run_of(0, [1, 2], "digest-a")


def test_a_right_run_has_no_failures() -> None:
    assert demo.failures(COLD, run_of(32, [1, 2], "digest-a"), 16) == []


@pytest.mark.parametrize(
    ("warm", "failure"),
    [
        (run_of(32, [1, 3], "digest-a"), "turn 1: the answer differs from the cold one"),
        (run_of(16, [1, 2], "digest-a"), "turn 1: 16 tokens loaded, expected 32; 0 loads failed"),
        (run_of(32, [1, 2], "digest-x"), "turn 1: 1 loaded blocks differ from the stored bytes"),
    ],
)
def test_the_demo_notices_what_is_wrong(warm: demo.Run, failure: str) -> None:
    assert demo.failures(COLD, warm, 16) == [failure]


def test_the_demo_ends_cleanly_when_interrupted() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.engine.demo", "--model", "tiny"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            if b"engine processes" in line:
                break
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGINT)
        # That nothing is left is for the fixture that watches every module.
        assert process.wait(60) == 130
