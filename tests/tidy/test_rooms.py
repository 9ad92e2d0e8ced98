"""What each room may import, where import-linter can't say it: lists of what is allowed."""

from __future__ import annotations

import sys

from tests.tidy.source import ROOT, imported_modules, python_files, where

# Standard library without effects: no IO, clock, randomness, processes, threads.
PURE_STANDARD = {
    "__future__", "abc", "array", "bisect", "collections", "contextlib", "dataclasses", "enum",
    "functools", "hashlib", "heapq", "itertools", "math", "operator", "types", "typing",
}  # fmt: skip
# Anonymous memory of small pages, as numpy can't be asked for it; no file, no other effect.
# Which numbers of queues are taken: no decision depends on when they are free again.
PURE_BUT = {("sparse.py", "mmap"), ("slot_queue.py", "weakref")}
PURE_PROTO = ("groups", "key_status", "layout", "limits", "tags")
PURE_OURS = ("kvd.core", *(f"kvd_proto.{name}" for name in PURE_PROTO))
CLIENT_DISTRIBUTIONS = {"numpy", "grpc", "google", "kvd_client", "kvd_proto"}


def top(module: str) -> str:
    return module.partition(".")[0]


def test_the_core_imports_only_what_is_pure() -> None:
    core = [path for path in python_files() if path.is_relative_to(ROOT / "kvd" / "core")]
    assert core
    wrong = []
    for path in core:
        for module in sorted(imported_modules(path)):
            if top(module) in PURE_STANDARD or top(module) == "numpy":
                continue
            if module.startswith(PURE_OURS):
                continue
            if module in ("kvd_proto", "kvd") or (path.name, module) in PURE_BUT:
                continue
            wrong.append(f"{where(path, 1)} {module}")
    assert wrong == []


def test_the_client_needs_numpy_grpcio_and_protobuf_alone() -> None:
    client = [path for path in python_files() if path.is_relative_to(ROOT / "client" / "src")]
    assert client
    assert [
        f"{where(path, 1)} {module}"
        for path in client
        if "integrations" not in path.parts
        for module in sorted(imported_modules(path))
        if top(module) not in CLIENT_DISTRIBUTIONS | set(sys.stdlib_module_names)
    ] == []


def test_metrics_are_declared_in_one_place_only() -> None:
    declaring = {
        str(path.relative_to(ROOT))
        for path in python_files()
        if path.is_relative_to(ROOT / "kvd")
        and any(top(module) == "prometheus_client" for module in imported_modules(path))
    }
    assert declaring == {
        "kvd/observability/metrics.py",
        "kvd/observability/tier_metrics.py",
    }


def test_both_distributions_have_one_version() -> None:
    import tomllib

    import kvd

    daemon = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    client = tomllib.loads((ROOT / "client" / "pyproject.toml").read_text())["project"]
    assert daemon["version"] == client["version"] == kvd.__version__
    assert f"kvd-client=={daemon['version']}" in daemon["dependencies"]


def test_libc_and_proc_are_asked_in_one_room_only() -> None:
    asking = {
        str(path.relative_to(ROOT))
        for path in python_files()
        if path.is_relative_to(ROOT / "kvd")
        and not path.is_relative_to(ROOT / "kvd" / "linux")
        and not path.is_relative_to(ROOT / "kvd" / "mover" / "cuda")  # the GPU's driver
        and not path.is_relative_to(ROOT / "kvd" / "native")  # our own library
        and ("ctypes" in imported_modules(path) or 'Path("/proc' in path.read_text())
    }
    assert asking == set()
