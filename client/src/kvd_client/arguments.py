"""What an engine's author gives by mistake, refused where it is given.

Later it would fail on a thread of the client's own, and the engine would go on without a cache.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from numbers import Real


def _wrong(name: str, value: object, needed: str) -> ValueError:
    return ValueError(f"{name} is {value!r:.64} ({type(value).__name__}), needed is {needed}")


def require_text(name: str, text: object, most_bytes: int) -> None:
    """ValueError, naming the field, for what no message can carry as text, or no daemon takes."""
    if not isinstance(text, str):
        raise _wrong(name, text, "str")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{name} is no Unicode text: {text[:64]!a}") from None
    if size > most_bytes:
        raise ValueError(f"{name} has {size} bytes, allowed are at most {most_bytes}")


def require_whole(name: str, number: object, least: int, most: int) -> None:
    """ValueError, naming the field, for what is no whole number from `least` to `most`.

    What a division gave is a float, whole or not: no message carries it.
    """
    try:
        whole = operator.index(number)  # type: ignore[arg-type]
    except TypeError:  # also of an array or tensor of several
        raise _wrong(name, number, "a whole number") from None
    if not least <= whole <= most:
        raise ValueError(f"{name} is {whole}, allowed are {least}..{most}")


def require_seconds(name: str, seconds: object) -> None:
    """ValueError, naming the field, for what is no number of seconds from 0 on."""
    if not isinstance(seconds, Real) or not float(seconds) >= 0:
        raise _wrong(name, seconds, "a number of seconds, 0 or more")


def require_kind(name: str, value: object, kind: type) -> None:
    """ValueError, naming the field, for what is of another type."""
    if not isinstance(value, kind):
        raise _wrong(name, value, kind.__name__)


def require_list(name: str, values: object) -> None:
    """ValueError, naming the field, for what is no list, such as the one thing that goes in it."""
    if not isinstance(values, Sequence):
        raise _wrong(name, values, "a list or tuple")


def require_path(name: str, path: object) -> str:
    """A file's path as text. ValueError, naming the field, for what is none."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str):
        raise _wrong(name, path, "the path of the daemon's socket")
    return text
