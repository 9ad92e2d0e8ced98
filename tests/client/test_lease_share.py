"""A prompt longer than leases' share of the pool: its beginning is found, and operators see why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.__main__ import main
from tests.client.content import TOKENS
from tests.client.small_engine import SmallEngine
from tests.control.running_daemon import RunningDaemon

BLOCKS = 800
BLOCK_BYTES = 4096
SHARE = 0.25
COMMANDS = ("status", "doctor")


@pytest.fixture
def running() -> Iterator[RunningDaemon]:
    running = RunningDaemon("--lease-share", str(SHARE))
    running.pool_bytes, running.extent_bytes = 8 << 20, 1 << 20
    try:
        running.start()
        yield running
    finally:
        running.remove()


def advice(command: str, running: RunningDaemon, capsys: pytest.CaptureFixture[str]) -> str:
    """What this command says of leases' share."""
    main([command, "--socket", running.socket])
    return "".join(line for line in capsys.readouterr().out.splitlines() if "lease_share" in line)


def test_a_prompt_beyond_the_share_is_found_in_part_and_operators_are_told(
    running: RunningDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = SmallEngine(running.socket, "writer", num_blocks=BLOCKS + 100)
    reader = SmallEngine(running.socket, "reader", num_blocks=BLOCKS + 100)
    for engine in (writer, reader):
        engine.wait_usable()
    writer.store("w", "prompt", BLOCKS)
    assert reader.load("short", "prompt", 100) == 100
    assert not any(advice(command, running, capsys) for command in COMMANDS)
    reader.arrive("long", "prompt", BLOCKS)
    assert reader.match("long") == int(SHARE * running.pool_bytes) // BLOCK_BYTES * TOKENS
    assert all("sizing.md" in advice(command, running, capsys) for command in COMMANDS)
    for engine in (writer, reader):
        engine.close()
