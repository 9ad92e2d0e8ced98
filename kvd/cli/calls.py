"""How a command finds its daemon and calls it, and what it says where that fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc

from kvd import config
from kvd.cli import remote
from kvd.cli.exits import EXIT_FAILED, EXIT_MISUSED, EXIT_REFUSED, Failure, is_of_output
from kvd.cli.options import FILES
from kvd.config.settings import ConfigError, socket_of
from kvd.config.values import FIT_FOR_A_SOCKET, is_too_long_for_a_socket
from kvd.linux.proc import locker_of
from kvd_client.backoff import describe
from kvd_client.companion import CompanionRefused, is_something_else
from kvd_client.daemon import greeted
from kvd_proto.v1 import companion_pb2, operator_pb2_grpc

MORE_TIME = 300.0  # more than other calls: millions of blocks take seconds

# Answers of a daemon that heard the call and will not do it.
_REFUSALS = frozenset(
    {
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


def place_of(given: SimpleNamespace) -> str:
    """The socket, or the gateway, that the flags, the environment and the file name."""
    if getattr(given, "remote", None):
        for name in ("socket", "config"):
            if getattr(given, name, None) is not None:
                raise Failure(f"--{name} and --remote name two daemons: give one", EXIT_MISUSED)
        return str(given.remote)
    for name in (*FILES, "server_name"):
        if getattr(given, name, None) is not None and hasattr(given, "remote"):
            flag = name.replace("_", "-")
            raise Failure(f"--{flag} goes with --remote HOST:PORT", EXIT_MISUSED)
    try:
        socket = socket_of(given.socket, os.environ, given.config)
    except ConfigError as error:
        raise Failure(str(error), EXIT_MISUSED) from None
    if is_too_long_for_a_socket(os.fsencode(socket)):
        raise Failure(f"socket is {socket!r}; it must be a path {FIT_FOR_A_SOCKET}", EXIT_MISUSED)
    return socket


def socket_gone(place: str) -> str:
    """What is wrong where a daemon's companion socket is there, and its socket isn't."""
    return f"a daemon runs, and {place} is not there: it begins, or somebody removed it"


def holder_of(pool: Path) -> str | None:
    """Who has the pool while nobody answers on the socket; None: nobody, or this user can't see."""
    with suppress(OSError):
        owner = locker_of(pool / "lock")
        if owner is not None:
            return (
                f"pid {owner} has the pool {pool}: it begins, or its socket is elsewhere, or was"
                " removed"
            )
    return None


def _who_begins(file: str | None) -> str:
    """What to add where nobody answers: a daemon that reads its pool has no socket yet."""
    with suppress(ConfigError):
        holder = holder_of(config.load({"config": file}, os.environ).pool_directory)
        return f"; {holder}" if holder else ""
    return ""


@contextmanager
def said_plainly(place: str, file: str | None = None) -> Iterator[None]:
    """What goes wrong with a call becomes one line and an exit code.

    `file`: the configuration file that was named.
    """
    try:
        yield
    except PermissionError:
        raise Failure(
            f"this user may not open {place}: be in the group that owns it, or root"
        ) from None
    except TimeoutError:
        raise Failure(
            f"the daemon on {place} does not answer in time: it is stopped, hangs, or has too much"
            " to do; see its log, or wait longer (--timeout)"
        ) from None
    except (OSError, CompanionRefused) as error:
        if isinstance(error, OSError) and is_of_output(error):
            raise
        if is_something_else(place):
            said = f"{place} is there and is no socket: name the daemon's"
            raise Failure(f"{said} (--socket, KVD_SOCKET, --config)") from None
        begins = ""
        if isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
            begins = _who_begins(file)
        raise Failure(f"no daemon answers on {place}: {error}{begins}") from None
    except grpc.RpcError as error:
        if error.code() in _REFUSALS:
            said = f"the daemon on {place} refused: {describe(error)}"
            raise Failure(said, EXIT_REFUSED) from None
        said = f"the daemon on {place} did not answer: {describe(error)}"
        if os.path.lexists(f"{place}.companion") and not os.path.lexists(place):
            said = (
                f"{socket_gone(place)}; wait until it has begun, and if it has, restart it"
                " (systemctl restart kvd)"
            )
        raise Failure(said, EXIT_FAILED) from None


@dataclass(frozen=True, slots=True)
class Link:
    """A daemon that was found. `terms` go with each call."""

    channel: grpc.Channel
    operator: operator_pb2_grpc.OperatorServiceStub
    metadata: tuple[tuple[str, str], ...]
    timeout_s: float

    def terms(self, more_seconds: float = 0.0) -> dict[str, Any]:
        """How long a call may take, and who calls."""
        return {"timeout": self.timeout_s + more_seconds, "metadata": self.metadata}


@contextmanager
def linked(given: SimpleNamespace, program: str) -> Iterator[Link]:
    """The daemon that the flags name; Failure for all that goes wrong with it."""
    place = place_of(given)
    with said_plainly(place, getattr(given, "config", None)):
        if getattr(given, "remote", None):
            with remote.channel(given) as channel:
                stub = operator_pb2_grpc.OperatorServiceStub(channel)
                yield Link(channel, stub, (), given.timeout)
            return
        with greeted(place, companion_pb2.PEER_ROLE_TOOL, program, given.timeout) as daemon:
            stub = operator_pb2_grpc.OperatorServiceStub(daemon.channel)
            yield Link(daemon.channel, stub, daemon.metadata, given.timeout)
