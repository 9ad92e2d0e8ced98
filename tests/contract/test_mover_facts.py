"""What a mover says of itself goes into core, metrics and status: nonsense of it goes nowhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvd.mover.facts import CUDA_IPC, GpuFacts, MoverFacts

GPU = GpuFacts(
    "GPU-01234567-89ab-cdef-0123-456789abcdef", "NVIDIA H100", "580.65", 410 << 20, 62 << 30, 3, 9
)
FACTS = MoverFacts(CUDA_IPC, "batch", GPU)


def told(place: str, value: Any) -> bytes:
    """The facts with one of them changed, as a mover would write them."""
    facts = json.loads(FACTS.pack())
    where, *path = reversed(place.split("."))
    inner = facts
    for name in reversed(path):
        inner = inner[name]
    inner[where] = value
    return json.dumps(facts).encode()


HOST = [MoverFacts.of_host_memory(level, "no\ncompiler" * 99) for level in (None, "avx2")]


@pytest.mark.parametrize("facts", [FACTS, MoverFacts(), *HOST])
def test_facts_come_back_as_they_were_told(facts: MoverFacts) -> None:
    assert MoverFacts.unpack(facts.pack() + b"\0\0\0") == facts


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("transport", "carrier pigeon"),
        ("transport", ["cuda-ipc"]),
        ("copier", None),
        ("copier", "strided"),
        ("copier", "x" * 1000),
        ("copier", {}),
        ("note", 7),
        ("note", "two\nlines"),
        ("gpu", []),
        ("gpu", {"uuid": GPU.uuid}),
        ("gpu.uuid", 7),
        ("gpu.name", "x" * 257),
        ("gpu.name", "two\nlines"),
        ("gpu.driver_version", "\ud800"),
        ("gpu.context_bytes", -1),
        ("gpu.context_bytes", 1 << 63),
        ("gpu.registered_bytes", 1.5),
        ("gpu.unregistered_extents", True),
        ("gpu.staged_bytes", None),
        ("gpu.numa_node", [0]),
        ("gpu.numa_node", -2),
        ("gpu.numa_node", 1 << 40),
    ],
)
def test_facts_that_no_mover_of_ours_would_tell_are_refused(place: str, value: Any) -> None:
    with pytest.raises(ValueError, match="no facts"):
        MoverFacts.unpack(told(place, value))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b"{}", b"[" * 100_000, b"\xff\xfe"])
def test_what_is_no_facts_at_all_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="no facts"):
        MoverFacts.unpack(body)
