"""The doctor's checks: each looks at one thing, and says what is wrong with it and what to do."""

from __future__ import annotations

import asyncio
import os
import shlex
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvd import native
from kvd.cli.calls import holder_of, socket_gone
from kvd.cli.doctor.system import OWN_VERSION, System
from kvd.cli.pool_settings import pool_config
from kvd.cli.status import awaits_ends, how_it_flaps
from kvd.config.settings import Config
from kvd.control.access.descriptors import COMFORTABLE, LEAST
from kvd.control.http import try_to_listen
from kvd.control.sockets import SocketTaken, refuse_taken, require_bindable, require_group
from kvd.linux.own_directory import (
    CLOSED_FIX,
    NotTrustedError,
    Wanted,
    require_own,
    require_place,
)
from kvd.pool.capacity_check import (
    is_shared,
    measure,
    mount_command,
    require_memory_files,
    require_new_files,
    require_space,
    standing_of,
)
from kvd.pool.choices import settled
from kvd.pool.config import PoolConfig, PoolError
from kvd.pool.ownership import refuse_owned, require_apart, require_files, require_writable
from kvd.processes import extras
from kvd.tiers.kinds import check_options, require_library
from kvd.tiers.store import LibraryMissing, TierUnusable
from kvd_client.companion import is_something_else
from kvd_proto.v1 import operator_pb2 as pb

FAST_PREFAULT = (5, 14)  # kernels that have MADV_POPULATE_WRITE
PIDFD_OF_PEERS = (6, 5)
LEAST_PROCESSORS = 1.0
MAX_SESSIONS_SHOWN = 16  # of those that serve nothing
NOT_LEASED_SHARE = 0.01  # of the blocks that were loaded: less is two who met for a moment
LOOK_AT_WORKERS = (
    "look at the engine's workers: each must reach the socket (their logs say why not); where they"
    " say that the mover has ended, kvd's log says how: by SIGKILL, perhaps for want of memory"
)
LOOK_AT_TIERS = "docs/tiers.md; the log says more"
WAIT_FOR_ENDS = (
    "look again in 10 seconds: one that was killed and stays waits in the kernel, as for a GPU that"
    " hangs (dmesg, /proc/PID/stack); mend or reset that, or start the machine anew"
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Something that is wrong (`is_fault`), or could be better."""

    about: str
    problem: str
    fix: str
    is_fault: bool = True


@dataclass(frozen=True, slots=True)
class Subject:
    """What is looked at. `status`: of the running daemon, None where none answers."""

    system: System
    config: Config
    status: pb.StatusResponse | None = None
    why_no_answer: str = ""
    before_start: bool = False  # the daemon is to be started here, by this user

    @property
    def pool(self) -> PoolConfig:
        """The pool as the settings have it."""
        return pool_config(self.config)


def _shared_memory(on: Subject) -> Iterator[Diagnosis]:
    """The pool's directories: there, in memory, the daemon's alone, and large enough."""
    directory = on.pool.directory
    if not on.before_start and on.status is None and _is_elsewhere(on):
        return
    try:
        if on.before_start:
            require_apart(on.pool)
        if not directory.exists():
            yield from _absent(on)
            return
        if not directory.is_dir():
            fix = "name a directory as pool_directory"
            yield Diagnosis("shared memory", f"pool_directory {directory} is no directory", fix)
            return
        _require_place(on)
    except (PoolError, NotTrustedError) as error:
        yield _said("shared memory", error)
        return
    except OSError as error:
        if isinstance(error, PermissionError) and on.status is not None:
            return  # of a daemon's the pool is closed to all others: as it should be
        problem = f"pool_directory {directory} can't be used by uid {os.geteuid()}"
        fix = "name a directory that the daemon's user may write to, or ask as that user"
        yield Diagnosis("shared memory", f"{problem}: {error.strerror}", fix)
        return
    if is_shared(directory):
        yield Diagnosis(
            "shared memory",
            f"{directory} lies on a file system that others may fill",
            "mount a tmpfs of its own there (deploy/systemd/var-lib-kvd-pool.mount)",
            is_fault=False,
        )


def _is_elsewhere(on: Subject) -> bool:
    """Whether the socket's daemon, mute or killed, may have another pool than the settings say.

    It has one by its flags perhaps, and can't tell which. One that was killed has left its socket,
    and in its pool the lock. Who may not reach the socket needs no pool.
    """
    if _is_shut_out(on):
        return True
    try:
        has_left = on.config.companion_socket.exists()
        return _is_answered(on) or (has_left and not (on.pool.directory / "lock").exists())
    except OSError:  # what can't be looked at is said of the socket, or of the pool
        return False


def _require_place(on: Subject) -> None:
    """The directory is there: PoolError, NotTrustedError or OSError where it won't do."""
    directory = on.pool.directory
    # A daemon that runs has found its place good enough.
    is_measured = on.status is None and os.access(directory, os.R_OK | os.X_OK)
    pool = on.pool
    if is_measured:
        pool = settled(pool)
        require_memory_files(pool)
    if on.before_start:
        require_own(Wanted("pool_directory", directory))
        _require_extents_directory(pool)
        require_files(pool)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PoolError(f"pool_directory {directory} can't be written to: {CLOSED_FIX}")
        if not _is_answered(on):  # else it is that daemon's
            refuse_owned(pool)
    if is_measured:
        _require_room(pool)


def _require_extents_directory(pool: PoolConfig) -> None:
    """The same of the extents' own, where it is there; else it can be made."""
    place = pool.extents_directory
    if place is None:
        return
    above = standing_of(place)
    if above == place:
        require_own(Wanted("extents_directory", place))
        require_writable(place)
    elif not os.access(above, os.W_OK | os.X_OK):
        raise PoolError(
            f"extents_directory {place} can't be made by uid {os.geteuid()}: name a directory that"
            " the daemon's user may write to"
        )


def _require_room(pool: PoolConfig) -> None:
    require_new_files(pool)
    require_space(pool, measure(pool))


def _absent(on: Subject) -> Iterator[Diagnosis]:
    """The daemon makes a directory that is not there, where it can and where memory is."""
    if on.status is not None:
        return
    pool = on.pool
    above = standing_of(pool.directory)
    problem = f"pool_directory {pool.directory} is not there"
    made = f"mkdir -p {shlex.quote(str(pool.directory))}"
    fix = f"mount a tmpfs there: {made} && {mount_command(pool)}"
    if not above.is_dir():
        problem += f", and {above} is no directory"
        yield Diagnosis("shared memory", problem, "remove that, or name another pool_directory")
        return
    if on.before_start and not os.access(above, os.W_OK | os.X_OK):
        problem += f", and uid {os.geteuid()} can't make it in {above}"
        yield Diagnosis("shared memory", problem, fix)
        return
    try:
        pool = settled(pool)
        require_memory_files(pool)
    except PoolError:
        yield Diagnosis("shared memory", problem, fix)
        return
    try:
        if on.before_start:
            _require_extents_directory(pool)
        _require_room(pool)
    except (PoolError, NotTrustedError) as error:
        yield _said("shared memory", error)


def _said(about: str, error: Exception) -> Diagnosis:
    """What the daemon would say at its start; its fix comes last."""
    said = str(error)
    if isinstance(error, OSError) and error.filename:
        problem = f"{error.filename} can't be used by uid {os.geteuid()}: {error.strerror}"
        return Diagnosis(about, problem, "name another place, or ask as the daemon's user")
    for mark in (". ", "; ", ": "):
        problem, _, fix = said.partition(mark) if mark == ". " else said.rpartition(mark)
        if problem and fix:
            return Diagnosis(about, problem, fix)
    return Diagnosis(about, said, "docs/configuration.md")


def _socket(on: Subject) -> Iterator[Diagnosis]:
    """Who answers on the socket, and whether this user may ask."""
    config, directory = on.config, on.config.socket.parent
    if on.before_start:
        try:
            above = standing_of(directory)
            if above != directory:
                if not os.access(above, os.W_OK | os.X_OK):
                    problem = f"uid {os.geteuid()} can't make the socket's directory {directory}"
                    yield Diagnosis("socket", problem, "have it made, or choose another --socket")
            else:
                require_place(Wanted("the socket's directory", directory))
                refuse_taken(config.socket, config.companion_socket)
                require_bindable(config.socket)
                require_bindable(config.companion_socket)
            require_group(config.socket_group)
        except (SocketTaken, NotTrustedError, OSError) as error:
            yield _said("socket", error)
        return
    if on.status is not None:
        return
    if _may_not_enter(directory):
        owner = _owner(directory)
        problem = f"this user may not enter {directory}, which is {owner}"
        fix = "join that group (usermod -aG), or have the directory and the socket given to one of"
        yield Diagnosis("socket", problem, f"{fix} this user's: chgrp, and socket_group")
    elif is_something_else(str(config.socket)):
        problem = f"{config.socket} is there and is no socket"
        fix = "name the daemon's (--socket, KVD_SOCKET, --config), or remove what is in its place"
        yield Diagnosis("socket", problem, fix)
    elif not config.companion_socket.exists():
        yield _no_socket(on)
    elif _is_shut_out(on):
        problem = f"this user may not open {config.socket}, which is"
        problem += f" {_owner(config.companion_socket)}"
        yield Diagnosis("socket", problem, "join that group (usermod -aG), or set socket_group")
    elif config.socket.exists() and not os.access(config.socket, os.W_OK):
        yield Diagnosis(
            "socket",
            f"this user may not open {config.socket} now: the daemon keeps out for up to a minute"
            " who connects again and again",
            "stop what connects so often, and wait; the daemon's log says when (journalctl -u kvd)",
        )
    elif not config.socket.exists() and _is_answered(on):
        yield Diagnosis(
            "socket",
            socket_gone(str(config.socket)),
            "wait until it has begun; if it has, restart it (systemctl restart kvd)",
        )
    else:
        again = "start it again"
        # A start beside it would be refused.
        if _is_answered(on) or holder_of(on.pool.directory) is not None:
            again = "wait; if that does not help, restart it (systemctl restart kvd)"
        yield Diagnosis(
            "socket",
            on.why_no_answer or f"nobody answers on {config.socket}",
            f"look at the daemon's log (journalctl -u kvd) and {again}",
        )


def _no_socket(on: Subject) -> Diagnosis:
    """Of a daemon that has the settings' pool, and no socket there: it can't be started again."""
    if _is_answered(on):
        problem = f"a daemon answers on {on.config.socket}, and {on.config.companion_socket} is"
        problem += " not there: somebody removed it, or it is not mounted here"
        return Diagnosis(
            "socket",
            problem,
            "restart the daemon (systemctl restart kvd), or mount the directory of both",
        )
    problem = f"no daemon has its socket at {on.config.socket}"
    named = "name its socket (--socket, KVD_SOCKET, --config)"
    holder = holder_of(on.pool.directory)
    if holder is None:
        return Diagnosis("socket", problem, f"start it (systemctl start kvd), or {named}")
    problem += f", and {holder}"
    fix = f"wait until it has begun, or {named}; where it was removed, restart the daemon"
    return Diagnosis("socket", problem, f"{fix} (systemctl restart kvd)")


def _may_not_enter(directory: Path) -> bool:
    return not os.access(directory, os.X_OK) and directory.exists()


def _is_shut_out(on: Subject) -> bool:
    """Whether the socket is there, or its directory, and closed to this user: it is another's."""
    if on.before_start:
        return False
    companion = on.config.companion_socket
    if _may_not_enter(companion.parent):
        return True
    return companion.exists() and not os.access(companion, os.W_OK)


def _is_answered(on: Subject) -> bool:
    """Whether a daemon answers on the socket that another is to have."""
    try:
        refuse_taken(on.config.socket, on.config.companion_socket)
    except SocketTaken:
        return True
    except OSError:  # said of the socket
        return False
    return False


def _pages(on: Subject) -> Iterator[Diagnosis]:
    """Whether the HTTP pages could be served where they are to be."""
    config = on.config
    if not on.before_start or not config.http_port or _is_answered(on):
        return
    try:
        asyncio.run(try_to_listen(config.http_address, config.http_port))
    except OSError as error:
        yield _said("HTTP", error)


def _tiers(on: Subject) -> Iterator[Diagnosis]:
    """Whether kvd's own stores would take their options, and have their libraries.

    A tier that can't start serves nothing.
    """
    for at, rule in enumerate(on.config.tiers if on.before_start else ()):
        try:
            check_options(rule.store, rule.options)
        except TierUnusable as error:
            problem = f"tier {rule.name} could not start: {error}"
            yield Diagnosis("tiers", problem, f"correct options of tiers[{at}] (docs/tiers.md)")
            continue
        try:
            require_library(rule.store)
        except LibraryMissing as error:
            problem = f"tier {rule.name} could not start: {error.problem}"
            yield Diagnosis("tiers", problem, error.fix)


def _owner(path: Path) -> str:
    found = path.stat()
    return f"uid {found.st_uid}'s, group {found.st_gid}, mode {stat.S_IMODE(found.st_mode):04o}"


def _processes(on: Subject) -> Iterator[Diagnosis]:
    """Limits of the daemon's process, and of its control group on processors."""
    limit = on.system.descriptors
    if 0 <= limit < max(COMFORTABLE, LEAST):
        yield Diagnosis(
            "limits",
            f"the daemon may have {limit} file descriptors, and wants {COMFORTABLE}",
            "LimitNOFILE= in the unit, ulimit -n, --ulimit nofile= of a container",
            is_fault=limit < LEAST,
        )
    allowed = on.system.processors_allowed
    if allowed is not None and allowed < LEAST_PROCESSORS:
        yield Diagnosis(
            "limits",
            f"the control group has {allowed:.2f} of a processor: copies and answers wait for it",
            "raise CPUQuota=, or limits.cpu of the pod, to 1 at least; best set none",
        )


def _machine(on: Subject) -> Iterator[Diagnosis]:
    """Processor, kernel and the library that copies."""
    system = on.system
    if system.processor != "x86_64":
        problem = f"this is {system.processor}, and kvd's tables need x86-64 (ADR 0003)"
        yield Diagnosis("machine", problem, "run it on x86-64")
    for least, what in (
        (FAST_PREFAULT, "prefault the pool fast"),
        (PIDFD_OF_PEERS, "name callers by pidfd"),
    ):
        if system.kernel < least:
            had = ".".join(map(str, system.kernel))
            need = ".".join(map(str, least))
            problem = f"Linux {had} can't {what}"
            yield Diagnosis("machine", problem, f"Linux {need} or later", is_fault=False)
    if system.native_problem:
        yield Diagnosis(
            "machine",
            f"copies go by numpy, which is slower: {system.native_problem}",
            _native_fix(system.native_problem),
            is_fault=False,
        )


def _native_fix(problem: str) -> str:
    """How movers come by the library; pip alone leaves the same release as it is, or as cached."""
    if problem.startswith(f"{native.VARIABLE} "):
        return f"set {native.VARIABLE} to auto, or take it out of the environment"
    again = "pip install --force-reinstall --no-deps --no-cache-dir"
    return f"install a C compiler and then kvd again ({again}), or a wheel built where one is"


def _nodes(on: Subject) -> Iterator[Diagnosis]:
    """NUMA: whether the pool fits the memory of each node."""
    nodes = on.system.node_bytes
    share = on.config.pool_bytes / max(1, len(nodes))
    if len(nodes) > 1 and any(share > node * 0.9 for node in nodes):
        yield Diagnosis(
            "NUMA",
            f"each of {len(nodes)} nodes gets {share / (1 << 30):.1f} GiB of the pool, and the"
            f" smallest has {min(nodes) / (1 << 30):.1f} GiB: rows will lie far from their ranks",
            "lower pool_bytes, or run the engines on the nodes that have the memory",
            is_fault=False,
        )


def _gpus(on: Subject) -> Iterator[Diagnosis]:
    """Whether movers could reach GPUs, where there are any."""
    system = on.system
    if not system.gpus:
        if system.has_gpu_driver:
            yield Diagnosis(
                "GPU",
                "the kernel drives NVIDIA GPUs, but no /dev/nvidia* is visible here",
                "--gpus all, gpu.enabled of the chart, or kvd-gpu.conf of the unit (docs/gpu.md)",
            )
        return
    if system.gpus_closed:
        problem = f"this user may not open {', '.join(system.gpus_closed)}"
        yield Diagnosis(
            "GPU", problem, "join the group of the device files (video), or DeviceAllow="
        )
    if system.cuda_problem:
        problem = f"libcuda can't be loaded: {system.cuda_problem}"
        fix = "install the driver's libraries, or let NVIDIA's container toolkit mount them"
        yield Diagnosis("GPU", problem, fix)
    if not system.has_cupy:
        yield Diagnosis(
            "GPU",
            "CuPy is not installed, so ranks on GPUs are refused",
            f"{extras.install('cuda12')}, or '.[cuda13]' by the driver's version",
        )
    locked = system.locked_bytes
    if 0 <= locked < on.config.pool_bytes:
        yield Diagnosis(
            "memlock",
            f"a process may lock {locked >> 10} KiB, and pinning the pool for a GPU takes"
            f" {on.config.pool_bytes >> 20} MiB",
            "LimitMEMLOCK=infinity in the unit, --ulimit memlock=-1 of a container",
        )


def _versions(on: Subject) -> Iterator[Diagnosis]:
    """Whether daemon, client and this command are of one release."""
    client = on.system.client_version
    if client is not None and client != OWN_VERSION:
        yield Diagnosis(
            "versions",
            f"kvd-client {client} is installed beside kvd {OWN_VERSION}",
            f"in the source tree of kvd {OWN_VERSION}, pip install ./client .",
        )
    if on.status is not None and on.status.version != OWN_VERSION:
        yield Diagnosis(
            "versions",
            f"the daemon that runs is {on.status.version}, and {OWN_VERSION} is installed",
            "restart it (systemctl restart kvd): until then it starts no process for new ranks",
        )


def _ending(session: pb.SessionStatus) -> Diagnosis:
    """Of a session that waits for its movers, or one of them, to end."""
    whose = f" of {session.engine_id}" if session.engine_id else ", which has ended,"
    movers = ", ".join(str(rank.mover_pid) for rank in session.ranks)
    return Diagnosis(
        "daemon",
        f"session {session.session_id}{whose} waits for an end among its movers (pid {movers})",
        WAIT_FOR_ENDS,
    )


def _unusable(sessions: Sequence[pb.SessionStatus], is_draining: bool) -> Iterator[Diagnosis]:
    """Of sessions that serve nothing: the first ones, and how many more there are."""
    for session in sessions[:MAX_SESSIONS_SHOWN]:
        if awaits_ends(session):
            yield _ending(session)
            continue
        had = f"{len(session.ranks)} of {session.world_size} ranks"
        yield Diagnosis(
            "daemon",
            f"session {session.session_id} of {session.engine_id} has {had}",
            "kvd undrain: while it drains no rank comes in" if is_draining else LOOK_AT_WORKERS,
        )
    more = len(sessions) - MAX_SESSIONS_SHOWN
    if more > 0:
        yield Diagnosis(
            "daemon",
            f"{more} more sessions serve nothing, as these",
            "kvd status names every session",
        )


def _service(on: Subject) -> Iterator[Diagnosis]:
    """What the running daemon says of itself."""
    status = on.status
    if status is None:
        return
    is_draining = status.state == "draining"
    if is_draining:
        yield Diagnosis("daemon", "it drains: it takes no work", "kvd undrain")
    yield from _unusable([each for each in status.sessions if not each.usable], is_draining)
    for session in status.sessions:
        for note in sorted({r.copier_note for r in session.ranks if r.copier_note}):
            yield Diagnosis("daemon", f"ranks of {session.engine_id} copy slower", note, False)
    if status.blocks_not_leased > status.blocks_loaded * NOT_LEASED_SHARE:
        yield Diagnosis(
            "daemon",
            f"{status.blocks_not_leased} times a block was there and could not be held for a"
            " request: prompts are long for the share of the pool or quota that leases may have",
            "a larger pool_bytes or quota, or a larger lease_share, by reload (docs/sizing.md)",
            is_fault=False,
        )
    for tier in status.tiers:
        if not tier.serving:
            why = tier.problem or "its process is being started"
            problem = f"tier {tier.name} is not served: {why}"
            yield Diagnosis("tiers", problem, LOOK_AT_TIERS)
        elif tier.short_lives > 1:
            yield Diagnosis("tiers", how_it_flaps(tier), LOOK_AT_TIERS)
        for note in tier.notes:
            problem = f"tier {tier.name}: {note}"
            yield Diagnosis("tiers", problem, LOOK_AT_TIERS, is_fault=False)


CHECKS: tuple[Callable[[Subject], Iterator[Diagnosis]], ...] = (
    _socket,
    _shared_memory,
    _pages,
    _tiers,
    _processes,
    _machine,
    _nodes,
    _gpus,
    _versions,
    _service,
)


def findings(on: Subject) -> list[Diagnosis]:
    """All that is wrong or could be better."""
    return [found for check in CHECKS for found in check(on)]
