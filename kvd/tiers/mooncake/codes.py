"""What Mooncake's codes mean here. Numbers from its `types.h` (release 0.3.13)."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.tiers.store import TierError, TierReason

OK = 0
NO_SPACE = -200  # no node has room, nor anything that may leave
SIZE_DIFFERS = -600  # the value is larger than the memory for it; or a call that can't be
NOT_READY = -703  # being written
NOT_FOUND = -704
EXISTS = -705  # or is being written
LEASE_EXPIRED = -707
TRANSFER_FAILED = -800  # the node does not answer; or the value is smaller than the memory for it
RPC_FAILED = -900  # the master does not answer
RPC_TIMED_OUT = -901
NO_QUOTA = -1700

ABSENT = frozenset((NOT_FOUND, NOT_READY))
# Begun here before is SIZE_DIFFERS, where the master did not let it be given up.
THERE = frozenset((EXISTS, SIZE_DIFFERS))
FULL = frozenset((NO_SPACE, NO_QUOTA))
WITHOUT_MASTER = frozenset((RPC_FAILED, RPC_TIMED_OUT))
_REASONS = {
    LEASE_EXPIRED: TierReason.TIMEOUT,
    RPC_TIMED_OUT: TierReason.TIMEOUT,
    -101: TierReason.UNREACHABLE,  # no such segment
    -103: TierReason.UNREACHABLE,  # no such client
    -702: TierReason.UNREACHABLE,  # no replica that could be read
    -712: TierReason.UNREACHABLE,  # its replica is gone
    TRANSFER_FAILED: TierReason.UNREACHABLE,
    -801: TierReason.CHECKSUM_MISMATCH,
    RPC_FAILED: TierReason.UNREACHABLE,
    -1: TierReason.UNREACHABLE,  # what a question is answered where nobody is there to ask
}


def reason_of(code: int) -> TierReason:
    """Why a block or a call failed that came back with this code."""
    return _REASONS.get(code, TierReason.REFUSED)


def require_codes(codes: Sequence[int], count: int) -> list[int]:
    """As many codes as keys were given. TierError where they are not: nothing is known then."""
    if len(codes) != count:
        raise TierError(f"Mooncake gave {len(codes)} codes for {count} keys", TierReason.REFUSED)
    return list(codes)
