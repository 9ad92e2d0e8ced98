"""The daemon's settings: flags over KVD_* environment over a TOML file over defaults.

One table names every setting; flags, variables, keys of the file and `--print-config` all
follow from it. A wrong value is refused with its name, where it came from, and what would do.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvd.config.tenant_rule import TenantRule
from kvd.config.tiers import REUSE, TierFieldError, TierRule, read_tiers
from kvd.config.values import (
    number,
    one_of,
    read_address,
    read_checksums,
    read_extent_size,
    read_gpu_size,
    read_group,
    read_groups,
    read_mode,
    read_optional_path,
    read_path,
    read_quota,
    read_size,
    read_socket_path,
    read_switch,
    read_threshold,
    read_users,
    whole_number,
)
from kvd.core.keys import TenantId
from kvd.core.policy import POLICY_NAMES
from kvd.linux.plain_file import NotPlainError, read_plain
from kvd.pool.config import MAX_POOL_BYTES, Checksums, chosen_extent_bytes

MIB = 1 << 20
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


class ConfigError(Exception):
    """A setting can't be used; the message names it and the fix.

    log_format: in which a daemon says so, as far as that can be told where settings are wrong.
    """

    log_format = LOG_FORMATS[0]


@dataclass(frozen=True, slots=True)
class Config:
    """The daemon's settings, read and checked."""

    socket: Path
    socket_mode: int
    socket_group: str
    pool_directory: Path
    extents_directory: Path | None
    pool_bytes: int
    extent_bytes: int | None  # None: by the pool's size
    prefault_threads: int
    any_filesystem: bool
    payload_checksums: Checksums
    policy: str
    store_threshold: int
    sessions_per_user: int
    lease_ttl_ms: int
    lease_share: float
    private_grace_seconds: float
    submit_deadline_seconds: float
    copy_deadline_seconds: float
    gpu_context_bytes: int
    gpu_staging_bytes: int
    http_address: str
    http_port: int
    status_page: bool
    log_level: str
    log_format: str
    drain_seconds: float
    operators: tuple[int, ...]
    root_operates: bool
    tenants: tuple[TenantRule, ...]
    tiers: tuple[TierRule, ...] = ()
    # Keys of the file that say otherwise, and what counts before them: "policy (flag --policy)".
    overruled: tuple[str, ...] = field(default=(), compare=False)

    @property
    def new_extent_bytes(self) -> int:
        """The extents' size that a new pool gets."""
        return self.extent_bytes or chosen_extent_bytes(self.pool_bytes)

    @property
    def companion_socket(self) -> Path:
        return Path(f"{self.socket}.companion")


# -- the table ------------------------------------------------------------------------------------

_POOL_DIRECTORY = "/var/lib/kvd/pool"  # a tmpfs of its own, which nobody else can fill


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

    @property
    def is_switch(self) -> bool:
        """Whether its flag without a value means yes."""
        return self.read in _SWITCHES

    @property
    def default_text(self) -> str:
        """The default as a person writes it."""
        return _toml(self.default).strip('"') or "empty"

    @property
    def metavar(self) -> str:
        """What kind of value it takes, in a word."""
        if self.name.endswith("_seconds"):
            return "SECONDS"
        if self.name.endswith("_bytes"):
            return "SIZE"
        by_default = {int: "N", float: "SHARE"}.get(type(self.default), "NAME")
        return _METAVARS.get(self.read, by_default)


_METAVARS: dict[Callable[[Any], Any], str] = {
    read_socket_path: "PATH",
    read_path: "PATH",
    read_optional_path: "PATH",
    read_mode: "MODE",
    read_group: "GROUP",
    read_address: "ADDRESS",
    read_users: "USERS",
    read_switch: "true|false",
    read_checksums: "auto|on|off",
}

_SWITCHES = (read_switch, read_checksums)

SETTINGS: tuple[Setting, ...] = (
    Setting("socket", "/run/kvd/kvd.sock", read_socket_path, "Unix socket of the gRPC API"),
    Setting("socket_mode", "0660", read_mode, "mode of the socket files, octal"),
    Setting(
        "socket_group",
        "",
        read_group,
        "group that owns the socket files, by name or number; empty: the daemon's",
    ),
    Setting(
        "pool_directory",
        _POOL_DIRECTORY,
        read_path,
        "directory of the pool; give it a tmpfs of its own",
    ),
    Setting(
        "extents_directory",
        "",
        read_optional_path,
        "directory of the extents, on a tmpfs or hugetlbfs; empty: the pool's directory",
    ),
    Setting("pool_bytes", "1GiB", read_size, 'size of the pool: bytes, "4GiB", "60%" of memory'),
    Setting(
        "extent_bytes",
        "auto",
        read_extent_size,
        "size of one extent; auto: 4 to 64 MiB, by the pool's size",
    ),
    Setting(
        "prefault_threads",
        2,
        whole_number(1, 64),
        "threads that touch a new pool's memory at its start",
    ),
    Setting("any_filesystem", False, read_switch, "accept a pool directory that is not on a tmpfs"),
    Setting(
        "payload_checksums",
        "auto",
        read_checksums,
        "keep a checksum of every block's bytes and compare it at each load: auto, on, off;"
        " auto: where it costs almost nothing, or the pool has them",
    ),
    Setting("policy", "lru", one_of(*POLICY_NAMES), "eviction policy: " + ", ".join(POLICY_NAMES)),
    Setting(
        "store_threshold",
        1,
        read_threshold,
        "store a block only when it is offered for the n-th time; 1: at once",
    ),
    Setting(
        "sessions_per_user",
        32,
        whole_number(1, 128),
        "most sessions of one user at a time; each may take 4 MiB for a message",
    ),
    Setting(
        "lease_ttl_ms",
        2000,
        whole_number(100, 600_000),
        "how long a lease lasts, in milliseconds, unless an engine's step renews it",
    ),
    Setting(
        "lease_share",
        0.25,
        number(0.01, 1.0),
        "largest share of a tenant's quota (without one: of the pool) for leases and hand-offs,"
        " but at least one block of each group;"
        " half of it for hand-offs",
    ),
    Setting(
        "private_grace_seconds",
        60.0,
        number(0, 86400),
        "how long blocks that only one engine can use outlive that engine's session",
    ),
    Setting(
        "submit_deadline_seconds",
        30.0,
        number(0.1, 3600),
        "how long a job waits for every rank to be ready; then it is revoked",
    ),
    Setting(
        "copy_deadline_seconds",
        30.0,
        number(0.1, 3600),
        "how long a copy may then take; after that its mover is ended",
    ),
    Setting(
        "gpu_context_bytes",
        "640MiB",
        read_gpu_size(0, 16 << 30),
        "GPU memory that a mover is expected to take, unless less was measured on that GPU",
    ),
    Setting(
        "gpu_staging_bytes",
        "16MiB",
        read_gpu_size(MIB, 1 << 30),
        "pinned buffer of a mover for each direction, used for extents that can't be pinned",
    ),
    Setting(
        "http_address",
        "127.0.0.1",
        read_address,
        'address of the HTTP pages; "::" is all of IPv6 and IPv4, "0.0.0.0" all of IPv4',
    ),
    Setting(
        "http_port",
        9470,
        whole_number(0, 65535),
        "port of /metrics, /status, /healthz and /readyz; 0: none",
    ),
    Setting(
        "status_page",
        True,
        read_switch,
        "serve /status, a page that shows the figures in a browser",
    ),
    Setting(
        "log_level",
        "info",
        one_of(*LOG_LEVELS),
        "least level that is logged: " + ", ".join(LOG_LEVELS),
    ),
    Setting("log_format", "text", one_of(*LOG_FORMATS), "text for people, json for collectors"),
    Setting(
        "drain_seconds",
        10.0,
        number(0, 600),
        "how long the daemon waits for copies under way when it stops",
    ),
    Setting(
        "operators",
        [],
        read_users,
        "operators beside root and the daemon's user, by number or name",
    ),
    Setting(
        "root_operates",
        True,
        read_switch,
        "root is an operator; false where engines run as root, as in many containers",
    ),
)
_BY_NAME = {setting.name: setting for setting in SETTINGS}
_TABLES = ("tenants", "tiers")  # keys of the file that are no settings
DEFAULT_FILE = Path("/etc/kvd/kvd.toml")
MAX_TENANTS = 4096  # each is in every snapshot of figures, and in an operator's status
MAX_CONFIG_BYTES = 1 << 20  # 4,096 tenants take a third of it

# Kubernetes sets these for a Service whose name begins with kvd.
_OF_A_SERVICE = re.compile(r"KVD(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_\w+)")
_OTHER_VARIABLES = frozenset({"KVD_CONFIG", "KVD_NATIVE", "KVD_SOURCE"})
_LIKE = 0.85  # how alike two names must be for one to be a slip of the other


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """KVD_ variables that mean nothing here; ConfigError for one that looks like a slip."""
    known = {setting.variable for setting in SETTINGS} | _OTHER_VARIABLES
    unknown = []
    for name, value in sorted(environment.items()):
        if not name.startswith("KVD_") or name in known:
            continue
        if _OF_A_SERVICE.fullmatch(name) or (name.endswith("_PORT") and "://" in value):
            continue
        if near := difflib.get_close_matches(name, known, 1, _LIKE):
            raise ConfigError(
                f"the variable {name} means nothing to kvd; {near[0]} would. Rename or unset it"
            )
        unknown.append(name)
    return unknown


def load(
    flags: Mapping[str, Any], environment: Mapping[str, str], *, standing: Config | None = None
) -> Config:
    """The settings in force; ConfigError names what is wrong.

    `flags`: by name, each setting's and `config`, the file's; None is as if it were not there.
    `standing`: those that a daemon serves with, and its pool is of their size; whoever it serves
    waits, so a pipe is refused, and a file that says nothing.
    """
    written: dict[str, Any] = {}
    try:
        unknown_variables(environment)
        file = file_of(flags.get("config"), environment)
        if file:
            written = _parse_file(file, again=standing is not None)
            _check_keys(file, written)
        return _config_of(flags, environment, written, standing)
    except ConfigError as error:
        with contextlib.suppress(ConfigError):  # of the format itself
            error.log_format = _read_setting(_BY_NAME["log_format"], flags, environment, written)
        raise


def _config_of(
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    written: Mapping[str, Any],
    standing: Config | None,
) -> Config:
    values: dict[str, Any] = {
        setting.name: _read_setting(setting, flags, environment, written) for setting in SETTINGS
    }
    try:
        tiers = read_tiers(written.get("tiers", []))
    except TierFieldError as error:
        raise ConfigError(f"{error} (configuration file)") from None
    pool_bytes = standing.pool_bytes if standing else values["pool_bytes"]
    tenants = _tenants(written.get("tenants", {}), pool_bytes)
    overruled = tuple(
        f"{setting.name} ({_given(setting, flags, environment, {})[1]})"
        for setting in SETTINGS
        if _is_overruled(setting, written, values[setting.name])
    )
    config = Config(**values, tenants=tenants, tiers=tiers, overruled=overruled)
    _check_sizes(config)
    return config


def file_of(named: str | None, environment: Mapping[str, str]) -> Path | None:
    """The configuration file: the one named, the variable's, or the default where it is there."""
    if file := _named("config", named, environment):
        return Path(file)
    try:
        return DEFAULT_FILE if DEFAULT_FILE.exists() else None
    except OSError:  # of a folder that is closed to this user: who reads it says so
        return DEFAULT_FILE


def _named(name: str, by_flag: str | None, environment: Mapping[str, str]) -> str | None:
    """What the flag names, else the variable; an empty one is a slip, not the default."""
    path = environment.get(f"KVD_{name.upper()}") if by_flag is None else by_flag
    if path == "":
        source = f"variable KVD_{name.upper()}" if by_flag is None else f"flag --{name}"
        raise ConfigError(f"{name} is '' ({source}); it must be a path, or be left out")
    return path


def socket_of(named: str | None, environment: Mapping[str, str], file: str | None = None) -> str:
    """Where a command looks for its daemon: its flag, KVD_SOCKET, the file's, or the default.

    ConfigError for a file that was named and can't be used; the default one is passed over then.
    """
    socket = _BY_NAME["socket"]
    if given := _named("socket", named, environment):
        return given
    path = file_of(file, environment)
    if path is None:
        return str(socket.default)
    try:
        written = _parse_file(path)
        _check_keys(path, written)
        return str(_read_setting(socket, {}, {}, written))
    except ConfigError:
        if path == DEFAULT_FILE:
            return str(socket.default)
        raise


def _read_setting(
    setting: Setting,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    written: Mapping[str, Any],
) -> Any:
    given, source = _given(setting, flags, environment, written)
    try:
        return setting.read(given)
    except ValueError as error:
        raise ConfigError(f"{setting.name} is {given!r} ({source}); it must be {error}") from None


def _given(
    setting: Setting,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    written: Mapping[str, Any],
) -> tuple[Any, str]:
    by_flag = flags.get(setting.name)
    if by_flag is not None:
        return by_flag, f"flag {setting.flag}"
    if setting.variable in environment:
        return environment[setting.variable], f"variable {setting.variable}"
    if setting.name in written:
        return written[setting.name], "configuration file"
    return setting.default, "default"


def _is_overruled(setting: Setting, written: Mapping[str, Any], value: Any) -> bool:
    """Whether the file says something else than the value that counts."""
    if setting.name not in written:
        return False
    try:
        return bool(setting.read(written[setting.name]) != value)
    except ValueError:  # what it says can't be, and does not count
        return True


def _parse_file(path: Path, *, again: bool = False) -> dict[str, Any]:
    try:
        if again:  # a pipe is empty by now, or never ends
            content = read_plain(path, MAX_CONFIG_BYTES)
        else:
            with path.open("rb") as file:
                content = file.read(MAX_CONFIG_BYTES + 1)
        if len(content) > MAX_CONFIG_BYTES:
            raise ConfigError(
                f"configuration file {path} has more than {MAX_CONFIG_BYTES} bytes: make it smaller"
            )
        if content.startswith(codecs.BOM_UTF8):  # nobody sees it, and TOML allows none
            raise ConfigError(
                f"configuration file {path} begins with a byte order mark: save it as UTF-8"
                " without one"
            )
        written = tomllib.loads(content.decode())
    except NotPlainError as error:
        raise ConfigError(
            f"configuration file {path} {error}; put a plain file there, or restart kvd with one"
        ) from None
    except OSError as error:
        raise ConfigError(f"configuration file {path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not its encoding, too deep, too many digits
        raise ConfigError(f"configuration file {path} is no TOML: {error}") from None
    if again and not written:  # who writes it may have emptied it, and be about to go on
        raise ConfigError(
            f"configuration file {path} says nothing: write it and reload again, or restart kvd"
            " to take all back"
        )
    return written


def _check_keys(path: Path, written: Mapping[str, Any]) -> None:
    for name in written:
        if name not in _BY_NAME and name not in _TABLES:
            raise ConfigError(
                f"configuration file {path} has an unknown key {name!r}; {_what_would_do(name)}"
            )


def _what_would_do(unknown: str) -> str:
    """The key that somebody meant who wrote an unknown one, or all that there are."""
    keys = [*_BY_NAME, *_TABLES]
    near = difflib.get_close_matches(unknown.lower().replace("-", "_"), keys, 1, _LIKE)
    return f"{near[0]!r} would do" if near else "known: " + ", ".join(keys)


def _tenants(written: Any, pool_bytes: int) -> tuple[TenantRule, ...]:
    if not isinstance(written, dict):
        raise ConfigError("tenants must be tables such as [tenants.acme]")
    if len(written) > MAX_TENANTS:
        raise ConfigError(
            f"tenants has {len(written)} tables; at most {MAX_TENANTS}: let users share tenants"
        )
    return tuple(_tenant(name, rule, pool_bytes) for name, rule in written.items())


_TENANT_KEYS = ("uids", "gids", "quota")


def _tenant(name: str, rule: Any, pool_bytes: int) -> TenantRule:
    where = f"tenants.{name}"
    if not isinstance(rule, dict):
        raise ConfigError(f"{where} must be a table: [tenants.{name}]")
    for key in rule:
        if key not in _TENANT_KEYS:
            known = ", ".join(_TENANT_KEYS)
            raise ConfigError(f"{where} has an unknown key {key!r}; known: {known}")
    if not name or len(name.encode()) > 256:
        raise ConfigError(f"{where}: a tenant's name has 1 to 256 bytes")
    readers: dict[str, Callable[[Any], Any]] = {
        "uids": read_users,
        "gids": read_groups,
        "quota": lambda v: read_quota(v, pool_bytes),
    }
    values: dict[str, Any] = {"uids": (), "gids": (), "quota": 0}
    for key, given in rule.items():
        try:
            values[key] = readers[key](given)
        except ValueError as error:
            raise ConfigError(f"{where}.{key} is {given!r}; it must be {error}") from None
    uids, gids, quota = values["uids"], values["gids"], values["quota"]
    if not uids and not gids:
        raise ConfigError(f"{where} covers nobody; give uids or gids")
    return TenantRule(TenantId(name), frozenset(uids), frozenset(gids), quota)


def _check_sizes(config: Config) -> None:
    extent_bytes = config.new_extent_bytes
    if extent_bytes < 4096 or extent_bytes % 4096:
        raise ConfigError(f"extent_bytes is {extent_bytes}; it must be a positive multiple of 4096")
    if config.pool_bytes < extent_bytes:
        raise ConfigError(
            f"pool_bytes is {config.pool_bytes}, less than one extent of {extent_bytes};"
            " raise pool_bytes or lower extent_bytes"
        )
    if config.pool_bytes > MAX_POOL_BYTES:
        raise ConfigError(
            f"pool_bytes is {config.pool_bytes}; it must be less than 8 TiB, at most"
            f" {MAX_POOL_BYTES}: lower it, or run a second daemon with a pool of its own"
        )


def as_toml(config: Config) -> str:
    """The settings in force, as a file that says the same."""
    lines = []
    for setting in SETTINGS:
        value = getattr(config, setting.name)
        if value is None:
            value = setting.default
        if setting.name == "socket_mode":
            value = f"{value:04o}"
        lines += [f"# {setting.meaning}", f"{setting.name} = {_toml(value)}"]
    for rule in config.tenants:
        lines += ["", f"[tenants.{_toml(str(rule.tenant))}]"]
        lines += [f"uids = {_toml(sorted(rule.uids))}", f"gids = {_toml(sorted(rule.gids))}"]
        lines.append(f"quota = {rule.quota_bytes}")
    for tier in config.tiers:
        said = {name: getattr(tier, name) for name in TierRule.__dataclass_fields__}
        if tier.write != REUSE:
            del said["reuse"]
        lines += ["", "[[tiers]]", *(f"{name} = {_toml(value)}" for name, value in said.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    # Of what JSON leaves as it is, TOML takes all but this.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
