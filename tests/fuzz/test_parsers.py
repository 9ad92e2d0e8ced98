"""Every parser refuses nonsense in its own words; a long run is `make fuzz MINUTES=`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvd.cli.replay.trace import TraceError, read_trace
from tests.fuzz import targets
from tests.fuzz.targets import TARGETS, Target, mutated

INPUTS = 1500


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_valid_bytes_and_mutations_of_them_are_read_or_refused(target: Target) -> None:
    target(TARGETS[target])
    dice = random.Random(7)
    for _ in range(INPUTS):
        target(mutated(TARGETS[target], dice))


@pytest.mark.parametrize("body", [b"[]", b"null", b"{", b"[" * 100_000, b'{"kind": "new"}'])
def test_a_sealed_line_of_another_make_is_no_record_of_ours(body: bytes) -> None:
    targets.registry(body)
    targets.header(body)


def test_a_line_of_a_trace_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"[" * 100_000 + b"\n")
    with pytest.raises(TraceError, match="not JSON"):
        read_trace(path)
