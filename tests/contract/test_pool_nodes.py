"""Extents are dealt to memory nodes, populated by threads of theirs, and stay where they are.

This machine may have one node: what several would look like is given. That the kernel then
places the pages there can only be seen on a machine that has them.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvd.pool import Pool, PoolError, extents, nodes, pool, sealed_json
from kvd.pool.nodes import Node, deal, find_nodes
from tests.contract import pool_orders as orders
from tests.contract.pool_orders import opened

TWO = (Node(0, frozenset({0})), Node(3, frozenset({1})))


def machine(root: Path, cpus: dict[int, str], has_memory: str, allowed: str) -> tuple[Path, Path]:
    """A sysfs and a /proc that tell of these nodes, where "" is a node without processors."""
    sysfs, proc = root / "node", root / "proc"
    (proc / "self").mkdir(parents=True)
    line = f"Mems_allowed_list:\t{allowed}\n" if allowed else ""
    (proc / "self" / "status").write_text(f"Name:\tkvd\n{line}")
    for number, of in cpus.items():
        (sysfs / f"node{number}").mkdir(parents=True)
        (sysfs / f"node{number}" / "cpulist").write_text(of + "\n")
    (sysfs / "has_cpu").write_text(",".join(str(n) for n, of in cpus.items() if of) + "\n")
    (sysfs / "has_memory").write_text(has_memory + "\n")
    return sysfs, proc


@pytest.mark.parametrize(
    ("cpus", "has_memory", "allowed", "found"),
    [
        ({0: "0-3,8-9", 1: "4-7"}, "0-1", "0-1", {0: {0, 1, 2, 3, 8, 9}, 1: {4, 5, 6, 7}}),
        ({0: "0", 1: "1", 2: ""}, "0-2", "0-2", {0: {0}, 1: {1}}),  # 2: a GPU's own memory
        ({0: "0", 1: "1"}, "0", "0-1", {}),
        ({0: "0", 1: "1"}, "0-1", "1", {}),
        ({0: "0", 1: "1"}, "0-1", "", {0: {0}, 1: {1}}),  # a kernel without such limits
        ({0: "0-1"}, "0", "0", {}),
    ],
)
def test_nodes_with_memory_and_processors_that_are_allowed_count(
    tmp_path: Path, cpus: dict[int, str], has_memory: str, allowed: str, found: dict[int, set[int]]
) -> None:
    nodes_found = find_nodes(*machine(tmp_path, cpus, has_memory, allowed))
    assert {node.number: set(node.cpus) for node in nodes_found} == found


def test_a_kernel_that_tells_of_no_nodes_has_none(tmp_path: Path) -> None:
    assert find_nodes(tmp_path, tmp_path) == ()


@pytest.mark.parametrize(
    ("count", "among", "shares"),
    [
        (8, [0, 1], (0, 0, 0, 0, 1, 1, 1, 1)),
        (5, [0, 3], (0, 0, 0, 3, 3)),
        (7, [2, 4, 6], (2, 2, 2, 4, 4, 6, 6)),
        (1, [0, 1], (0,)),
        (8, [0], ()),
        (8, [], ()),
    ],
)
def test_extents_are_dealt_in_contiguous_equal_shares(
    count: int, among: Sequence[int], shares: tuple[int, ...]
) -> None:
    assert deal(count, among) == shares


def test_each_extent_is_populated_by_a_thread_of_its_node(
    shared_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: dict[int, int] = {}  # thread -> node
    made: dict[int, int] = {}  # extent -> node of the thread that made it
    make = extents.Extents._make

    def watch(self: extents.Extents, extent: int) -> None:
        made[extent] = bound[threading.get_ident()]
        make(self, extent)

    monkeypatch.setattr(pool, "find_nodes", lambda: TWO)
    monkeypatch.setattr(
        nodes, "bind_thread", lambda node: bound.update({threading.get_ident(): node.number})
    )
    monkeypatch.setattr(extents.Extents, "_make", watch)
    with opened(orders.config(shared_directory)) as opened_pool:
        assert opened_pool.extent_nodes == (0, 0, 0, 0, 3, 3, 3, 3)
        assert opened_pool.place.endswith("/extents; nodes 0, 3")
        assert made == dict(enumerate(opened_pool.extent_nodes))


@pytest.mark.parametrize("extent", range(orders.EXTENTS))
def test_an_extent_without_memory_is_noticed_whichever_node_it_is_of(
    shared_directory: Path, monkeypatch: pytest.MonkeyPatch, extent: int
) -> None:
    """Else a copy into it would be a SIGBUS."""
    make = extents.Extents._make

    def fail(self: extents.Extents, one: int) -> None:
        if one == extent:
            raise PoolError(f"no memory for extent {one}")
        make(self, one)

    monkeypatch.setattr(pool, "find_nodes", lambda: TWO)
    monkeypatch.setattr(nodes, "bind_thread", lambda _node: None)
    monkeypatch.setattr(extents.Extents, "_make", fail)
    with pytest.raises(PoolError, match=f"no memory for extent {extent}"):
        Pool.open(orders.config(shared_directory), lambda _done, _total: None)


def test_a_warm_pool_keeps_its_placement_whatever_the_machine_shows_now(
    shared_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "bind_thread", lambda _node: None)
    config = orders.config(shared_directory)
    monkeypatch.setattr(pool, "find_nodes", lambda: TWO)
    with opened(config) as first:
        placed = first.extent_nodes
    monkeypatch.setattr(pool, "find_nodes", lambda: ())
    with opened(config) as second:
        assert second.cold_reason == ""
        assert second.extent_nodes == placed
    header = sealed_json.unseal((config.directory / "pool.header").read_bytes())
    assert header is not None
    assert header["nodes"] == [0, 3]


def test_a_pool_of_one_node_has_no_placement(
    shared_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "find_nodes", lambda: ())
    with opened(orders.config(shared_directory)) as opened_pool:
        assert opened_pool.extent_nodes == ()


def bound_in_thread(node: Node) -> tuple[set[int], list[int]]:
    """What a thread bound to the node may run on, and its memory policy: mode and nodes' mask."""
    seen: list[tuple[set[int], list[int]]] = []

    def look() -> None:
        nodes.bind_thread(node)
        mode, mask = ctypes.c_int(), (ctypes.c_uint64 * 16)()
        number = {"x86_64": 239, "aarch64": 236}[os.uname().machine]
        call = (ctypes.c_long(number), ctypes.byref(mode), mask, ctypes.c_ulong(1024))
        known = ctypes.CDLL(None).syscall(*call, None, ctypes.c_ulong(0)) == 0
        policy = [mode.value, mask[0]] if known else []
        seen.append((set(os.sched_getaffinity(0)), policy))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return seen[0]


def test_a_bound_thread_runs_on_its_node_and_prefers_its_memory_and_no_other_thread_does() -> None:
    allowed = os.sched_getaffinity(0)
    first = min(allowed)
    affinity, policy = bound_in_thread(Node(0, frozenset({first, 100_000})))
    assert affinity == {first}
    assert policy in ([1, 1], []), "MPOL_PREFERRED for node 0, where the sandbox allows the call"
    assert os.sched_getaffinity(0) == allowed


def test_a_node_whose_processors_are_not_allowed_is_still_asked_for_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    allowed = os.sched_getaffinity(0)
    affinity, policy = bound_in_thread(Node(0, frozenset({100_000})))
    assert affinity == allowed
    assert bool(caplog.messages) == (policy == []), "silent although it was bound to nothing"


def test_a_thread_that_can_be_bound_to_nothing_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bound_in_thread(Node(900, frozenset({100_000})))
    (said,) = caplog.messages
    assert said.startswith("memory of node 900 can't be asked for")


def test_this_machine_can_be_asked_and_its_pool_is_opened_by_what_it_says(
    shared_directory: Path,
) -> None:
    found = find_nodes()
    config = orders.config(shared_directory)
    with opened(config) as opened_pool:
        assert opened_pool.extent_nodes == deal(config.extents, [node.number for node in found])
