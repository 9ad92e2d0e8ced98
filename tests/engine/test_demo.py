from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from examples.engine import demo

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_the_demo_loads_back_what_it_computed(
    ranks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--model", "tiny", "--turns", "2", "--tp", ranks, "--json"]) == 0
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
        assert process.wait(30) == 130
