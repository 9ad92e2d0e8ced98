"""What an engine tells the scheduler side once, and once for each request."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvd_proto import layout

NULL_BLOCK = layout.NULL_ENGINE_BLOCK
MAX_HAND_OFF_MS = 600_000  # as the protocol says


class StoreMode(enum.Enum):
    """EAGER stores a block when it is computed, LAZY when the device is about to evict it."""

    EAGER = "eager"
    LAZY = "lazy"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """All times in seconds.

    `null_block` is the engine's own id for 'no block here', besides NULL_BLOCK.
    """

    store_mode: StoreMode = StoreMode.EAGER
    prompt_only: bool = False  # store no generated tokens
    lookup_deadline_s: float = 0.005  # of the one wait in a step
    lookup_give_up_s: float = 0.1  # a lookup unanswered for so long is a miss
    miss_ttl_s: float = 0.05  # a miss as old as this is probed for again when asked again
    retry_deadline_s: float = 0.1  # how long RETRY may defer a request
    pending_deadline_s: float = 2.0  # how long PENDING, or its own store, may defer it
    ask_again_s: float = 0.002  # least time between two lookups of a deferred request
    request_level_attempts: int = 3
    null_block: int = NULL_BLOCK
    hand_off_s: float = 60.0  # how long a decode engine may take to fetch a prefill's blocks
    collect_events: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParams:
    """What a request asks of the cache. Token counts are from the prompt's start.

    A request whose `kv_transfer_params` say `do_remote_decode` is request-level: its whole KV
    is in the daemon when it ends, also the blocks that it loaded, and is held there until a decode
    engine has loaded it or `hand_off_ms` (of the same parameters; else `hand_off_s` of the
    options) have passed.
    """

    account: str | None = None  # cache salt; None = the session's default account
    priority: int = 0
    kv_transfer_params: Mapping[str, Any] = field(default_factory=dict)
    hints: Mapping[str, Any] = field(default_factory=dict)
    skip_lookup: bool = False
    max_load_tokens: int | None = None  # beyond what the device has; 0 = load nothing
    max_store_tokens: int | None = None

    @property
    def request_level(self) -> bool:
        return bool(self.kv_transfer_params.get("do_remote_decode", False))

    def hand_off_ms(self, options: SchedulerOptions) -> int:
        """The hand-off's deadline, within what the protocol allows; nonsense means the option's."""
        asked = self.kv_transfer_params.get("hand_off_ms")
        wanted_ms = options.hand_off_s * 1000
        if isinstance(asked, int | float) and 0 < asked < float("inf"):
            wanted_ms = asked
        return int(min(max(wanted_ms, 1), MAX_HAND_OFF_MS))
