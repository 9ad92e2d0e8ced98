"""Copies by way, fragment size and direction, alone and beside a busy engine, and what the
engine's matrix products lose meanwhile. The copies are made as a mover makes them: between
memory opened by an IPC handle and registered shared memory."""

from __future__ import annotations

import contextlib
import os
import select
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.probing.nvml import ClockLog
from benchmarks.gpu.probing.products import Marks, by_phase
from benchmarks.gpu.probing.remote import Remote, remotes, tried
from benchmarks.gpu.probing.scale import Scale

KIB = 1 << 10
MIB = 1 << 20
BUSY_FRAGMENTS = (8 * KIB, 32 * KIB, 2 * MIB)
WAYS: tuple[dict[str, Any], ...] = (
    {"way": "large"},
    {"way": "plain"},
    {"way": "batch", "most": 16},
    {"way": "batch", "most": 64},
    {"way": "batch", "most": 128},
    {"way": "batch", "most": 512},
    {"way": "batch", "most": 4096},
    {"way": "strided"},
    {"way": "kernel", "blocks": 8},
    {"way": "kernel", "blocks": 32},
)
BUSY_WAYS = (WAYS[0], WAYS[1], WAYS[4], WAYS[7], WAYS[8])
PHASES: dict[str, tuple[tuple[str, int, bool], ...]] = {  # (way, fragment, is it a store)
    "idle": (),
    "store, batch, 2 MiB": (("batch", 2 * MIB, True),),
    "load, batch, 2 MiB": (("batch", 2 * MIB, False),),
    "both, batch, 2 MiB": (("batch", 2 * MIB, True), ("batch", 2 * MIB, False)),
    "both, batch, 32 KiB": (("batch", 32 * KIB, True), ("batch", 32 * KIB, False)),
    "store, plain, 32 KiB": (("plain", 32 * KIB, True),),
    "store, kernel of 8 blocks, 32 KiB": (("kernel", 32 * KIB, True),),
    "load, kernel of 8 blocks, 32 KiB": (("kernel", 32 * KIB, False),),
}
SETTLE_SECONDS = 0.05
WAKE_SECONDS = 5.0


@contextlib.contextmanager
def _scene(scale: Scale) -> Iterator[tuple[Remote, Remote, dict[str, int]]]:
    """An engine, a mover that has its memory open, and where the mover copies between.

    Twice the memory of one measured copy on both sides: a half for each direction."""
    handle, name = tempfile.mkstemp(prefix=f"kvd-probe-{os.getpid()}-", dir="/dev/shm")
    size = 2 * scale.copied
    os.ftruncate(handle, size)
    os.close(handle)
    try:
        with remotes(2) as (engine, mover):
            base = engine.call("allocate", size=size)
            opened = mover.call("open", handle=engine.call("export", address=base))
            host = mover.call("map_file", path=name)["address"]
            mover.call("register", address=host, size=size, piece=size)
            yield engine, mover, {"host": host, "device": opened["address"]}
    finally:
        Path(name).unlink()


def copies(scale: Scale) -> dict[str, Any]:
    """Seconds of every way, by fragment size and direction: alone, then beside the engine."""
    with _scene(scale) as (engine, mover, places):
        found: dict[str, Any] = {"idle": _grid(scale, mover, places, (scale.fragments, WAYS))}
        order = {"width": scale.product, "with_torch": scale.torch}
        library = tried(lambda: engine.call("begin_products", **order))
        found["engine"] = library
        if "ok" in library:
            found["busy"] = _grid(scale, mover, places, (BUSY_FRAGMENTS, BUSY_WAYS))
            found["products_ms"] = [took for _, took in engine.call("end_products")]
    return found


def _grid(
    scale: Scale, mover: Remote, places: dict[str, int], over: tuple[Any, Any]
) -> list[dict[str, Any]]:
    rows = []
    for fragment in over[0]:
        total = scale.copied if fragment >= 64 * KIB else scale.copied_small
        for is_store in (True, False):
            for way in over[1]:
                if fragment > total:
                    continue
                case = {**way, **places, "fragment": fragment, "total": total}
                case |= {"is_store": is_store, "repeats": scale.repeats}
                took = tried(lambda case=case: mover.call("time_copies", case=case))  # type: ignore[misc]
                row = {**way, "fragment": fragment, "is_store": is_store, "total": total}
                if "ok" in took and over[1] is WAYS:  # once is enough
                    row["moved_right"] = mover.call("moves_right", case=case)
                rows.append(row | took.get("ok", took))
    return rows


def products(scale: Scale) -> dict[str, Any]:
    """The engine's products in rounds of phases, one idle and one for each load of copies; each
    round's ratio of a phase's median to that of its own idle phase. Clocks are logged."""
    with _scene(scale) as (engine, mover, places):
        order = {"width": scale.product, "with_torch": scale.torch}
        library = engine.call("begin_products", **order)
        clocks = ClockLog()
        try:
            time.sleep(10 * SETTLE_SECONDS)
            marks, speeds = _phases(scale, mover, places)
        finally:
            readings = clocks.end()
        samples = engine.call("end_products")
    phases = by_phase(marks, samples)
    for name, told in speeds.items():
        phases[name]["copies_bytes_per_s"] = told
    return {
        "library": library,
        "width": scale.product,
        "clocks": readings,
        "phases": phases,
    }


def _phases(scale: Scale, mover: Remote, places: dict[str, int]) -> tuple[list[Marks], Any]:
    """When each phase of each round began and ended, and the copies' bytes a second."""
    marks: list[Marks] = []
    speeds: dict[str, list[Any]] = {name: [] for name in PHASES}
    for number in range(scale.rounds):
        marks.append({})
        names = list(PHASES)[:: -1 if number % 2 else 1]
        for name in names:
            cases: list[dict[str, Any]] = []
            for half, (way, fragment, is_store) in enumerate(PHASES[name]):
                case: dict[str, Any] = {
                    at: address + half * scale.copied for at, address in places.items()
                }
                case |= {"way": way, "fragment": fragment, "is_store": is_store}
                cases.append(case | {"total": scale.copied})
            time.sleep(SETTLE_SECONDS)
            began = time.monotonic()
            if cases:
                order = {"cases": cases, "seconds": scale.phase_seconds}
                speeds[name].append(tried(lambda o=order: mover.call("copy_for", **o)))  # type: ignore[misc]
            else:
                time.sleep(scale.phase_seconds)
            marks[-1][name] = (began, time.monotonic())
    return marks, speeds


def wakes(scale: Scale) -> dict[str, Any]:
    """µs from one process's eventfd to another's answer after a copy, by size and by how the end
    of the copy is waited for; beside it the copy's own µs by the device's clock."""
    found = {}
    with _scene(scale) as (_, mover, places):
        for size in (0, 32 * KIB, 2 * MIB):
            for waiting in ("spin", "blocking", "poll"):
                case: dict[str, Any] = {**places, "bytes": size, "is_store": False}
                case |= {"waiting": waiting, "count": scale.wakes}
                fds = [mover.go, mover.done]
                mover.send("answer_wakes", case=case, fds=fds)
                found[f"{size} bytes, {waiting}"] = tried(lambda: _rounds(scale.wakes, mover))
    return found


def _rounds(count: int, mover: Remote) -> dict[str, list[float]]:
    micros = []
    for _ in range(count):
        time.sleep(200e-6)
        began = time.perf_counter()
        os.eventfd_write(mover.go, 1)
        if not select.select([mover.done], [], [], WAKE_SECONDS)[0]:
            break  # it failed: its answer says how
        os.eventfd_read(mover.done)
        micros.append((time.perf_counter() - began) * 1e6)
    return {"round_trip_us": micros, "copy_us": mover.answer()}
