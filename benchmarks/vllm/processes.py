"""Processes of vLLM's environment, which obey orders of one JSON line each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

REPOSITORY = Path(__file__).resolve().parents[2]
VARIABLE = "KVD_VLLM_PYTHON"
PATHS = "KVD_VLLM_PATHS"  # that it imports from, beside the checkout
STOP_SECONDS = 30.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def vllm_python() -> str:
    """The Python that has vLLM: $KVD_VLLM_PYTHON, else .venv-vllm's. Exits where there is none."""
    python = os.environ.get(VARIABLE) or str(REPOSITORY / ".venv-vllm" / "bin" / "python")
    if not Path(python).exists():
        sys.exit(f"vLLM is not installed: run `.ci/venv vllm`, or set {VARIABLE}")
    return python


class ProcessDied(RuntimeError):
    """The process has died; its last words are in the message."""


class OrderedProcess:
    """`python -m MODULE ARGUMENTS…` in vLLM's environment; ends with the context.

    Its last words are shown where something else ends the context, as when it hangs.
    """

    def __init__(self, module: str, arguments: Sequence[str], settings: dict[str, Any]) -> None:
        paths = [str(REPOSITORY), *filter(None, [os.environ.get(PATHS)])]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by `close`
        self._process = subprocess.Popen(
            [vllm_python(), "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=REPOSITORY,
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        try:
            self.ready = self._exchange(settings)
        except BaseException as error:
            self.close(says_more=not isinstance(error, ProcessDied))
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(says_more=kind is not None and not issubclass(kind, ProcessDied))

    def do(self, order: str, **arguments: object) -> dict[str, Any]:
        """Give an order and wait for its answer; the process's last words when it has died."""
        return self._exchange({"do": order, **arguments})

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ProcessDied(f"the engine has died:\n{self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read()[-4000:]

    def close(self, *, says_more: bool = False) -> None:
        """End it: in order, by the end of its input; by force when that takes too long.

        `says_more`: show its last words first, for whoever ends us before it has ended.
        """
        if says_more:
            print(self._last_words(), file=sys.stderr, flush=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()
