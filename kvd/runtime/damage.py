"""Says in the log where damaged blocks lay, so that bad memory or a stray writer can be found."""

from __future__ import annotations

import logging

import numpy as np

from kvd.core.keys import NamespaceId, Slots
from kvd.pool.pool import Pool

log = logging.getLogger(__name__)

MOST_PLACES_LOGGED = 16  # of blocks that one transfer or copy found damaged


def log_damage(pool: Pool, slots: Slots, namespace: NamespaceId, shard: int = 0) -> None:
    """Name the places of these blocks' parts of a shard."""
    extents, offsets = pool.locate(np.asarray(slots), shard)
    places = [f"{e}+{o}" for e, o in zip(extents.tolist(), offsets.tolist(), strict=True)]
    shown = ", ".join(places[:MOST_PLACES_LOGGED])
    log.error(
        "%d blocks of namespace %d failed their checksums and are removed; extent+offset: %s%s",
        len(slots),
        namespace,
        shown,
        ", ..." if len(places) > MOST_PLACES_LOGGED else "",
    )
