"""A vLLM server as a child process, and the time to its first token over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.engine.lifetime import REPOSITORY, child_environment, interrupts_held

START_SECONDS = 300.0
STOP_SECONDS = 30.0
TRACKER_SECONDS = 5.0
ANSWER_SECONDS = 120.0
BLOCK_TOKENS = 32
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two engines: else both sit on the same core
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
}


@dataclass(frozen=True)
class Answer:
    """What came of a prompt, as the caller saw it."""

    first_token_s: float
    text: str
    prompt_tokens: int
    cached_tokens: int  # not computed: loaded, or on the device already


class VllmServer:
    """vLLM's OpenAI server over a kvd daemon; `start` returns at once, `wait` when it answers."""

    def __init__(self, name: str, python: str, model: Path, kvd_socket: str, log: Path) -> None:
        self.name, self.log = name, log
        self._python, self._model, self._kvd_socket = python, model, kvd_socket
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Run it, in a process group of its own: Ctrl-C is for whoever started it."""
        self._port = _free_port()
        transfer = {
            "kv_connector": "KvdConnector",
            "kv_connector_module_path": "kvd_client.integrations.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket_path": self._kvd_socket},
        }
        flags = {
            "model": str(self._model),
            "served-model-name": "model",
            "host": "127.0.0.1",
            "port": str(self._port),
            "dtype": "float32",
            "block-size": str(BLOCK_TOKENS),
            "max-model-len": "4096",
            "kv-cache-memory-bytes": str(512 << 20),
            "kv-transfer-config": json.dumps(transfer),
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        words += ["--enforce-eager", "--enable-prompt-tokens-details"]
        module = ["-m", "examples.engine.lifetime", "-m", "vllm.entrypoints.openai.api_server"]
        with self.log.open("ab") as log, interrupts_held():
            self._process = subprocess.Popen(
                [self._python, *module, *words],
                cwd=REPOSITORY,
                env=child_environment() | ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until it answers; its last words when it ends before that."""
        deadline = time.monotonic() + START_SECONDS
        while not self._is_healthy():
            assert self._process is not None, "not started"
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} ended at its start:\n{self.last_words()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} took too long to start:\n{self.last_words()}")
            time.sleep(0.2)

    def last_words(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def ask(self, prompt: str, max_tokens: int) -> Answer:
        """Complete the prompt greedily, and say when the first token came."""
        request = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = time.perf_counter()
        first, text = 0.0, ""
        usage: dict[str, Any] = {}
        for event in self._stream("/v1/completions", request):
            first = first or time.perf_counter() - began
            text += "".join(choice["text"] for choice in event["choices"])
            usage = event.get("usage") or usage
        details = usage.get("prompt_tokens_details") or {}
        return Answer(first, text, usage["prompt_tokens"], details.get("cached_tokens") or 0)

    def reset_device_cache(self) -> None:
        """Empty vLLM's own prefix cache, as if other users' prompts had taken the blocks."""
        for _ in self._stream("/reset_prefix_cache", {}):
            pass

    def kill(self) -> None:
        """Kill -9 of the server, the engine and the worker behind it.

        Python's resource trackers are spared: they see the others' end, remove the shared memory
        that vLLM could not, and end.
        """
        if self._process is None:
            return
        group = self._process.pid
        for pid, command in _processes_of(group):
            if b"resource_tracker" not in command:
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + TRACKER_SECONDS
        while _processes_of(group) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid, _ in _processes_of(group):
            os.kill(pid, signal.SIGKILL)
        self._process = None

    def stop(self) -> None:
        """End it in order; by force when that takes too long."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                pass
        self.kill()

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except OSError:
            return False
        finally:
            connection.close()

    def _stream(self, path: str, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Post and yield each event of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_SECONDS)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", path, json.dumps(request), headers)
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                raise RuntimeError(f"{self.name}: HTTP {answer.status} {answer.read()[:500]!r}")
            for line in answer:
                content = line.decode().removeprefix("data:").strip()
                if line.startswith(b"data:") and content != "[DONE]":
                    yield json.loads(content)
        finally:
            connection.close()


def _processes_of(group: int) -> list[tuple[int, bytes]]:
    """Pid and command line of every living process of a process group."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            pid = int(folder.name)
            if os.getpgid(pid) == group and (command := (folder / "cmdline").read_bytes()):
                found.append((pid, command))
        except (ValueError, OSError):  # no process, or it has ended
            continue
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
