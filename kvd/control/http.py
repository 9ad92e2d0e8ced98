"""/metrics, /healthz and /readyz over plain HTTP: all that Prometheus and Kubernetes ask."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 8192
MAX_CONNECTIONS = 64
READ_SECONDS = 5.0
TEXT = "text/plain; charset=utf-8"

# Gives status, content type and content.
Page = Callable[[], tuple[int, str, bytes]]
_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class HttpServer:
    """One request a connection; anything unreadable is dropped."""

    def __init__(self, pages: dict[str, Page]) -> None:
        self._pages = pages
        self._server: asyncio.Server | None = None
        self._open = 0
        self.port = 0

    async def listen(self, address: str, port: int) -> None:
        """Listen; OSError, with the settings to change, where that can't be."""
        try:
            self._server = await asyncio.start_server(
                self._serve, address, port, limit=MAX_REQUEST_BYTES
            )
        except OSError as error:
            raise OSError(
                f"can't serve HTTP on http_address {address!r}, http_port {port}: {error}; choose"
                " another --http-port (0: none) or --http-address"
            ) from error
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= MAX_CONNECTIONS:
                async with asyncio.timeout(READ_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(head))
                    await writer.drain()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            pass  # whoever sent it gets nothing
        finally:
            self._open -= 1
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        method, target = (words[0], words[1]) if len(words) == 3 else ("", "")
        page = self._pages.get(target.partition("?")[0])
        if method not in ("GET", "HEAD"):
            status, kind, content = 405, TEXT, b"only GET\n"
        elif page is None:
            status, kind, content = 404, TEXT, b"not here\n"
        else:
            status, kind, content = page()
        lines = (
            f"HTTP/1.1 {status} {_REASONS[status]}",
            f"Content-Type: {kind}",
            f"Content-Length: {len(content)}",
            "Connection: close",
            "",
            "",
        )
        return "\r\n".join(lines).encode() + (b"" if method == "HEAD" else content)
