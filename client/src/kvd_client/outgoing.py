"""Messages turned into the stream's bytes, on its writer thread: whatever they hold, it goes on.

An exception there, or a message above the daemon's limit, would end the stream, and with it
every job and lease of the session. What can't be said is left out, and told to whoever asked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from kvd_client.draft import StepDraft
from kvd_client.lookup_calls import SharedCall
from kvd_proto.limits import MAX_MESSAGE_BYTES
from kvd_proto.v1 import engine_pb2

log = logging.getLogger(__name__)


Message = Callable[[], bytes | None]  # None: there is nothing to say by now


def serialised(outgoing: SimpleQueue[Message | None]) -> Iterator[bytes]:
    """The queue's messages as bytes, until a None. Runs on gRPC's thread."""
    while (message := outgoing.get()) is not None:
        try:
            body = message()
            if body is not None:
                yield body
        except Exception:
            log.exception("kvd: a message could not be made; the session goes on without it")


def as_is(body: bytes) -> bytes:
    """For gRPC, which would serialise by itself and end the stream where that fails."""
    return body


def lookup_bytes(call: SharedCall) -> bytes | None:
    """The lookup's message; None: it can't be said."""
    body = _lookup(call, bare=False)
    return body if body is not None else _lookup(call, bare=True)


def step_bytes(step: StepDraft, sequence: int) -> tuple[bytes, list[int]]:
    """The step's message, and ids of the jobs that it leaves out. Its number is always said.

    Tried whole, then without what users may set of requests, then part by part.
    """
    for bare in (False, True):
        body = _step(step, sequence, bare=bare)
        if body is not None:
            return body, []
    kept, left_out = _sayable(step)
    body = _step(kept, sequence, bare=True)
    if body is None:
        left_out += [job.job_id for job in (*kept.loads, *kept.stores)]
        body = engine_pb2.SessionRequest(
            step=engine_pb2.Step(sequence=sequence, end_step=True)
        ).SerializeToString()
    log.error("kvd: a step can't be said whole; %d of its jobs fail", len(left_out))
    return body, left_out


def _sayable(step: StepDraft) -> tuple[StepDraft, list[int]]:
    """The step without the jobs that can't be said by themselves, or that would be too many bytes.

    Loads come first: requests wait for them.
    """
    kept, left_out = step.without_orders(), list[int]()
    room = MAX_MESSAGE_BYTES // 2  # the other half is for what the engine says of ends
    for jobs, into, is_load in ((step.loads, kept.loads, True), (step.stores, kept.stores, False)):
        for job in jobs:
            alone = StepDraft(loads=[job]) if is_load else StepDraft(stores=[job])
            body = _step(alone, 1, bare=True)
            if body is None or len(body) > room:
                left_out.append(job.job_id)
            else:
                room -= len(body)
                into.append(job)
    return kept, left_out


def _lookup(call: SharedCall, *, bare: bool) -> bytes | None:
    return _bytes_of(lambda: engine_pb2.SessionRequest(lookup=call.to_proto(bare=bare)))


def _step(step: StepDraft, sequence: int, *, bare: bool) -> bytes | None:
    def make() -> engine_pb2.SessionRequest:
        if not bare and step.has_parameters:  # a copy of the whole fails where it is too deep
            return engine_pb2.SessionRequest(step=step.to_proto(sequence))
        request = engine_pb2.SessionRequest()
        step.put_into(request.step, sequence, bare=bare)
        return request

    return _bytes_of(make)


def _bytes_of(make: Callable[[], engine_pb2.SessionRequest]) -> bytes | None:
    try:
        body = make().SerializeToString()
    except Exception as error:  # noqa: BLE001 - protobuf's errors have no common class
        log.warning("kvd: a message can't be serialised: %r", error)
        return None
    return body if len(body) <= MAX_MESSAGE_BYTES else None
