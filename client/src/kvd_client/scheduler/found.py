"""What requests looked for and found, counted for the daemon: it hears of no miss otherwise."""

from __future__ import annotations

from kvd_client.draft import LookupCounts
from kvd_client.scheduler.request import Request


def count_found(
    counts: LookupCounts, request: Request, boundary_tokens: int, external_tokens: int
) -> None:
    """The request has its place on the device, and loads so many tokens. It counts once.

    What the device had of it is not looked for.
    """
    if request.was_counted:
        return
    request.was_counted = True
    computed = request.computed_tokens
    whole = max(computed, request.num_tokens)
    begun = computed // boundary_tokens
    found = (computed + external_tokens) // boundary_tokens - begun
    counts.add(
        LookupCounts(
            requests=1,
            requests_found=int(found > 0),
            blocks=whole // boundary_tokens - begun,
            blocks_found=found,
            tokens=whole - computed,
            tokens_found=external_tokens,
        )
    )
