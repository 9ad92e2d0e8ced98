"""Two nodes share a cluster: each a daemon on a host of its own, with a network between them."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.clusters import CLUSTERS, SharedCluster
from tests.faults.probe import Probe
from tests.faults.scene import Scene
from tests.faults.test_tiers import settled, wait_for_tier
from tests.network import Host, Network
from tests.waiting import wait_until

MIB = 1 << 20
DEADLINE_S = 3.0
SHARE_SECONDS = 60.0


@dataclass
class Node:
    """A host, the daemon there, and an engine beside it."""

    host: Host
    scene: Scene
    engine: Probe


@dataclass
class Stand:
    """Two nodes and what they share."""

    cluster: SharedCluster
    one: Node
    two: Node

    @property
    def nodes(self) -> tuple[Node, Node]:
        return self.one, self.two


@pytest.fixture(scope="module", params=sorted(CLUSTERS))
def stand(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stand]:
    """Each test leaves it as it was, whatever it breaks."""
    directory = tmp_path_factory.mktemp("nodes")
    with ExitStack() as ends:
        network = ends.enter_context(Network())
        cluster = CLUSTERS[request.param](directory / "cluster", network.address)
        ends.callback(cluster.end)
        file = directory / "kvd.toml"
        shared = f'name = "shared"\ndeadline_seconds = {DEADLINE_S}\n{cluster.toml()}'
        file.write_text(f"[[tiers]]\n{shared}")
        nodes = [_node(ends, network.host(), file, name) for name in ("one", "two")]
        yield Stand(cluster, *nodes)


def _node(ends: ExitStack, host: Host, file: Path, name: str) -> Node:
    scene = Scene(config=file)
    ends.callback(scene.close)
    scene.daemon.behind = host.command
    scene.daemon.pool_bytes = 4 * MIB  # 1024 blocks
    scene.daemon.start()
    wait_for_tier(scene)
    return Node(host, scene, scene.engine(name))


def wait_shared(giver: Node, taker: Node, prompt: str, blocks: int = 100) -> None:
    """Until the one node loads what the other stores, every byte of it right."""
    tried = 0

    def is_shared() -> bool:
        nonlocal tried
        tried += 1
        # Another prompt each time: what the taker has in host memory proves nothing.
        giver.engine.store(f"{prompt} {tried}", blocks)
        wait_until(lambda: giver.scene.status().tiers[0].bytes_down == 0, "what goes down")
        return taker.engine.load(f"{prompt} {tried}", blocks) == blocks

    wait_until(is_shared, f"{prompt} over the network", SHARE_SECONDS)


def test_what_one_node_stores_the_other_loads(stand: Stand) -> None:
    wait_shared(stand.one, stand.two, "there")
    wait_shared(stand.two, stand.one, "and back")
    tier = stand.one.scene.status().tiers[0]
    assert tier.blocks_promoted >= 100
    assert tier.blocks_written >= 100


def test_decode_goes_on_elsewhere_with_what_prefill_hands_off(stand: Stand) -> None:
    wait_shared(stand.one, stand.two, "warm")
    prefill, decode = stand.one.engine, stand.two.engine
    number = 0

    def goes_on() -> bool:
        """Where the machine is too busy for the two seconds that the client waits, once more."""
        nonlocal number
        number += 1
        # The request that goes on comes first: it waits for the bytes.
        decode.order("load", prefix=f"handed {number}", count=100, awaits=True)
        time.sleep(0.1 * (number % 4))
        prefill.ask("hand_off", prefix=f"handed {number}", count=100, milliseconds=10_000)
        answer = decode.answer()
        assert answer["wrong"] == []
        return bool(answer["loaded"] == 100)

    for _ in range(3):
        wait_until(goes_on, "what prefill hands off", SHARE_SECONDS)


FAULTS = ("killed", "frozen", "cut off")


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_cluster_that_fails_in_mid_work_costs_its_blocks_alone(stand: Stand, fault: str) -> None:
    wait_shared(stand.one, stand.two, f"before it is {fault}")
    prompts = [f"prompt {number} {fault}" for number in range(12)]
    for node in stand.nodes:
        node.engine.order("churn", prefixes=prompts, rounds=60, most=200)
    time.sleep(0.5)
    with broken(stand, fault):
        answers = [node.engine.answer() for node in stand.nodes]
        assert [answer["wrong"] for answer in answers] == [[], []]
        assert all(answer["stored"] for answer in answers)
        for node in stand.nodes:  # what host memory has, it has
            name = f"{fault} beside {node.engine.engine_id}"
            assert node.engine.store(name, 100) == 100
            assert node.engine.load(name, 100) == 100
    for node in stand.nodes:
        wait_for_tier(node.scene)
        wait_until(lambda node=node: settled(node.scene), "the end of every copy", 30.0)  # type: ignore[misc]
    wait_shared(stand.one, stand.two, f"after it was {fault}")
    wait_shared(stand.two, stand.one, f"after {fault} and back")


@contextmanager
def broken(stand: Stand, fault: str) -> Iterator[None]:
    match fault:
        case "killed":
            stand.cluster.send(signal.SIGKILL)
        case "frozen":
            stand.cluster.send(signal.SIGSTOP)
        case _:
            stand.two.host.cut_off()
    try:
        yield
    finally:
        match fault:
            case "killed":
                stand.cluster.start_again()
            case "frozen":
                stand.cluster.send(signal.SIGCONT)
            case _:
                stand.two.host.join()


def test_a_clear_on_both_nodes_leaves_nothing_anywhere_and_they_share_again(stand: Stand) -> None:
    wait_shared(stand.one, stand.two, "before the clear")
    for node in stand.nodes:
        node.scene.clear()
    for node in stand.nodes:
        assert node.engine.load("before the clear 1", 100) == 0
    wait_shared(stand.one, stand.two, "after the clear")
    assert stand.one.engine.load("before the clear 1", 100) == 0
