"""What one companion connection may pile up."""

from __future__ import annotations

import pytest

from kvd.control.access.peers import MAX_REGISTRATIONS, Credentials, Peer, Role
from kvd.core.errors import LimitExceeded


def test_a_connection_registers_only_so_often() -> None:
    peer = Peer(Credentials(0, 0, 1, None), Role.WORKER, "test", lambda _message, _fds: None)
    peer.registrations.update(range(MAX_REGISTRATIONS - 1))
    peer.require_registration()
    peer.registrations.add(MAX_REGISTRATIONS)
    with pytest.raises(LimitExceeded):
        peer.require_registration()
