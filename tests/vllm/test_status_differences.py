"""`kvd status` says in which field two engines differ that might have been meant to share."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvd_client import EngineIdentity, NamespaceFields, SchedulerConnection
from tests.daemons import DAEMON_PYTHON
from tests.vllm.configurations import cache_of, configure, full_attention, handshake
from tests.vllm.node_daemon import NodeDaemon
from tests.waiting import wait_until


@dataclass
class Node:
    """Sessions of engines that have a namespace and nothing else."""

    daemon: NodeDaemon
    open: list[SchedulerConnection]

    def enter(self, namespace: NamespaceFields) -> None:
        """Open a session; it never becomes usable, but its namespace is known."""
        identity = EngineIdentity(os.urandom(8).hex(), os.urandom(16))
        self.open.append(SchedulerConnection(self.daemon.socket, identity, namespace))
        wait_until(lambda: len(self.daemon.status().sessions) == len(self.open))

    def status(self) -> str:
        command = [DAEMON_PYTHON, "-m", "kvd", "status", "--socket", self.daemon.socket]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def node(kvd: NodeDaemon) -> Iterator[Node]:
    made = Node(kvd, [])
    yield made
    for connection in made.open:
        connection.close()
    wait_until(lambda: not kvd.status().sessions)


def test_alike_engines_have_one_namespace_and_no_difference(node: Node, model: Path) -> None:
    for _ in range(2):
        node.enter(configure(model).namespace())
    status = node.daemon.status()
    assert len({session.namespace_id for session in status.sessions}) == 1
    assert "differ" not in node.status()


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("weights_id", {"options": {"weights_id": "mine"}}),
        ("model_config_digest", {"hf_overrides": {"rope_theta": 5e5}}),
        ("kv_dtype", {"dtype": "bfloat16"}),
        ("groups[0]", {"options": {"blocks_per_chunk": 2}}),
        ("hash_algorithm", {"prefix_caching_hash_algo": "sha256_cbor"}),
        ("lora_digest", {"enable_lora": True, "options": {"lora_id": "one"}}),
        ("unshared", {"options": {"unshared": True}}),
    ],
)
def test_engines_that_differ_are_told_apart_by_the_fields_name(
    node: Node, model: Path, field: str, other: dict[str, Any]
) -> None:
    node.enter(configure(model).namespace())
    node.enter(configure(model, **other).namespace())
    status = node.daemon.status()
    mine, theirs = (session.namespace_id for session in status.sessions)
    assert mine != theirs
    [told] = [n.differs[str(theirs)] for n in status.namespaces if n.namespace_id == mine]
    assert f"{field} (" in told
    assert field in node.status()


def test_ranks_with_another_layout_are_told_apart(node: Node, model: Path) -> None:
    made = configure(model, cache=cache_of(full_attention()))
    node.enter(made.namespace())
    node.enter(made.namespace([handshake(0, layout="LBHNC;CPU_ATTN;avx512/amx")]))
    assert "kv_layout" in node.status()
