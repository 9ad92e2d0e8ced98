"""A full pool, a wholly pinned one, and a tenant at its quota."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from kvd.core.room import reclaim
from kvd_proto.v1 import engine_pb2
from tests.control.daemon_rig import RawEngine, block, hashes, identity, namespace, store_job
from tests.faults.probe import Probe
from tests.faults.scene import MakeScene, Scene, scenes
from tests.waiting import wait_until

MIB = 1 << 20
CAPACITY = 1024  # blocks of 4 KiB in 4 MiB
PROMISED_SECONDS = reclaim.PROMISED_NS / 1e9
LEASES = {"lease_share": 1.0, "lease_ttl_ms": 3000}
PROMPTS = [f"prompt {number}" for number in range(8)]


@pytest.fixture(scope="module")
def small_scene() -> Iterator[Scene]:
    with scenes() as make:
        yield make(4 * MIB, **LEASES)


@pytest.fixture
def small(small_scene: Scene) -> Iterator[Scene]:
    """Room for 1024 blocks; leases may hold all of them, for three seconds."""
    small_scene.clear()
    yield small_scene
    small_scene.end_engines()


def fill(engine: Probe) -> list[str]:
    """Four prompts of 256 blocks: the whole pool."""
    prompts = [f"full {number}" for number in range(4)]
    for prompt in prompts:
        assert engine.store(prompt, 256) == 256
    return prompts


def test_full_pool_evicts_when_blocks_are_allocated_and_stays_right(small: Scene) -> None:
    one, two = small.engines("one", "two")
    fill(one)
    assert small.status().pool.slots_ready == CAPACITY
    assert one.store("one more", 100) == 100
    assert small.status().pool.slots_ready == CAPACITY
    assert two.load("one more", 100) == 100
    for engine in (one, two):
        engine.order("churn", prefixes=PROMPTS, rounds=25, most=256)
    answers = [engine.answer() for engine in (one, two)]
    assert [answer["wrong"] for answer in answers] == [[], []]
    assert sum(answer["stored"] for answer in answers) > CAPACITY
    assert sum(answer["loaded"] for answer in answers) > 0
    pool = small.status().pool
    assert pool.slots_ready + pool.slots_free == CAPACITY


def test_wholly_pinned_pool_refuses_stores_and_goes_on_loading(small: Scene) -> None:
    holder, other = small.engines("holder", "other")
    # Of another namespace, to which the page has no room to show: the daemon itself says no.
    stranger = RawEngine(small.daemon.socket, identity=identity("stranger"))
    prompts = fill(holder)
    for prompt in prompts:
        assert holder.ask("match", request=prompt, prefix=prompt, count=256)["found"] == 256
    holder.order("pump_for", seconds=1.0)  # it renews its leases beside what follows
    (verdict,) = stranger.scheduler.step(stores=[store_job(1, [1], [0])]).verdicts
    assert (verdict.accepted, verdict.reason) == (False, "NO_ROOM")
    assert other.ask("status")["room"] == 0
    assert other.store("no room", 4) == 0
    stranger.close()
    holder.answer()
    holder.ask("start_load", request=prompts[0], found=256, first_block=0)
    status = holder.ask("pump")
    assert prompts[0] in status["finished"]
    assert holder.ask("check", prefix=prompts[0], count=256, first_block=0)["wrong"] == []
    for prompt in prompts:
        holder.ask("finish", request=prompt)
    wait_until(lambda: other.ask("status")["room"] > 0, "room")
    assert other.store("room again", 4) == 4


def test_leases_that_nobody_renews_give_the_pool_back(small: Scene) -> None:
    holder, other = small.engines("holder", "other")
    for prompt in fill(holder):
        holder.ask("match", request=prompt, prefix=prompt, count=256)
    assert other.store("no room", 4) == 0
    wait_until(lambda: other.ask("status")["room"] > 0, "the leases' end")
    assert other.store("room again", 4) == 4


@pytest.fixture(scope="module")
def tenants_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    config = tmp_path_factory.mktemp("tenants") / "kvd.toml"
    config.write_text(
        f"[tenants.large]\nuids = [{os.getuid()}]\n"
        f'[tenants.small]\nuids = [{os.getuid()}]\nquota = "1MiB"\n'
    )
    with scenes() as make:
        yield make(8 * MIB, lease_share=1.0, lease_ttl_ms=1000, config=config)


@pytest.fixture
def tenants(tenants_scene: Scene) -> Iterator[Scene]:
    """Two tenants of one user; "small" may hold 256 blocks."""
    tenants_scene.clear()
    yield tenants_scene
    tenants_scene.end_engines()


@pytest.fixture
def highest_use(tenants: Scene) -> Iterator[list[int]]:
    """Watches what the small tenant uses, all the time."""
    seen: list[int] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen.append(used(tenants, "small"))
            time.sleep(0.002)

    watching = threading.Thread(target=watch)
    watching.start()
    yield seen
    stop.set()
    watching.join()


def used(scene: Scene, tenant: str) -> int:
    return next((t.bytes_used for t in scene.status().tenants if t.tenant == tenant), 0)


def test_tenant_at_its_quota_evicts_its_own_blocks_and_never_another_tenants(
    tenants: Scene, highest_use: list[int]
) -> None:
    small = tenants.engine("small", tenant="small")
    large = tenants.engine("large", tenant="large")
    assert large.store("shared name", 200) == 200
    assert small.hits("shared name", 200) == (0, 0)
    for number in range(6):
        assert small.store(f"small {number}", 128) == 128
    assert small.load("small 5", 128) == 128
    assert 0 < max(highest_use) <= MIB
    assert large.load("shared name", 200) == 200


def test_tenant_whose_quota_is_pinned_is_refused_while_the_other_goes_on(
    tenants: Scene, highest_use: list[int]
) -> None:
    kept = RawEngine(tenants.daemon.socket, namespace=namespace(tenant="small"))
    keys = list(range(1, 257))
    for start in range(0, 256, 64):
        contents = {key: block(key) for key in keys[start : start + 64]}
        assert kept.store(contents).status == 1
    assert kept.scheduler.statuses(keys) == [1] * 256  # and leases them
    (verdict,) = kept.scheduler.step(stores=[store_job(99, [1000], [0])]).verdicts
    assert (verdict.accepted, verdict.reason) == (False, "QUOTA")
    large = tenants.engine("large", tenant="large")
    assert large.store("goes on", 200) == 200
    assert kept.load(keys[:8]) == [block(key) for key in keys[:8]]
    assert max(highest_use) <= MIB
    kept.close()


def test_tenant_can_not_see_another_tenants_blocks_by_naming_its_keys(tenants: Scene) -> None:
    small = RawEngine(
        tenants.daemon.socket, identity=identity("s"), namespace=namespace(tenant="small")
    )
    large = RawEngine(
        tenants.daemon.socket, identity=identity("l"), namespace=namespace(tenant="large")
    )
    assert large.store({7: block(7)}).status == 1
    assert small.scheduler.statuses([7]) == [0]
    job = engine_pb2.LoadJob(job_id=5, context={"request_id": "r"})
    run = job.runs.add(hashes=hashes(7), engine_blocks=bytes(4))
    assert run.group == 0
    (verdict,) = small.scheduler.step(loads=[job]).verdicts
    assert (verdict.accepted, verdict.reason) == (False, "KEY_MISSING")
    small.close()
    large.close()


@pytest.fixture
def fresh(own_scene: MakeScene) -> Scene:
    """As `small`, and no other model has a row of it."""
    return own_scene(4 * MIB, **LEASES)


def served_beside(holder: Probe, newcomer: Probe, seconds: float) -> bool:
    """Whether the newcomer, of another model, gets to store while the holder renews its leases."""
    until, number, stored = time.monotonic() + seconds, 0, 0
    while not stored and time.monotonic() < until:
        number += 1
        holder.order("pump_for", seconds=0.2)
        stored = newcomer.store(f"newcomer {number}", 4)
        holder.answer()
    return stored > 0


def test_leases_held_too_long_end_and_their_loads_fail_without_a_wrong_byte(fresh: Scene) -> None:
    holder = fresh.engine("holder", num_blocks=CAPACITY)
    prompts = fill(holder)
    for prompt in prompts:
        assert holder.ask("match", request=prompt, prefix=prompt, count=256)["found"] == 256
    newcomer = fresh.engine("newcomer", model="another")
    assert served_beside(holder, newcomer, 10 * PROMISED_SECONDS)
    ends = []
    for number, prompt in enumerate(prompts):
        first = 256 * number
        holder.ask("start_load", request=prompt, found=256, first_block=first)
        ends.append(holder.ask("wait_for_end", request=prompt)["failed"])
        if not ends[-1]:
            assert holder.ask("check", prefix=prompt, count=256, first_block=first)["wrong"] == []
    assert True in ends, "a row was taken from under leases"
    assert False in ends, "and no more than was needed"
    lost = prompts[ends.index(True)]
    assert holder.ask("match_again", request=lost)["found"] == 0, "it is computed"
    for prompt in prompts:
        holder.ask("finish", request=prompt)
        holder.load(prompt, 256)


def test_load_under_way_keeps_its_bytes_though_its_lease_is_ended(fresh: Scene) -> None:
    holder = fresh.engine("holder", num_blocks=CAPACITY)
    prompts = fill(holder)
    for number, prompt in enumerate(prompts):
        assert holder.ask("match", request=prompt, prefix=prompt, count=256)["found"] == 256
        holder.ask("start_load", request=prompt, found=256, first_block=256 * number, hold=True)
    newcomer = fresh.engine("newcomer", model="another")
    assert not served_beside(holder, newcomer, 2 * PROMISED_SECONDS), "no copy has ended yet"
    holder.ask("ready")
    assert served_beside(holder, newcomer, 10 * PROMISED_SECONDS)
    wait_until(lambda: sorted(holder.ask("status")["finished"]) == prompts, "the loads' ends")
    for number, prompt in enumerate(prompts):
        said = holder.ask("check", prefix=prompt, count=256, first_block=256 * number)
        assert said["wrong"] == [], prompt
