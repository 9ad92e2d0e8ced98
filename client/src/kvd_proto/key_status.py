"""Status of one key in a kvd.v1 `Answer`: one of four in the low two bits, and one bit more."""

from __future__ import annotations

STATUS_BITS = 3
MISS = 0
HIT = 1
PENDING = 2  # on its way: somebody stores it, or a tier brings it up
RETRY = 3  # there, and not leased: the tenant has as many leases as it may
DOUBT_BIT = 2  # of PENDING and RETRY, and of no other

ADMITTED_BIT = 4  # beside MISS: a store of the key would be admitted now
