"""A daemon that was found: how the client introduces itself, and what it has then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import grpc

from kvd_client.companion import CompanionSocket
from kvd_proto.v1 import companion_pb2

CONNECT_TIMEOUT_S = 1.0
CHANNEL_OPTIONS = (
    # A stream that gRPC begins anew by itself while a daemon stops may never end, cancelled or not.
    ("grpc.enable_retries", 0),
    # Channels would share one backoff through the global pool: a restarted daemon is found late.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
)


class DaemonLink(NamedTuple):
    """What calls to a daemon need. `metadata` says who calls."""

    companion: CompanionSocket
    channel: grpc.Channel
    metadata: tuple[tuple[str, str], ...]


@contextmanager
def greeted(
    socket_path: str,
    role: companion_pb2.PeerRole,
    program: str,
    timeout_s: float = CONNECT_TIMEOUT_S,
) -> Iterator[DaemonLink]:
    """The daemon at this path, once it has greeted us; both connections end with the context.

    OSError where nobody answers in time, CompanionRefused where the daemon said no.
    """
    with CompanionSocket(socket_path, timeout_s) as companion:
        metadata = (("kvd-token", companion.hello(role, program).token),)
        with grpc.insecure_channel(f"unix:{socket_path}", CHANNEL_OPTIONS) as channel:
            yield DaemonLink(companion, channel, metadata)
