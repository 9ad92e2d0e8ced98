"""A recorded log, fed to a fresh machine: it orders exactly the same."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvd.core.errors import KvdError
from kvd.core.keys import KeyBatch
from kvd.core.machine import Machine
from tests.core.bench import Bench, numbers_of


def replay(bench: Bench) -> None:
    """A fresh machine, fed the log, orders exactly the same."""
    fresh = Machine(bench.config)
    for (event, now_ns), expected in zip(bench.log, bench.history, strict=False):
        try:
            actions = fresh.handle(event, now_ns)
        except KvdError:
            actions = []
        assert plain(actions) == plain(expected)


def plain(thing: object) -> object:
    """The same content in types that compare by value."""
    if isinstance(thing, np.ndarray):
        return (str(thing.dtype), thing.tolist())
    if isinstance(thing, KeyBatch):
        return numbers_of(thing)
    if isinstance(thing, (list, tuple)):
        return [plain(part) for part in thing]
    if hasattr(thing, "__dataclass_fields__"):
        fields: Iterable[str] = thing.__dataclass_fields__
        return (type(thing).__name__, [plain(getattr(thing, name)) for name in fields])
    return thing
