"""How long vLLM takes for prompts: of scripted requests, at the times that a script says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvd_client.integrations.vllm.scheduling import prompt_times
from kvd_client.integrations.vllm.scheduling.prompt_times import PromptTimes


class Measured:
    """What is measured of steps that begin at given times."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.samples: list[tuple[float, int]] = []
        self._times = PromptTimes(lambda: self.now_s)

    def sample(self, seconds: float, tokens: int) -> None:
        self.samples.append((seconds, tokens))

    def step(self, at_s: float, *begun: tuple[Any, int]) -> None:
        self.now_s = at_s
        self._times.step(begun, self)  # type: ignore[arg-type]

    def ended(self, at_s: float, request: Any) -> None:
        self.now_s = at_s
        self._times.ended(request, self)  # type: ignore[arg-type]

    @property
    def computing(self) -> int:
        return len(self._times._computing)


@pytest.fixture
def measured() -> Measured:
    return Measured()


def request(name: str, tokens: int = 100, answered: int = 0) -> Any:
    return SimpleNamespace(request_id=name, num_prompt_tokens=tokens, num_output_tokens=answered)


def test_a_prompt_takes_from_its_first_step_to_the_step_after_its_first_token(
    measured: Measured,
) -> None:
    asked = request("r")
    measured.step(2.0, (asked, 40))
    measured.step(3.0)
    assert not measured.samples, "it has no token yet"
    asked.num_output_tokens = 1
    measured.step(5.0)
    measured.step(9.0)
    measured.ended(9.5, asked)
    assert measured.samples == [(3.0, 60)], "once, of what it did not have already"


def test_prompts_that_are_computed_together_share_their_time(measured: Measured) -> None:
    first, second, late = request("first"), request("second", 50), request("late", 30)
    measured.step(1.0, (first, 0))
    measured.step(2.0, (second, 0), (late, 0))
    first.num_output_tokens = second.num_output_tokens = 1
    measured.step(4.0)
    assert measured.samples.pop() == (3.0, 150), "since the first of them began"
    late.num_output_tokens = 1
    measured.step(5.0)
    assert measured.samples.pop() == (1.0, 30), "what was counted for others is not counted again"


def test_a_request_that_ends_with_its_first_token_is_measured(measured: Measured) -> None:
    short, aborted, unknown = request("short"), request("aborted"), request("unknown", answered=1)
    measured.step(0.0, (short, 0), (aborted, 0))
    short.num_output_tokens = 1
    measured.ended(1.0, short)
    assert measured.samples == [(1.0, 100)]
    measured.ended(2.0, aborted)
    measured.ended(2.0, unknown)
    assert measured.samples == [(1.0, 100)], "of what was not computed here nothing is known"
    assert measured.computing == 0


def test_a_request_that_has_tokens_as_it_begins_anew_is_not_measured(measured: Measured) -> None:
    measured.step(0.0, (request("answers since long", answered=7), 0))
    measured.step(1.0)
    assert (measured.samples, measured.computing) == ([], 0)


def test_no_more_prompts_than_the_bound_are_timed_at_once(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_times, "MAX_COMPUTING", 2)
    asked = [request(name) for name in "abc"]
    measured.step(0.0, *((each, 0) for each in asked))
    for each in asked:
        each.num_output_tokens = 1
    measured.step(1.0)
    assert measured.samples == [(1.0, 200)]
