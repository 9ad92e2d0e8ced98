"""Reads a store's table of options: what each may be, and what is said where it is not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from kvd.linux.plain_file import MAX_PEM_BYTES, NotPlainError, read_plain
from kvd.tiers.store import OptionValue, TierOptions, TierUnusable

# Gives the value as the store wants it. ValueError: what it must be.
Reader = Callable[[OptionValue], Any]
# Of every size in the configuration, in small letters.
UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "kib": 1 << 10,
    "m": 10**6, "mb": 10**6, "mib": 1 << 20,
    "g": 10**9, "gb": 10**9, "gib": 1 << 30,
    "t": 10**12, "tb": 10**12, "tib": 1 << 40,
}  # fmt: skip
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([a-zA-Z]*)")


def read_options(
    options: TierOptions, readers: Mapping[str, Reader], needed: Iterable[str] = ()
) -> dict[str, Any]:
    """The values of a table. TierUnusable names the option that is wrong, and what it must be."""
    unknown = sorted(set(options) - set(readers))
    if unknown:
        raise TierUnusable(f"{unknown[0]}: no such option; known: {', '.join(sorted(readers))}")
    for name in needed:
        if name not in options:
            raise TierUnusable(f"{name}: is needed")
    values: dict[str, Any] = {}
    for name, given in options.items():
        try:
            values[name] = readers[name](given)
        except ValueError as error:
            raise TierUnusable(f"{name}: {given!r} is not {error}") from None
    return values


def text(pattern: str, wanted: str) -> Reader:
    """A text that the whole pattern fits."""

    def read(given: OptionValue) -> str:
        if not isinstance(given, str) or not re.fullmatch(pattern, given):
            raise ValueError(wanted)
        return given

    return read


def texts(pattern: str, wanted: str) -> Reader:
    """One or several of them, none twice."""
    one = text(pattern, wanted)

    def read(given: OptionValue) -> tuple[str, ...]:
        several = given if isinstance(given, list) else [given]
        if not several or len(set(map(str, several))) < len(several):
            raise ValueError(f"{wanted}; at least one, none twice")
        return tuple(one(each) for each in several)

    return read


def whole(least: int, most: int) -> Reader:
    """A whole number in these bounds."""

    def read(given: OptionValue) -> int:
        if not isinstance(given, int) or isinstance(given, bool) or not least <= given <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return given

    return read


def seconds(least: float, most: float) -> Reader:
    """A number of seconds in these bounds."""

    def read(given: OptionValue) -> float:
        if (
            not isinstance(given, int | float)
            or isinstance(given, bool)
            or not least <= given <= most  # as they are: a float can't have every whole number
        ):
            raise ValueError(f"a number of seconds from {least:g} to {most:g}")
        return float(given)

    return read


def bytes_of(given: OptionValue) -> int | None:
    """Bytes from a whole number, or from "4MiB"; None where it is no size."""
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    match = _SIZE.fullmatch(given.strip()) if isinstance(given, str) else None
    if match is None or match[2].lower() not in UNITS:
        return None
    return int(float(match[1]) * UNITS[match[2].lower()])


def size(least: int, most: int) -> Reader:
    """A whole number of bytes, or one with a unit: 4MiB."""

    def read(given: OptionValue) -> int:
        value = bytes_of(given)
        if value is None or not least <= value <= most:
            raise ValueError(f"a size from {least} to {most} bytes, such as 4MiB")
        return value

    return read


def switch(given: OptionValue) -> bool:
    """True or false."""
    if not isinstance(given, bool):
        raise ValueError("true or false")  # noqa: TRY004 - one kind of error for a wrong value
    return given


def path(given: OptionValue) -> Path:
    """A file by its absolute path."""
    if not isinstance(given, str) or not given.startswith("/") or "\0" in given:
        raise ValueError("an absolute path, without a zero byte")
    return Path(given)


def content_of(name: str, file: Path) -> bytes:
    """What the file holds that an option names. TierUnusable says why it can't be read."""
    try:
        return read_plain(file, MAX_PEM_BYTES)
    except OSError as error:
        raise TierUnusable(f"{name}: {file} can't be read: {error.strerror}") from None
    except NotPlainError as error:
        raise TierUnusable(f"{name}: {file} {error}; name another") from None


def secret_of(name: str, file: Path) -> str:
    """The one line of a file with a secret. It is never part of a message."""
    try:
        secret = content_of(name, file).decode().strip("\r\n")
    except UnicodeDecodeError:
        raise TierUnusable(f"{name}: {file} is no text") from None
    if not secret or "\n" in secret:
        raise TierUnusable(f"{name}: {file} must have the secret alone, in one line")
    return secret
