"""kvd's main job on real input: a conversation survives its engine's and its daemon's restart.

A real language model answers a multi-turn conversation three times, each time in a new engine
process: once cold, once with every prefix loaded back from the daemon, and once more after the
daemon was killed with -9 and started again. The answers must be the same tokens, and the loaded
KV bytes the ones that were stored.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

from examples.engine.config import EngineConfig
from examples.engine.conversation import HANDBOOK, QUESTIONS
from examples.engine.daemon import Daemon
from examples.engine.lifetime import REPOSITORY
from examples.engine.process import Answer, EngineProcess
from examples.engine.report import print_table
from examples.engine.requests import RequestOrder
from examples.engine.tokenizer import TextCodec, chat_answer_start, chat_turn, codec_of
from examples.engine.weights import load_checkpoint

POOL_BYTES = 1 << 30
BLOCKS = {"smollm2": 160, "tiny": 512}
ANSWER_TOKENS = 32

Say = Callable[[str], None]


@dataclass
class Run:
    """One engine's life: its answers by turn, and what it moved."""

    start_s: float
    prompts: list[int] = field(default_factory=list)  # tokens of each turn's prompt
    answers: list[Answer] = field(default_factory=list)
    bytes_stored: int = 0
    bytes_loaded: int = 0

    def outputs(self) -> list[list[int]]:
        return [answer.output for answer in self.answers]


class Conversation:
    """Asks an engine the questions one after the other, each with all that was said before."""

    def __init__(self, codec: TextCodec, turns: int, say: Say) -> None:
        self._codec = codec
        self._questions = QUESTIONS[:turns]
        self._say = say

    def hold(self, engine: EngineProcess, use_cache: bool) -> Run:
        """Every turn starts with an empty device cache, as after others used the blocks."""
        run = Run(engine.start_s)
        tokens = self._codec.encode(chat_turn("system", HANDBOOK))
        for number, question in enumerate(self._questions):
            tokens += self._codec.encode(chat_turn("user", question) + chat_answer_start())
            engine.reset_device_cache()
            order = RequestOrder(f"turn-{number}", tuple(tokens), ANSWER_TOKENS, use_cache)
            answer = engine.generate([order])[order.request_id]
            run.prompts.append(len(tokens))
            run.answers.append(answer)
            self._say(
                f"  turn {number + 1}: {answer.prefilled} tokens computed, {answer.loaded} loaded, "
                f"first token after {answer.first_token_s * 1e3:.0f} ms"
            )
            self._say(f"    {question}  ->  {self._codec.decode(answer.output).strip()!r}")
            tokens += answer.output
            tokens += self._codec.encode("<|im_end|>\n")
        copied = engine.settle()
        run.bytes_stored, run.bytes_loaded = copied["bytes_stored"], copied["bytes_loaded"]
        return run


def failures(cold: Run, warm: Run, block_tokens: int) -> list[str]:
    """What is wrong with a run that should have been answered from the cache; empty if right."""
    found = []
    stored: dict[str, set[str]] = {}
    for answer in cold.answers:
        for block_hash, digest in answer.digests.items():
            stored.setdefault(block_hash, set()).add(digest)
    for turn, answer in enumerate(warm.answers, start=1):
        if answer.output != cold.answers[turn - 1].output:
            found.append(f"turn {turn}: the answer differs from the cold one")
        # A block that ends before the prompt's last token is loadable.
        expected = (warm.prompts[turn - 1] - 1) // block_tokens * block_tokens
        if answer.loaded != expected:
            failed = answer.fields["failed_loads"]
            found.append(
                f"turn {turn}: {answer.loaded} tokens loaded, expected {expected}; {failed} loads"
                " failed"
            )
        wrong = [
            block_hash
            for block_hash, digest in answer.loaded_digests.items()
            if digest not in stored.get(block_hash, ())
        ]
        if wrong:
            found.append(f"turn {turn}: {len(wrong)} loaded blocks differ from the stored bytes")
    return found


def run_demo(arguments: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Run all three conversations; returns the figures and the list of failures."""
    cache_dir = str(REPOSITORY / ".cache" / "engine")
    say(f"preparing the model ({arguments.model}; the first time takes some seconds)")
    checkpoint = load_checkpoint(arguments.model, cache_dir, seed=0)
    conversation = Conversation(codec_of(checkpoint), arguments.turns, say)
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(POOL_BYTES))
        say(f"daemon started in {daemon.start_s:.1f} s, pool {POOL_BYTES >> 20} MiB")
        config = EngineConfig(
            model=arguments.model,
            ranks=arguments.tp,
            num_blocks=BLOCKS[arguments.model],
            max_running=4,
            socket=daemon.socket,
            engine_id="demo",
            connect_s=30.0,  # the daemon is there: a busy machine only needs longer
            lookup_patience_s=5.0,
            cache_dir=cache_dir,
        )
        with EngineProcess(config) as engine:
            say(f"cold: engine processes {engine.pids}")
            cold = conversation.hold(engine, use_cache=False)
        with EngineProcess(config) as engine:
            say(f"warm: the engine was restarted, now {engine.pids}")
            warm = conversation.hold(engine, use_cache=True)
            say("kill -9 of the daemon, and of the engine")
            daemon.kill()
            engine.kill()
        daemon.start()
        say(f"daemon started again in {daemon.start_s:.1f} s")
        with EngineProcess(config) as engine:
            say(f"warm after kill -9: engine processes {engine.pids}")
            again = conversation.hold(engine, use_cache=True)
        log = daemon.log.read_text()
    wrong = [f"after the engine's restart, {each}" for each in failures(cold, warm, 16)]
    wrong += [f"after the daemon's kill -9, {each}" for each in failures(cold, again, 16)]
    if wrong:
        print(f"the daemon's log:\n{log}", file=sys.stderr)
    return figures(arguments, [cold, warm, again]) | {"failures": wrong}


def figures(arguments: argparse.Namespace, runs: Sequence[Run]) -> dict[str, Any]:
    """The runs as plain numbers."""
    cold = runs[0]
    rows = []
    for turn, prompt in enumerate(cold.prompts):
        row: dict[str, Any] = {"turn": turn + 1, "prompt_tokens": prompt}
        for name, run in zip(("cold", "warm", "after_kill"), runs, strict=True):
            answer = run.answers[turn]
            row[name] = {
                "computed": answer.prefilled,
                "loaded": answer.loaded,
                "first_token_s": round(answer.first_token_s, 4),
                "ratio": round(cold.answers[turn].first_token_s / answer.first_token_s, 2),
            }
        rows.append(row)
    return {
        "model": arguments.model,
        "ranks": arguments.tp,
        "turns": rows,
        "bytes_stored": [run.bytes_stored for run in runs],
        "bytes_loaded": [run.bytes_loaded for run in runs],
        "same_tokens": all(run.outputs() == cold.outputs() for run in runs),
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvd demo", description=__doc__)
    parser.add_argument(
        "--model",
        choices=sorted(BLOCKS),
        default="smollm2",
        help="SmolLM2-135M, or a tiny model with random weights (default: smollm2)",
    )
    parser.add_argument(
        "--tp", type=int, choices=(1, 2), default=1, help="tensor-parallel ranks (default: 1)"
    )
    parser.add_argument(
        "--turns",
        type=int,
        choices=range(1, len(QUESTIONS) + 1),
        default=4,
        help="questions of the conversation (default: 4)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser.parse_args(argv)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 when the answers and the bytes were right, 130 after Ctrl-C."""
    arguments = parse(argv)
    started = time.monotonic()
    progress = sys.stderr if arguments.json else sys.stdout

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {line}", file=progress, flush=True)

    # Ending by SIGTERM must also take the daemon, the engine and the pool along.
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        result = run_demo(arguments, say)
    except KeyboardInterrupt:
        print("interrupted; everything was stopped", file=sys.stderr)
        return 130
    except (RuntimeError, OSError) as error:  # a process died or hung, the weights are missing
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, previous)
    result["seconds"] = round(time.monotonic() - started, 1)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        print_table(result)
    for failure in result["failures"]:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
