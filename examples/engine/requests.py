"""A request on its way through the engine."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class RequestState(enum.Enum):
    WAITING = "waiting"  # holds no blocks
    LOADING = "loading"  # holds blocks that kvd is filling
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class RequestOrder:
    """What a caller asks for: greedy continuation of `prompt` by at most `max_tokens`."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    use_cache: bool = True  # False: compute everything, even what is cached


@dataclass
class Request:
    """An order and how far it has come."""

    order: RequestOrder
    tokens: list[int]  # prompt, then output
    hashes: list[bytes]  # of the full blocks of `tokens`
    state: RequestState = RequestState.WAITING
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # leading tokens whose KV is in the blocks
    loading_tokens: int = 0  # of a load under way
    # What happened, over all attempts.
    tokens_computed: int = 0
    tokens_loaded: int = 0
    tokens_reused: int = 0
    failed_loads: int = 0
    preemptions: int = 0
    loaded_blocks: set[int] = field(default_factory=set)  # indices in `hashes`

    @property
    def request_id(self) -> str:
        return self.order.request_id

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.order.prompt) :]
