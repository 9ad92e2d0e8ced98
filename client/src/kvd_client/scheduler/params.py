"""What an engine tells the scheduler side once, and once for each request."""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvd_client.arguments import require_kind, require_seconds, require_whole
from kvd_proto import layout
from kvd_proto.limits import U32_MAX

log = logging.getLogger(__name__)

NULL_BLOCK = layout.NULL_ENGINE_BLOCK
MAX_HAND_OFF_MS = 600_000  # as the protocol says


class StoreMode(enum.Enum):
    """EAGER stores a block when it is computed, LAZY when the device is about to evict it."""

    EAGER = "eager"
    LAZY = "lazy"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """The scheduler side's options. All times are in seconds.

    `null_block` is the engine's own id for 'no block here', besides NULL_BLOCK.

    `share_loads` is for engines with a prefix cache of their own: a request whose hit another
    request is loading waits for that load and then finds the blocks on the device.

    A recurrent group's block is stored by the step that ends at the block's end, because
    later the state has moved on. With `keeps_every_state` the engine promises that entry i of
    such a group's table always holds the state at block i's end, or is null.

    `retention_tokens` thins out what is stored of sliding-window and recurrent groups: what a hit
    at each multiple of it needs, and at the ends of a prompt and of a request. 0 = only at
    these ends. None = at every boundary.
    """

    store_mode: StoreMode = StoreMode.EAGER
    prompt_only: bool = False  # store no generated tokens
    lookup_deadline_s: float = 0.005  # of the one wait in a step
    lookup_give_up_s: float = 0.1  # a lookup may go unanswered for so long, whatever it is worth
    miss_ttl_s: float = 0.05  # a miss as old as this is probed for again when asked again
    retry_deadline_s: float = 0.1  # how long RETRY may defer a request, whatever it is worth
    # How long PENDING, its own stores, another request's load of the same, or too many jobs in
    # flight may defer it.
    pending_deadline_s: float = 2.0
    # All three go on while computing what the page shows would take longer, so long at most.
    patience_s: float = 10.0
    ask_again_s: float = 0.002  # least time between two lookups of a deferred request, at first
    request_level_attempts: int = 3
    null_block: int = NULL_BLOCK
    hand_off_s: float = 60.0  # how long a decode engine may take to fetch a prefill's blocks
    collect_events: bool = True
    share_loads: bool = True
    keeps_every_state: bool = False
    retention_tokens: int | None = None
    # Load what the index page shows whole, without waiting for the answer. For engines that can
    # compute a request whose load was refused, and whose own side says so by `load_failed`.
    trusts_page: bool = False

    def __post_init__(self) -> None:
        require_kind("store_mode", self.store_mode, StoreMode)
        for each in fields(self):
            if each.type == "float":
                require_seconds(each.name, getattr(self, each.name))
            elif each.type == "bool":
                require_kind(each.name, getattr(self, each.name), bool)
        require_whole("request_level_attempts", self.request_level_attempts, 0, U32_MAX)
        require_whole("null_block", self.null_block, -U32_MAX, U32_MAX)
        if self.retention_tokens is not None:
            require_whole("retention_tokens", self.retention_tokens, 0, U32_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParams:
    """What a request asks of the cache. Token counts are from the prompt's start.

    A count that is no whole number of tokens is ignored: whoever sent the request made it up.

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
    # Tiers below host memory that it may be read from (numbers of kvd.v1 Tier); None = all.
    load_tiers: tuple[int, ...] | None = None
    max_load_tokens: int | None = None  # beyond what the device has; 0 = load nothing
    max_store_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.account is not None:
            require_kind("account", self.account, str)
        require_kind("kv_transfer_params", self.kv_transfer_params, Mapping)
        require_kind("hints", self.hints, Mapping)
        for name in ("max_load_tokens", "max_store_tokens"):
            count = getattr(self, name)
            if count is not None and (type(count) is not int or count < 0):
                log.warning("%s must be a whole number of tokens, not %r: ignored", name, count)
                object.__setattr__(self, name, None)

    @property
    def request_level(self) -> bool:
        return bool(self.kv_transfer_params.get("do_remote_decode", False))

    def hand_off_ms(self, options: SchedulerOptions) -> int:
        """The hand-off's deadline, within what the protocol allows; nonsense means the option's."""
        asked = self.kv_transfer_params.get("hand_off_ms")
        wanted_ms = options.hand_off_s * 1000
        if isinstance(asked, int | float) and asked is not True and 0 < asked < float("inf"):
            wanted_ms = asked
        return int(min(max(wanted_ms, 1), MAX_HAND_OFF_MS))
