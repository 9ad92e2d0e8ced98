"""What a mover says of itself: how it reaches the rank's memory, and how it copies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvd import native
from kvd.core.keys import NODE_UNKNOWN

HOST_SHARED_MEMORY = "host-shm"
CUDA_IPC = "cuda-ipc"
CUDA_VMM = "cuda-vmm"

_TRANSPORTS = (HOST_SHARED_MEMORY, CUDA_IPC, CUDA_VMM)
_NATIVE = tuple(f"native-{level}" for level in native.LEVELS)
_COPIERS = ("memcpy", "numpy", *_NATIVE, "batch", "plain")
_MOST_CHARACTERS = 256
_MOST_COUNT = (1 << 63) - 1
_MOST_NODE = 1023


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """The GPU that a rank's memory is on, as its mover found it.

    context_bytes: device memory that the mover takes, 0 where that can't be known.
    unregistered_extents could not be pinned; staged_bytes went through the staging buffer.
    """

    uuid: str
    name: str
    driver_version: str
    context_bytes: int = 0
    registered_bytes: int = 0
    unregistered_extents: int = 0
    staged_bytes: int = 0
    numa_node: int = NODE_UNKNOWN


@dataclass(frozen=True, slots=True)
class MoverFacts:
    """What a mover says of itself: the transport in use, and for a GPU its figures.

    copier: by what it moves bytes. note: why its copies are not faster, where that can be helped.
    """

    transport: str = HOST_SHARED_MEMORY
    copier: str = "memcpy"  # until the mover has told
    gpu: GpuFacts | None = None
    note: str = ""

    @classmethod
    def of_host_memory(cls, level: str | None, why_not: str) -> MoverFacts:
        """Copies by the native library at this level; None: by numpy, and why."""
        if level is not None:
            return cls(copier=f"native-{level}")
        why = "".join(c if c.isprintable() else " " for c in why_not)[:_MOST_CHARACTERS]
        return cls(copier="numpy", note=why)

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, body: bytes) -> MoverFacts:
        """The inverse of `pack`; ValueError for what no mover of ours would say.

        Core, metrics and status take the figures as they are, so each is looked at here.
        """
        try:
            told = json.loads(body.rstrip(b"\0"))
            gpu = told["gpu"]
            return cls(
                _one_of(_TRANSPORTS, told["transport"]),
                _one_of(_COPIERS, told["copier"]),
                None if gpu is None else _gpu(gpu),
                _text(told["note"]),
            )
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"no facts: {error!r:.200}") from error


def _gpu(told: Mapping[str, Any]) -> GpuFacts:
    return GpuFacts(
        _text(told["uuid"]),
        _text(told["name"]),
        _text(told["driver_version"]),
        _count(told["context_bytes"]),
        _count(told["registered_bytes"]),
        _count(told["unregistered_extents"]),
        _count(told["staged_bytes"]),
        _count(told["numa_node"], least=NODE_UNKNOWN, most=_MOST_NODE),
    )


def _one_of(known: tuple[str, ...], told: object) -> str:
    if not isinstance(told, str) or told not in known:
        raise ValueError(f"{told!r:.40} is none of {', '.join(known)}")
    return told


def _text(told: object) -> str:
    if not isinstance(told, str) or len(told) > _MOST_CHARACTERS or not told.isprintable():
        raise ValueError(f"{told!r:.40} as a name")
    return told


def _count(told: object, least: int = 0, most: int = _MOST_COUNT) -> int:
    if type(told) is not int or not least <= told <= most:
        raise ValueError(f"{told!r:.40} as a figure")
    return told
