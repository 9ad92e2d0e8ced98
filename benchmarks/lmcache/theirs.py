"""LMCache's server and engines, as processes of the environment that has LMCache."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

FOLDER = Path(__file__).resolve().parent
REPOSITORY = FOLDER.parents[1]
VARIABLE = "KVD_LMCACHE_BIN"
START_SECONDS = 120.0
STOP_SECONDS = 30.0
ENVIRONMENT = {
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_TRACK_USAGE": "false",
    # With more threads torch's copies fall to a tenth of their rate on busy cores.
    "OMP_NUM_THREADS": "1",
}
ENGINE_DRIVEN, LMCACHE_DRIVEN = "engine_driven", "lmcache_driven"


def programs() -> Path:
    """Where LMCache's programs are: $KVD_LMCACHE_BIN, else .venv-lmcache's. Exits without them."""
    folder = Path(os.environ.get(VARIABLE) or REPOSITORY / ".venv-lmcache" / "bin")
    if not (folder / "lmcache").exists():
        sys.exit(f"LMCache is not installed: run `.ci/venv lmcache`, or set {VARIABLE}")
    return folder


@contextlib.contextmanager
def server(chunk_tokens: int, pool_bytes: int, mode: str = ENGINE_DRIVEN) -> Iterator[str]:
    """`lmcache server` over ZMQ with all other settings as shipped; the URL to reach it at.

    Engine-driven copies go through shared memory, which has to be switched on: the default is
    to pickle blocks into messages, at a tenth of the rate.
    """
    port, http_port, metrics_port = _free_ports(3)
    gib = pool_bytes / (1 << 30)
    command = [
        str(programs() / "lmcache"), "server", "--port", str(port),
        "--http-port", str(http_port), "--prometheus-port", str(metrics_port),
        "--chunk-size", str(chunk_tokens), "--supported-transfer-mode", mode,
        "--l1-size-gb", f"{gib:g}", "--l1-init-size-gb", str(math.ceil(gib)),
        "--eviction-policy", "LRU",
    ]  # fmt: skip
    if mode == ENGINE_DRIVEN:
        command += ["--shm-name", f"kvd-bench-lmcache-{os.getpid()}-{port}"]
    with _process(command) as (process, log):
        _wait_healthy(process, log, http_port)
        yield f"tcp://localhost:{port}"


class Engine:
    """One engine of theirs, registered with the server at `url`; see `engine.py` for its orders."""

    def __init__(self, url: str, shape: str, mode: str = ENGINE_DRIVEN) -> None:
        """`shape` is LMCache's, (2, blocks, tokens, heads, size):type:layers."""
        command = [str(programs() / "python"), str(FOLDER / "engine.py"), url, mode, shape]
        self._ending = contextlib.ExitStack()
        self._process, self._log = self._ending.enter_context(_process(command, answers=True))
        self._read()

    def do(self, order: str, **arguments: object) -> dict[str, Any]:
        """Give an order and wait for its answer; its last words where it has died."""
        assert self._process.stdin is not None
        print(json.dumps({"do": order, **arguments}), file=self._process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        """Leave the server, and end the process."""
        with contextlib.suppress(RuntimeError, BrokenPipeError):
            self.do("close")
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._ending.close()
        for left in Path("/dev/shm").glob(f"lmcache_kv_{self._process.pid}_*"):
            left.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"LMCache's engine has died:\n{_last_words(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def engine(url: str, shape: str, mode: str = ENGINE_DRIVEN) -> Iterator[Engine]:
    """An `Engine` that is closed at the end."""
    running = Engine(url, shape, mode)
    try:
        yield running
    finally:
        running.close()


@contextlib.contextmanager
def _process(
    command: Sequence[str], answers: bool = False
) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    scratch = tempfile.mkdtemp(prefix="kvd-bench-lmcache-")
    with contextlib.ExitStack() as ending:
        ending.callback(shutil.rmtree, scratch)
        log = ending.enter_context(tempfile.TemporaryFile("w+"))
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if answers else log,
            stderr=log,
            text=True,
            cwd=scratch,
            env=os.environ | ENVIRONMENT,
        )
        ending.callback(_end, process)
        yield process, log


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.terminate()
        process.wait(STOP_SECONDS)
        return
    process.kill()
    process.wait()


def _wait_healthy(process: subprocess.Popen[str], log: IO[str], http_port: int) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://localhost:{http_port}/healthcheck", timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"LMCache's server is not there:\n{_last_words(log)}")


def _last_words(log: IO[str]) -> str:
    log.seek(0)
    return log.read()[-3000:]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("localhost", 0))
        return [each.getsockname()[1] for each in sockets]
