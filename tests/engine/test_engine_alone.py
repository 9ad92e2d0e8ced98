from __future__ import annotations

import pytest

from examples.engine.config import EngineConfig
from examples.engine.process import EngineProcess
from tests.engine.orders import outputs, shared_prefix_orders, total

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Each request's output when it has the engine for itself and nothing is cached."""
    found: dict[str, list[int]] = {}
    with EngineProcess(EngineConfig()) as engine:
        for order in shared_prefix_orders(8, use_cache=False):
            found |= outputs(engine.generate([order]))
    return found


def test_outputs_are_long_and_differ(expected: dict[str, list[int]]) -> None:
    # Otherwise equal outputs would prove little.
    assert len({tuple(output) for output in expected.values()}) == len(expected)
    assert all(len(set(output)) > 5 for output in expected.values())


@pytest.mark.parametrize("ranks", [1, 2])
def test_many_requests_at_once_answer_as_alone(expected: dict[str, list[int]], ranks: int) -> None:
    with EngineProcess(EngineConfig(ranks=ranks)) as engine:
        assert outputs(engine.generate(shared_prefix_orders(8))) == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_few_blocks_force_preemption_and_change_no_answer(
    expected: dict[str, list[int]], ranks: int
) -> None:
    config = EngineConfig(ranks=ranks, num_blocks=16, step_tokens=48)
    with EngineProcess(config) as engine:
        answers = engine.generate(shared_prefix_orders(8))
    assert outputs(answers) == expected
    assert total(answers, "preemptions") > 0


def test_a_cached_prefix_is_computed_once(expected: dict[str, list[int]]) -> None:
    with EngineProcess(EngineConfig()) as engine:
        (order,) = shared_prefix_orders(1)
        engine.generate([order])
        again = engine.generate([order])
        assert total(again, "reused") == len(order.prompt) // 16 * 16
        engine.reset_device_cache()
        fresh = engine.generate([order])
        assert total(fresh, "reused") == 0
    assert outputs(again)[order.request_id] == expected[order.request_id]


def test_a_request_that_can_never_fit_is_refused_and_others_go_on() -> None:
    with EngineProcess(EngineConfig(num_blocks=6)) as engine:
        small, *_, large = shared_prefix_orders(8)
        with pytest.raises(ValueError, match="need 7 blocks of 6"):
            engine.generate([large])
        assert len(engine.generate([small])[small.request_id].output) == 20
