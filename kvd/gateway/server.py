"""The gateway's gRPC server: mutual TLS, and bounds on what strangers can take of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc

from kvd.gateway.certificates import Renewal
from kvd.gateway.servicer import MAX_CALL_SECONDS, MAX_CALLS_AT_ONCE, Gateway

MAX_CONNECTIONS = 64  # handshakes among them
MAX_STREAMS = 8  # calls under way on one connection
MAX_MESSAGE_BYTES = 64 * 1024  # of a request; an operator's have a few hundred bytes
HANDSHAKE_SECONDS = 5.0
# Then a connection without calls is closed: who keeps many open has only as many as calls for long.
IDLE_SECONDS = 10.0
PING_SECONDS = 60.0
# Or a tenth more; then whoever calls shows a certificate again: one that has expired since, or is
# of an authority that is trusted no more, would else be good for as long as calls come.
CONNECTION_SECONDS = 600.0
# Threads beside those of calls under way: other calls are refused on them, as many as come. gRPC's
# own bound on calls would refuse an operator's, while somebody has many refused.
THREADS_TO_REFUSE = 4


def _options() -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", 16 << 20),
        ("grpc.max_metadata_size", 16 * 1024),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_SECONDS * 1e3)),
        ("grpc.max_connection_idle_ms", int(IDLE_SECONDS * 1e3)),
        ("grpc.max_connection_age_ms", int(CONNECTION_SECONDS * 1e3)),
        ("grpc.max_connection_age_grace_ms", int(MAX_CALL_SECONDS * 1e3)),  # calls may end
        ("grpc.keepalive_time_ms", int(PING_SECONDS * 1e3)),
        ("grpc.http2.lookahead_bytes", 16 * 1024),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.so_reuseport", 0),
    )


def begin(address: str, renewal: Renewal, gateway: Gateway) -> tuple[grpc.Server, int]:
    """Take calls from now on; the server and its port. OSError where that can't be."""
    server = grpc.server(
        ThreadPoolExecutor(MAX_CALLS_AT_ONCE + THREADS_TO_REFUSE, thread_name_prefix="gateway"),
        handlers=[gateway],
        options=_options(),
    )
    try:
        port = server.add_secure_port(address, renewal.credentials())
    except RuntimeError as error:  # gRPC's
        raise OSError(f"can't listen on {address}: {error}; choose another --address") from None
    server.start()
    return server, port
