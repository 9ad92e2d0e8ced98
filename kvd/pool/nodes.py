"""NUMA: which extents lie on which node, and how a thread comes to touch memory there.

A page lies where the thread that touches it first runs, or where that thread's memory policy
says. So each extent is populated by a thread of its node. Extents are dealt to the nodes in
contiguous, equal shares; a warm pool keeps the deal that its header names.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvd.linux.calls import prefer_memory_of
from kvd.linux.limits import NODES
from kvd.linux.proc import PROC, allowed_nodes, numbers_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Node:
    """A memory node with memory and processors of its own."""

    number: int
    cpus: frozenset[int]


def find_nodes(root: Path = NODES, proc: Path = PROC) -> tuple[Node, ...]:
    """Nodes that extents may lie on, ascending; empty where there is no choice.

    Left out are nodes without processors (a GPU's or an expander's memory), and those that this
    process's control group keeps from it.
    """
    try:
        numbers = numbers_of((root / "has_memory").read_text())
        numbers &= numbers_of((root / "has_cpu").read_text())
        numbers &= allowed_nodes(proc) or numbers
        nodes = tuple(
            Node(number, numbers_of((root / f"node{number}" / "cpulist").read_text()))
            for number in sorted(numbers)
        )
    except OSError:  # a kernel without NUMA
        return ()
    return nodes if len(nodes) > 1 else ()


def deal(extents: int, nodes: Sequence[int]) -> tuple[int, ...]:
    """The node of each extent; empty where there is one node or none."""
    if len(nodes) < 2:
        return ()
    return tuple(nodes[extent * len(nodes) // extents] for extent in range(extents))


def bind_thread(node: Node) -> None:
    """Have what this thread touches from now on lie on that node, as long as it has memory.

    Each of two ways is enough: to run on the node's processors, and to prefer its memory. A
    container may forbid one of them; where it forbids both, the log says so.
    """
    bound = _run_on(node.cpus)
    preferred = prefer_memory_of(node.number)
    if not bound and not preferred:
        log.warning(
            "memory of node %d can't be asked for: neither its processors nor set_mempolicy are"
            " allowed here; extents may lie on any node",
            node.number,
        )


def _run_on(cpus: frozenset[int]) -> bool:
    allowed = cpus & os.sched_getaffinity(0)
    if not allowed:
        return False
    try:
        os.sched_setaffinity(0, allowed)  # of this thread alone
    except OSError:
        return False
    return True
