"""An open session as control knows one, without a daemon around it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvd.control.sessions.verbs import LiveSession
from kvd.core.keys import NamespaceId, SessionId, TenantId
from kvd.core.spec import GroupSpec, NamespaceSpec
from kvd_proto.groups import GroupKind

SPEC = NamespaceSpec(
    "ns", TenantId("default"), 32, (GroupSpec(GroupKind.FULL_ATTENTION, 1, (4096,)),)
)


def live_session() -> LiveSession:
    """Session 1 of user 0, whose hashes have 32 bytes."""
    peer: Any = SimpleNamespace(uid=0)
    return LiveSession(SessionId(1), NamespaceId(1), SPEC, peer, "engine", 1)
