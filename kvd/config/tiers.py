"""Secondary tiers as the file has them: an ordered list of tables, `[[tiers]]`.

A wrong value is refused with the place of its table and its field, and what would do.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvd.config.values import number, one_of, whole_number
from kvd.tiers.kinds import OPEN_DISK
from kvd.tiers.process import (
    MAX_KEYS_QUEUED,
    MAX_READS_QUEUED,
    MAX_WRITES_QUEUED,
    QueueBounds,
)
from kvd.tiers.store import OptionValue, TierOptions
from kvd_proto.limits import MAX_TIERS

THROUGH, DEMOTION, REUSE = WRITES = ("through", "demotion", "reuse")
MEDIA = ("STORAGE", "REMOTE")  # of this node alone; of every node that shares the tier
KINDS = {  # ours, by name
    "disk": OPEN_DISK,
    "mooncake": "kvd.tiers.kinds:open_mooncake",
    "valkey": "kvd.tiers.kinds:open_valkey",
    "s3": "kvd.tiers.kinds:open_s3",
}
SHARED_KINDS = frozenset({"mooncake", "valkey", "s3"})  # whose medium is REMOTE
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_STORE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True, slots=True)
class TierRule:
    """One secondary tier, as the site wants it.

    store: "package.module:name" of what opens it, with `options`. write: "through" writes what is
    stored, "demotion" what is about to be evicted, "reuse" what was asked for `reuse` times.
    """

    name: str
    store: str
    medium: str = "STORAGE"
    write: str = THROUGH
    reuse: int = 2
    deadline_seconds: float = 5.0
    queue_keys: int = MAX_KEYS_QUEUED
    queue_reads: int = MAX_READS_QUEUED
    queue_writes: int = MAX_WRITES_QUEUED
    options: TierOptions = field(default_factory=dict)

    @property
    def bounds(self) -> QueueBounds:
        """How much may wait for its process."""
        return QueueBounds(self.queue_keys, self.queue_reads, self.queue_writes)


class TierFieldError(Exception):
    """A table of [[tiers]] can't be used; the message names table, field and fix."""


def _read_name(value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError('1 to 64 small letters, digits, "-" and "_", such as "disk"')
    return value


def _read_store(value: Any) -> str:
    if not isinstance(value, str) or not _STORE.fullmatch(value):
        raise ValueError('where its code lies: "package.module:name"')
    return value


def _read_options(value: Any) -> dict[str, OptionValue]:
    wanted = "a table of texts, numbers, switches and lists of texts"
    if not isinstance(value, dict):
        raise ValueError(wanted)  # noqa: TRY004 - one kind of error for every wrong value
    for name, given in value.items():
        plain = isinstance(given, str | int | float)
        if not plain and not (isinstance(given, list) and all(isinstance(g, str) for g in given)):
            raise ValueError(f"{wanted}; {name} is none")
    return value


_READERS: dict[str, Callable[[Any], Any]] = {
    "name": _read_name,
    "kind": one_of(*KINDS),
    "store": _read_store,
    "medium": one_of(*MEDIA),
    "write": one_of(*WRITES),
    "reuse": whole_number(2, 255),
    "deadline_seconds": number(0.05, 600),
    "queue_keys": whole_number(1, MAX_KEYS_QUEUED),
    "queue_reads": whole_number(1, MAX_READS_QUEUED),
    "queue_writes": whole_number(1, MAX_WRITES_QUEUED),
    "options": _read_options,
}
TIER_KEYS = frozenset(_READERS)


def read_tiers(written: Any) -> tuple[TierRule, ...]:
    """The tiers in their order; TierFieldError names what is wrong."""
    if not isinstance(written, list) or not all(isinstance(table, dict) for table in written):
        raise TierFieldError("tiers must be a list of tables: [[tiers]]")
    if len(written) > MAX_TIERS:
        raise TierFieldError(f"there are {len(written)} [[tiers]]; at most {MAX_TIERS} may be")
    rules = tuple(_read_tier(f"tiers[{at}]", table) for at, table in enumerate(written))
    names = [rule.name for rule in rules]
    for at, name in enumerate(names):
        if name in names[:at]:
            raise TierFieldError(f"tiers[{at}].name is {name!r}, as of an earlier one; rename one")
    return rules


def _read_tier(where: str, table: dict[str, Any]) -> TierRule:
    for name in table:
        if name not in _READERS:
            raise TierFieldError(
                f"{where} has an unknown key {name!r}; known: {', '.join(_READERS)}"
            )
    if "name" not in table:
        raise TierFieldError(f"{where} has no name; give it one")
    if ("kind" in table) == ("store" in table):
        raise TierFieldError(
            f"{where} needs one of kind ({', '.join(KINDS)}) and store (a site's own); set one"
        )
    values: dict[str, Any] = {}
    for name, given in table.items():
        try:
            values[name] = _READERS[name](given)
        except ValueError as error:
            raise TierFieldError(f"{where}.{name} is {given!r}; it must be {error}") from None
    if "kind" in values:
        kind = values.pop("kind")
        values["store"] = KINDS[kind]
        if kind in SHARED_KINDS:
            values.setdefault("medium", "REMOTE")
    if "reuse" in values and values.get("write") != REUSE:
        raise TierFieldError(
            f'{where}.reuse counts only with write = "reuse"; set that, or remove it'
        )
    return TierRule(**values)
