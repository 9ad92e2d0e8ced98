"""Run benchmarks, each in a process of its own: `python -m benchmarks [NAME ...]`.

Without names all of them, one after the other; every one prints a table and writes its JSON, with
machine and commit, to benchmarks/results/NAME.json.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.ends import end_in_order

FOLDER = Path(__file__).resolve().parent


def benchmarks(folder: Path) -> dict[str, str]:
    """Name → first line of its docstring, of every module there that can be run."""
    found = {}
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if path.stem != "__main__" and "main" in functions:
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def run_named(folder: Path, package: str) -> int:
    """Run the benchmarks of a folder that the command line names; 1 if one of them failed."""
    there_are = benchmarks(folder)
    listed = "\n".join(f"  {name:14} {title}" for name, title in there_are.items())
    parser = argparse.ArgumentParser(
        prog=f"python -m {package}",
        epilog=listed,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which; all when none is given")
    names = parser.parse_args().names or list(there_are)
    end_in_order()
    if unknown := set(names) - there_are.keys():
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are\n{listed}")
    failed = []
    for name in names:
        print(f"\n== {name}: {there_are[name]}", flush=True)
        began = time.monotonic()
        command = [sys.executable, "-m", f"{package}.{name}"]
        if run_to_its_end(command) != 0:
            failed.append(name)
        print(f"== {name}: {time.monotonic() - began:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run_to_its_end(command: list[str]) -> int:
    """Its exit status. Whatever ends us is passed on, and what it has started ends with it."""
    with subprocess.Popen(command, cwd=FOLDER.parent) as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise


if __name__ == "__main__":
    sys.exit(run_named(FOLDER, "benchmarks"))
