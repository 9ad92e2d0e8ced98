"""Prefill on one node, decode on another: two daemons on hosts of their own share a cluster."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.daemons import DAEMON_PYTHON, ROOT
from tests.network import Network
from tests.tiers import valkey_rig
from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import BLOCK_TOKENS, HITS, LENGTH, WHOLE, Engine, prompt
from tests.vllm.node_daemon import NodeDaemon, with_kvd
from tests.waiting import wait_until

TIER = """
[[tiers]]
name = "shared"
kind = "valkey"
write = "demotion"
deadline_seconds = 20.0
options = {{ addresses = ["{address}"] }}
"""
WHERE = "from tests.tiers.valkey_rig import server_binary; print(server_binary())"


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network() as made:
        yield made


@pytest.fixture(scope="module")
def address(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Valkey server that every node reaches; it is installed beside the daemon alone."""
    asked = subprocess.run(
        [DAEMON_PYTHON, "-c", WHERE], capture_output=True, text=True, check=False, cwd=ROOT
    )
    binary = asked.stdout.strip()
    if asked.returncode or binary == "None":
        pytest.skip(f"there is no Valkey beside the daemon: {asked.stderr.strip()[-200:]}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(valkey_rig, "server_binary", lambda: binary)
        place = tmp_path_factory.mktemp("valkey")
        server = valkey_rig.ValkeyServer(place, in_cluster=False, host=network.address)
    try:
        server.wait()
        yield server.address
    finally:
        server.kill()


@pytest.fixture(scope="module")
def nodes(
    network: Network,
    address: str,
    make_daemon: Callable[[], NodeDaemon],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[NodeDaemon]:
    config: Path = tmp_path_factory.mktemp("config") / "kvd.toml"
    config.write_text(TIER.format(address=address))
    made = [make_daemon(), make_daemon()]
    for daemon in made:
        daemon.behind = network.host().command
        daemon.flags |= {"config": config}
        daemon.start()
        wait_until(lambda daemon=daemon: daemon.status().tiers[0].serving, "the tier", 60.0)  # type: ignore[misc]
    return made


@pytest.fixture(scope="module")
def engines(start_engine: StartEngine, nodes: list[NodeDaemon]) -> list[Engine]:
    started = [start_engine(**with_kvd(daemon.socket)) for daemon in nodes]
    for engine in started:
        engine.wait_for_daemon()
    return started


def test_decode_goes_on_with_what_another_node_computed(
    engines: list[Engine], nodes: list[NodeDaemon], plain: Plain
) -> None:
    prefill, decode = engines
    handed = prompt("handed over the network", LENGTH)
    first = prefill.submit(handed, max_tokens=1, transfer={"do_remote_decode": True})
    prefill.finish(first)
    hit = decode.count(HITS)
    # It may come before the bytes do, and waits for them.
    request = decode.submit(handed, transfer={"do_remote_prefill": True})
    prefill.settle()
    (answer,) = decode.finish(request)
    assert (answer.tokens,) == tuple(plain.tokens(handed))
    assert decode.count(HITS) - hit == WHOLE
    blocks = WHOLE // BLOCK_TOKENS
    given, taken = (daemon.status().tiers[0] for daemon in nodes)
    assert given.blocks_written >= blocks
    assert taken.blocks_promoted >= blocks
    # Where nodes share they are held no longer.
    wait_until(lambda: not sum(tenant.bytes_leased for tenant in nodes[0].status().tenants))


def test_what_nobody_handed_off_stays_on_its_node(engines: list[Engine], plain: Plain) -> None:
    one, other = engines
    ordinary = prompt("ordinary", LENGTH)
    one.store(ordinary)
    hit = other.count(HITS)
    assert [answer.tokens for answer in other.generate(ordinary)] == plain.tokens(ordinary)
    assert other.count(HITS) == hit
