"""Pages over plain HTTP: what Prometheus, Kubernetes and a person's browser ask."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

from kvd.runtime.threads import NoThread

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 8192
# Beyond them the oldest of the address that has the most gives way: a probe is answered at once,
# and who says nothing, or takes no answer, is as a rule one of many that do so.
MAX_CONNECTIONS = 64
READ_SECONDS = 5.0  # for a request to come, and for its answer to be taken
SCRAPE_SHARE = 0.05  # of the event loop's time for the pages that take long to make
EVERY_ADDRESS = "::"
TEXT = "text/plain; charset=utf-8"

Answer = tuple[int, str, bytes]  # status, content type and content
LongPage = Callable[[], Awaitable[Answer]]
Page = Callable[[], Answer] | LongPage
Headers = tuple[tuple[str, str], ...]


def seldom(page: LongPage, now: Callable[[], float] = time.perf_counter) -> LongPage:
    """The page, made anew only so often that making it takes SCRAPE_SHARE of the time at most."""
    made: Answer | None = None
    good_until = 0.0
    making: asyncio.Task[Answer] | None = None

    async def make() -> Answer:
        nonlocal made, good_until
        began = now()
        made = await page()
        ended = now()
        good_until = ended + (ended - began) / SCRAPE_SHARE
        return made

    async def answer() -> Answer:
        nonlocal making
        if made is not None and now() < good_until:
            return made
        if making is None or making.done():
            making = asyncio.create_task(make())
        return await asyncio.shield(making)  # whoever asked may be cut off, and others wait too

    return answer


def every_address(port: int) -> socket.socket:
    """A socket at every address of this machine, of IPv4 and of IPv6 where there is any."""
    try:
        taken = socket.socket(socket.AF_INET6, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    except OSError:  # a kernel without IPv6
        return _every_address_of_ipv4(port)
    taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        return _bound(taken, EVERY_ADDRESS, port)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:  # IPv6 is switched off
            raise
    return _every_address_of_ipv4(port)


def _every_address_of_ipv4(port: int) -> socket.socket:
    return _bound(socket.socket(socket.AF_INET, socket.SOCK_STREAM), "0.0.0.0", port)  # noqa: S104


def _bound(taken: socket.socket, address: str, port: int) -> socket.socket:
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((address, port))
    except BaseException:
        taken.close()
        raise
    return taken


_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class HttpServer:
    """Serves pages: one request a connection; what can't be read is dropped."""

    def __init__(
        self, pages: dict[str, Page], headers: Mapping[str, Headers] | None = None
    ) -> None:
        self._pages = pages
        self._headers = headers or {}  # more of them, by the page's path
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[None], str] = {}  # in the order in which they came
        self.port = 0

    async def listen(self, address: str, port: int) -> None:
        """Listen; OSError, with the settings to change, where that can't be."""
        try:
            self._server = await self._listen(address, port)
        except (OSError, ValueError) as error:  # ValueError: it is no name
            raise OSError(
                f"can't serve HTTP on http_address {address!r}, http_port {port}: {error}; choose"
                " another --http-port (0: none) or --http-address"
            ) from error
        self.port = self._server.sockets[0].getsockname()[1]

    async def _listen(self, address: str, port: int) -> asyncio.Server:
        if address != EVERY_ADDRESS:
            return await asyncio.start_server(self._serve, address, port, limit=MAX_REQUEST_BYTES)
        taken = every_address(port)
        try:
            return await asyncio.start_server(self._serve, sock=taken, limit=MAX_REQUEST_BYTES)
        except BaseException:
            taken.close()
            raise

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a connection is served in a task"
        while len(self._open) >= MAX_CONNECTIONS:
            self._give_way()
        self._open[task] = str((writer.get_extra_info("peername") or ("",))[0])
        try:
            async with asyncio.timeout(READ_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.transport.set_write_buffer_limits(0)  # drained is when all of it was taken
                writer.write(await self._answer(head))
                await writer.drain()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            writer.transport.abort()  # whoever sent it gets nothing, or no more
        except asyncio.CancelledError:
            writer.transport.abort()  # it gave way
        finally:
            self._open.pop(task, None)
            writer.close()

    def _give_way(self) -> None:
        """End the oldest connection of the address that has the most."""
        (most, _), *_ = Counter(self._open.values()).most_common(1)
        oldest = next(task for task, address in self._open.items() if address == most)
        del self._open[oldest]
        oldest.cancel()

    async def _answer(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        method, target = (words[0], words[1]) if len(words) == 3 else ("", "")
        path = target.partition("?")[0]
        page = self._pages.get(path)
        if method not in ("GET", "HEAD"):
            status, kind, content = 405, TEXT, b"only GET\n"
        elif page is None:
            there = " ".join(sorted(self._pages))
            status, kind, content = 404, TEXT, f"not here; there are {there}\n".encode()
        else:
            status, kind, content = await _content_of(page)
        lines = (
            f"HTTP/1.1 {status} {_REASONS[status]}",
            f"Content-Type: {kind}",
            f"Content-Length: {len(content)}",
            "Connection: close",
            *(f"{name}: {value}" for name, value in self._headers.get(path, ())),
            "",
            "",
        )
        return "\r\n".join(lines).encode() + (b"" if method == "HEAD" else content)


async def _content_of(page: Page) -> Answer:
    try:
        answer = page()
        return answer if isinstance(answer, tuple) else await answer
    except NoThread as error:
        return 503, TEXT, f"not now: {error}\n".encode()


async def try_to_listen(address: str, port: int) -> None:
    """OSError, with the settings to change, where a server could not listen there now."""
    server = HttpServer({})
    await server.listen(address, port)
    await server.close()
