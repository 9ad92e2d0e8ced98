"""Options of an integration, as fields of a data class: their meanings, ranges and checks."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import Field, field
from typing import Any

from kvd_client.draft import is_unicode

DEFAULT_SOCKET = "/run/kvd/kvd.sock"  # the daemon's own default
SOCKET_VARIABLE = "KVD_SOCKET"  # as `kvd status` reads it
MAX_TEXT_BYTES = 256
MAX_SOCKET_BYTES = 96  # sun_path has 108, and the companion's name is longer than the socket's


def text(default: str = "", meaning: str = "") -> Any:
    return field(default=default, metadata={"meaning": meaning})


def choice(default: str, allowed: tuple[str, ...], meaning: str) -> Any:
    return field(default=default, metadata={"meaning": meaning, "choices": allowed})


def switch(default: bool, meaning: str) -> Any:
    return field(default=default, metadata={"meaning": meaning})


def seconds(default: float, at_most: float, meaning: str, at_least: float = 0.0) -> Any:
    metadata = {"meaning": meaning, "range": (at_least, at_most)}
    return field(default=default, metadata=metadata)


def count(default: int, at_most: int, meaning: str) -> Any:
    return field(default=default, metadata={"meaning": meaning, "range": (0, at_most)})


def read(
    where: str, given: Mapping[str, Any], own: Mapping[str, Field[Any]], others: Iterable[str]
) -> dict[str, Any]:
    """The values of one's own options; keys of `others` are let through.

    Raises ValueError for a value out of range and an unknown key; `where` says where it stands.
    """
    values: dict[str, Any] = {}
    known = frozenset(others)
    for key, value in given.items():
        if key in own:
            values[key] = _checked(where, value, own[key])
        elif key not in known:
            close = difflib.get_close_matches(str(key), [*own, *known], n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(own))}"
            raise ValueError(f"{where}: unknown option {key!r}; {hint}")
    if not values.get("socket_path"):
        path = os.environ.get(SOCKET_VARIABLE, DEFAULT_SOCKET)  # empty: a slip
        values["socket_path"] = _socket_path("environment", SOCKET_VARIABLE, path)
    return values


def _checked(where: str, value: Any, option: Field[Any]) -> Any:
    name, default, metadata = option.name, option.default, option.metadata
    match default:
        case bool():
            allowed, fits = "true or false", isinstance(value, bool)
        case int():
            at_least, at_most = metadata["range"]
            allowed = f"a whole number from {at_least} to {at_most}"
            fits = type(value) is int and at_least <= value <= at_most
        case float():
            at_least, at_most = metadata["range"]
            allowed = f"a number of seconds from {at_least:g} to {at_most:g}"
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            fits = is_number and at_least <= value <= at_most  # NaN does not fit
        case _ if "choices" in metadata:
            allowed = " or ".join(metadata["choices"])
            fits = isinstance(value, str) and value in metadata["choices"]
        case _:
            allowed = f"a string of at most {MAX_TEXT_BYTES} bytes"
            fits = isinstance(value, str) and len(_bytes_of(value)) <= MAX_TEXT_BYTES
            if fits and not is_unicode(value):
                fits, allowed = False, f"{allowed}, without halves of surrogate pairs"
    if not fits:
        raise ValueError(wrong(where, name, value, allowed))
    if name == "socket_path" and value:
        return _socket_path(where, name, value)
    return float(value) if isinstance(default, float) else value


def _socket_path(where: str, name: str, path: str) -> str:
    """The path of the socket file; `unix:` before it is let through."""
    bare = path.removeprefix("unix://").removeprefix("unix:")
    if not bare.startswith("/") or "\0" in bare:
        raise ValueError(wrong(where, name, path, "an absolute path"))
    if len(_bytes_of(bare)) > MAX_SOCKET_BYTES:
        allowed = f"a path of at most {MAX_SOCKET_BYTES} bytes"
        raise ValueError(wrong(where, name, path, allowed))
    return bare


def _bytes_of(value: str) -> bytes:
    return value.encode(errors="surrogatepass")


def wrong(where: str, name: str, value: Any, allowed: str) -> str:
    """What to say of an option whose value is not allowed."""
    return f"{where}: {name} is {value!r}, allowed is {allowed}"
