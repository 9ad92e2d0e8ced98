"""Rules that callers may break. A miss or a full tier is an answer, never one of these."""

from __future__ import annotations


class KvdError(Exception):
    """The caller broke a rule. Nothing was changed.

    `reason` is stable and listed in docs/errors.md; `field` names what was wrong.
    """

    reason = "INTERNAL"

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class InvalidArgument(KvdError):
    """A field's value is impossible whatever the state."""

    reason = "INVALID_ARGUMENT"

    def __init__(self, message: str, field: str = "", reason: str = "") -> None:
        super().__init__(message, field)
        if reason:
            self.reason = reason


class UnknownSession(KvdError):
    """The caller has no open session with this id."""

    reason = "UNKNOWN_SESSION"


class UnknownNamespace(KvdError):
    """No namespace that the caller may see has this id."""

    reason = "UNKNOWN_NAMESPACE"


class UnknownRegistration(KvdError):
    """No rank of the caller has this registration."""

    reason = "UNKNOWN_REGISTRATION"


class DuplicateJob(KvdError):
    """A live job of the session already has this id."""

    reason = "DUPLICATE_JOB"


class JobNotRising(KvdError):
    """An earlier message of the session named this job id, or a later one."""

    reason = "JOB_NOT_RISING"


class SequenceGap(KvdError):
    """A mutating message's number is neither the next one nor an old one."""

    reason = "SEQUENCE_GAP"


class EngineAlreadyLives(KvdError):
    """Another live process holds this engine id."""

    reason = "ENGINE_ALREADY_LIVES"


class RankTaken(KvdError):
    """Another live process registered this rank of the same engine start."""

    reason = "RANK_TAKEN"


class LayoutMismatch(KvdError):
    """A rank's fragments don't add up to what the scheduler said."""

    reason = "LAYOUT_MISMATCH"


class LimitExceeded(KvdError):
    """A named bound was passed: sessions, jobs in flight, namespaces."""

    reason = "LIMIT_EXCEEDED"


class ExtentWaste(KvdError):
    """More than a tenth of each extent would be lost behind this namespace's blocks."""

    reason = "EXTENT_WASTE"


class TooFewExtents(KvdError):
    """The pool has no row for each group of this namespace at once."""

    reason = "TOO_FEW_EXTENTS"


class PermissionDenied(KvdError):
    """The caller's user has no right to this."""

    reason = "PERMISSION_DENIED"


class Unauthenticated(KvdError):
    """No companion connection of a live peer stands behind this token."""

    reason = "UNAUTHENTICATED"


class Draining(KvdError):
    """An operator drained the daemon, or it is about to stop: it takes nothing new."""

    reason = "DRAINING"

    def __init__(self, message: str = "") -> None:
        super().__init__(
            message
            or "the daemon drains: it takes no new sessions, ranks and stores until `kvd undrain`"
            " or its next start"
        )


# Reasons of an InvalidArgument: which limit a field is beyond.
HASH_BYTES = "HASH_BYTES"
GROUP_COUNT = "GROUP_COUNT"
TOO_MANY_KEYS = "TOO_MANY_KEYS"
BLOCKS_PER_BLOCK = "BLOCKS_PER_BLOCK"
RANK_COUNT = "RANK_COUNT"
STRING_TOO_LONG = "STRING_TOO_LONG"
TOO_MANY_PARTS = "TOO_MANY_PARTS"

# Reasons that a verdict may carry (answers, not errors).
NO_ROOM = "NO_ROOM"  # everything is pinned, in flight or just offered
QUOTA = "QUOTA"  # the tenant's hard quota, and nothing of its own can be evicted
KEY_MISSING = "KEY_MISSING"  # a load's block is not (or no longer) readable
RANKS_MISSING = "RANKS_MISSING"  # not every rank is registered
QUEUE_FULL = "QUEUE_FULL"  # the mover has as much queued as it may
DRAINING = "DRAINING"
EXPIRED = "EXPIRED"  # a half of the job never came
MOVER_GONE = "MOVER_GONE"
COPY_FAILED = "COPY_FAILED"
ABANDONED = "ABANDONED"  # the engine gave the store up: it needed the blocks
CHECKSUM_MISMATCH = "CHECKSUM_MISMATCH"  # a block's bytes are not those that were stored
SESSION_CLOSED = "SESSION_CLOSED"
RESET = "RESET"  # the cache was reset or cleared meanwhile
