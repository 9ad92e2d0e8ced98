"""What an application advises with a request: kvd's own words, or vLLM's KvHintsEnvelope.

Both are a struct without a fixed meaning. What is not known, or can't be meant, is passed over: a
hint never refuses a request. Of several that say what becomes of blocks the last one that is known
counts; to prefetch goes with each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from google.protobuf import struct_pb2

from kvd.core.events import Advice, Hint

MAX_HINT_ACTIONS = 16  # of one request that are looked at
MAX_RETAIN_S = 3600.0
DEFAULT_RETAIN_S = 300.0
_NS = 1_000_000_000
_BY_NAME = {
    "retain": Hint.RETAIN,
    "pin": Hint.RETAIN,  # as advice: for a while, and within a share
    "demote": Hint.DEMOTE,
    "release": Hint.RELEASE,
}
# Names under which a time stands, and how many of it are a second.
_TIMES = {
    "ttl_seconds": 1.0, "ttl_s": 1.0, "seconds": 1.0, "ttl": 1.0, "ttl_ms": 1000.0,
    "cache_ttl_ms": 1000.0,
}  # fmt: skip


def wants_prefetch(hints: struct_pb2.Struct) -> bool:
    """Whether what the request touches is to be brought up, beside any advice."""
    return any(
        name.lower() == Hint.PREFETCH.value and _is_meant(value)
        for name, value in islice(_actions(hints), MAX_HINT_ACTIONS)
    )


def advice_of(hints: struct_pb2.Struct) -> Advice | None:
    """The last one that is known of what becomes of the blocks; None: there is none."""
    found = None
    for name, value in islice(_actions(hints), MAX_HINT_ACTIONS):
        hint = _BY_NAME.get(name.lower())
        if hint is Hint.RETAIN:
            found = Advice(hint, int(_seconds(value) * _NS))
        elif hint is not None and _is_meant(value):
            found = Advice(hint)
    return found


def _actions(hints: struct_pb2.Struct) -> Iterator[tuple[str, struct_pb2.Value]]:
    if "actions" not in hints.fields:
        yield from hints.fields.items()
        return
    for each in hints.fields["actions"].list_value.values:
        fields = each.struct_value.fields
        if "action_type" in fields:
            payload = fields["payload"] if "payload" in fields else struct_pb2.Value()
            yield fields["action_type"].string_value, payload


def _is_meant(value: struct_pb2.Value) -> bool:
    kind = value.WhichOneof("kind")
    return kind != "null_value" and (kind != "bool_value" or value.bool_value)


def _seconds(value: struct_pb2.Value) -> float:
    """What a value or its fields say of a time, within bounds."""
    kind = value.WhichOneof("kind")
    said = value.number_value if kind == "number_value" else 0.0
    if kind == "struct_value":
        fields = value.struct_value.fields
        for name, a_second in _TIMES.items():
            if name in fields:
                said = fields[name].number_value / a_second
                break
    if not math.isfinite(said) or said <= 0:
        said = DEFAULT_RETAIN_S
    return min(said, MAX_RETAIN_S)
