"""Time to the first token in vLLM: cold, loaded from kvd, and from vLLM's own prefix cache.

    python -m benchmarks.vllm first_token

One real engine in one process (SmolLM2-135M-Instruct on the CPU, one thread) over a real daemon.
Each pair has a prompt of 900 tokens of its own, asked for three times: cold; once vLLM's own
prefix cache is emptied (kvd); and again while it still has it (prefix cache). The last two take
turns in going first. All three must give the same tokens, from the same bytes in their blocks.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.report import Spread
from benchmarks.rig import MIB, daemon
from benchmarks.vllm.processes import REPOSITORY, OrderedProcess
from examples.engine.hugging_face import model_folder

LENGTH = 900
BLOCK_TOKENS = 32
ANSWER_TOKENS = 8
WARM_UP = 1
POOL_BYTES = 1024 * MIB
COLD_BAR = 3.0  # cold over kvd
ALLOWED_SHARE, ALLOWED_S = 1.1, 0.05  # kvd at most so much more than the prefix cache's hit
CASES = ("cold", "kvd", "prefix cache")


def ask_thrice(engine: OrderedProcess, number: int) -> dict[str, float]:
    """Seconds to the first token in each case, once the tokens have been compared."""

    def ask() -> dict[str, Any]:
        return engine.do("ask", number=number, length=LENGTH, max_tokens=ANSWER_TOKENS)

    answers = {"cold": ask()}
    for case in ("kvd", "prefix cache") if number % 2 else ("prefix cache", "kvd"):
        if case == "kvd":
            assert engine.do("forget_device")["done"], "requests still hold blocks"
        answers[case] = ask()
    whole = LENGTH // BLOCK_TOKENS * BLOCK_TOKENS
    for case, answer in answers.items():
        assert answer["tokens"] == answers["cold"]["tokens"], f"{case}: other tokens than cold"
        assert answer["digest"] == answers["cold"]["digest"], f"{case}: other bytes than cold"
        assert answer["cached"] == (0 if case == "cold" else whole), (case, answer["cached"])
    assert engine.do("forget_device")["done"], "requests still hold blocks"
    return {case: float(answers[case]["seconds"]) for case in CASES}


def results_of(pairs: list[dict[str, float]]) -> dict[str, Any]:
    by_case = {case: [pair[case] for pair in pairs] for case in CASES}
    allowed = [ALLOWED_SHARE * hit + ALLOWED_S for hit in by_case["prefix cache"]]
    return {
        "first_token_ms": {c: Spread.of([s * 1e3 for s in v]) for c, v in by_case.items()},
        "cold_over_kvd": report.ratios(by_case["cold"], by_case["kvd"]),
        "cold_bar": COLD_BAR,
        "kvd_over_allowed": report.ratios(by_case["kvd"], allowed),
        "allowed": f"{ALLOWED_SHARE} x prefix cache + {ALLOWED_S * 1e3:.0f} ms",
    }


def show(results: dict[str, Any]) -> None:
    rows = [[case, value] for case, value in results["first_token_ms"].items()]
    print(report.table(["case", "first token ms"], rows))
    print(f"cold / kvd: {results['cold_over_kvd']}, bar at least {COLD_BAR:g}")
    print(f"kvd / ({results['allowed']}): {results['kvd_over_allowed']}, bar at most 1")


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="two pairs: a smoke test")
    parser.add_argument("--model", choices=("smollm2", "tiny"), default="smollm2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    pairs = 2 if options.quick else options.pairs
    folder = model_folder(options.model, REPOSITORY / ".cache" / "engine")
    module = "benchmarks.vllm.whole_engine"
    with (
        daemon(POOL_BYTES) as running,
        OrderedProcess(module, [running.socket, str(folder)], {"dtype": options.dtype}) as engine,
    ):
        taken = [ask_thrice(engine, number) for number in range(WARM_UP + pairs)][WARM_UP:]
        results: dict[str, Any] = {
            "vllm": engine.ready["vllm"],
            "model": options.model,
            "dtype": options.dtype,
            "prompt_tokens": LENGTH,
            **results_of(taken),
        }
    show(results)
    report.write("vllm.first_token", results, options.output)


if __name__ == "__main__":
    main()
