"""Benchmarks of kvd under vLLM: `python -m benchmarks.vllm [NAME ...]`.

Run by kvd's own environment; the engines run in vLLM's (`.ci/venv vllm`).
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.__main__ import run_named

if __name__ == "__main__":
    sys.exit(run_named(Path(__file__).resolve().parent, "benchmarks.vllm"))
