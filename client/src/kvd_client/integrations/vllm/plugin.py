"""Makes `KvdConnector` and its spec known to vLLM by name; an entry point of vLLM's plugins.

vLLM calls `register` in each of its processes, also in engines that don't use kvd: so nothing
of vLLM's connectors is imported before one is asked for, and nothing here ever raises.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

log = logging.getLogger(__name__)

CONNECTOR = ("KvdConnector", "kvd_client.integrations.vllm.connector")
SPEC = ("KvdOffloadingSpec", "kvd_client.integrations.vllm.spec")
CONNECTOR_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
SPEC_FACTORY = "vllm.v1.kv_offload.factory"


def register() -> None:
    """Register connector and spec where this vLLM has a place for them. May be called again."""
    factory = _find(CONNECTOR_FACTORY, "KVConnectorFactory")
    if factory is not None:
        name, module = CONNECTOR
        _register(factory, "register_connector", name, module)
    register_spec()


def register_spec() -> None:
    """Register the spec alone, for a connector that was named by its module. May be repeated."""
    factory = _find(SPEC_FACTORY, "OffloadingSpecFactory")
    if factory is not None:
        name, module = SPEC
        _register(factory, "register_spec", name, module)


def knows_spec(name: str) -> bool:
    """Whether vLLM has a spec of this name."""
    return name in getattr(_find(SPEC_FACTORY, "OffloadingSpecFactory"), "_registry", {})


def _find(module: str, name: str) -> Any:
    """The factory; None in a vLLM that has none."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        log.warning("kvd: this vLLM has no %s: %s", name, error)
        return None


def _register(factory: Any, method: str, name: str, module: str) -> None:
    if name in getattr(factory, "_registry", {}):
        return
    try:
        getattr(factory, method)(name, module, name)
    except (AttributeError, TypeError, ValueError) as error:
        log.warning("kvd: %s is not registered: %s", name, error)
