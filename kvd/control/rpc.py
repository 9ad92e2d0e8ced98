"""Around every call: errors become statuses, bad bytes a typed refusal, time a metric."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from kvd.control import errors
from kvd.control.peers import Context
from kvd.core.errors import InvalidArgument, KvdError

log = logging.getLogger(__name__)

OWN_PREFIX = "/kvd.v1."
REFUSED = object()  # what a refused call returns: its status says it all
# The stubs make it generic, the class is not; and they leave out that it may be None.
Handler = Any
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]


class CallObserver(Protocol):
    """Counts calls, for metrics."""

    def call_ended(self, method: str, code: str, seconds: float) -> None:
        """A call was answered; `method` is one of kvd.v1's."""

    def message_answered(self, kind: str, seconds: float) -> None:
        """A message of a session's stream was worked off; `kind` is one of SessionRequest's."""

    def refused(self, reason: str) -> None:
        """A call or a message broke a rule."""


@dataclass(frozen=True, slots=True)
class MalformedBytes:
    """Stands for a request whose bytes could not be read."""

    error: str


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps kvd's own methods; health and reflection pass untouched."""

    def __init__(
        self, observer: CallObserver, on_broken_invariant: Callable[[AssertionError], None]
    ) -> None:
        self._observer = observer
        self._on_broken_invariant = on_broken_invariant

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """The handler, wrapped."""
        handler = await continuation(handler_call_details)
        path = handler_call_details.method
        if handler is None or not path.startswith(OWN_PREFIX):
            return handler
        method = path.removeprefix(OWN_PREFIX)
        deserializer = _lenient(handler.request_deserializer)
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                self._stream_stream(method, handler.stream_stream),
                deserializer,
                handler.response_serializer,
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                self._unary_stream(method, handler.unary_stream),
                deserializer,
                handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary_unary(method, handler.unary_unary),
            deserializer,
            _serializer(handler.response_serializer),
        )

    def _unary_unary(self, method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def call(request: Any, context: Context) -> Any:
            return await self._run(method, context, lambda: behaviour(_whole(request), context))

        return call

    def _unary_stream(self, method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def call(request: Any, context: Context) -> None:
            await self._run(method, context, lambda: behaviour(_whole(request), context))

        return call

    def _stream_stream(self, method: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
        async def call(requests: AsyncIterator[Any], context: Context) -> None:
            whole = _whole_ones(requests)
            await self._run(method, context, lambda: behaviour(whole, context))

        return call

    async def _run(
        self, method: str, context: Context, behaviour: Callable[[], Awaitable[Any]]
    ) -> Any:
        began = time.perf_counter()
        code = grpc.StatusCode.OK
        try:
            return await behaviour()
        except KvdError as error:
            code = errors.status_code(error)
            self._observer.refused(error.reason)
            return _refuse(context, error)
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except AssertionError as error:
            code = grpc.StatusCode.INTERNAL
            log.critical("broken invariant in %s", method, exc_info=True)
            self._on_broken_invariant(error)
            raise
        except Exception:
            code = grpc.StatusCode.INTERNAL
            log.exception("%s failed", method)
            return _refuse(context, KvdError("the daemon failed; its log says how"))
        finally:
            self._observer.call_ended(method, code.name, time.perf_counter() - began)


def _refuse(context: Context, error: KvdError) -> Any:
    """Set the status that the call ends with; the answer to return.

    Not `context.abort`: grpcio 1.76 keeps some memory for every call that ends that way.
    """
    context.set_code(errors.status_code(error))
    context.set_details(str(error))
    context.set_trailing_metadata(errors.rich_details(error))
    return REFUSED


def _serializer(serialize: Callable[[Any], bytes] | None) -> Callable[[Any], bytes]:
    """The answer's serializer, which knows the answer of a refused call."""
    assert serialize is not None, "kvd's methods carry messages"

    def write(answer: Any) -> bytes:
        return b"" if answer is REFUSED else serialize(answer)

    return write


def _lenient(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """A deserializer whose failures reach our own code instead of an untyped INTERNAL."""
    assert deserializer is not None, "kvd's methods carry messages"

    def read(content: bytes) -> Any:
        try:
            return deserializer(content)
        except Exception as error:  # noqa: BLE001 - protobuf raises more than DecodeError
            return MalformedBytes(str(error))

    return read


def _whole(request: Any) -> Any:
    if isinstance(request, MalformedBytes):
        raise InvalidArgument(
            f"the bytes are no message of this type: {request.error}",
            reason=errors.MALFORMED_MESSAGE,
        )
    return request


async def _whole_ones(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _whole(request)
