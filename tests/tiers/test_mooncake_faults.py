"""The Mooncake tier's process while nodes and master are killed, frozen and started again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from examples.cluster.mooncake import MooncakeCluster, end, free_port
from kvd.tiers.process import OrderEnd, TierAnswer, TierId, TierProcess, TierRefused
from kvd.tiers.store import Outcome, TierReason
from tests.daemon_process import is_alive
from tests.tiers.mooncake_cluster import freeze, mooncake_cluster, options_of
from tests.tiers.mooncake_reader import THREADS, WatchedReader
from tests.tiers.test_keeper import Heard, kept
from tests.tiers.tier_rig import TierRig, keys, on_loop, placed, soon, tier_rig, until
from tests.waiting import wait_until

pytest.importorskip("mooncake.store", reason="needs the mooncake extra", exc_type=ImportError)
pytestmark = pytest.mark.slow
MOONCAKE = "tests.tiers.mooncake_cluster:open_from_rig"
DONE, MISSING, FAILED = Outcome.DONE, Outcome.MISSING, Outcome.FAILED
BLOCKS = range(8)


@contextlib.asynccontextmanager
async def served(tmp_path: Path) -> AsyncIterator[tuple[MooncakeCluster, TierRig, TierProcess]]:
    """A cluster of one node, and a tier's process that wrote BLOCKS there."""
    with mooncake_cluster(tmp_path / "mooncake") as cluster:
        async with tier_rig() as r:
            tier = await r.start(MOONCAKE, **options_of(cluster))  # type: ignore[arg-type]
            assert await written(r, tier) == [DONE] * len(BLOCKS)
            yield cluster, r, tier


async def written(r: TierRig, tier: TierProcess) -> list[Outcome]:
    order = r.next_order()
    assert tier.write(order, placed(BLOCKS, BLOCKS), soon())
    answer = await r.sink.answer(order)
    if answer.end is not OrderEnd.ANSWERED:
        return [FAILED] * len(BLOCKS)
    return [Outcome(value) for value in answer.values.tolist()]


async def read_back(r: TierRig, tier: TierProcess) -> list[Outcome]:
    """Read into other slots. What is DONE has the very bytes."""
    order = r.next_order()
    slots = range(20, 20 + len(BLOCKS))
    assert tier.read(order, placed(BLOCKS, slots), soon())
    answer = await r.sink.answer(order)
    if answer.end is not OrderEnd.ANSWERED:
        return [FAILED] * len(BLOCKS)
    outcomes = [Outcome(value) for value in answer.values.tolist()]
    for block, slot, outcome in zip(BLOCKS, slots, outcomes, strict=True):
        same = outcome is not DONE or r.content(slot) == r.content(block)
        assert same, "a wrong byte"
    return outcomes


async def becomes(r: TierRig, tier: TierProcess, what: str, wanted: Outcome) -> None:
    """Writing or reading comes to it within some seconds."""
    call = written if what == "written" else read_back
    async with asyncio.timeout(20):
        while await call(r, tier) != [wanted] * len(BLOCKS):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.1)


async def serves(r: TierRig, tier: TierProcess) -> None:
    """What is written is read, soon. A master that was away may first give its nodes up, and lose
    what was written meanwhile."""
    wanted = ([DONE] * len(BLOCKS),) * 2
    async with asyncio.timeout(20):
        while (await written(r, tier), await read_back(r, tier)) != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@on_loop
async def test_blocks_outlive_the_tiers_process(tmp_path: Path) -> None:
    async with served(tmp_path) as (cluster, r, tier):
        tier.kill()
        await until(lambda: r.sink.gone)
        r.sink.gone.clear()
        again = await r.start(MOONCAKE, **options_of(cluster))  # type: ignore[arg-type]
        assert await read_back(r, again) == [DONE] * len(BLOCKS)
        r.sink.gone.append("counted")


@on_loop
async def test_a_killed_node_costs_its_blocks_and_no_more(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MC_LOG_LEVEL", raising=False)  # set by any store of this very process
    async with served(tmp_path) as (cluster, r, tier):
        end(cluster.nodes[0])
        assert DONE not in await read_back(r, tier)
        await becomes(r, tier, "read", MISSING)  # once the master has given the node up
        own = [line for line in capfd.readouterr().err.splitlines() if ".cpp:" in line]
        assert len(own) <= 4, own  # of its setup; not one for each block
        cluster.start_node()
        await becomes(r, tier, "written", DONE)
        assert await read_back(r, tier) == [DONE] * len(BLOCKS)
        assert not r.sink.gone


@on_loop
async def test_a_node_that_dies_while_all_goes_well_costs_the_process_at_most(
    tmp_path: Path,
) -> None:
    """Mooncake takes a second for each value of the call that is under way, and nobody waits."""
    async with served(tmp_path) as (cluster, r, tier):
        tier.late_s = 0.5
        assert await read_back(r, tier) == [DONE] * len(BLOCKS)
        end(cluster.nodes[0])
        order = r.next_order()
        assert tier.read(order, placed(BLOCKS, range(20, 28)), soon(0.5))
        answer = await r.sink.answer(order)
        assert answer.end is not OrderEnd.ANSWERED
        await until(lambda: r.sink.gone)
        assert "did not end within 0.5 s of its deadline" in r.sink.gone[0]
        r.sink.gone.clear()
        cluster.start_node()
        again = await r.start(MOONCAKE, **options_of(cluster))  # type: ignore[arg-type]
        await becomes(r, again, "read", MISSING)
        await becomes(r, again, "written", DONE)
        assert await read_back(r, again) == [DONE] * len(BLOCKS)
        r.sink.gone.append("counted")


@on_loop
async def test_a_frozen_node_costs_the_process_in_time_and_no_slot(tmp_path: Path) -> None:
    async with served(tmp_path) as (cluster, r, tier):
        tier.late_s = 0.5
        freeze(cluster.nodes[0])
        order = r.next_order()
        assert tier.read(order, placed(BLOCKS, range(20, 28)), soon(1.0))
        answer = await r.sink.answer(order)  # Mooncake itself would take 60 s
        assert answer.end is not OrderEnd.ANSWERED
        await until(lambda: r.sink.gone)
        before = [r.content(slot) for slot in range(20, 28)]
        cluster.nodes[0].send_signal(signal.SIGCONT)
        await asyncio.sleep(0.5)
        unchanged = before == [r.content(slot) for slot in range(20, 28)]
        assert unchanged
        r.sink.gone.clear()
        again = await r.start(MOONCAKE, **options_of(cluster))  # type: ignore[arg-type]
        await serves(r, again)  # the master may have given the node up meanwhile, and its blocks
        r.sink.gone.append("counted")


class HeardByRig(Heard):
    """Heard of a keeper; the rig's sink hears of what its processes answer."""

    def __init__(self, r: TierRig) -> None:
        super().__init__()
        self._sink = r.sink

    def order_ended(self, tier: TierId, answer: TierAnswer) -> None:
        super().order_ended(tier, answer)
        self._sink.order_ended(tier, answer)


def descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


@on_loop
async def test_a_node_that_dies_in_mid_read_costs_its_blocks_and_the_process_starts_again(
    tmp_path: Path,
) -> None:
    """As where its machine loses its power. Mooncake would take 60 s, and then never return."""
    with mooncake_cluster(tmp_path / "mooncake") as cluster:
        async with tier_rig() as r:
            heard = HeardByRig(r)
            async with kept(r, heard, MOONCAKE, **options_of(cluster)) as keeper:  # type: ignore[arg-type]
                await until(lambda: heard.started)
                first = heard.started[0]
                first.late_s = 0.5
                assert await written(r, first) == [DONE] * len(BLOCKS)
                held = descriptors()
                freeze(cluster.nodes[0])
                order = r.next_order()
                assert first.read(order, placed(BLOCKS, range(20, 28)), soon(1.0))
                assert (await r.sink.answer(order)).end is not OrderEnd.ANSWERED
                assert not is_alive(first.pid), "it may still write into the slots"
                await until(lambda: len(heard.started) == 2)
                assert heard.gone == ["read of 8 did not end within 0.5 s of its deadline"]
                end(cluster.nodes.pop())
                cluster.start_node()
                assert keeper.process is heard.started[1]
                await serves(r, heard.started[1])
                assert list(heard.noted) == [heard.started[1].pid]
                await until(lambda: descriptors() <= held)


@on_loop
async def test_a_killed_master_is_a_refusal_at_once_and_found_when_it_is_back(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as (cluster, r, tier):
        assert cluster.master is not None
        end(cluster.master)
        first = r.next_order()
        assert tier.exists(first, keys(*BLOCKS), soon())
        answer = await r.sink.answer(first)
        assert answer.end is OrderEnd.FAILED
        assert answer.reason == TierReason.UNREACHABLE
        assert await read_back(r, tier) == [FAILED] * len(BLOCKS)
        cluster.start_master()  # it knows nothing of what it had
        await serves(r, tier)
        assert not r.sink.gone


@on_loop
async def test_a_frozen_master_is_no_answer_in_time(tmp_path: Path) -> None:
    async with served(tmp_path) as (cluster, r, tier):
        assert cluster.master is not None
        freeze(cluster.master)
        # rpc_timeout_seconds is 1; Mooncake's own is 30, and nobody waits for so long.
        assert await read_back(r, tier) == [FAILED] * len(BLOCKS)
        cluster.master.send_signal(signal.SIGCONT)
        await serves(r, tier)
        assert not r.sink.gone


@on_loop
async def test_without_a_master_the_process_does_not_start_and_says_why() -> None:
    async with tier_rig() as r:
        nobody = f"127.0.0.1:{free_port()}"
        with pytest.raises(TierRefused, match=f"no Mooncake master answers at {nobody}") as refused:
            await r.start(MOONCAKE, master=nobody)
        assert refused.value.reason == TierReason.UNREACHABLE


def test_no_wrong_byte_while_nodes_come_and_go_and_blocks_are_evicted(tmp_path: Path) -> None:
    """Many blocks, little room, two nodes of which one is killed while all goes well."""

    def a_hundred_more() -> None:
        wanted = reader.right + 100
        wait_until(lambda: reader.look() >= wanted, "a hundred blocks to be read", 60)

    with mooncake_cluster(tmp_path, megabytes=16, nodes=2) as cluster:
        with WatchedReader(options_of(cluster, calls=THREADS)) as reader:
            for _ in range(3):
                a_hundred_more()
                end(cluster.nodes.pop(0))
                cluster.start_node()
            a_hundred_more()
        assert reader.wrong == 0
