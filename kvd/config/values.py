"""How the value of a setting is read, whether it came as text or from TOML.

Each reader returns the value or raises ValueError, which says what would do: "it must be ...".
"""

from __future__ import annotations

import grp
import ipaddress
import os
import pwd
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvd.linux import proc
from kvd.linux.control_groups import memory_limit
from kvd.pool.config import Checksums
from kvd.tiers.options import UNITS

LEAST_QUOTA_BYTES = 4096  # no block takes less
MOST_SIZE_BYTES = 1 << 62
HIGHEST_PORT = 65535
# The kernel's limits, less a name with its slash and the final zero: files lie below.
MOST_PATH_BYTES = 4096 - 257
MOST_NAME_BYTES = 255
MOST_SOCKET_BYTES = 107  # sun_path of unix(7), less its final zero
_COMPANION = b".companion"  # what the name of the socket beside it has more
FIT_FOR_A_SOCKET = (
    f"of at most {MOST_SOCKET_BYTES - len(_COMPANION)} bytes: the kernel's limit for Unix sockets"
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*|%)")


def parse_size(value: Any, whole: Callable[[], int] | None, of: str = "memory") -> int:
    """Bytes from a number, "4GiB" or "60%" of `whole()`, which is `of` what; None: no share."""
    if isinstance(value, int) and not isinstance(value, bool):
        return _countable(value)
    match = _SIZE.fullmatch(str(value).strip())
    if match is None or (whole is None and match[2] == "%"):
        share = f', or a share of {of} such as "60%"' if whole else ""
        raise ValueError(f'a size: bytes, "4GiB"{share}')
    number, unit = float(match[1]), match[2].lower()
    if unit == "%" and whole is not None:
        if not 0 < number <= 100:
            raise ValueError("a share over 0% and up to 100%")
        return int(whole() * number / 100)
    if unit not in UNITS:
        raise ValueError("a size in B, KiB, MiB, GiB, TiB (or kB, MB, GB, TB)")
    return _countable(number * UNITS[unit])


def read_quota(value: Any, pool_bytes: int) -> int:
    """Bytes of a hard quota, 0 for none."""
    quota = parse_size(value, lambda: pool_bytes, "the pool")
    if quota < 0 or 0 < quota < LEAST_QUOTA_BYTES:
        raise ValueError(
            'a size of 4KiB or more, for no block is smaller; 0 for none; or a share such as "25%"'
        )
    return quota


def _countable(size: float) -> int:
    if size > MOST_SIZE_BYTES:  # an infinite one, too
        raise ValueError("a size of at most 4194304TiB")
    return int(size)


def memory_bytes() -> int:
    """What "100%" means: the machine's memory, or the cgroup's limit where that is less."""
    total = proc.memory_bytes("MemTotal")
    if total is None:
        raise ValueError("in bytes: /proc/meminfo has no MemTotal")
    return min(total, memory_limit() or total)


def read_size(value: Any) -> int:
    return parse_size(value, memory_bytes)


def read_extent_size(value: Any) -> int | None:
    """None where it is for the daemon to choose."""
    if value == "auto":
        return None
    try:
        size = read_size(value)
    except ValueError as error:
        raise ValueError(f'{error}, or "auto"') from None
    if size < 1:
        raise ValueError('a positive multiple of 4096 bytes, such as "16MiB", or "auto"')
    return size


def read_gpu_size(least: int, most: int) -> Callable[[Any], int]:
    """Bytes of a range, as a whole number of 4 KiB; no share, for of which memory would it be."""

    def read(value: Any) -> int:
        wanted = f'a multiple of 4KiB from {least} to {most} bytes, such as "64MiB"'
        try:
            size = parse_size(value, None)
        except ValueError:
            raise ValueError(wanted) from None
        if not least <= size <= most or size % 4096:
            raise ValueError(wanted)
        return size

    return read


def number(least: float, most: float) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        wanted = f"a number from {least:g} to {most:g}"
        if isinstance(value, bool):  # for Python, 1 or 0
            raise ValueError(wanted)  # noqa: TRY004 - one kind of error for every wrong value
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(wanted) from None
        if not least <= number <= most:
            raise ValueError(wanted)
        return number

    return read


def whole_number(least: int, most: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        wanted = f"a whole number from {least} to {most}"
        try:
            number = int(str(value))
        except ValueError:
            raise ValueError(wanted) from None
        if not least <= number <= most:
            raise ValueError(wanted)
        return number

    return read


read_threshold = whole_number(1, 255)  # sightings, as far as the reuse filter counts them


def one_of(*names: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in names:
            raise ValueError("one of " + ", ".join(names))
        return str(value)

    return read


def read_switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if str(value).lower() not in known:
        raise ValueError("true or false")
    return known[str(value).lower()]


def read_checksums(value: Any) -> Checksums:
    if value in tuple(Checksums):
        return Checksums(value)
    try:
        return Checksums.ON if read_switch(value) else Checksums.OFF
    except ValueError:
        raise ValueError('"auto", "on" or "off"') from None


def read_mode(value: Any) -> int:
    try:
        mode = int(str(value), 8)
    except ValueError:
        raise ValueError('an octal mode in quotes, such as "0660"') from None
    if not 0o600 <= mode <= 0o777:
        raise ValueError('an octal mode from "0600" to "0777"')
    return mode


def is_utf8(text: str) -> bool:
    """Whether it came as UTF-8: bytes of a command line that did not are in it as surrogates."""
    return text.encode(errors="replace").decode() == text


def read_path(value: Any) -> Path:
    text = str(value)
    path = Path(text)
    if not path.is_absolute():
        raise ValueError("an absolute path")
    if "\0" in text or not is_utf8(text):
        raise ValueError("an absolute path in UTF-8, without a zero byte")
    longest_name = max(len(os.fsencode(name)) for name in path.parts)
    if len(os.fsencode(path)) > MOST_PATH_BYTES or longest_name > MOST_NAME_BYTES:
        raise ValueError(
            f"a path of at most {MOST_PATH_BYTES} bytes, and of {MOST_NAME_BYTES} between two"
            " slashes: the kernel's limits, with room for files below it"
        )
    return path


def read_optional_path(value: Any) -> Path | None:
    """None where the setting is empty."""
    if not str(value):
        return None
    try:
        return read_path(value)
    except ValueError as error:
        raise ValueError(f"{error}, or empty") from None


def read_socket_path(value: Any) -> Path:
    path = read_path(value)
    if path.name in ("", "..") or str(value).endswith("/"):
        raise ValueError("the absolute path of a file, with a name after its last slash")
    if is_too_long_for_a_socket(os.fsencode(path)):
        raise ValueError(f"a path {FIT_FOR_A_SOCKET}")
    return path


def is_too_long_for_a_socket(path: bytes) -> bool:
    """Whether the kernel would refuse it, or that of the companion socket beside it."""
    return len(path + _COMPANION) > MOST_SOCKET_BYTES


def _read_ids(kind: str, database: str, look_up: Callable[[str], int]) -> Callable[[Any], Any]:
    """A list of ids, or text with commas or spaces between them, each a number or a name."""

    def read_one(part: Any) -> int:
        text = str(part)
        if isinstance(part, int) or (text.isascii() and text.lstrip("-").isdigit()):
            return whole_number(0, 2**32 - 2)(part)
        try:
            return look_up(text)
        except (KeyError, ValueError):  # ValueError: bytes that no name has
            raise ValueError(
                f"{kind}s by number, or by a name of this system (getent {database});"
                f" it has no {kind} {text!r}"
            ) from None

    def read(value: Any) -> tuple[int, ...]:
        parts = value.replace(",", " ").split() if isinstance(value, str) else value
        if not isinstance(parts, list):
            raise ValueError(  # noqa: TRY004 - one kind of error for every wrong value
                f"a list of {kind}s, by number or name"
            )
        return tuple(read_one(part) for part in parts)

    return read


# Both may ask a directory service, which takes its time.
read_users = _read_ids("user", "passwd", lambda name: pwd.getpwnam(name).pw_uid)
read_groups = _read_ids("group", "group", lambda name: grp.getgrnam(name).gr_gid)


def read_group(value: Any) -> str:
    name = str(value)
    try:
        if name:
            gid_of(name)
    except (KeyError, ValueError):  # ValueError: bytes that no name has
        raise ValueError("a group of this system (getent group), a number, or empty") from None
    return name


def gid_of(group: str) -> int:
    """The number of a group that is given by name or number. KeyError: there is none."""
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        if group.isascii() and group.isdigit() and int(group) < 2**32 - 1:
            return int(group)
        raise


# Underscores and other letters than English ones do occur; what is looked up may fail all the same.
_HOST_NAME = re.compile(r"[\w-]+(?:\.[\w-]+)*\.?")
_LIKE_IPV4 = re.compile(r"[\d.]+")
MOST_HOST_NAME_BYTES = 253  # RFC 1035, without its length bytes


def read_address(value: Any) -> str:
    """An address, or what may be a host's name: whether it is one is known once it is used."""
    if not isinstance(value, str) or not (_is_address(value) or _may_be_host(value)):
        raise ValueError(
            "an address or host name, without a port or brackets;"
            " :: means every one of this machine, 0.0.0.0 those of IPv4"
        )
    return value


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _may_be_host(text: str) -> bool:
    return (
        len(text.encode(errors="replace")) <= MOST_HOST_NAME_BYTES
        and _HOST_NAME.fullmatch(text) is not None
        and _LIKE_IPV4.fullmatch(text) is None
    )


_PLACE = re.compile(r"(?:\[[0-9A-Fa-f:.]+(?:%[^\s\]]+)?\]|[^\s:/\[\]]+):([0-9]{1,5})")


def place(least_port: int) -> Callable[[Any], str]:
    """HOST:PORT, of which gRPC itself takes any number, and cuts it down to 16 bits."""

    def read(value: Any) -> str:
        found = _PLACE.fullmatch(str(value))
        if found is None or not least_port <= int(found[1]) <= HIGHEST_PORT or not is_utf8(value):
            raise ValueError(
                f"HOST:PORT with a port from {least_port} to {HIGHEST_PORT}; an address of IPv6"
                " stands in brackets, as [::]:9471"
            )
        return str(value)

    return read
