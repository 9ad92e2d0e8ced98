"""A tenant that opens engine after engine takes no more of a full pool than its share, and one that
asks a tier much keeps nobody else from it."""

from __future__ import annotations

import os
import time
from itertools import count
from pathlib import Path

from tests.control.daemon_rig import RawEngine, block, identity, namespace, store_job
from tests.faults.scene import MakeScene, Scene
from tests.faults.test_tiers import evict, tiered, wait_for_tier
from tests.tiers.gated_store import MANY, Gate
from tests.waiting import wait_until

MIB = 1 << 20
UIDS = f"uids = [{os.getuid()}]\n"
TENANTS = f"[tenants.many]\n{UIDS}[tenants.one]\n{UIDS}"
TIER = """
[[tiers]]
name = "gated"
store = "tests.tiers.gated_store:GatedStore"
deadline_seconds = 60.0
options = {{ signs = "{signs}", concurrency = {calls} }}
"""
CALLS = 5  # that the store takes at once
EXTENTS = 8
MANY_ENGINES = 10  # engines of one tenant, each with a model of its own: more than there are rows
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
    config.write_text(TENANTS)
    scene = own_scene(EXTENTS * MIB, config=config)
    engines: list[Storer] = []
    try:
        engines += [Storer(scene, f"many {number}", "many") for number in range(MANY_ENGINES)]
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
        served = [False] * MANY_ENGINES
        until = time.monotonic() + PATIENCE_SECONDS
        while not all(served) and time.monotonic() < until:
            other.store()
            served = [each.store() or before for each, before in zip(engines, served, strict=False)]
        assert all(served), "the many go round in their own half"
        assert used_mib(scene, "one") > EXTENTS / 2 - 1
    finally:
        for each in engines:
            each.engine.close()


def test_tenant_whose_questions_hang_keeps_no_other_from_a_tier(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "signs")
    tier = TIER.format(signs=tmp_path / "signs", calls=CALLS)
    with tiered(tmp_path, TENANTS + tier) as scene:
        wait_for_tier(scene)
        many = scene.start_engine("many", tenant="many", model="many")
        one = scene.engine("one", tenant="one", model="one")
        many.wait_usable()
        prompts = [f"prompt {number}" for number in range(4)]
        for prompt in prompts:
            assert one.store(prompt, 4) == 4
        wait_until(lambda: not scene.status().tiers[0].bytes_down, "the last writes")
        evict(one)
        with gate.held("exists of many"):
            for number in range(2 * CALLS):
                many.ask("ask_once", request=f"r{number}", prefix=f"nowhere {number}", count=MANY)
            gate.wait_for("exists of many")
            assert [one.load(prompt, 4) for prompt in prompts] == [4] * 4
