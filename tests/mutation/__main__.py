"""Changes one place of a room at a time, of kvd/core where none is named, and asks its tests.

    python -m tests.mutation --sample 400 --seed 1    so many mutants, drawn from all
    python -m tests.mutation --only kvd/core/policy   of some modules, all of them
    python -m tests.mutation --room pool              of another room (tests/mutation/rooms.py)
    python -m tests.mutation ... --again              survivors once more, after tests were written

What became of each mutant is kept in .cache/mutation/mutants.json (mutants-pool.json and so on) and
not asked again while its function is the same, so a run may be broken off, and a larger sample adds
to a smaller one. Those that survived are in survivors.json beside it, with place and difference.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.mutants import Mutant, all_mutants, modules, sample
from tests.mutation.rooms import ROOMS, Room
from tests.mutation.trials import Seen, collect_and, traced, tried
from tests.tidy.source import ROOT

CACHE = ROOT / ".cache" / "mutation"
Ledger = dict[str, dict[str, Any]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sample", type=int, default=0, help="how many; all, where not told")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--room", choices=list(ROOMS), default="core")
    parser.add_argument("--only", nargs="*", type=Path, default=[], help="modules or directories")
    parser.add_argument("--tests", nargs="*", help="all of the room's, where not told")
    parser.add_argument("--again", action="store_true", help="try survivors again")
    parser.add_argument("--tell", action="store_true", help="only what is known already")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="for one mutant: of processor in the core"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    room = ROOMS[asked.room]
    everything = all_mutants([(ROOT / each).resolve() for each in asked.only] or room.paths())
    chosen = sample(everything, asked.sample or len(everything), asked.seed)
    ledger: Ledger = load(f"mutants{room.suffix}.json")

    def is_due(mutant: Mutant) -> bool:
        known = ledger.get(mutant.key)
        return known is None or (asked.again and known["verdict"] == "survived")

    due = [mutant for mutant in chosen if is_due(mutant)]
    print(f"{len(everything)} mutants, {len(chosen)} drawn, {len(due)} to try", flush=True)
    status = 0
    if due and not asked.tell:
        os.environ["CI"] = "1"  # the same examples at each run
        status = collect_and(
            lambda items: try_all(due, items, room, ledger, asked.seconds, asked.processes),
            asked.tests or room.tests,
        )
    told = {mutant.key: ledger[mutant.key] for mutant in chosen if mutant.key in ledger}
    report(told, room)
    return status


def try_all(
    due: Sequence[Mutant],
    items: dict[str, pytest.Item],
    room: Room,
    ledger: Ledger,
    seconds: float,
    processes: int,
) -> None:
    seen = traces(items, room, processes)
    began = saved = time.monotonic()
    for number, (mutant, said) in enumerate(tried(due, items, seen, room, seconds, processes), 1):
        ledger[mutant.key] = {
            "path": mutant.path,
            "function": mutant.function,
            "line": mutant.lines.start,
            "difference": mutant.difference,
            **said,
        }
        if said["verdict"] != "killed":
            print(described(mutant.key, ledger[mutant.key]), flush=True)
        if time.monotonic() - saved > 5 or number == len(due):
            saved = time.monotonic()
            save(f"mutants{room.suffix}.json", ledger)
            print(f"{number} of {len(due)}, {saved - began:.0f} s", flush=True)


def traces(items: dict[str, pytest.Item], room: Room, processes: int) -> dict[str, Seen]:
    """What each test runs: known already, but for tests whose module changed, or the room."""
    code = digest(*sorted(each for path in room.paths() for each in modules(path)))
    directories = {item.path.parent for item in items.values()}
    others = {each for path in directories for each in path.glob("*.py")}
    bases = digest(*sorted(p for p in others if not p.name.startswith("test_")))
    file = f"traces{room.suffix}.json"
    known = load(file)
    marks = {name: f"{code} {bases} {digest(item.path)}" for name, item in items.items()}
    missing = [i for n, i in items.items() if known.get(n, {}).get("mark") != marks[n]]
    if missing:
        print(f"looking at what {len(missing)} tests run", flush=True)
    for number, (name, seen) in enumerate(traced(missing, room, processes), 1):
        if seen is not None:
            known[name] = {"mark": marks[name], **dataclasses.asdict(seen)}
        elif room.has_processes:  # one that is late on a busy machine is not asked
            print(f"{name} fails without any mutant, and is left out", flush=True)
        else:
            sys.exit(f"{name} fails without any mutant")
        if number % 50 == 0 or number == len(missing):
            save(file, known)
            print(f"{number} of {len(missing)} tests", flush=True)
    fields = [field.name for field in dataclasses.fields(Seen)]
    return {
        name: Seen(**{field: known[name][field] for field in fields})
        for name in items
        if known.get(name, {}).get("mark") == marks[name]
    }


# -- the report ---------------------------------------------------------------------------------


def report(told: Ledger, room: Room) -> None:
    tried_ones = {key: said for key, said in told.items() if said["verdict"] != "impossible"}
    survivors = {k: said for k, said in tried_ones.items() if said["verdict"] == "survived"}
    save(f"survivors{room.suffix}.json", survivors)
    print("\nSurvivors:")
    for key, said in sorted(survivors.items()):
        print(described(key, said))
    count, killed = Counter[str](), Counter[str]()
    for said in tried_ones.values():
        count[said["path"]] += 1
        killed[said["path"]] += said["verdict"] == "killed"
    print("\nBy module: killed of tried")
    for path in sorted(count):
        print(f"{killed[path]:5} of {count[path]:5}  {path}")
    if tried_ones:
        low, high = interval(killed.total(), count.total())
        print(
            f"\nscore {100 * killed.total() / count.total():.1f} %: {killed.total()} of"
            f" {count.total()} killed; 95 % interval {100 * low:.1f} to {100 * high:.1f} %"
        )


def described(key: str, said: dict[str, Any]) -> str:
    words = "\n    ".join(said["difference"])
    return f"{said['path']}:{said['line']}: {said['verdict']} ({key})\n    {words}"


def interval(killed: int, count: int) -> tuple[float, float]:
    """Wilson's, at 95 %, of a share in a uniform sample."""
    z = 1.96
    share, weight = killed / count, z * z / count
    middle = (share + weight / 2) / (1 + weight)
    half = z * math.sqrt(share * (1 - share) / count + weight / (4 * count)) / (1 + weight)
    return middle - half, min(1.0, middle + half)


def digest(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]


def load(name: str) -> Any:
    path = CACHE / name
    return json.loads(path.read_text()) if path.exists() else {}


def save(name: str, what: object) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    fresh = CACHE / f"{name}.new"
    fresh.write_text(json.dumps(what, indent=1))
    fresh.replace(CACHE / name)


if __name__ == "__main__":
    sys.exit(main())
