"""vLLM's OpenAI server as its own processes, as a user starts it, spoken to over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.ports import free_port
from tests.vllm.engine import CONNECTED, ENVIRONMENT, PATIENCE_SECONDS, Prompt
from tests.waiting import wait_until

MODEL = "tiny"
START_SECONDS = 300.0  # three processes import vLLM, one after the other
SAMPLE = re.compile(r"^([a-z_:]+?)(?:_total)?(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


class ApiServer:
    """Answers once this is made."""

    def __init__(self, settings: dict[str, Any], log: Path) -> None:
        self.log = log
        self._url = f"http://127.0.0.1:{free_port()}"
        flags = settings | {"served_model_name": MODEL, "host": "127.0.0.1"}
        words = ["--port", self._url.rpartition(":")[2]]
        for name, value in flags.items():
            words.append("--" + ("" if value is not False else "no-") + name.replace("_", "-"))
            if not isinstance(value, bool):
                words.append(json.dumps(value) if isinstance(value, dict) else str(value))
        environment = os.environ | ENVIRONMENT | {"VLLM_SERVER_DEV_MODE": "1"}
        del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            wait_until(self._answers, "the server", START_SECONDS)
        except AssertionError:
            self._end_by_force()
            raise AssertionError(log.read_text()[-8000:]) from None

    def complete(self, prompt: Prompt, max_tokens: int = 12) -> tuple[int, ...]:
        """The tokens that follow a prompt."""
        request = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = json.loads(self._ask("/v1/completions", request))
        return tuple(answer["choices"][0]["token_ids"])

    def reset(self) -> None:
        """Forget the prefix cache."""
        self._ask("/reset_prefix_cache", {})

    def count(self, name: str) -> float:
        """A metric's value, summed over its labels."""
        samples = SAMPLE.findall(self._ask("/metrics"))
        return sum(float(value) for sample, value in samples if sample == name)

    def wait_for_daemon(self) -> None:
        """Returns once the server's engine has a session that can be used."""
        wait_until(self._is_connected)

    def _is_connected(self) -> bool:
        self.complete([3, 4, 5], max_tokens=2)  # it counts when it steps
        return self.count(CONNECTED) == 1

    def end(self) -> None:
        """Stop it in order; by force, with all that it started, when that takes too long."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(PATIENCE_SECONDS)
        finally:
            self._end_by_force()

    def _end_by_force(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answers(self) -> bool:
        assert self._process.poll() is None, "the server has ended"
        try:
            self._ask("/health")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    def _ask(self, path: str, content: dict[str, Any] | None = None) -> str:
        request = urllib.request.Request(
            self._url + path,
            None if content is None else json.dumps(content).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            text: str = answer.read().decode()
        return text
