"""Outputs are the same with and without kvd, whatever dies; loaded bytes are the stored ones."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from examples.engine.config import EngineConfig
from examples.engine.daemon import Daemon
from examples.engine.process import Answer, EngineProcess
from tests.engine.orders import outputs, patient, shared_prefix_orders, total

pytestmark = [pytest.mark.engine, pytest.mark.slow]
BLOCK_TOKENS = 16


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """The outputs of an engine that has no daemon."""
    with EngineProcess(EngineConfig()) as engine:
        return outputs(engine.generate(shared_prefix_orders(8)))


def loadable_tokens(order_prompt: tuple[int, ...]) -> int:
    """Tokens of the blocks that end before the prompt's last token."""
    return (len(order_prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def assert_loaded_bytes_were_computed(stored: dict[str, Answer], loaded: dict[str, Answer]) -> None:
    computed: dict[str, set[str]] = {}
    for answer in stored.values():
        for block_hash, digest in answer.digests.items():
            computed.setdefault(block_hash, set()).add(digest)
    digests = {
        block_hash: digest
        for answer in loaded.values()
        for block_hash, digest in answer.loaded_digests.items()
    }
    assert digests
    assert {name for name, digest in digests.items() if digest not in computed[name]} == set()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_restarted_engine_loads_what_its_predecessor_stored(
    daemon: Daemon, expected: dict[str, list[int]], ranks: int
) -> None:
    config = patient(daemon, ranks=ranks)
    orders = shared_prefix_orders(8)
    with EngineProcess(config) as engine:
        stored = engine.generate(orders)
        assert engine.settle()["bytes_stored"] > 0
    assert outputs(stored) == expected
    assert total(stored, "loaded") == 0
    with EngineProcess(config) as engine:
        for order in orders:
            loaded = engine.generate([order])
            answer = loaded[order.request_id]
            assert answer.output == expected[order.request_id]
            found = answer.loaded + int(answer.fields["reused"])
            assert found == loadable_tokens(order.prompt)
            assert answer.loaded > 0
            assert_loaded_bytes_were_computed(stored, loaded)


@pytest.mark.parametrize("ranks", [1, 2])
def test_preemption_with_kvd_changes_no_answer(
    daemon: Daemon, expected: dict[str, list[int]], ranks: int
) -> None:
    config = patient(daemon, ranks=ranks, num_blocks=16, step_tokens=48)
    for _ in range(2):  # the second engine's requests load, and are preempted too
        with EngineProcess(config) as engine:
            answers = engine.generate(shared_prefix_orders(8))
            assert outputs(answers) == expected
            assert total(answers, "preemptions") > 0
            again = engine.generate(shared_prefix_orders(8))
            assert outputs(again) == expected


def test_an_engine_killed_in_the_middle_leaves_only_whole_blocks(
    daemon: Daemon, expected: dict[str, list[int]]
) -> None:
    config = patient(daemon)
    orders = shared_prefix_orders(8)
    engine = EngineProcess(config)
    try:
        stored = engine.generate(orders[:1])
        engine.settle()  # some of it is stored, however busy the machine is
        stored |= engine.generate(orders[1:])
    finally:
        engine.kill()  # with stores perhaps under way
    with EngineProcess(config) as second:
        loaded = second.generate(orders)
    assert outputs(loaded) == expected
    assert_loaded_bytes_were_computed(stored, loaded)


def test_engines_killed_while_they_work_leave_only_whole_blocks(
    daemon: Daemon, expected: dict[str, list[int]]
) -> None:
    config = patient(daemon, step_tokens=48)
    orders = shared_prefix_orders(8)
    for delay_s in (0.02, 0.06, 0.12):
        engine = EngineProcess(config)
        try:
            with contextlib.suppress(TimeoutError):
                engine.generate(orders, timeout_s=delay_s)
        finally:
            engine.kill()
    with EngineProcess(config) as engine:
        loaded = engine.generate(orders)
    assert outputs(loaded) == expected
    assert total(loaded, "loaded") > 0


def test_an_engine_ends_with_its_killed_rank_and_its_successor_loads(
    daemon: Daemon, expected: dict[str, list[int]]
) -> None:
    config = patient(daemon, ranks=2)
    orders = shared_prefix_orders(8)
    engine = EngineProcess(config)
    try:
        stored = engine.generate(orders)
        engine.settle()
        os.kill(engine.pids[-1], signal.SIGKILL)
        with pytest.raises(RuntimeError, match="the engine process died"):
            engine.generate(orders)
    finally:
        engine.stop()
    with EngineProcess(config) as successor:
        loaded = successor.generate(orders)
    assert outputs(loaded) == expected
    assert_loaded_bytes_were_computed(stored, loaded)


def test_two_engines_share_what_either_stored(
    daemon: Daemon, expected: dict[str, list[int]]
) -> None:
    orders = shared_prefix_orders(8)
    with (
        EngineProcess(patient(daemon, engine_id="one")) as one,
        EngineProcess(patient(daemon, engine_id="two")) as two,
    ):
        first = one.generate(orders[::2])
        one.settle()
        second = two.generate(orders)
        two.settle()
        one.reset_device_cache()
        third = one.generate(orders)
    assert outputs(second) == outputs(third) == expected
    assert second[orders[0].request_id].loaded > 0
    assert third[orders[1].request_id].loaded > 0
    assert_loaded_bytes_were_computed(first | {f"two-{k}": v for k, v in second.items()}, third)


def test_a_pool_too_small_for_all_changes_no_answer(expected: dict[str, list[int]]) -> None:
    orders = shared_prefix_orders(8)
    stored = []
    with (
        Daemon(pool_bytes=128 << 10, extent_bytes=64 << 10) as daemon,
        EngineProcess(patient(daemon)) as engine,
    ):
        for _ in range(3):
            assert outputs(engine.generate(orders)) == expected
            stored.append(engine.settle()["bytes_stored"])
            engine.reset_device_cache()
    # What was stored again had been evicted.
    assert 0 < stored[0] < stored[-1]


def test_the_cache_survives_the_daemons_kill(
    daemon: Daemon, expected: dict[str, list[int]]
) -> None:
    config = patient(daemon)
    orders = shared_prefix_orders(8)
    with EngineProcess(config) as engine:
        stored = engine.generate(orders)
        engine.settle()
        daemon.kill()
        # The engine lives on without it.
        engine.reset_device_cache()
        assert outputs(engine.generate(orders)) == expected
    daemon.start()
    with EngineProcess(config) as engine:
        loaded = engine.generate(orders)
        assert outputs(loaded) == expected
    assert_loaded_bytes_were_computed(stored, loaded)


def test_a_running_engine_finds_the_restarted_daemon_again(
    daemon: Daemon, expected: dict[str, list[int]]
) -> None:
    orders = shared_prefix_orders(4)
    with EngineProcess(patient(daemon)) as engine:
        engine.generate(orders)
        engine.settle()
        daemon.kill()
        daemon.start()
        loaded = 0
        for _ in range(100):  # about 10 s at most
            engine.reset_device_cache()
            answers = engine.generate(orders)
            for order in orders:
                assert answers[order.request_id].output == expected[order.request_id]
            loaded = total(answers, "loaded")
            if loaded:
                break
        assert loaded > 0


def test_a_stopped_daemon_does_not_stop_the_engine(
    daemon: Daemon, expected: dict[str, list[int]]
) -> None:
    orders = shared_prefix_orders(4)
    with EngineProcess(EngineConfig(socket=daemon.socket)) as engine:
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            answers = engine.generate(orders, timeout_s=30.0)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
    for order in orders:
        assert answers[order.request_id].output == expected[order.request_id]


def test_an_engine_starts_without_its_daemon(expected: dict[str, list[int]]) -> None:
    config = EngineConfig(socket="/nonexistent/kvd.sock", connect_s=0.3)
    with EngineProcess(config) as engine:
        assert outputs(engine.generate(shared_prefix_orders(8))) == expected
