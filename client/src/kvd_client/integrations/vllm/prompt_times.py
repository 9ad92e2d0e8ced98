"""How long vLLM takes for the prompts that it computes, from its scheduler's own view."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from kvd_client.scheduler.pace import TokenPace

MAX_COMPUTING = 4096  # prompts under way; of more the youngest are not timed


class Prompted(Protocol):
    """What is read of a vLLM request."""

    request_id: str
    num_prompt_tokens: int

    @property
    def num_output_tokens(self) -> int: ...


class PromptTimes:
    """Times a prompt from the step that begins it to the first step after its first token."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._computing: dict[str, tuple[Prompted, float, int]] = {}

    def step(self, begun: Iterable[tuple[Prompted, int]], pace: TokenPace) -> None:
        """A step begins: requests that are new to it, with the tokens that they have already."""
        for request, _, _ in list(self._computing.values()):
            self.look_at(request, pace)
        for request, had_tokens in begun:
            if len(self._computing) < MAX_COMPUTING and not request.num_output_tokens:
                tokens = request.num_prompt_tokens - had_tokens
                self._computing[request.request_id] = (request, self._clock(), tokens)

    def look_at(self, request: Prompted, pace: TokenPace, *, has_ended: bool = False) -> None:
        """Take its time if it is computed by now."""
        known = self._computing.get(request.request_id)
        if known is None or not (request.num_output_tokens or has_ended):
            return
        del self._computing[request.request_id]
        if request.num_output_tokens:
            pace.sample(self._clock() - known[1], known[2])
