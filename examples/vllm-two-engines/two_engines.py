"""Two vLLM servers on one kvd daemon: what one has computed, the other loads.

Starts a daemon and two servers, asks each the same questions about a long text, restarts an
engine and then the daemon, both by kill -9, and asks again. Prints the time to the first token as
it goes, and draws it. Fails unless every answer is the same text and every warm one was loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import grpc
from chart import draw
from servers import BLOCK_TOKENS, Answer, VllmServer

from examples.engine.conversation import HANDBOOK, QUESTIONS
from examples.engine.daemon import Daemon
from examples.engine.hugging_face import model_folder
from examples.engine.lifetime import REPOSITORY
from kvd.cli.status import ask as ask_status

POOL_BYTES = 1 << 30
ANSWER_TOKENS = 16
SETTLE_SECONDS = 60.0
LAST_WORDS = 20  # lines
TINY_TEXT = 1200  # characters of the handbook: each is a token there

WARM_UP = " ".join(QUESTIONS)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Stage:
    """One round of questions, all to the same server."""

    name: str
    is_warm: bool
    answers: tuple[Answer, ...]

    @property
    def median_ms(self) -> float:
        return statistics.median(answer.first_token_s for answer in self.answers) * 1e3


class Node:
    """The daemon and the two servers."""

    def __init__(self, stack: ExitStack, python: str, model: Path, logs: Path, say: Say) -> None:
        self._say = say
        self.daemon = stack.enter_context(Daemon(POOL_BYTES))
        stack.callback(lambda: shutil.copy(self.daemon.log, logs / "kvd.log"))
        say(f"daemon started, pool {POOL_BYTES >> 20} MiB; starting two vLLM servers ...")
        self.engines = []
        for name in ("A", "B"):
            log = logs / f"engine-{name}.log"
            log.unlink(missing_ok=True)
            server = VllmServer(f"engine {name}", python, model, self.daemon.socket, log)
            stack.callback(server.stop)
            self.engines.append(server)
            server.start()
        for server in self.engines:
            server.wait()
            self.wait_loading(server)
        say("both servers answer")

    def wait_loading(self, server: VllmServer) -> None:
        """Until the server loads what was stored: it has found the daemon, and is warmed up."""

        def loads() -> bool:
            server.reset_device_cache()
            return server.ask(WARM_UP, max_tokens=2).cached_tokens > 0

        self._until(loads)

    def count_stored(self) -> int:
        """Blocks that can be loaded."""
        return int(ask_status(self.daemon.socket, 5.0).pool.slots_ready)

    def wait_stored(self, blocks: int) -> None:
        self._until(lambda: self.count_stored() >= blocks)

    def restart_engine(self, server: VllmServer) -> None:
        self._say(f"kill -9 of {server.name}, and another start ...")
        server.kill()
        server.start()
        server.wait()
        self.wait_loading(server)

    def restart_daemon(self) -> None:
        self._say("kill -9 of the daemon, and another start ...")
        self.daemon.kill()
        self.daemon.start()
        for server in self.engines:
            self.wait_loading(server)

    def _until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SETTLE_SECONDS
        while not holds():
            if time.monotonic() > deadline:
                words = self.daemon.log.read_text().splitlines()[-LAST_WORDS:]
                raise TimeoutError("\n".join(["waited in vain; the daemon's log ends:", *words]))
            time.sleep(0.2)


def prompts_of(model: str, count: int) -> list[str]:
    """Prompts that differ from their first block on, so that none is warm by another."""
    text = HANDBOOK if model == "smollm2" else HANDBOOK[:TINY_TEXT]
    return [
        f"<|im_start|>system\nVisitor {number} of today. {text}<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        for number, question in enumerate(QUESTIONS[:count])
    ]


def run_stages(node: Node, prompts: list[str], say: Say) -> list[Stage]:
    """All stages, in order."""
    one, other = node.engines
    stages: list[Stage] = []

    def stage(name: str, server: VllmServer, is_warm: bool) -> None:
        answers = tuple(server.ask(prompt, ANSWER_TOKENS) for prompt in prompts)
        stages.append(Stage(name, is_warm, answers))
        say(row_of(stages[-1]))

    before = node.count_stored()
    say(head_of(prompts))
    stage("A, cold", one, is_warm=False)
    whole = [answer.prompt_tokens // BLOCK_TOKENS for answer in stages[0].answers]
    node.wait_stored(before + sum(whole))
    one.reset_device_cache()
    stage("A, its own cache emptied", one, is_warm=True)
    stage("B, which never saw them", other, is_warm=True)
    node.restart_engine(one)
    stage("A, started again", one, is_warm=True)
    node.restart_daemon()
    other.reset_device_cache()
    stage("B, daemon started again", other, is_warm=True)
    return stages


def head_of(prompts: Sequence[str]) -> str:
    columns = "".join(f"{f'prompt {number + 1}':>10}" for number in range(len(prompts)))
    return f"{'first token, ms':28}{columns}{'median':>10}{'tokens loaded':>15}"


def row_of(stage: Stage) -> str:
    columns = "".join(f"{answer.first_token_s * 1e3:10.0f}" for answer in stage.answers)
    loaded = sum(answer.cached_tokens for answer in stage.answers)
    total = sum(answer.prompt_tokens for answer in stage.answers)
    return f"{stage.name:28}{columns}{stage.median_ms:10.0f}{f'{loaded} of {total}':>15}"


def failures(stages: Sequence[Stage]) -> list[str]:
    """What is wrong; empty if nothing is."""
    cold, found = stages[0], []
    for stage in stages:
        for number, (answer, first) in enumerate(zip(stage.answers, cold.answers, strict=True), 1):
            if answer.text != first.text:
                found.append(f"{stage.name}: prompt {number} was answered otherwise than cold")
            # The last block is loadable only if a token is left to compute.
            whole = (answer.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            if answer.cached_tokens < (whole if stage.is_warm else 0):
                found.append(
                    f"{stage.name}: prompt {number} had {answer.cached_tokens} tokens, not {whole}"
                )
            if not stage.is_warm and answer.cached_tokens:
                found.append(f"{stage.name}: prompt {number} was not cold")
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__)
    parser.add_argument("--model", choices=("smollm2", "tiny"), default="smollm2")
    parser.add_argument("--prompts", type=int, choices=range(1, len(QUESTIONS) + 1), default=5)
    parser.add_argument(
        "--vllm-python",
        default=os.environ.get("KVD_VLLM_PYTHON", str(REPOSITORY / ".venv-vllm/bin/python")),
        help="the Python that has vLLM (default: $KVD_VLLM_PYTHON, else .venv-vllm's)",
    )
    parser.add_argument(
        "--output", type=Path, default=REPOSITORY / ".cache" / "vllm-two-engines", metavar="FOLDER"
    )
    arguments = parser.parse_args(argv)
    wrong = _wrong_python(arguments.vllm_python) or _wrong_folder(arguments.output)
    if wrong:
        parser.error(wrong)
    return arguments


def _wrong_python(python: str) -> str:
    """Why the servers can't run by it; "" where they can."""
    fix = "make .venv-vllm by `.ci/venv vllm`, or name the Python that has vLLM"
    seeks = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        ran = subprocess.run([python, "-c", seeks], cwd=REPOSITORY, check=False)
    except OSError as error:
        return f"argument --vllm-python: {python} can't be run ({error.strerror}): {fix}"
    return f"argument --vllm-python: {python} has no vLLM: {fix}" if ran.returncode else ""


def _wrong_folder(folder: Path) -> str:
    """Why nothing can be left there; "" where it can: the folder is made."""
    fix = "name a folder that can be made and written to"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"argument --output: {folder} can't be used ({error.strerror}): {fix}"
    return ""


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def run(arguments: argparse.Namespace, say: Say) -> list[Stage]:
    """Start everything, ask, and end everything that was started, whatever happens."""
    say(f"preparing the model ({arguments.model}; the first time takes some seconds)")
    model = model_folder(arguments.model, REPOSITORY / ".cache" / "engine")
    with ExitStack() as stack:
        node = Node(stack, arguments.vllm_python, model, arguments.output, say)
        return run_stages(node, prompts_of(arguments.model, arguments.prompts), say)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when all answers were right and loaded, 130 after Ctrl-C."""
    arguments = parse(argv)
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {line}", flush=True)

    # Ending by SIGTERM must also take the daemon and the servers along.
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        stages = run(arguments, say)
    except KeyboardInterrupt:
        print("interrupted; everything was stopped", file=sys.stderr)
        return 130
    except (RuntimeError, OSError, grpc.RpcError) as error:  # a process died or hung
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, previous)
    figures = arguments.output / "first-token.json"
    rows = [asdict(stage) | {"median_ms": stage.median_ms} for stage in stages]
    figures.write_text(json.dumps({"model": arguments.model, "stages": rows}, indent=1) + "\n")
    say(f"figures: {figures}")
    say(draw(rows, arguments.model, arguments.output / "first-token.png"))
    wrong = failures(stages)
    for failure in wrong:
        print(f"FAILED: {failure}", file=sys.stderr)
    if not wrong:
        say("every answer is the same text, and every warm prompt was loaded")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
