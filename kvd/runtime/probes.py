"""The work of the core's that the native library does, where it is."""

from __future__ import annotations

from kvd.core.model.probes import Probes
from kvd.native import ghost_table, key_index


def native_probes() -> Probes:
    """To be handed to a `Machine`."""
    return Probes(key_index.maker(), ghost_table.maker())
