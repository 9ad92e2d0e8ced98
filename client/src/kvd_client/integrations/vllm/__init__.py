"""vLLM over kvd: `kv_connector_module_path="kvd_client.integrations.vllm"`. See docs/vllm.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvd_client.integrations.vllm.connector import KvdConnector

__all__ = ["KvdConnector"]


def __getattr__(name: str) -> Any:
    # Only when it is asked for: vLLM imports this package for its plugin in each process.
    if name != "KvdConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvd_client.integrations.vllm.connector import KvdConnector  # noqa: PLC0415 - see above

    return KvdConnector
