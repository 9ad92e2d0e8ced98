"""The demo's figures for reading."""

from __future__ import annotations

from typing import Any

HEAD = (
    "        prompt |   cold engine    |  restarted engine, warm       |  daemon killed -9, warm\n"
    "  turn  tokens | computed    TTFT | computed loaded    TTFT ratio | computed loaded"
    "    TTFT ratio"
)


def print_table(result: dict[str, Any]) -> None:
    """Tokens computed and loaded, time to first token and its ratio by turn; bytes moved."""
    print()
    print(HEAD)
    print("  " + "-" * (max(map(len, HEAD.splitlines())) - 2))
    for row in result["turns"]:
        cold = row["cold"]
        line = f"  {row['turn']:4d}  {row['prompt_tokens']:6d} "
        line += f"| {cold['computed']:8d} {_milliseconds(cold)} "
        for name in ("warm", "after_kill"):
            part = row[name]
            line += f"| {part['computed']:8d} {part['loaded']:6d} "
            line += f"{_milliseconds(part)} {part['ratio']:4.1f}x "
        print(line)
    stored, loaded = result["bytes_stored"], result["bytes_loaded"]
    print()
    print(f"  bytes moved: {_mebibytes(stored[0])} stored by the cold engine; ", end="")
    print(f"{_mebibytes(loaded[1])} loaded after its restart, ", end="")
    print(f"{_mebibytes(loaded[2])} after the daemon's")
    if not result["failures"]:
        print("  the answers are the same tokens, and the loaded KV bytes equal the stored ones")
    print(f"  took {result['seconds']:.0f} s")


def _milliseconds(part: dict[str, Any]) -> str:
    return f"{part['first_token_s'] * 1e3:4.0f} ms"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
