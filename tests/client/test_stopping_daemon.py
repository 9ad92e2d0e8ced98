"""Streams that begin while a server stops: each ends, so that its thread finds the next daemon."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from kvd_client.daemon import CHANNEL_OPTIONS

ROUNDS = 60  # seven had four streams without end, where gRPC begins streams anew by itself
STREAMS = 8
LATEST_S = 0.002
CANCELLED_AFTER_S = 1.0
ENDED_AFTER_S = 20.0


class Echo(grpc.GenericRpcHandler):
    """Any method: a stream that says what it hears."""

    def service(self, handler_call_details: object) -> Any:
        return grpc.stream_stream_rpc_method_handler(lambda requests, _: requests)


def one_stream(address: str, begins_in_s: float) -> None:
    """One, which stays open until the server ends it or time is up."""
    time.sleep(begins_in_s)
    done = threading.Event()

    def requests() -> Iterator[bytes]:
        yield b"first"
        done.wait()

    with grpc.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        method: Any = channel.stream_stream("/echo/Echo")
        call = method(requests())
        timer = threading.Timer(CANCELLED_AFTER_S, call.cancel)
        timer.start()
        with contextlib.suppress(grpc.RpcError):
            for _ in call:
                pass
        done.set()
        timer.cancel()


def test_streams_that_begin_while_a_server_stops_end(tmp_path: Path) -> None:
    dice, address = random.Random(1), f"unix:{tmp_path / 's'}"
    for _ in range(ROUNDS):
        server = grpc.server(ThreadPoolExecutor(STREAMS), handlers=[Echo()])
        server.add_insecure_port(address)
        server.start()
        streams = [
            threading.Thread(
                target=one_stream, args=(address, dice.uniform(0, LATEST_S)), daemon=True
            )
            for _ in range(STREAMS)
        ]
        for stream in streams:
            stream.start()
        time.sleep(dice.uniform(0, LATEST_S))
        server.stop(0)
        until = time.monotonic() + ENDED_AFTER_S
        for stream in streams:
            stream.join(max(0, until - time.monotonic()))
            assert not stream.is_alive(), "it neither ends nor can be cancelled"
