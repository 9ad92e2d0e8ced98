"""Where a GPU hangs, as sysfs says it; read from a folder that looks like sysfs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvd.core.keys import NODE_UNKNOWN
from kvd.linux.proc import numbers_of
from kvd.mover.cuda import node


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two nodes, and one GPU on the second of them."""
    first, second = sorted(os.sched_getaffinity(0))[:1], sorted(os.sched_getaffinity(0))[-1:]
    place(tmp_path, "devices/system/node/online", "0-1\n")
    place(tmp_path, "devices/system/node/node0/cpulist", f"{first[0]},100-103\n")
    place(tmp_path, "devices/system/node/node1/cpulist", f"{second[0]},104-107\n")
    place(tmp_path, "bus/pci/devices/0000:ab:00.0/numa_node", "1\n")
    place(tmp_path, "bus/pci/devices/0001:0c:00.0/numa_node", "-1\n")
    place(tmp_path, "bus/pci/devices/10000:ab:00.0/numa_node", "0\n")
    place(tmp_path, "bus/pci/devices/fedcba98:ab:00.0/numa_node", "1\n")
    place(tmp_path, "bus/pci/devices/0000:1f:00.0/numa_node", "somewhere\n")
    return tmp_path


def place(sysfs: Path, path: str, text: str) -> None:
    (sysfs / path).parent.mkdir(parents=True, exist_ok=True)
    (sysfs / path).write_text(text)


@pytest.mark.parametrize(
    ("bus_id", "found"),
    [
        ("0000:AB:00.0", 1),
        ("00000000:AB:00.0", 1),
        ("0000:ab:00.0", 1),
        ("10000:AB:00.0", 0),
        ("00010000:AB:00.0", 0),
        ("FEDCBA98:AB:00.0", 1),
        ("0001:0C:00.0", NODE_UNKNOWN),  # what the kernel says where there is one node
        ("0000:1F:00.0", NODE_UNKNOWN),
        ("0000:77:00.0", NODE_UNKNOWN),
        ("", NODE_UNKNOWN),
    ],
)
def test_a_gpus_node_is_found_by_its_bus_id_however_that_is_written(
    sysfs: Path, bus_id: str, found: int
) -> None:
    assert node.node_of(bus_id, sysfs) == found


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}),
        ("0\n", {0}),
        ("\n", set()),
    ],
)
def test_lists_of_numbers_are_read_as_the_kernel_writes_them(text: str, numbers: set[int]) -> None:
    assert numbers_of(text) == numbers


def test_nodes_and_their_processors_are_read(sysfs: Path) -> None:
    assert node.online_nodes(sysfs) == {0, 1}
    assert {104, 105, 106, 107} < node.cpus_of(1, sysfs)
    assert node.cpus_of(2, sysfs) == frozenset()
    assert node.online_nodes(sysfs / "nothing") == frozenset()


def test_a_mover_stays_on_those_of_its_processors_that_its_gpus_node_has(sysfs: Path) -> None:
    before = os.sched_getaffinity(0)
    try:
        assert node.bind_to(1, sysfs)
        assert os.sched_getaffinity(0) == {max(before)}
    finally:
        os.sched_setaffinity(0, before)


def test_nothing_is_bound_where_the_node_is_not_known_or_has_no_processor_for_us(
    sysfs: Path,
) -> None:
    before = os.sched_getaffinity(0)
    place(sysfs, "devices/system/node/node1/cpulist", "100-103\n")
    assert not node.bind_to(1, sysfs)
    assert not node.bind_to(NODE_UNKNOWN, sysfs)
    place(sysfs, "devices/system/node/online", "0\n")
    assert not node.bind_to(0, sysfs)
    assert os.sched_getaffinity(0) == before
