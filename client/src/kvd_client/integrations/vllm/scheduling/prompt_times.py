"""How long vLLM takes for the prompts that it computes, from its scheduler's own view."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from vllm.v1.request import Request

from kvd_client.scheduler.pace import TokenPace

MAX_COMPUTING = 4096  # prompts under way; of more the youngest are not timed


class PromptTimes:
    """Measures how long prompts take, from their first step to the step after their first tokens.

    Prompts that are computed together share that time: it is the engine's, not each one's.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._computing: dict[str, tuple[Request, float, int]] = {}
        self._counted_s = 0.0  # up to then, time was counted for others

    def step(self, begun: Iterable[tuple[Request, int]], pace: TokenPace) -> None:
        """A step begins: requests that are new to it, with the tokens that they have already."""
        self._count([each for each in self._computing.values() if each[0].num_output_tokens], pace)
        for request, had_tokens in begun:
            if len(self._computing) < MAX_COMPUTING and not request.num_output_tokens:
                tokens = request.num_prompt_tokens - had_tokens
                self._computing[request.request_id] = (request, self._clock(), tokens)

    def ended(self, request: Request, pace: TokenPace) -> None:
        """The request is over, perhaps with its first token."""
        known = self._computing.get(request.request_id)
        if known is not None and request.num_output_tokens:
            self._count([known], pace)
        self._computing.pop(request.request_id, None)

    def _count(self, computed: list[tuple[Request, float, int]], pace: TokenPace) -> None:
        if not computed:
            return
        now = self._clock()
        began_s = max(self._counted_s, min(began_s for _, began_s, _ in computed))
        pace.sample(now - began_s, sum(tokens for _, _, tokens in computed))
        self._counted_s = now
        for request, _, _ in computed:
            del self._computing[request.request_id]
