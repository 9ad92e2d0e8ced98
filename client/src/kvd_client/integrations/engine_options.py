"""Options that every engine's integration has: who the engine is, and how it finds its daemon."""

from __future__ import annotations

from dataclasses import dataclass

from kvd_client.integrations.option_fields import seconds, switch, text


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What an integration's own options begin with; `metadata` has meanings and ranges."""

    socket_path: str = text(
        meaning="the daemon's Unix socket; empty: KVD_SOCKET, else /run/kvd/kvd.sock"
    )
    tenant: str = text(meaning="whose quota; empty: as the daemon's file says for this user")
    account: str = text(meaning="cache salt of all that brings none of its own")
    weights_id: str = text(
        meaning="name of these exact weights; empty: found out from revision or local files"
    )
    lora_id: str = text(
        meaning="name of the adapters' contents, for engines with LoRA that shall share;"
        " change it whenever an adapter is replaced under its old name"
    )
    engine_name: str = text(
        meaning="the engine's name over its restarts; empty: a new one at each start"
    )
    unshared: bool = switch(False, "share nothing with any other engine, nor with a later start")
    silent_after_s: float = seconds(
        0.1, 60.0, "a daemon silent for so long is left alone for a second", at_least=0.001
    )
    register_wait_s: float = seconds(
        5.0, 600.0, "how long a rank's start waits for the daemon; it goes on without one"
    )
