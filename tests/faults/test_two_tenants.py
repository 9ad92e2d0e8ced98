"""A tenant that opens engine after engine takes no more of a full pool than its share."""

from __future__ import annotations

import os
import time
from itertools import count
from pathlib import Path

from tests.control.daemon_rig import RawEngine, block, identity, namespace, store_job
from tests.faults.scene import MakeScene, Scene

MIB = 1 << 20
EXTENTS = 8
MANY = 10  # engines of one tenant, each with a model of its own: more than there are rows
AT_ONCE = 32  # blocks of a store
PATIENCE_SECONDS = 60.0


class Storer:
    """An engine that tries to store new blocks each time that it is asked."""

    def __init__(self, scene: Scene, name: str, tenant: str) -> None:
        names = namespace(model=name, tenant=tenant)
        self.engine = RawEngine(scene.daemon.socket, identity=identity(name), namespace=names)
        self._jobs, self._keys = count(1), count(1)
        for number in range(AT_ONCE):
            self.engine.worker.write(number, block(number))

    def store(self) -> bool:
        job, keys = next(self._jobs), [next(self._keys) for _ in range(AT_ONCE)]
        wanted = store_job(job, keys, list(range(AT_ONCE)))
        (verdict,) = self.engine.scheduler.step(stores=[wanted], end_step=True).verdicts
        if not verdict.accepted:
            return False
        self.engine.worker.ready(job)
        return self.engine.ended(job).status == 1


def used_mib(scene: Scene, tenant: str) -> float:
    found = (t.bytes_used for t in scene.status().tenants if t.tenant == tenant)
    return next(found, 0) / MIB


def test_tenant_with_more_engines_than_rows_leaves_another_its_share(
    own_scene: MakeScene, tmp_path: Path
) -> None:
    config = tmp_path / "kvd.toml"
    uids = f"uids = [{os.getuid()}]\n"
    config.write_text(f"[tenants.many]\n{uids}[tenants.one]\n{uids}")
    scene = own_scene(EXTENTS * MIB, config=config)
    engines: list[Storer] = []
    try:
        engines += [Storer(scene, f"many {number}", "many") for number in range(MANY)]
        until = time.monotonic() + PATIENCE_SECONDS
        while used_mib(scene, "many") < EXTENTS - 1 and time.monotonic() < until:
            for each in engines:
                each.store()
        other = Storer(scene, "one", "one")
        engines.append(other)
        until = time.monotonic() + PATIENCE_SECONDS
        while (has := used_mib(scene, "one")) <= EXTENTS / 2 - 1 and time.monotonic() < until:
            for each in engines:
                each.store()
        assert has > EXTENTS / 2 - 1, "half of the pool, but for what it is about to fill"
        served = [False] * MANY
        until = time.monotonic() + PATIENCE_SECONDS
        while not all(served) and time.monotonic() < until:
            other.store()
            served = [each.store() or before for each, before in zip(engines, served, strict=False)]
        assert all(served), "the many go round in their own half"
        assert used_mib(scene, "one") > EXTENTS / 2 - 1
    finally:
        for each in engines:
            each.engine.close()
