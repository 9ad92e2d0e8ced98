"""A recording's messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvd.control.access.peers import Context
from kvd.control.errors import DeadlinePassed
from kvd.runtime.recorder import Recording, RequestRecord
from kvd_proto.v1 import operator_pb2 as pb

REQUESTS_PER_MESSAGE = 64
BYTES_PER_MESSAGE = 1 << 20  # the last request may pass it
READ_SECONDS = 60.0  # a reader that takes nothing for so long is ended


async def write_all(
    recording: Recording, context: Context, began_ns: int, check: Callable[[], None]
) -> None:
    """Write what is recorded until cancelled, or `check` raises: whoever reads may have lost the
    right meanwhile.
    """
    await _write(context, pb.RecordResponse())
    while True:
        records = await recording.take(REQUESTS_PER_MESSAGE)
        check()
        message = pb.RecordResponse(lost=recording.lost)
        size = 0
        for record in records:
            message.requests.append(_message(record, began_ns))
            size += len(record.hashes)
            if size >= BYTES_PER_MESSAGE:
                await _write(context, message)
                message, size = pb.RecordResponse(lost=recording.lost), 0
        await _write(context, message)


async def _write(context: Context, message: pb.RecordResponse) -> None:
    try:
        async with asyncio.timeout(READ_SECONDS):
            await context.write(message)
    except TimeoutError:
        raise DeadlinePassed(f"the reader took no message for {READ_SECONDS:g} s") from None


def _message(record: RequestRecord, began_ns: int) -> pb.RecordedRequest:
    return pb.RecordedRequest(
        at_ms=max(0, record.at_ns - began_ns) // 1_000_000,
        namespace_id=record.namespace,
        epoch=record.epoch,
        account=record.account,
        prompt_tokens=record.prompt_tokens,
        hash_bytes=record.hash_bytes,
        hashes=record.hashes,
    )
