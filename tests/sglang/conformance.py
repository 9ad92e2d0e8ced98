"""`make conformance-sglang`: SGLang's own tests and test kits, with kvd as the storage backend.

SGLang's wheel brings them: tests of a store with zero copies, and the kits of its radix cache in
nineteen configurations, with SGLang's own fault injection in some. With `--checkout`, the tests of
SGLang's repository that use these kits, too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

from tests.daemon_process import DaemonProcess

ROOT = Path(__file__).resolve().parents[2]
FILES = ("tests/sglang/test_sglangs_store_tests.py", "tests/sglang/test_radix_caches.py")
UNIT_TESTS = "test/registered/unit/mem_cache"  # in SGLang's repository
KITS = "sglang.test.kits.unified_radix_cache"
NOT_RUN = {
    "storage/mooncake_store/test_mooncake_store.py::test_single_operation": (
        "sets and gets by addresses, which SGLang does only without interface_v1"
    ),
    "storage/aibrix_kvcache/unit_test.py": "copies pages through tensors, as without interface_v1",
    "storage/simm/test_simm.py": "makes its store's own keys, and gives bytes as indices of pages",
    "storage/eic/test_unit.py": "tests EIC's own client",
    "storage/hf3fs/test_hf3fs_utils.py": "tests 3FS's own extension",
    "storage/tensorcast_store": "tests TensorCast's own classes over a session that it makes up",
    "kits: sliding windows and Mamba in one model": "its kits have no hierarchical cache there",
    "kits: Mamba in buffer_only": "its kits have no load-back there",
    "test/registered/hicache in its repository": "wants a GPU: examples/sglang/run.sh MODEL",
}


def pytest_counts(arguments: list[str], environment: dict[str, str]) -> tuple[int, Counter[str]]:
    """Run pytest; its exit status, and how many tests passed, failed and were skipped, by file."""
    with tempfile.TemporaryDirectory(prefix="kvd-conformance-") as place:
        results = Path(place) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junit-xml={results}", *arguments]
        status = subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=False)
        counts: Counter[str] = Counter()
        if results.exists():
            for case in ET.parse(results).iter("testcase"):
                kind = next((part.tag for part in case), "passed")
                counts[kind] += 1
        return status.returncode, counts


def of_checkout(checkout: Path) -> list[str]:
    """The repository's test files that use the kits' storage."""
    files = sorted((checkout / UNIT_TESTS).rglob("test_*.py"))
    return [str(file) for file in files if f"{KITS}.storage" in file.read_text()]


def run_checkout(files: list[str]) -> tuple[int, Counter[str]]:
    """The repository's tests, with kvd where they ask for the file backend."""
    with (
        tempfile.TemporaryDirectory(prefix="kvd-conformance-") as place,
        tempfile.TemporaryDirectory(prefix="kvd-conformance-", dir="/dev/shm") as pool,
    ):
        daemon = DaemonProcess(Path(place), Path(pool))
        daemon.python = str(ROOT / ".venv" / "bin" / "python")
        daemon.pool_bytes, daemon.extent_bytes = 1 << 30, 16 << 20
        daemon.start()
        try:
            return pytest_counts(
                ["-p", "tests.sglang.kits_plugin", "-c", os.devnull, *files],
                {"KVD_SGLANG_SOCKET": daemon.socket, "PYTHONPATH": str(ROOT)},
            )
        finally:
            daemon.end()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sglang.conformance")
    parser.add_argument("--checkout", type=Path, help="of SGLang's repository, at its release")
    options, more = parser.parse_known_args()
    status, counts = pytest_counts([*FILES, *more], {"KVD_SGLANG_CONFIGS": "all"})
    if options.checkout:
        files = of_checkout(options.checkout.absolute())
        theirs, more_counts = run_checkout(files) if files else (1, Counter())
        status, counts = status or theirs, counts + more_counts
    print(f"with kvd as the storage backend: {dict(counts)}")
    print("of SGLang's wheel and kits are not run:")
    for name, reason in NOT_RUN.items():
        print(f"  {name}: {reason}")
    return status


if __name__ == "__main__":
    sys.exit(main())
