"""Around every call: errors become statuses, bad bytes a typed refusal, time a metric."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError, Message

from kvd.control import errors
from kvd.control.access.calls_in_line import CallsInLine
from kvd.control.access.intake import SMALL_BYTES, TAKE_IN_SECONDS, Intake
from kvd.control.access.peers import Context, no_peer
from kvd.control.sessions import wire
from kvd.core.errors import InvalidArgument, KvdError
from kvd.runtime.turns import FairQueue, Pace

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

    def lined_up(self) -> None:
        """A call waits in line: its user sends more than are taken up as they come."""


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Checks and counts every call of kvd's own methods; of health and reflection, which need no
    hello, it bounds the messages."""

    def __init__(
        self,
        observer: CallObserver,
        on_broken_invariant: Callable[[AssertionError], None],
        turns: FairQueue,
        user_of: Callable[[Context], int | None],
        operates: Callable[[int], bool],
    ) -> None:
        self._observer = observer
        self._turns = turns
        self._user_of = user_of
        self._operates = operates
        self._line = CallsInLine()
        self.on_wait: Callable[[], None] = lambda: None  # somebody sends more than is taken up
        self._intake = Intake()
        self._on_broken_invariant = on_broken_invariant

    def close(self) -> None:
        """Let each call that is given up from now on end at once."""
        self._line.close()

    def has_shut_out(self, user: int) -> None:
        """He can't connect any more for a while, and his connections of before are closed."""
        for each in user, None:  # who connects without end need not say hello
            self._line.connections_closed(each)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """The handler, wrapped."""
        handler = await continuation(handler_call_details)
        path = handler_call_details.method
        if handler is None:
            return None
        if not path.startswith(OWN_PREFIX):
            return self._for_anyone(handler)
        method = path.removeprefix(OWN_PREFIX)
        kind = _message_of(handler.request_deserializer)
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                self._stream_stream(method, kind, handler.stream_stream),
                None,
                handler.response_serializer,
            )
        if handler.unary_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                self._unary(method, kind, handler.unary_stream),
                None,
                handler.response_serializer,
            )
        return grpc.stream_unary_rpc_method_handler(
            self._unary(method, kind, handler.unary_unary),
            None,
            _serializer(handler.response_serializer),
        )

    def _unary(
        self, method: str, kind: type[Message], behaviour: Callable[..., Any]
    ) -> Callable[..., Any]:
        # On the wire a call of one message is a stream of one. Taken as such, its message comes
        # only when it is asked for, and who has many calls half said holds only his own share.
        async def call(_requests: AsyncIterator[bytes], context: Context) -> Any:
            async def read_and_behave() -> Any:
                user = await self._count(context)
                content = await self._take_in(user, context)
                async with self._intake.for_message(user, len(content)):
                    message = await self._read(kind, content, user)
                    del content
                    return await behaviour(message, context)

            return await self._run(method, context, read_and_behave)

        return call

    def _for_anyone(self, handler: Handler) -> Handler:
        """Health and reflection: whose a call is nobody knows, so what each may send is little."""
        kind = _message_of(handler.request_deserializer)

        async def read_each(context: Context) -> AsyncGenerator[Any]:
            while (content := await self._take_small(context)) is not None:
                yield _parsed(kind, content)

        async def first_of(context: Context) -> Message:
            content = await self._take_small(context)
            if content is None:
                raise _no_message()
            return _parsed(kind, content)

        async def call(_requests: AsyncIterator[bytes], context: Context) -> Any:
            try:
                if handler.unary_unary is not None:
                    return await handler.unary_unary(await first_of(context), context)
                if handler.unary_stream is not None:
                    return await handler.unary_stream(await first_of(context), context)
                async with contextlib.aclosing(read_each(context)) as each:
                    async for answer in handler.stream_stream(each, context):
                        await context.write(answer)
            except KvdError as error:
                return _refuse(context, error)

        serialize = handler.response_serializer
        if handler.unary_unary is not None:
            return grpc.stream_unary_rpc_method_handler(call, None, _serializer(serialize))
        return grpc.stream_stream_rpc_method_handler(call, None, serialize)

    async def _take_small(self, context: Context) -> bytes | None:
        """The next message of a call that anyone may make; None after the last."""
        try:
            async with self._intake.small.coming():
                content = await _next_of(context)
        except TimeoutError:
            raise errors.DeadlinePassed(
                "the message did not come whole in time: send it with its call"
            ) from None
        if content is not None and len(content) > SMALL_BYTES:
            raise InvalidArgument(
                f"a message of {len(content)} bytes; health and reflection take {SMALL_BYTES}"
            )
        return content

    async def _count(self, context: Context) -> int:
        """The caller's user, with one call more under way, as soon as it may be taken up.

        It is over when gRPC holds nothing of its answer any more: until then a caller who takes
        none has this place.
        """
        user = self._user_of(context)
        if self._line.must_wait(user):
            self._observer.lined_up()
            self.on_wait()
            await self._line.wait(user)
        if user is None:
            raise no_peer()
        self._intake.calls.take(user, operates=self._operates(user))
        # The task ends when the status is sent. A callback of the context's would leave what gRPC
        # has for the call in a circle.
        call = asyncio.current_task()
        assert call is not None, "a call runs in a task"
        call.add_done_callback(lambda _: self._intake.calls.give_back(user))
        return user

    async def _take_in(self, user: int, context: Context) -> bytes:
        """The first message of a call, as soon as it is the user's turn."""
        is_one_of_many = self._intake.first.is_taken(user)
        async with self._intake.first.hold(user, 1):
            if is_one_of_many:
                await self._turns.let_others_in(user)
            try:
                async with asyncio.timeout(TAKE_IN_SECONDS):
                    content = await _next_of(context)
            except TimeoutError:
                raise errors.DeadlinePassed(
                    f"the message did not come whole within {TAKE_IN_SECONDS:.0f} s"
                ) from None
            if content is None:
                raise _no_message()
            return content

    def _stream_stream(
        self, method: str, kind: type[Message], behaviour: Callable[..., Any]
    ) -> Callable[..., Any]:
        async def read_each(user: int, context: Context) -> AsyncGenerator[Any]:
            content: bytes | None = await self._take_in(user, context)
            while content is not None:
                # Held until the next is asked for: until this one is worked off.
                async with self._intake.for_message(user, len(content)):
                    try:
                        request: Any = await self._read(kind, content, user)
                    except KvdError as error:
                        request = wire.unreadable_request(content, error)
                    del content  # the next may be long in coming
                    yield request
                    del request
                content = await _next_of(context)

        async def call(_requests: AsyncIterator[bytes], context: Context) -> None:
            async def read_and_behave() -> None:
                # Closed at once: what it holds for its last message would else stay for the
                # collector.
                user = await self._count(context)
                async with contextlib.aclosing(read_each(user, context)) as each:
                    await behaviour(each, context)

            await self._run(method, context, read_and_behave)

        return call

    async def _read(self, kind: type[Message], content: bytes, user: int) -> Message:
        """The message in these bytes; a large one is read in pieces."""
        message = kind()
        try:
            await wire.read_in_pieces(message, content, Pace(self._turns, user))
        except wire.Unreadable as error:
            raise InvalidArgument(
                f"the bytes are no message of this type: {error}",
                reason=errors.MALFORMED_MESSAGE,
            ) from None
        return message

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
        except grpc.aio.InternalError:
            # A message could not be sent: the caller has gone, and gRPC has yet to say so.
            code = grpc.StatusCode.CANCELLED
            log.debug("%s: its caller has gone", method, exc_info=True)
            return _refuse(context, KvdError("the caller has gone"))
        except Exception:
            code = grpc.StatusCode.INTERNAL
            log.exception("%s failed", method, extra={"user": self._user_of(context)})
            return _refuse(context, KvdError("the daemon failed; its log says how"))
        finally:
            self._observer.call_ended(method, code.name, time.perf_counter() - began)


async def _next_of(context: Context) -> bytes | None:
    """The next message of a call, None after the last.

    Not by gRPC's iterator of them: it keeps each until the next has come, and the one of a call
    that ended until the collector finds it.
    """
    content: Any = await context.read()
    return content if isinstance(content, bytes) else None


def expect_callers_to_go() -> None:
    """Keep gRPC from an error and a traceback in the log for each answer that was not taken."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_gone_caller)


def _is_no_gone_caller(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, grpc.aio.InternalError):
        return True
    log.debug("an answer could not be sent: its caller has gone")
    return False


def _no_message() -> InvalidArgument:
    return InvalidArgument("the call came without a message", reason=errors.MALFORMED_MESSAGE)


def _parsed(kind: type[Message], content: bytes) -> Message:
    try:
        return kind.FromString(content)
    except DecodeError:
        raise InvalidArgument(
            "the bytes are no message of this type", reason=errors.MALFORMED_MESSAGE
        ) from None


def _refuse(context: Context, error: KvdError) -> Any:
    """Set the status that the call ends with; the answer to return.

    Not `context.abort`: grpcio 1.76 keeps some memory for every call that ends that way.
    """
    context.set_code(errors.status_code(error))
    context.set_details(errors.cut_short(str(error)))
    context.set_trailing_metadata(errors.rich_details(error))
    return REFUSED


def _serializer(serialize: Callable[[Any], bytes] | None) -> Callable[[Any], bytes]:
    """The answer's serializer, which knows the answer of a refused call."""
    assert serialize is not None, "kvd's methods carry messages"

    def write(answer: Any) -> bytes:
        return b"" if answer is REFUSED else serialize(answer)

    return write


def _message_of(deserializer: Any) -> type[Message]:
    """The class whose FromString this is, as the stubs give it."""
    kind: type[Message] = deserializer.__self__
    return kind
