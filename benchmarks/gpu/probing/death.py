"""How long after kill -9 a device's memory is back, and what the survivor can still do."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.probing.nvml import used_bytes
from benchmarks.gpu.probing.remote import Remote, remotes, tried, wait_until
from benchmarks.gpu.probing.scale import Scale

PATIENCE_S = 10.0
MIB = 1 << 20
COPY_BYTES = 32 * MIB
QUEUED = 400  # copies of 32 MiB: about a quarter of a second at 55 GB/s


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
