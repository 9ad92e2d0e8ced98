"""Time on vLLM's scheduler thread, kvd beside vLLM's in-process CPU manager.

    python -m benchmarks.vllm scheduler_time

Two engine processes with vLLM's real scheduler, connector and worker hooks, no model, and a real
daemon behind one of them; they take turns, prompt by prompt. The other's worker copies nothing
and is done at once. A turn's figure is all that the scheduler thread did for it: `add_request`,
`schedule` and `update_from_output` of every step from arrival to rest, waiting included.

cold     10,000 tokens that nobody has: 625 blocks of 16 tokens are stored
warm     the same prompt, not on the device: 625 blocks are loaded
decode   256 requests generate; each completes a block in the same step, and all are stored.
         `decode` is a round of 16 steps, `decode, storing step` the one that makes the stores

Before anything is timed, 625 blocks of known bytes go through the daemon and come back.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report, scattered
from benchmarks.report import Spread
from benchmarks.rig import MIB, daemon
from benchmarks.vllm.processes import OrderedProcess

BLOCKS = 625
DECODERS = 256
WARM_UP = 2
POOL_BYTES = 512 * MIB
BARS = {
    "cold": 0.6,
    "warm": 0.7,
    "decode": 0.9,
    "decode, storing step": 0.9,
}
CPU_BAR = 0.9

Answer = dict[str, Any]
Pair = tuple[Answer, Answer]


def check_bytes(kvd: OrderedProcess) -> Answer:
    """625 blocks out and back, byte for byte, and nothing else written."""
    answer = kvd.do("verify", number=10_000_000)
    assert answer == {"blocks": BLOCKS, "equal": BLOCKS, "strays": 0}, answer
    return answer


@dataclass(frozen=True)
class Sides:
    """Both engine processes, and how many pairs of turns they take."""

    kvd: OrderedProcess
    vllm: OrderedProcess
    pairs: int
    profiles: Path | None  # a folder: figures taken with it are none

    def take_turns(self, case: str, turn: Callable[[OrderedProcess, int], Answer]) -> list[Pair]:
        """(kvd's answer, vLLM's) of each pair, who goes first alternating; warm-up left out."""
        taken = []
        for number in range(self.pairs + WARM_UP):
            if number == WARM_UP and self.profiles is not None:
                self.kvd.do("profile", path=str(self.profiles / f"kvd-{case}.prof"))
                self.vllm.do("profile", path=str(self.profiles / f"vllm-{case}.prof"))
            if number % 2:
                theirs = turn(self.vllm, number)
                ours = turn(self.kvd, number)
            else:
                ours = turn(self.kvd, number)
                theirs = turn(self.vllm, number)
            taken.append((ours, theirs))
        for side in (self.kvd, self.vllm):
            side.do("profile", path="")
        return taken[WARM_UP:]


def prompts(sides: Sides, case: str) -> list[Pair]:
    """A prompt of its own for each pair; warm, the same ones as cold."""

    def turn(side: OrderedProcess, number: int) -> Answer:
        answer = side.do("prompt", case=case, number=number)
        check_prompt(case, answer)
        return answer

    return sides.take_turns(case, turn)


def check_prompt(case: str, answer: Answer) -> None:
    """Cold computed the whole prompt; warm loaded it, but for the token that is computed anew."""
    if case == "cold":
        assert (answer["cached_tokens"], answer["load_jobs"]) == (0, 0), answer
        assert answer["computed_tokens"] >= BLOCKS * 16, answer
        assert answer["store_jobs"] > 0, answer
    else:
        assert answer["cached_tokens"] == BLOCKS * 16 - 1, answer
        assert answer["load_jobs"] == 1, answer
        assert answer["store_jobs"] == 0, answer


def decode(sides: Sides) -> list[Pair]:
    """Rounds of 16 steps; what was generated must all be there at the end."""
    for side in (sides.kvd, sides.vllm):
        side.do("decode_start", requests=DECODERS, rounds=sides.pairs + WARM_UP)

    def turn(side: OrderedProcess, number: int) -> Answer:
        del number
        answer = side.do("decode_round")
        assert answer["store_jobs"] == DECODERS, answer
        assert len(answer["storing_steps"]) == 1, answer
        return answer

    taken = sides.take_turns("decode", turn)
    for side in (sides.kvd, sides.vllm):
        answer = side.do("decode_end", requests=DECODERS)
        assert answer["loaded_blocks"] == answer["whole_blocks"], answer
    return taken


def storing_step(answer: Answer) -> float:
    """Seconds of the step that made the stores: its schedule and its update."""
    (step,) = answer["storing_steps"]
    return float(answer["schedule"][step] + answer["update"][step])


def row_of(case: str, pairs: list[Pair], figure: Callable[[Answer], float]) -> dict[str, Any]:
    ours, theirs = ([figure(pair[side]) for pair in pairs] for side in (0, 1))
    return {
        "case": case,
        "kvd_ms": Spread.of([value * 1e3 for value in ours]),
        "vllm_ms": Spread.of([value * 1e3 for value in theirs]),
        "ratio": report.ratios(ours, theirs),
    }


def rows_of(cases: dict[str, list[Pair]]) -> dict[str, Any]:
    """Scheduler-thread time and the process's CPU time, for each case."""
    thread = [row_of(case, pairs, lambda a: float(a["total"])) for case, pairs in cases.items()]
    thread.append(row_of("decode, storing step", cases["decode"], storing_step))
    for row in thread:
        row["bar"] = BARS[row["case"]]
    cpu = [row_of(case, p, lambda a: float(a["process_cpu"])) for case, p in cases.items()]
    everything = [
        (
            {"process_cpu": sum(a["process_cpu"] for a in ours)},
            {"process_cpu": sum(a["process_cpu"] for a in theirs)},
        )
        for ours, theirs in (zip(*turn, strict=True) for turn in zip(*cases.values(), strict=True))
    ]
    cpu.append(row_of("all three", everything, lambda a: float(a["process_cpu"])))
    for row in cpu:
        row["bar"] = CPU_BAR
    ran = [row_of(case, p, lambda a: float(a["on_cpu"])) for case, p in cases.items()]
    waits = {
        case: {
            "blocking_calls": Spread.of([float(ours["blocking_calls"]) for ours, _ in pairs]),
            "steps_kvd": Spread.of([float(ours["steps"]) for ours, _ in pairs]),
            "steps_vllm": Spread.of([float(theirs["steps"]) for _, theirs in pairs]),
        }
        for case, pairs in cases.items()
    }
    return {
        "scheduler_thread": thread,
        "scheduler_thread_on_cpu": ran,
        "process_cpu": cpu,
        "calls": waits,
    }


def show(results: dict[str, Any]) -> None:
    for part in ("scheduler_thread", "scheduler_thread_on_cpu", "process_cpu"):
        print(f"\n{part.replace('_', ' ')}")
        header = ["case", "kvd ms", "vLLM ms", "ratio", "bar"]
        rows = [
            [r["case"], r["kvd_ms"], r["vllm_ms"], r["ratio"], r.get("bar", "")]
            for r in results[part]
        ]
        print(report.table(header, rows))
    for case, calls in results["calls"].items():
        print(f"{case}: {', '.join(f'{k} {v}' for k, v in calls.items())}")


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--quick", action="store_true", help="three pairs: a smoke test")
    parser.add_argument("--synchronous", action="store_true", help="vLLM's synchronous scheduler")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="write cProfile files")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    pairs = 3 if options.quick else options.pairs
    settings = {"asynchronous": not options.synchronous}
    module = "benchmarks.vllm.side"
    with (
        scattered.set_aside() as aside,
        daemon(POOL_BYTES, extent_bytes=8 * MIB) as running,
        OrderedProcess(module, ["kvd", running.socket], settings) as kvd,
        OrderedProcess(module, ["vllm"], settings) as vllm,
    ):
        results: dict[str, Any] = {"vllm": kvd.ready["vllm"], **settings, "set_aside_bytes": aside}
        results["bytes"] = check_bytes(kvd)
        sides = Sides(kvd, vllm, pairs, options.profile)
        cases = {case: prompts(sides, case) for case in ("cold", "warm")}
        cases["decode"] = decode(sides)
    results |= rows_of(cases)
    show(results)
    report.write("vllm.scheduler_time", results, options.output)


if __name__ == "__main__":
    main()
