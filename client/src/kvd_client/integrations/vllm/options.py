"""The connector's options: what may stand in `kv_connector_extra_config`, checked at start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvd_client.integrations.engine_options import EngineOptions
from kvd_client.integrations.option_fields import choice, count, read, seconds, switch, wrong
from kvd_client.scheduler import SchedulerOptions
from kvd_client.scheduler.params import StoreMode

WHERE = "kv_connector_extra_config"
MOST_TOKENS = 1 << 30

# What vLLM's own offloading connector reads, for every spec.
VLLM_KEYS = frozenset(
    {
        "block_size",
        "blocks_per_chunk",
        "offload_prompt_only",
        "self_describing_kv_events",
        "spec_module_path",
        "spec_name",
        "sync_load_budget_bytes",
    }
)

# What only vLLM's own specs read: set beside kvd it would silently do nothing.
_POOL = "the daemon sizes the pool: start it with --pool-bytes and leave this out"
_POLICY = "the daemon chooses what to evict: start it with --policy and leave this out"
_REUSE = "the daemon filters stores: start it with --store-threshold and leave this out"
_TIERS = "the daemon has the tiers below host memory; leave this out"
FOREIGN_KEYS = {
    "cpu_bytes_to_use": _POOL,
    "cpu_bytes_to_use_per_rank": _POOL,
    "num_cpu_blocks": _POOL,
    "eviction_policy": _POLICY,
    "cache_policy_module_path": _POLICY,
    "store_threshold": _REUSE,
    "max_tracker_size": _REUSE,
    "secondary_tiers": _TIERS,
    "tier_poll_interval_s": _TIERS,
    "backpressure": _TIERS,
    "canonical_layout": "kvd keeps each rank's bytes as they are; leave this out",
    "lazy_offload": "kvd's own option is store_mode; leave this out",
    "kv_offload_backend": "this is an option of vLLM's SimpleCPUOffloadConnector; leave this out",
}


# vLLM takes any value for these, "false" for true and 2.7 for 2, or fails without a name.
VLLM_SWITCHES = ("offload_prompt_only", "self_describing_kv_events")
VLLM_COUNTS = ("block_size", "blocks_per_chunk")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvdOptions(EngineOptions):
    """The connector's options. Every `_s` is in seconds; `metadata` has meanings and ranges."""

    store_mode: str = choice(
        StoreMode.EAGER.value,
        tuple(mode.value for mode in StoreMode),
        "eager: store a block when it is computed; lazy: when vLLM is about to give it away",
    )
    watch_removals: bool = switch(
        True, "with vLLM's KV events on: pass on what the daemon evicted of this engine's blocks"
    )
    watch_tiers: bool = switch(
        True, "with that: pass on, too, which of this engine's blocks the daemon's tiers hold"
    )
    trust_page: bool = switch(
        True, "load what the index page shows whole, without waiting for the daemon's answer"
    )
    min_load_tokens: int = count(
        0, MOST_TOKENS, "what is found of fewer tokens than this is computed, not loaded"
    )
    lookup_deadline_s: float = seconds(0.005, 1.0, "the one wait of a step for lookups")
    patience_s: float = seconds(
        10.0,
        600.0,
        "how long a request waits at most for what would take as long to compute; what follows is"
        " the least, whatever is at stake",
    )
    lookup_give_up_s: float = seconds(0.1, 60.0, "a lookup unanswered for so long is a miss")
    retry_deadline_s: float = seconds(0.1, 60.0, "how long 'ask again' may defer a request")
    pending_deadline_s: float = seconds(
        2.0, 600.0, "how long blocks that are being stored, or sought in tiers, may defer a request"
    )
    flush_timeout_s: float = seconds(
        1.0, 60.0, "how long a flush waits for stores, which are then given up"
    )
    load_flush_timeout_s: float = seconds(
        5.0, 600.0, "how long a flush waits for loads before the rank ends its mover", at_least=0.1
    )
    load_deadline_s: float = seconds(
        10.0,
        600.0,
        "how long a load may take, from the last end that its mover told, before the rank ends it",
        at_least=0.1,
    )
    hand_off_s: float = seconds(
        60.0, 600.0, "how long a prefill's blocks are held for the decode engine", at_least=0.001
    )

    @property
    def stores_lazily(self) -> bool:
        return self.store_mode == StoreMode.LAZY.value

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any]) -> KvdOptions:
        """The options in vLLM's `kv_connector_extra_config`.

        Raises ValueError for an unknown key or a value out of range, naming it and the fix.
        """
        for key in extra_config:
            if key in FOREIGN_KEYS:
                raise ValueError(f"{WHERE}: {key} has no meaning for kvd: {FOREIGN_KEYS[key]}")
        own = {option.name: option for option in fields(cls)}
        options = cls(**read(WHERE, extra_config, own, VLLM_KEYS))
        _check_vllms_own(extra_config)
        return options

    def scheduler_options(self) -> SchedulerOptions:
        """What the engine-neutral scheduler side takes of these."""
        return SchedulerOptions(
            lookup_deadline_s=self.lookup_deadline_s,
            lookup_give_up_s=self.lookup_give_up_s,
            retry_deadline_s=self.retry_deadline_s,
            pending_deadline_s=self.pending_deadline_s,
            patience_s=self.patience_s,
            hand_off_s=self.hand_off_s,
            trusts_page=self.trust_page,
        )


def _check_vllms_own(extra_config: Mapping[str, Any]) -> None:
    """Raise ValueError, naming it, for a key of vLLM's whose value has another type."""
    for name, value in extra_config.items():
        if name in VLLM_SWITCHES:
            fits, allowed = isinstance(value, bool), "true or false"
        elif name in VLLM_COUNTS:
            fits, allowed = value is None or _is_count(value), "a whole number from 1 on"
        else:
            continue
        if not fits:
            raise ValueError(wrong(WHERE, name, value, allowed))


def _is_count(value: Any) -> bool:
    """Also one in a string, as vLLM takes it."""
    if isinstance(value, str):
        return value.isdecimal() and bool(value.strip("0"))
    return type(value) is int and value > 0
