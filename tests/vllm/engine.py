"""The tests' side of an engine process: prompts go in, tokens come out, and it can be killed."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import leaks
from tests.vllm.tiny_model import VOCABULARY

PATIENCE_SECONDS = 120.0  # for whatever an engine was told to do
START_SECONDS = 300.0  # two ranks import vLLM anew
BLOCK_TOKENS = 32
BLOCK_BYTES = 4 * 2 * 2 * 64 * 4 * BLOCK_TOKENS  # layers, K and V, heads, width, float32
HITS = "vllm:external_prefix_cache_hits"
QUERIES = "vllm:external_prefix_cache_queries"
PREEMPTIONS = "vllm:num_preemptions"
FAILED_LOADS = "vllm:kvd_failed_loads"
CONNECTED = "vllm:kvd_connected"
SESSIONS = "vllm:kvd_sessions"

LENGTH = 6 * BLOCK_TOKENS + 8  # of a prompt
WHOLE = 6 * BLOCK_TOKENS  # what of it can be stored

GROUP_NAME = re.compile(r"\bvllm_dist_[0-9a-f]+")  # of an engine's ranks, as its log has it

# One server that has imported vLLM, from which every engine of this run is forked.
FORKS = multiprocessing.get_context("forkserver")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CACHE_ROOT": str(Path(__file__).resolve().parents[2] / ".cache" / "vllm"),
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

Prompt = list[int]
Happening = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """What a request came to: its tokens, and how many of its prompt's were in some cache.

    `logprob` is the tokens' together: it moves with bytes that are too few to change a token.
    """

    tokens: tuple[int, ...]
    cached: int
    logprob: float


def prompt(name: str, length: int, after: Sequence[int] = ()) -> Prompt:
    """Tokens that are the same for the same name, behind those of another prompt."""
    draw = random.Random(name)
    return [*after, *(draw.randrange(3, VOCABULARY) for _ in range(length))]


def tokens(answers: Sequence[Answer]) -> list[tuple[int, ...]]:
    """The tokens alone, to be compared with what is right."""
    return [answer.tokens for answer in answers]


class Engine:
    """A vLLM engine in a process of its own, ready for prompts once this is made."""

    def __init__(
        self, settings: dict[str, Any], log: Path, environment: dict[str, str] | None = None
    ) -> None:
        self.log = log
        self._numbers = itertools.count()
        self._tokens: dict[str, tuple[int, ...]] = {}
        self._answers: dict[str, Answer] = {}
        self._connection, theirs = FORKS.Pipe()
        variables = ENVIRONMENT | (environment or {})
        self._process = FORKS.Process(target=_serve, args=(theirs, settings, variables, log))
        self._process.start()
        theirs.close()
        self._wait_for("ready", START_SECONDS)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def generate(self, *prompts: Prompt, max_tokens: int = 12) -> list[Answer]:
        """Answers to some prompts, all given at once."""
        return self.finish(*(self.submit(each, max_tokens) for each in prompts))

    def store(self, *prompts: Prompt, max_tokens: int = 12) -> list[Answer]:
        """The same, and kvd has their blocks afterwards, and the device's cache has none."""
        answers = self.generate(*prompts, max_tokens=max_tokens)
        self.settle()
        assert self.reset()
        return answers

    def submit(
        self,
        prompt: Prompt,
        max_tokens: int = 12,
        transfer: dict[str, Any] | None = None,
        name: str = "",
    ) -> str:
        """Give the engine a request and go on; returns its id: `name`, or else a new one."""
        request = name or f"request-{next(self._numbers)}"
        self._tokens[request] = ()
        self._answers.pop(request, None)
        self._tell(
            "submit", request=request, prompt=prompt, max_tokens=max_tokens, transfer=transfer
        )
        return request

    def abort(self, request: str) -> None:
        self._tell("abort", request=request)

    def finish(self, *requests: str) -> list[Answer]:
        """The answers to what was submitted, once all of them are there."""
        self.wait(lambda: all(request in self._answers for request in requests))
        return [self._answers[request] for request in requests]

    def has_finished(self, request: str) -> bool:
        """Whether an answer is there, as far as the engine has told."""
        return request in self._answers

    def tokens_of(self, request: str) -> tuple[int, ...]:
        """What a request has produced so far, as far as the engine has told."""
        return self._tokens[request]

    def wait(self, until: Callable[[], bool]) -> None:
        """Take in what the engine tells until a condition holds."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not until():
            self._take(deadline)

    def settle(self) -> None:
        """Returns once the engine has nothing to do any more: its stores have ended, too."""
        self._tell("settle")
        self._wait_for("settled")

    def reset(self, connector: bool = False, running: bool = False) -> bool:
        """Forget the prefix cache, on request also the connector's; whether vLLM did so.

        With `running` the requests that run are preempted for it, and begin anew.
        """
        self._tell("reset", connector=connector, running=running)
        return bool(self._wait_for("reset")["done"])

    def count(self, name: str) -> float:
        """A metric's value, summed over its labels."""
        return self.counts().get(name, 0.0)

    def counts(self) -> dict[str, float]:
        """All counters and gauges that vLLM keeps."""
        self._tell("count")
        values: dict[str, float] = self._wait_for("counted")["values"]
        return values

    def wait_for_count(self, name: str, least: float) -> None:
        """Returns once a metric has come to so much; the engine has something to do until then."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.count(name) < least:
            assert time.monotonic() < deadline, f"{name} < {least}:\n{self._last_words()}"
            time.sleep(0.01)

    def wait_for_daemon(self, after: int = 0) -> None:
        """Returns once the engine's session can be used, one with a higher number than `after`.

        The daemon knows it a moment before the engine does; the engine counts it when it steps.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            self.generate([3, 4, 5], max_tokens=2)
            counts = self.counts()
            if counts.get(CONNECTED) == 1 and counts.get(SESSIONS, 0) > after:
                return
            assert time.monotonic() < deadline, f"no session {after + 1}:\n{self._last_words()}"
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill -9, workers too; returns once the process is gone."""
        if self._process.is_alive():
            os.kill(self.pid, signal.SIGKILL)
        self._close()

    def end(self) -> None:
        """Let it shut down in order; by force when that takes too long."""
        if self._connection.closed:
            return
        with contextlib.suppress(OSError):
            self._tell("end")
        self._process.join(PATIENCE_SECONDS)
        code = self._process.exitcode
        self.kill()
        assert code == 0, f"the engine ended with {code}:\n{self._last_words()}"

    def _close(self) -> None:
        self._process.join()
        self._process.close()
        self._connection.close()
        # vLLM leaves its ranks' own shared memory behind where it had to kill them.
        for name in set(GROUP_NAME.findall(self.log.read_text())):
            for path in leaks.SHARED_MEMORY.glob(f"{name}-*"):
                path.unlink(missing_ok=True)

    def _tell(self, do: str, **order: Any) -> None:
        self._connection.send({"do": do, **order})

    def _wait_for(self, event: str, seconds: float = PATIENCE_SECONDS) -> Happening:
        deadline = time.monotonic() + seconds
        while True:
            told = self._take(deadline)
            if told["event"] == event:
                return told

    def _take(self, deadline: float) -> Happening:
        """The engine's next word; an assertion if it has died or is silent."""
        if not self._connection.poll(max(0.0, deadline - time.monotonic())):
            raise AssertionError(f"the engine says nothing any more:\n{self._last_words()}")
        try:
            told: Happening = self._connection.recv()
        except (EOFError, OSError):
            raise AssertionError(f"the engine is gone:\n{self._last_words()}") from None
        assert told["event"] != "died", f"{told['why']}\n{self._last_words()}"
        self._note(told)
        return told

    def _note(self, told: Happening) -> None:
        if told["event"] == "tokens":
            self._tokens[told["request"]] = tuple(told["tokens"])
        elif told["event"] == "finished":
            answer = Answer(tuple(told["tokens"]), told["cached"], told["logprob"])
            self._tokens[told["request"]] = answer.tokens
            self._answers[told["request"]] = answer

    def _last_words(self) -> str:
        return "\n".join(self.log.read_text().splitlines()[-60:])


def _serve(*given: Any) -> None:
    from tests.vllm.engine_process import serve  # imports vLLM: in the forked process only

    serve(*given)
