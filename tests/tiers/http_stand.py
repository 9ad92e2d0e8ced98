"""HTTP servers on loopback that answer as a test says."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import TypeVar

Stand = TypeVar("Stand", bound=ThreadingHTTPServer)


@contextlib.contextmanager
def serving(server: Stand) -> Iterator[Stand]:
    """It answers on a thread of its own, which has ended when this returns."""
    with server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
