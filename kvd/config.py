"""The daemon's settings: flags over KVD_* environment over a TOML file over defaults.

One table names every setting; flags, variables, keys of the file and `--print-config` all
follow from it. A wrong value is refused with its name, where it came from, and what would do.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvd.control.tenants import TenantRule
from kvd.core.keys import TenantId
from kvd.pool.space import memory_limit

MIB = 1 << 20
POLICIES = ("lru", "arc", "s3fifo")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "kib": 1 << 10,
    "m": 10**6, "mb": 10**6, "mib": 1 << 20,
    "g": 10**9, "gb": 10**9, "gib": 1 << 30,
    "t": 10**12, "tb": 10**12, "tib": 1 << 40,
}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*|%)")


class ConfigError(Exception):
    """A setting can't be used; the message names it and the fix."""


@dataclass(frozen=True, slots=True)
class Config:
    """Validated settings."""

    socket: Path
    socket_mode: int
    socket_group: str
    pool_directory: Path
    pool_bytes: int
    extent_bytes: int
    prefault_threads: int
    any_filesystem: bool
    policy: str
    store_threshold: int
    lease_ttl_ms: int
    lease_share: float
    submit_deadline_seconds: float
    copy_deadline_seconds: float
    http_address: str
    http_port: int
    log_level: str
    log_format: str
    drain_seconds: float
    operators: tuple[int, ...]
    tenants: tuple[TenantRule, ...]

    @property
    def companion_socket(self) -> Path:
        return self.socket.with_name(self.socket.name + ".companion")


# -- how a value is read ------------------------------------------------------------------------


def parse_size(value: Any, whole: Callable[[], int]) -> int:
    """Bytes from a number, "4GiB" or "60%" of `whole()`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(str(value).strip())
    if match is None:
        raise ValueError('a size: bytes, "4GiB", or a share of memory such as "60%"')
    number, unit = float(match[1]), match[2].lower()
    if unit == "%":
        if not 0 < number <= 100:
            raise ValueError("a share over 0% and up to 100%")
        return int(whole() * number / 100)
    if unit not in _UNITS:
        raise ValueError("a size in B, KiB, MiB, GiB, TiB (or kB, MB, GB, TB)")
    return int(number * _UNITS[unit])


def memory_bytes() -> int:
    """What "100%" means: the machine's memory, or the cgroup's limit where that is less."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
            return min(total, memory_limit() or total)
    raise ConfigError("/proc/meminfo has no MemTotal; give sizes in bytes")


def _size(value: Any) -> int:
    return parse_size(value, memory_bytes)


def _number(least: float, most: float) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        wanted = f"a number from {least:g} to {most:g}"
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ValueError(wanted) from None
        if not least <= number <= most:
            raise ValueError(wanted)
        return number

    return read


def _whole(least: int, most: int) -> Callable[[Any], int]:
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


def _one_of(*names: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in names:
            raise ValueError("one of " + ", ".join(names))
        return str(value)

    return read


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if str(value).lower() not in known:
        raise ValueError("true or false")
    return known[str(value).lower()]


def _mode(value: Any) -> int:
    try:
        mode = int(str(value), 8)
    except ValueError:
        raise ValueError('an octal mode in quotes, such as "0660"') from None
    if not 0o600 <= mode <= 0o777:
        raise ValueError('an octal mode from "0600" to "0777"')
    return mode


def _path(value: Any) -> Path:
    path = Path(str(value))
    if not path.is_absolute():
        raise ValueError("an absolute path")
    return path


def _socket_path(value: Any) -> Path:
    path = _path(value)
    if len(str(path)) + len(".companion") > 107:  # sun_path of unix(7), less its final zero
        raise ValueError("a path of at most 97 bytes: the kernel's limit for Unix sockets")
    return path


def _uids(value: Any) -> tuple[int, ...]:
    parts = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(parts, list):
        raise ValueError(  # noqa: TRY004 - one kind of error for every wrong value
            "a list of numeric user ids"
        )
    return tuple(_whole(0, 2**32 - 2)(part) for part in parts)


_POOL_DIRECTORY = "/dev/shm/kvd"  # noqa: S108 - the pool makes it with mode 0700

# -- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: flag --like-this, variable KVD_LIKE_THIS, key like_this of the file."""

    name: str
    default: Any
    read: Callable[[Any], Any]
    meaning: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "KVD_" + self.name.upper()


SETTINGS: tuple[Setting, ...] = (
    Setting("socket", "/run/kvd/kvd.sock", _socket_path, "Unix socket of the gRPC API"),
    Setting("socket_mode", "0660", _mode, "mode of the socket files, octal"),
    Setting("socket_group", "", str, "group that owns the socket files; empty: the daemon's"),
    Setting("pool_directory", _POOL_DIRECTORY, _path, "directory on a tmpfs that holds the pool"),
    Setting("pool_bytes", "1GiB", _size, 'size of the pool: bytes, "4GiB", "60%%" of memory'),
    Setting("extent_bytes", "64MiB", _size, "size of one extent, the unit of a row"),
    Setting("prefault_threads", 2, _whole(1, 64), "threads that touch a new pool's memory"),
    Setting("any_filesystem", False, _flag, "take a pool directory that is not on a tmpfs"),
    Setting("policy", "lru", _one_of(*POLICIES), "eviction policy: " + ", ".join(POLICIES)),
    Setting("store_threshold", 1, _whole(1, 255), "store a block on its n-th sighting"),
    Setting("lease_ttl_ms", 2000, _whole(100, 600_000), "life of a lease that no step renews"),
    Setting("lease_share", 0.25, _number(0.01, 1.0), "most of a quota for leases and hand-offs"),
    Setting("submit_deadline_seconds", 30.0, _number(0.1, 3600), "longest wait for a rank's ready"),
    Setting("copy_deadline_seconds", 30.0, _number(0.1, 3600), "after it, before a mover is ended"),
    Setting("http_address", "127.0.0.1", str, "address of /metrics, /healthz, /readyz"),
    Setting("http_port", 9470, _whole(0, 65535), "port of the same; 0 turns it off"),
    Setting("log_level", "info", _one_of(*LOG_LEVELS), "one of " + ", ".join(LOG_LEVELS)),
    Setting("log_format", "text", _one_of(*LOG_FORMATS), "text for people, json for collectors"),
    Setting("drain_seconds", 10.0, _number(0, 600), "longest wait for copies when stopping"),
    Setting("operators", [], _uids, "user ids that may operate, beside root and the daemon's"),
)
_BY_NAME = {setting.name: setting for setting in SETTINGS}
_DEFAULT_FILE = Path("/etc/kvd/kvd.toml")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser a flag for each setting."""
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings and tenants")
    parser.add_argument(
        "--print-config", action="store_true", help="print the settings in force and exit"
    )
    for setting in SETTINGS:
        shown = str(setting.default).replace("%", "%%")
        parser.add_argument(
            setting.flag,
            dest=setting.name,
            metavar="VALUE",
            help=f"{setting.meaning} (default {shown or 'empty'})",
        )


def load(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Config:
    """The settings in force; ConfigError names what is wrong."""
    file = arguments.config or environment.get("KVD_CONFIG")
    if file is None and _DEFAULT_FILE.exists():
        file = str(_DEFAULT_FILE)
    written = _read_file(Path(file)) if file else {}
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        given, source = _given(setting, arguments, environment, written)
        try:
            values[setting.name] = setting.read(given)
        except ValueError as error:
            raise ConfigError(
                f"{setting.name} is {given!r} ({source}); it must be {error}"
            ) from None
    config = Config(**values, tenants=_tenants(written.get("tenants", {}), values["pool_bytes"]))
    _check_sizes(config)
    return config


def _given(
    setting: Setting,
    arguments: argparse.Namespace,
    environment: Mapping[str, str],
    written: Mapping[str, Any],
) -> tuple[Any, str]:
    by_flag = getattr(arguments, setting.name, None)
    if by_flag is not None:
        return by_flag, f"flag {setting.flag}"
    if setting.variable in environment:
        return environment[setting.variable], f"variable {setting.variable}"
    if setting.name in written:
        return written[setting.name], "configuration file"
    return setting.default, "default"


def _read_file(path: Path) -> dict[str, Any]:
    try:
        written = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"configuration file {path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} is no TOML: {error}") from None
    for name in written:
        if name not in _BY_NAME and name != "tenants":
            known = ", ".join([*_BY_NAME, "tenants"])
            raise ConfigError(
                f"configuration file {path} has an unknown key {name!r}; known: {known}"
            )
    return written


def _tenants(written: Any, pool_bytes: int) -> tuple[TenantRule, ...]:
    if not isinstance(written, dict):
        raise ConfigError("tenants must be tables such as [tenants.acme]")
    return tuple(_tenant(name, rule, pool_bytes) for name, rule in written.items())


def _tenant(name: str, rule: Any, pool_bytes: int) -> TenantRule:
    where = f"tenants.{name}"
    if not isinstance(rule, dict) or not rule.keys() <= {"uids", "gids", "quota"}:
        raise ConfigError(f"{where} may have uids, gids and quota, nothing else")
    if not name or len(name.encode()) > 256:
        raise ConfigError(f"{where}: a tenant's name has 1 to 256 bytes")
    try:
        uids, gids = _uids(rule.get("uids", [])), _uids(rule.get("gids", []))
        quota = parse_size(rule.get("quota", 0), lambda: pool_bytes)
    except ValueError as error:
        raise ConfigError(f"{where} has a value that can't be; it must be {error}") from None
    if not uids and not gids:
        raise ConfigError(f"{where} covers nobody; give uids or gids")
    if quota < 0:
        raise ConfigError(f"{where}.quota is negative; 0 means none")
    return TenantRule(TenantId(name), frozenset(uids), frozenset(gids), quota)


def _check_sizes(config: Config) -> None:
    if config.extent_bytes < 4096 or config.extent_bytes % 4096:
        raise ConfigError(
            f"extent_bytes is {config.extent_bytes}; it must be a positive multiple of 4096"
        )
    if config.pool_bytes < config.extent_bytes:
        raise ConfigError(
            f"pool_bytes is {config.pool_bytes}, less than one extent of {config.extent_bytes};"
            " raise pool_bytes or lower extent_bytes"
        )


def as_toml(config: Config) -> str:
    """The settings in force, as a file that says the same."""
    lines = []
    for setting in SETTINGS:
        value = getattr(config, setting.name)
        if setting.name == "socket_mode":
            value = f"{value:04o}"
        lines += [f"# {setting.meaning.replace('%%', '%')}", f"{setting.name} = {_toml(value)}"]
    for rule in config.tenants:
        lines += ["", f"[tenants.{_toml(str(rule.tenant))}]"]
        lines += [f"uids = {_toml(sorted(rule.uids))}", f"gids = {_toml(sorted(rule.gids))}"]
        lines.append(f"quota = {rule.quota_bytes}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
