"""The backend's options: what may stand in `--hicache-storage-backend-extra-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvd_client.batches import BatchOptions
from kvd_client.integrations.engine_options import EngineOptions
from kvd_client.integrations.option_fields import read, seconds

WHERE = "hicache_storage_backend_extra_config"

# What SGLang itself reads there; some of these it takes away before the backend sees them.
SGLANG_KEYS = frozenset(
    {
        "allocator",
        "backend_name",
        "class_name",
        "file_storage_path",  # which SGLang puts there where its flag of that name is given
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "tp_lcm_size",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HiCacheOptions(EngineOptions):
    """The backend's options. Every `_s` is in seconds; `metadata` has meanings and ranges."""

    lookup_deadline_s: float = seconds(0.5, 60.0, "an answer that takes longer is a miss")
    retry_deadline_s: float = seconds(
        0.1, 60.0, "how long 'ask again' is asked again, and what was not taken offered again"
    )
    pending_deadline_s: float = seconds(
        1.0, 600.0, "how long pages are waited for that are being stored, or come up from a tier"
    )
    lease_s: float = seconds(
        10.0, 600.0, "how long pages that were found are kept for their get, at most", at_least=0.1
    )
    load_deadline_s: float = seconds(
        5.0, 600.0, "how long a get may take before the rank ends its mover", at_least=0.1
    )
    store_deadline_s: float = seconds(
        5.0, 600.0, "how long a set may take before it is given up", at_least=0.1
    )

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any] | None) -> HiCacheOptions:
        """The options; ValueError for what can't work, naming the way out."""
        given = extra_config or {}
        own = {option.name: option for option in fields(cls)}
        options = cls(**read(WHERE, given, own, SGLANG_KEYS))
        if not given.get("interface_v1"):
            raise ValueError(
                f'{WHERE}: "interface_v1": 1 is missing: without it SGLang copies each page in'
                " Python"
            )
        return options

    def batch_options(self) -> BatchOptions:
        """What moves batches takes of these."""
        return BatchOptions(
            **{each.name: getattr(self, each.name) for each in fields(BatchOptions)}
        )
