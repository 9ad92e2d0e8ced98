"""SGLang's storage backend beside memcpy and SGLang's file backend: `python -m benchmarks.sglang`.

Run in `.venv-sglang` (`.ci/venv sglang`). Batches of 128 pages, in one process: set and get by
kvd, a copy of as many bytes between mapped and touched memory, and SGLang's own file backend on
tmpfs as its controller uses it. All in interleaved rounds. Then `batch_exists` of 128 pages that
are there, beside a Health.Check of the same daemon.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.sglang import absent

absent.install()

import torch  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheFile  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402

from tests.daemon_process import DaemonProcess  # noqa: E402
from tests.daemons import DAEMON_PYTHON  # noqa: E402
from tests.sglang import rig  # noqa: E402

PAGES = 128
MIB = 1 << 20


def timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def keys(number: int) -> list[str]:
    """128 keys of one prompt."""
    return [hashlib.sha256(f"{number} {page}".encode()).hexdigest() for page in range(PAGES)]


def through_files(files: HiCacheFile, pool: Any, names: list[str], first: list[int]) -> list[float]:
    """Set and get as SGLang's controller does without `interface_v1`."""

    def set_pages() -> None:
        assert files.batch_set(names, [pool.get_data_page(index) for index in first])

    def get_pages() -> None:
        data = files.batch_get(names, [pool.get_dummy_flat_data_page() for _ in first])
        for index, page in zip(first, data, strict=True):
            pool.set_from_flat_data_page(index, page)

    return [timed(set_pages), timed(get_pages)]


def copies(rank: rig.Rank, directory: Path, rounds: int) -> dict[str, Any]:
    pool, backend = rank.pool, rank.backend
    pool.kv_buffer.fill_(1)
    indices = pool.alloc(PAGES * rig.PAGE_TOKENS)
    first = [int(index) for index in indices[:: rig.PAGE_TOKENS]]
    size = pool.size_per_token * rig.PAGE_TOKENS * PAGES
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    files = HiCacheFile(rig.storage_config({}), str(directory))
    times: dict[str, list[float]] = {
        name: [] for name in ("set", "get", "memcpy", "file set", "file get")
    }
    for number in range(rounds):
        names = keys(number)
        times["memcpy"].append(timed(lambda: np.copyto(target, source)))
        times["set"].append(timed(partial(backend.batch_set_v1, names, indices)))
        times["memcpy"].append(timed(lambda: np.copyto(target, source)))
        assert backend.batch_exists(names) == PAGES
        times["get"].append(timed(partial(backend.batch_get_v1, names, indices)))
        by_file = through_files(files, pool, names, first)
        times["file set"].append(by_file[0])
        times["file get"].append(by_file[1])
        files.clear()
    half = rounds // 4  # the first rounds touch the pool's pages
    rates = {name: size / statistics.median(each[half:]) / 1e9 for name, each in times.items()}
    return {
        "page_bytes": size // PAGES,
        "gb_per_s": rates,
        "set_to_memcpy": rates["set"] / rates["memcpy"],
        "get_to_memcpy": rates["get"] / rates["memcpy"],
        "set_to_file": rates["set"] / rates["file set"],
        "get_to_file": rates["get"] / rates["file get"],
    }


def calls(rank: rig.Rank, socket: str, names: list[str], rounds: int) -> dict[str, float]:
    assert rank.backend.batch_exists(names) == PAGES
    channel = grpc.insecure_channel(f"unix:{socket}")
    health: Any = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest()
    exists, check = [], []
    for _ in range(rounds):
        check.append(timed(lambda: health.Check(request)))
        exists.append(timed(lambda: rank.backend.batch_exists(names)))
    channel.close()
    figures = {
        "batch_exists_ms": statistics.median(exists) * 1e3,
        "health_check_ms": statistics.median(check) * 1e3,
    }
    return figures | {"ratio": figures["batch_exists_ms"] / figures["health_check_ms"]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="SGLang's storage backend over kvd.")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--layers", type=int, default=32, help="32: pages of 1 MiB")
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="kvd-bench-"))
    pool = Path(tempfile.mkdtemp(prefix="kvd-bench-", dir="/dev/shm"))
    daemon = DaemonProcess(scratch, pool)
    daemon.python = DAEMON_PYTHON
    daemon.pool_bytes, daemon.extent_bytes = 1024 * MIB, 64 * MIB
    daemon.flags = {"log-level": "warning"}
    daemon.start()
    device = MHATokenToKVPool(
        rig.DEVICE_TOKENS, rig.PAGE_TOKENS, torch.float16, 8, 64, options.layers, "cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    rank = rig.Rank(daemon.socket, device)
    try:
        rank.wait_usable()
        (pool / "files").mkdir()
        print(copies(rank, pool / "files", options.rounds))
        print(calls(rank, daemon.socket, keys(options.rounds - 1), 20 * options.rounds))
    finally:
        rank.close()
        daemon.end()
        shutil.rmtree(scratch)
        shutil.rmtree(pool)


if __name__ == "__main__":
    main()
