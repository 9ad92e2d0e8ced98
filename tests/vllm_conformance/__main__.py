"""`make conformance-vllm`: vLLM's own tests, with kvd's daemon in the place of vLLM's cache."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.daemon_process import DaemonProcess
from tests.vllm_conformance import fetch, report

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = Path(__file__).parent / "plugin"  # all that runs where `tests` is vLLM's package
CACHE = ROOT / ".cache" / "vllm-conformance"
SHARED_MEMORY = "/dev/shm"
CANNOT_BE_HAD = 3
CONNECTOR = "tests/v1/kv_connector/unit/offloading_connector"
FILES = {
    "synchronous": (
        "tests/v1/kv_offload/cpu/test_manager.py",
        "tests/v1/kv_offload/tiering/test_tiering_offloading.py",  # above the daemon
        *(
            f"{CONNECTOR}/test_{name}.py"
            for name in ("scheduler", "events", "worker", "metrics", "config")
        ),
    ),
    "few-calls": tuple(f"{CONNECTOR}/test_{name}.py" for name in ("scheduler", "events")),
}
DAEMONS = (("lru", 1), ("arc", 1), ("lru", 2))  # policy and store threshold


@contextlib.contextmanager
def daemons() -> Iterator[dict[str, str]]:
    """Sockets of running daemons, by policy and store threshold."""
    with contextlib.ExitStack() as ending:
        sockets = {}
        for policy, threshold in DAEMONS:
            place = Path(tempfile.mkdtemp(prefix="kvd-conformance-"))
            pool = Path(
                tempfile.mkdtemp(prefix=f"kvd-conformance-{os.getpid()}-", dir=SHARED_MEMORY)
            )
            ending.callback(shutil.rmtree, place)
            ending.callback(shutil.rmtree, pool)
            daemon = DaemonProcess(place, pool)
            daemon.flags = {
                "policy": policy,
                "store-threshold": threshold,
                "lease-share": 1.0,
                "pool-bytes": 16 << 20,
            }
            daemon.start()
            ending.callback(daemon.end)
            sockets[f"{policy}-{threshold}"] = daemon.socket
        yield sockets


def run(mode: str, python: Path, more: list[str]) -> int:
    """Run the mode's files; 0 when nothing fails but what the list says, and all of that."""
    try:
        place = fetch.laid_out(python, CACHE)
    except fetch.CannotBeHad as error:
        print(f"vLLM's source distribution can't be had here: {error}")
        return CANNOT_BE_HAD
    results = CACHE / f"{mode}.json"
    results.unlink(missing_ok=True)
    log = CACHE / f"{mode}.log"
    with daemons() as sockets, log.open("w") as output:
        environment = {
            "HF_HUB_OFFLINE": "1",
            "KVD_CONFORMANCE_MODE": mode,
            "KVD_CONFORMANCE_RESULTS": str(results),
            "KVD_CONFORMANCE_SOCKETS": json.dumps(sockets),
            "OMP_NUM_THREADS": "1",
            # vLLM's Python of the fetched version comes before the installed one's.
            "PYTHONPATH": os.pathsep.join([str(place), str(PLUGIN)]),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_TARGET_DEVICE": "cpu",
        }
        options = ["-q", "-p", "no:cacheprovider", "-p", "kvd_conformance", "-c", os.devnull]
        command = [str(python), "-m", "pytest", *options, "--rootdir", str(place), *FILES[mode]]
        print(f"vLLM {fetch.VERSION}, {mode}: its words go to {log.relative_to(ROOT)}", flush=True)
        subprocess.run(
            [*command, *more],
            cwd=place,
            env=os.environ | environment,
            stdout=output,
            stderr=output,
            check=False,
        )
    if not results.exists():
        print(log.read_text()[-4000:])
        return 1
    figures = json.loads(results.read_text())
    listed = report.reasons(mode)
    if more:  # a part of the tests: the others are neither here nor there
        listed = {test: why for test, why in listed.items() if _was_run(test, figures["tests"])}
    verdict = report.judge(figures["tests"], listed)
    print("\n".join(report.lines(verdict, figures)))
    return 0 if verdict.is_sound and figures["managers"] else 1


def _was_run(listed: str, tests: dict[str, dict[str, str]]) -> bool:
    return any(test.partition("[")[0] == listed or test == listed for test in tests)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm_conformance", description=__doc__)
    parser.add_argument("--mode", choices=[*FILES, "both"], default="both")
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    arguments, more = parser.parse_known_args()
    modes = list(FILES) if arguments.mode == "both" else [arguments.mode]
    CACHE.mkdir(parents=True, exist_ok=True)
    return max(run(mode, arguments.python.absolute(), more) for mode in modes)


if __name__ == "__main__":
    sys.exit(main())
