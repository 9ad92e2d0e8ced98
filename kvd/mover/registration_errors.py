"""Why a mover may refuse a registration, besides a layout that can't be.

A mover raises `InvalidArgument(message, field, reason)` with one of these; control passes reason
and field on to the worker. docs/errors.md says what to do about each.
"""

from __future__ import annotations

# This daemon has no way to memory of this kind: no CuPy in its environment, no driver.
TRANSPORT_UNSUPPORTED = "TRANSPORT_UNSUPPORTED"
GPU_UNKNOWN = "GPU_UNKNOWN"  # the daemon does not see the GPU of this UUID
GPU_HANDLE_REFUSED = "GPU_HANDLE_REFUSED"  # the driver opens no memory by this handle
GPU_MEMORY_SHORT = "GPU_MEMORY_SHORT"  # no room on the GPU for the mover's context
GPU_MODE_UNSUPPORTED = "GPU_MODE_UNSUPPORTED"  # MPS, exclusive-process, MIG

REASONS = frozenset(
    {
        TRANSPORT_UNSUPPORTED,
        GPU_UNKNOWN,
        GPU_HANDLE_REFUSED,
        GPU_MEMORY_SHORT,
        GPU_MODE_UNSUPPORTED,
    }
)
