"""The HTTP page's connections are few: those that say nothing give way to those that ask."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import urllib.request

import pytest

from kvd.control.http import MAX_CONNECTIONS, SCRAPE_SHARE, HttpServer, seldom
from tests.control.running_daemon import daemon
from tests.ports import free_port


def test_probes_are_answered_beside_any_number_of_connections_that_say_nothing() -> None:
    port = free_port()
    with daemon("--http-port", str(port)):
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(MAX_CONNECTIONS * 2)]
        half = [socket.create_connection(("127.0.0.1", port)) for _ in range(MAX_CONNECTIONS)]
        for each in half:
            each.sendall(b"GET /healthz HTTP/1.1\r\n")
        for _ in range(MAX_CONNECTIONS + 2):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=25) as answer:
                assert answer.status == 200
        for each in (*silent, *half):
            each.close()


async def test_the_oldest_of_the_address_with_most_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = HttpServer({})
    ended: list[str] = []

    class Task:
        def __init__(self, name: str) -> None:
            self.name = name

        def cancel(self) -> None:
            ended.append(self.name)

    for number, address in enumerate(["b", "a", "a", "c", "a"]):
        server._open[Task(f"{address}{number}")] = address  # type: ignore[index]
    server._give_way()
    server._give_way()
    assert ended == ["a1", "a2"]


async def test_who_takes_no_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed connection would else keep its answer in memory for as long as its reader likes."""
    size = 32 << 20  # more than the kernel takes
    monkeypatch.setattr("kvd.control.http.READ_SECONDS", 0.2)
    asked = asyncio.Event()

    def page() -> tuple[int, str, bytes]:
        asked.set()
        return 200, "", bytes(size)

    server = HttpServer({"/": page})
    await server.listen("127.0.0.1", 0)
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", server.port))
    slow.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(slow, b"GET / HTTP/1.1\r\n\r\n")
    async with asyncio.timeout(25):
        await asked.wait()
        await asyncio.gather(*server._open)
    got = 0
    with contextlib.suppress(ConnectionResetError):
        while piece := await loop.sock_recv(slow, 1 << 20):
            got += len(piece)
    assert got < size
    slow.close()
    await server.close()


async def test_a_page_that_takes_long_is_made_seldom() -> None:
    clock = 0.0
    made = 0

    async def page() -> tuple[int, str, bytes]:
        nonlocal clock, made
        clock += 0.05
        made += 1
        return 200, "", b""

    answer = seldom(page, lambda: clock)
    for _ in range(1000):
        await answer()
        clock += 0.01
    assert made * 0.05 <= clock * SCRAPE_SHARE + 0.05
    assert made > 5


async def test_a_page_under_way_is_made_once_for_all_who_ask_and_outlives_who_asked_first() -> None:
    begun = 0
    go_on = asyncio.Event()

    async def page() -> tuple[int, str, bytes]:
        nonlocal begun
        begun += 1
        await go_on.wait()
        return 200, "", b"made"

    answer = seldom(page)
    first, second = (asyncio.ensure_future(answer()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    go_on.set()
    assert await second == (200, "", b"made")
    assert begun == 1
