"""A daemon and probe engines whose KV lies on the driver's GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvd_proto.v1 import operator_pb2
from tests.faults.probe import Probe
from tests.faults.scene import RELEASE_SECONDS, Scene
from tests.gpu.driver import Driver
from tests.waiting import wait_until

BLOCK = 64 << 10
NUM_BLOCKS = 96


class GpuScene(Scene):
    """A Scene that also knows what the driver has."""

    def __init__(self, driver: Driver, **flags: object) -> None:
        super().__init__(**flags)
        self.driver = driver
        self.daemon.pool_bytes, self.daemon.extent_bytes = 64 << 20, 4 << 20

    def start_engine(self, engine_id: str, **changes: Any) -> Probe:
        settings = {"memory": "malloc", "block_bytes": BLOCK, "num_blocks": NUM_BLOCKS}
        return super().start_engine(engine_id, **(settings | changes))

    def ranks_of(self, probe: Probe) -> list[operator_pb2.RankStatus]:
        return list(self.session_of(probe).ranks)

    def wait_free(self, at_least: int, since: float) -> float:
        """Seconds from `since` until so much device memory is free; the design's bound holds."""
        wait_until(lambda: self.driver.free_bytes() >= at_least, "the GPU's memory")
        spent = time.monotonic() - since
        assert spent < RELEASE_SECONDS, f"device memory was back after {spent:.2f} s"
        return spent

    def processes_with_cuda(self) -> set[int]:
        """Those of the daemon's that have the driver's library mapped."""
        pids = {self.daemon.pid, *self.daemon.movers()}
        return {pid for pid in pids if "libcuda.so" in Path(f"/proc/{pid}/maps").read_text()}


@contextmanager
def gpu_scene(driver: Driver, **flags: object) -> Iterator[GpuScene]:
    """A running daemon; it and its engines are gone afterwards."""
    scene = GpuScene(driver, **flags)
    try:
        scene.daemon.start()
        yield scene
    finally:
        scene.close()
