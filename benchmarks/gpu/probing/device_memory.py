"""Device memory that processes take before they copy a byte, and when it is back: how long after
kill -9, and what the survivor can still do."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.gpu.probing.nvml import used_bytes
from benchmarks.gpu.probing.remote import Remote, remotes, tried, wait_until
from benchmarks.gpu.probing.scale import Scale

PATIENCE_S = 10.0
MIB = 1 << 20
COPY_BYTES = 32 * MIB
QUEUED = 400  # copies of 32 MiB: about a quarter of a second at 55 GB/s

Step = tuple[str, str, dict[str, Any]]  # name, order, its arguments

STEPS: tuple[Step, ...] = (
    ("driver loaded", "load_driver", {}),
    ("primary context", "start", {}),
    ("one stream", "make_streams", {"count": 1}),
    ("16 more streams", "make_streams", {"count": 16}),
    ("CuPy's runtime", "import_cupy", {}),
    ("a compiled kernel", "make_kernel", {}),
    ("256 MiB of pinned memory", "pin", {"size": 256 * MIB}),
)


def footprint(scale: Scale) -> dict[str, Any]:
    """What each step of a mover takes, then those of an engine with torch, seen from outside."""
    with remotes(1) as (observer,):
        found: dict[str, Any] = {"mover": _steps(observer, STEPS)}
        torch_steps: tuple[Step, ...] = (STEPS[0], STEPS[1], ("torch", "import_torch", {}))
        if scale.torch:
            found["engine"] = _steps(observer, torch_steps)
    return found


def _steps(observer: Remote, steps: tuple[Step, ...]) -> list[Any]:
    rows = []
    remote = Remote()
    try:
        for name, order, arguments in steps:
            before = observer.call("memory")
            began = time.perf_counter()
            told = tried(lambda o=order, a=arguments: remote.call(o, **a))  # type: ignore[misc]
            row = {"step": name, "seconds": time.perf_counter() - began}
            row["bytes"] = before - observer.call("memory")
            rows.append(row | ({"failed": told["failed"]} if "failed" in told else {}))
    finally:
        remote.end()
    return rows


def deaths(scale: Scale) -> dict[str, list[dict[str, Any]]]:
    """Every case `scale.deaths` times."""
    cases = {
        "importer killed with copies queued": importer_dies,
        "exporter killed with the importer's copies queued": exporter_dies,
        "exporter frees what is open elsewhere": exporter_frees,
    }
    return {
        name: [tried(lambda case=case: case(scale)) for _ in range(scale.deaths)]  # type: ignore[misc]
        for name, case in cases.items()
    }


class Scene:
    """An engine whose memory a mover has open and copies from, and one who looks on."""

    def __init__(self, scale: Scale, processes: list[Remote]) -> None:
        self.engine, self.mover, self.observer = processes
        self.held = scale.held
        self.alone = self.free()
        self.base = self.engine.call("allocate", size=scale.held)
        self.allocated = self.free()
        handle = self.engine.call("export", address=self.base)
        self.address = self.mover.call("open", handle=handle)["address"]
        self.piece = min(COPY_BYTES, scale.held)
        host = self.mover.call("pin", size=self.piece)
        self.places = [host, self.address, self.piece]
        self.queued = max(8, min(QUEUED, QUEUED * scale.held // (1 << 30)))

    def free(self) -> int:
        return int(self.observer.call("memory"))

    def queue(self) -> None:
        self.mover.call("queue", is_store=True, places=self.places, times=self.queued)

    def seconds_until_free(self, more: int, than: int) -> dict[str, Any]:
        """Seconds until `more` bytes are free than there were, by the driver; and what is used
        then by the management library's account."""
        seconds = wait_until(lambda: self.free() >= than + more * 9 // 10, PATIENCE_S)
        return {"seconds": seconds, "free": self.free(), "used_by_nvml": used_bytes()}


def importer_dies(scale: Scale) -> dict[str, Any]:
    """Its context's memory must come back, and the engine must not notice."""
    with remotes(3) as processes:
        scene = Scene(scale, processes)
        before = scene.free()
        scene.queue()
        scene.mover.kill()
        gone = wait_until(lambda: scene.mover.is_gone, PATIENCE_S)
        risen = wait_until(lambda: scene.free() > before, PATIENCE_S)
        engine_reads = tried(lambda: scene.engine.call("sample", address=scene.base))
        after = scene.free()
        scene.engine.call("free", address=scene.base)
        return {
            "process_gone_after_s": gone,
            "more_is_free_after_s": None if risen is None else (gone or 0.0) + risen,
            "context_bytes_back": after - before,
            "engine_still_reads": engine_reads,
            "engine_frees_it": scene.seconds_until_free(scene.held, after),
        }


def exporter_dies(scale: Scale) -> dict[str, Any]:
    """The engine's memory must come back once its mover has let go: by a close, or by its end."""
    with remotes(3) as processes:
        scene = Scene(scale, processes)
        before = scene.free()
        scene.queue()
        scene.engine.kill()
        gone = wait_until(lambda: scene.engine.is_gone, PATIENCE_S)
        copies = tried(lambda: scene.mover.call("wait"))
        reads = tried(lambda: scene.mover.call("sample", address=scene.address))
        held = scene.free()
        found = {
            "process_gone_after_s": gone,
            "queued_copies": copies,
            "importer_still_reads": reads,
            "came_back_without_the_importer": held - before,
        }
        closed = tried(lambda: scene.mover.call("close", address=scene.address))
        found["close"] = closed
        found["back_after_close"] = scene.seconds_until_free(scene.held, before)
        scene.mover.kill()
        found["back_after_the_importers_end"] = scene.seconds_until_free(scene.held, before)
        return found


def exporter_frees(scale: Scale) -> dict[str, Any]:
    """What an import is after cudaFree in the exporter: the manual calls it undefined."""
    with remotes(3) as processes:
        scene = Scene(scale, processes)
        before = scene.free()
        freed = tried(lambda: scene.engine.call("free", address=scene.base))
        found = {
            "free": freed,
            "came_back_at_once": scene.free() - before,
            "importer_reads": tried(lambda: scene.mover.call("sample", address=scene.address)),
            "close": tried(lambda: scene.mover.call("close", address=scene.address)),
        }
        found["back_after_close"] = scene.seconds_until_free(scene.held, before)
        return found
