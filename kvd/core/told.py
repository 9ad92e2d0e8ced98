"""What clients tell of their requests. It is remembered, and decides nothing."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvd.core.keys import U64, RequestId


class Unasked(enum.Enum):
    """Why a client computes what the daemon may have."""

    NOT = "it asked, or the index page showed nothing"
    NO_SESSION = "there was no daemon, or it was silent"
    UNANSWERED = "its question was not answered in time"
    RETRY = "its tenant held as many leases as it may, for too long"
    PENDING = "the blocks were being stored, for too long"


@dataclass(frozen=True, slots=True, eq=False)
class MissedBlock:
    """The first block of a request that was not found."""

    group: int
    block: int  # its place in the prompt, in blocks of the group
    words: U64  # its key, shape [words of a key]
    status: int  # that the client had for it: as in kvd.v1 Answer


@dataclass(frozen=True, slots=True, eq=False)
class ToldRequest:
    """What one request looked for and found, as its client says."""

    request: RequestId
    account: str
    prompt_tokens: int
    device_tokens: int  # of those, that the device had
    found_tokens: int  # of those, loaded
    missed: MissedBlock | None = None
    given_up: Unasked = Unasked.NOT
