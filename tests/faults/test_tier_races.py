"""What happens while a tier reads and writes: drains, clears, deaths, others who want the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvd_proto.v1 import operator_pb2
from tests.faults.probe import Probe
from tests.faults.scene import Scene
from tests.faults.test_tiers import TIER, evict, settled, tiered, wait_for_tier
from tests.tiers.gated_store import Gate
from tests.waiting import wait_until

COUNT = 100  # blocks of a prompt: fewer than may be on their way, up or down


@contextmanager
def gated(directory: Path) -> Iterator[tuple[Scene, Gate]]:
    """A daemon over a tier, and the tier's gate."""
    options = f'\noptions = {{ signs = "{directory / "signs"}" }}\n'
    tier = TIER.replace("memory_store:MemoryStore", "gated_store:GatedStore") + options
    tier = tier.replace("deadline_seconds = 3.0", "deadline_seconds = 30.0")  # none passes here
    gate = Gate(directory / "signs")
    with tiered(directory, tier) as scene:
        wait_for_tier(scene)
        yield scene, gate


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scene, Gate]]:
    with gated(tmp_path_factory.mktemp("gated")) as both:
        yield both


@pytest.fixture
def gate(shared: tuple[Scene, Gate]) -> Gate:
    return shared[1]


@pytest.fixture
def scene(shared: tuple[Scene, Gate]) -> Iterator[Scene]:
    """The module's daemon without engines and blocks; no copy is left at the end."""
    scene, _ = shared
    scene.clear()
    wait_until(lambda: scene.status().tiers[0].blocks == 0, "the tier to be empty")
    yield scene
    scene.end_engines()
    assert_settled(scene)


def assert_settled(scene: Scene) -> None:
    wait_until(lambda: settled(scene), "the end of every copy")
    # Blocks that are written down stay where they are: their copies show here alone.
    wait_until(lambda: not scene.status().tiers[0].bytes_up, "the last reads")
    wait_written(scene)


def bring_down(scene: Scene, engine: Probe, prompt: str) -> None:
    """Have a prompt in the tier, and not in host memory."""
    before = scene.status().tiers[0].blocks_written
    assert engine.store(prompt, COUNT) == COUNT
    wait_written(scene)
    assert scene.status().tiers[0].blocks_written == before + COUNT
    evict(engine)
    wait_written(scene)


def wait_written(scene: Scene) -> None:
    wait_until(lambda: scene.status().tiers[0].bytes_down == 0, "the last writes")


def test_two_engines_that_ask_at_once_have_it_read_once(scene: Scene, gate: Gate) -> None:
    engines = scene.engines("one", "two", "three")
    bring_down(scene, engines[0], "first")
    before = scene.status().tiers[0].blocks_promoted
    with gate.held("read"):
        for engine in engines:
            engine.order("load", prefix="first", count=COUNT)
        gate.wait_for("read")
        time.sleep(0.2)
    answers = [engine.answer() for engine in engines]
    assert [(a["wrong"], a["loaded"]) for a in answers] == [([], COUNT)] * 3
    assert scene.status().tiers[0].blocks_promoted - before == COUNT


def test_an_engine_killed_while_it_waits_leaves_nothing_and_others_find_it(
    scene: Scene, gate: Gate
) -> None:
    one = scene.engine("one")
    bring_down(scene, one, "first")
    two = scene.engine("two")
    with gate.held("read"):
        two.order("load", prefix="first", count=COUNT)
        gate.wait_for("read")
        two.kill()
        time.sleep(0.3)
    scene.probes.remove(two)
    wait_until(lambda: len(scene.status().sessions) == 1, "its end")
    assert one.load("first", COUNT) == COUNT


@pytest.mark.parametrize("stopped", ["read", "write"])
def test_a_clear_while_a_tier_copies_holds_for_what_it_copies(
    scene: Scene, gate: Gate, stopped: str
) -> None:
    one, two = scene.engines("one", "two")
    bring_down(scene, one, "first")
    with gate.held(stopped):
        if stopped == "write":
            assert one.store("first", COUNT) == COUNT
            one.store("more", COUNT)
        else:
            two.order("load", prefix="first", count=COUNT)
        gate.wait_for(stopped)
        scene.clear()
        if stopped != "write":
            answer = two.answer()
            assert (answer["found"], answer["wrong"]) == (0, [])
    for engine in (one, two):
        assert engine.load("first", COUNT) == 0
    wait_until(lambda: scene.status().tiers[0].blocks == 0, "the tier to be empty")
    bring_down(scene, one, "first")
    assert two.load("first", COUNT) == COUNT


def test_a_request_that_ends_while_it_is_pending_leaves_nothing(scene: Scene, gate: Gate) -> None:
    one = scene.engine("one")
    bring_down(scene, one, "first")
    for stopped in ("exists", "read"):
        with gate.held(stopped):
            for number in range(20):
                name = f"{stopped} {number}"
                asked = one.ask("ask_once", request=name, prefix="first", count=COUNT)
                assert asked["found"] is None
                if stopped == "read":
                    gate.wait_for("read")
                one.ask("finish", request=name)
            wait_until(lambda: scene.session_of(one).leases == 0, "no leases")
    wait_until(lambda: settled(scene), "the end of every copy")
    assert one.load("first", COUNT) == COUNT


def test_a_row_is_taken_back_though_a_tier_copies_into_it(scene: Scene, gate: Gate) -> None:
    one = scene.engine("one")
    bring_down(scene, one, "first")
    with gate.held("read"):
        one.order("load", prefix="first", count=COUNT)
        gate.wait_for("read")
        other = scene.start_engine("other", model="other", block_bytes=8192)
        other.wait_usable()
        # A row is free once the tier's process has unmapped it: when that is, the machine decides.
        # Until then a part may be stored, which is not stored again.
        wait_until(
            lambda: other.store("other", 100) == 100 or other.hits("other", 100)[0] == 100,
            "a row that no copy uses",
        )
        for number in range(6):  # the last one, too
            other.store(f"other {number}", 100)
    answer = one.answer()
    assert answer["wrong"] == []
    wait_until(lambda: other.store("other 5", 100) + other.hits("other 5", 100)[0] >= 100)
    assert other.load("other 5", 100) == 100
    assert one.load("first", COUNT) == COUNT


def test_hand_offs_hold_what_a_tier_brought_up(scene: Scene) -> None:
    one, two = scene.engines("one", "two")
    bring_down(scene, one, "first")
    whole = COUNT + 20  # no more than an eighth of the pool, which may be handed off
    handed = one.ask("hand_off", prefix="first", count=whole, milliseconds=120_000)
    assert handed["loaded"] == COUNT
    evict(one)
    assert two.hits("first", whole)[0] == whole
    assert two.load("first", whole) == whole


def test_a_drain_lets_promotions_end_and_begins_none(tmp_path: Path) -> None:
    with gated(tmp_path) as (scene, gate):
        drain_while_it_reads(scene, gate)


def drain_while_it_reads(scene: Scene, gate: Gate) -> None:
    one, two = scene.engines("one", "two")
    bring_down(scene, one, "first")
    bring_down(scene, one, "second")
    with gate.held("read"):
        two.order("load", prefix="first", count=COUNT)
        gate.wait_for("read")
        drain = operator_pb2.DrainRequest(deadline_ms=500)
        scene.caller.call(scene.caller.operator.Drain, drain)
    answer = two.answer()
    assert (answer["loaded"], answer["wrong"]) == (COUNT, [])
    with gate.held("read"):  # so that what waits for a read has no answer within the patience
        assert one.load("second", COUNT) == 0, "what can't be brought up is a miss at once"
    assert_settled(scene)
