"""A write to a Valkey server that was given up, and comes late."""

from __future__ import annotations

import socket
import threading
from contextlib import closing, suppress

import pytest

from kvd.tiers.store import Outcome, TierError
from kvd.tiers.valkey.store import ValkeyStore
from tests.tiers.contract import ONE, content, keep, key, read, soon, source
from tests.tiers.valkey_rig import ValkeyServer, server_binary, until

if server_binary() is None:
    pytest.skip("no Valkey server is here", allow_module_level=True)
PATIENCE = {"request_timeout_seconds": 3.0, "connect_timeout_seconds": 3.0}


class LateRoad:
    """Leads to a server. While `writes_go` is not set, lines with a SET are held up at it."""

    def __init__(self, server: ValkeyServer) -> None:
        self.writes_go = threading.Event()
        self.writes_go.set()
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.writes_go.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((self._server.host, self._server.port))
                for way in ((near, far), (far, near)):
                    threading.Thread(target=self._lead, args=way, daemon=True).start()

    def _lead(self, giver: socket.socket, taker: socket.socket) -> None:
        with suppress(OSError):
            while some := giver.recv(1 << 20):
                if b"\r\nSET\r\n" in some:
                    self.writes_go.wait()
                taker.sendall(some)
            taker.shutdown(socket.SHUT_WR)


def test_nothing_is_deleted_while_a_write_that_was_given_up_is_on_its_way(
    server: ValkeyServer,
) -> None:
    with (
        closing(LateRoad(server)) as road,
        closing(ValkeyStore({"addresses": [road.address], **PATIENCE})) as store,
    ):
        keep(store, [1])
        road.writes_go.clear()
        assert store.write([source(key(2), content((2, ONE)))], soon()) == [Outcome.FAILED]
        until(lambda: read(store, key(1))[0] is Outcome.DONE)  # by another line
        with pytest.raises(TierError, match="has not come to what it was sent before"):
            store.delete_scopes([ONE], soon())
        road.writes_go.set()
        store.delete_scopes([ONE], soon())
        assert "keys=" not in server.call("INFO", "keyspace")
