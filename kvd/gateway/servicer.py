"""Carries calls of OperatorService to the daemon, as far as the caller's certificate goes."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from kvd.control.access.peers import MAX_NAME_CHARACTERS, ON_BEHALF_OF_KEY
from kvd.gateway.certificates import names_of
from kvd.gateway.upstream import NoDaemonError, Upstream
from kvd_proto.v1 import operator_pb2

log = logging.getLogger(__name__)

# What who only looks may call; all else changes something.
READING = frozenset({"Status", "ListNamespaces", "Explain"})
CALL_SECONDS = 30.0  # of a call that names no deadline
MAX_CALL_SECONDS = 660.0  # a drain may take 600 s
MESSAGE_SECONDS = 10.0  # for a call's message to come
MAX_CALLS_AT_ONCE = 16  # each holds a thread
MAX_CALLS_OF_A_CALLER = 8
CALLS_FOR_OPERATORS = 4  # of all

Context = grpc.ServicerContext
Code = grpc.StatusCode


@dataclass(frozen=True, slots=True)
class Method:
    """One method that the gateway carries."""

    path: str
    name: str

    @property
    def only_reads(self) -> bool:
        return self.name in READING


def carried_methods() -> dict[str, Method]:
    """OperatorService's methods with one request and one answer, by path."""
    service = operator_pb2.DESCRIPTOR.services_by_name["OperatorService"]
    methods = [
        Method(f"/{service.full_name}/{method.name}", method.name)
        for method in service.methods
        if not method.client_streaming and not method.server_streaming
    ]
    return {method.path: method for method in methods}


class CallPlaces:
    """Who has how many calls under way: nobody has them all, and operators find some. Any thread
    may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: Counter[tuple[str, ...]] = Counter()

    def take(self, names: tuple[str, ...], *, operates: bool) -> bool:
        """One more for the caller; False where that is too many."""
        most = MAX_CALLS_AT_ONCE - (0 if operates else CALLS_FOR_OPERATORS)
        with self._lock:
            if self._taken[names] >= MAX_CALLS_OF_A_CALLER or self._taken.total() >= most:
                return False
            self._taken[names] += 1
            return True

    def give_back(self, names: tuple[str, ...]) -> None:
        """One less."""
        with self._lock:
            self._taken[names] -= 1
            self._taken = +self._taken


class Gateway(grpc.GenericRpcHandler):
    """Every verified certificate may look; those of `operators` may also change things."""

    def __init__(self, upstream: Upstream, operators: frozenset[str]) -> None:
        self._upstream = upstream
        self._operators = operators
        self._methods = carried_methods()
        self._places = CallPlaces()

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The handler of a method that is carried; None: gRPC answers UNIMPLEMENTED."""
        method = self._methods.get(handler_call_details.method)
        if method is None:
            return None
        # Its message is taken in by us: gRPC would wait for it for ever, and hold a thread.
        return grpc.stream_unary_rpc_method_handler(self._carrier(method))

    def _carrier(self, method: Method) -> Callable[[Iterator[bytes], Context], bytes]:
        def carry(requests: Iterator[bytes], context: Context) -> bytes:
            verified: Any = context.auth_context()  # of lists, where the stubs say bytes
            names = names_of(verified)
            who = _printable(names[0] if names else "a certificate without a name")
            operates = not self._operators.isdisjoint(names)
            if not method.only_reads and not operates:
                log.warning("%s was refused to %s at %s", method.name, who, context.peer())
                context.abort(
                    Code.PERMISSION_DENIED,
                    f"{who} is no operator of this gateway, and {method.name} changes something;"
                    " name it in --operators",
                )
            with self._place(names, who, context, operates=operates):
                request = _message_of(requests, context)
                if not method.only_reads:  # said before: what nobody waits for is done all the same
                    log.info("%s is carried out for %s at %s", method.name, who, context.peer())
                return self._ask(method, request, who, context)

        return carry

    @contextlib.contextmanager
    def _place(
        self, names: tuple[str, ...], who: str, context: Context, *, operates: bool
    ) -> Iterator[None]:
        if not self._places.take(names, operates=operates):
            context.abort(
                Code.RESOURCE_EXHAUSTED,
                f"{who} may have {MAX_CALLS_OF_A_CALLER} calls under way at once, all but operators"
                f" {MAX_CALLS_AT_ONCE - CALLS_FOR_OPERATORS}, and all together {MAX_CALLS_AT_ONCE}:"
                " call again when some have ended",
            )
        try:
            yield
        finally:
            self._places.give_back(names)

    def _ask(self, method: Method, request: bytes, who: str, context: Context) -> bytes:
        left: float | None = context.time_remaining()
        timeout_s = CALL_SECONDS if left is None else min(left, MAX_CALL_SECONDS)
        try:
            return self._upstream.call(method.path, request, timeout_s, ((ON_BEHALF_OF_KEY, who),))
        except NoDaemonError as error:
            context.abort(Code.UNAVAILABLE, str(error))
        except grpc.RpcError as error:
            context.set_trailing_metadata(
                tuple((e.key, e.value) for e in error.trailing_metadata() or ())
            )
            context.abort(error.code(), error.details() or "the daemon refused without a word")
        raise AssertionError("abort raises")


def _message_of(requests: Iterator[bytes], context: Context) -> bytes:
    """The call's one message; the call ends where it does not come in time."""
    timer = threading.Timer(MESSAGE_SECONDS, context.cancel)
    timer.daemon = True
    timer.start()
    try:
        for request in requests:
            return request
    finally:
        timer.cancel()
    context.abort(Code.INVALID_ARGUMENT, "the call came without a message")
    raise AssertionError("abort raises")


def _printable(name: str) -> str:
    """A name that metadata and a line of the log can take."""
    shown = name.encode("ascii", "backslashreplace")[:MAX_NAME_CHARACTERS].decode()
    return "".join(c if c.isprintable() else "?" for c in shown)
