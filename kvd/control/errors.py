"""From a broken rule to a gRPC status: the one table of reasons.

Every refusal carries a canonical code and, in `grpc-status-details-bin`, a google.rpc.Status
with ErrorInfo{reason, domain "kvd", metadata {"field"}}. Reasons are stable: clients branch on
them. docs/errors.md lists them for people; a test compares the two.
"""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from kvd.core import errors
from kvd.core.errors import KvdError
from kvd.mover import registration_errors

DOMAIN = "kvd"
DETAILS_KEY = "grpc-status-details-bin"
MESSAGE_BYTES = 1024  # for people, in a refusal or a verdict

# Reasons that the control plane adds to those of the core, and those that both give.
MALFORMED_MESSAGE = "MALFORMED_MESSAGE"
UNKNOWN_MESSAGE = "UNKNOWN_MESSAGE"
HASH_BYTES = errors.HASH_BYTES
GROUP_COUNT = errors.GROUP_COUNT
TOO_MANY_KEYS = errors.TOO_MANY_KEYS
BLOCKS_PER_BLOCK = errors.BLOCKS_PER_BLOCK
RANK_COUNT = errors.RANK_COUNT
STRING_TOO_LONG = errors.STRING_TOO_LONG
TOO_MANY_PARTS = errors.TOO_MANY_PARTS
OLD_ENGINE_ENDING = "OLD_ENGINE_ENDING"
DEADLINE = "DEADLINE"
DRAIN_TAKEN_BACK = "DRAIN_TAKEN_BACK"
MOVER_START_FAILED = "MOVER_START_FAILED"
INTERNAL = "INTERNAL"

_Code = grpc.StatusCode

# Reasons that a call may fail with.
STATUS_OF: dict[str, grpc.StatusCode] = {
    errors.InvalidArgument.reason: _Code.INVALID_ARGUMENT,
    MALFORMED_MESSAGE: _Code.INVALID_ARGUMENT,
    UNKNOWN_MESSAGE: _Code.INVALID_ARGUMENT,
    HASH_BYTES: _Code.INVALID_ARGUMENT,
    GROUP_COUNT: _Code.INVALID_ARGUMENT,
    TOO_MANY_KEYS: _Code.INVALID_ARGUMENT,
    BLOCKS_PER_BLOCK: _Code.INVALID_ARGUMENT,
    RANK_COUNT: _Code.INVALID_ARGUMENT,
    STRING_TOO_LONG: _Code.INVALID_ARGUMENT,
    TOO_MANY_PARTS: _Code.INVALID_ARGUMENT,
    registration_errors.TRANSPORT_UNSUPPORTED: _Code.INVALID_ARGUMENT,
    errors.UnknownSession.reason: _Code.NOT_FOUND,
    errors.UnknownNamespace.reason: _Code.NOT_FOUND,
    errors.UnknownRegistration.reason: _Code.NOT_FOUND,
    errors.DuplicateJob.reason: _Code.ALREADY_EXISTS,
    errors.RankTaken.reason: _Code.ALREADY_EXISTS,
    errors.EngineAlreadyLives.reason: _Code.ALREADY_EXISTS,
    errors.JobNotRising.reason: _Code.FAILED_PRECONDITION,
    errors.SequenceGap.reason: _Code.FAILED_PRECONDITION,
    errors.LayoutMismatch.reason: _Code.FAILED_PRECONDITION,
    errors.ExtentWaste.reason: _Code.FAILED_PRECONDITION,
    errors.TooFewExtents.reason: _Code.FAILED_PRECONDITION,
    registration_errors.GPU_UNKNOWN: _Code.FAILED_PRECONDITION,
    registration_errors.GPU_HANDLE_REFUSED: _Code.FAILED_PRECONDITION,
    registration_errors.GPU_MODE_UNSUPPORTED: _Code.FAILED_PRECONDITION,
    DRAIN_TAKEN_BACK: _Code.FAILED_PRECONDITION,
    registration_errors.GPU_MEMORY_SHORT: _Code.RESOURCE_EXHAUSTED,
    errors.LimitExceeded.reason: _Code.RESOURCE_EXHAUSTED,
    errors.PermissionDenied.reason: _Code.PERMISSION_DENIED,
    errors.Unauthenticated.reason: _Code.UNAUTHENTICATED,
    errors.Draining.reason: _Code.UNAVAILABLE,
    OLD_ENGINE_ENDING: _Code.UNAVAILABLE,
    MOVER_START_FAILED: _Code.UNAVAILABLE,
    DEADLINE: _Code.DEADLINE_EXCEEDED,
    INTERNAL: _Code.INTERNAL,
}


class DrainTakenBack(KvdError):
    """Somebody undrained the daemon while the caller waited for the drain: it takes work again."""

    reason = DRAIN_TAKEN_BACK


class OldEngineEnding(KvdError):
    """Movers of an earlier start of this engine, or of this rank, have not ended yet: ask again."""

    reason = OLD_ENGINE_ENDING


class DeadlinePassed(KvdError):
    """The call's deadline has passed, and what it waits for still runs."""

    reason = DEADLINE


class MoverStartFailed(KvdError):
    """The rank's mover process did not come up; the daemon's log says why."""

    reason = MOVER_START_FAILED


def status_code(error: KvdError) -> grpc.StatusCode:
    """The canonical code of a broken rule; a reason outside the table takes its class's code."""
    code = STATUS_OF.get(error.reason)
    if code is None:
        code = STATUS_OF.get(type(error).reason, _Code.INTERNAL)
    return code


def rich_details(error: KvdError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata that names reason and field."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    if error.field:
        info.metadata["field"] = error.field
    detail = any_pb2.Any()
    detail.Pack(info)
    number: int = status_code(error).value[0]
    said = cut_short(str(error))
    status = status_pb2.Status(code=number, message=said, details=[detail])
    return ((DETAILS_KEY, status.SerializeToString()),)


def cut_short(message: str) -> str:
    """No longer than the protocol says. What a caller sent may be quoted in it, and gRPC has a
    caller hear of nothing where the metadata is too long."""
    return message.encode()[:MESSAGE_BYTES].decode(errors="ignore")
