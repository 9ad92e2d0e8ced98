"""`kvd status --watch`: the figures live, what moved since the last look beside what there is."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import click
from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvd.cli.exits import EXIT_FAILED, Failure
from kvd.cli.printing import duration, show_json, size
from kvd.cli.status import DEFAULT_INTERVAL, as_json
from kvd.observability.printable import printable
from kvd_proto.v1 import operator_pb2 as pb

SESSIONS_SHOWN = 20  # the rest are counted
NARROW = 80  # columns; with fewer there is no room for how each session copies
REST_OF_WIDE, REST_OF_NARROW = 12, 18  # lines of all else on the screen, down to 40 columns


@dataclass(frozen=True, slots=True)
class Glance:
    """A status, and when it was taken."""

    status: pb.StatusResponse
    at: float

    @property
    def found(self) -> tuple[int, int]:
        """Blocks that engines found, and looked for, as they told it."""
        told = [tenant.lookups for tenant in self.status.tenants]
        return sum(t.blocks_found for t in told), sum(t.blocks for t in told)

    @property
    def copied(self) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
        """Bytes stored and loaded, by session and rank."""
        ranks = [(s.session_id, r) for s in self.status.sessions for r in s.ranks]
        stored = {(session, r.mover_pid): r.bytes_stored for session, r in ranks}
        return stored, {(session, r.mover_pid): r.bytes_loaded for session, r in ranks}


@dataclass(frozen=True, slots=True)
class Moved:
    """What moved between two looks; None where it can't be told."""

    hit_ratio: float | None
    stored_per_s: float
    loaded_per_s: float
    evicted_per_s: float


def moved(before: Glance | None, now: Glance) -> Moved | None:
    """None at the first look, and where the daemon began anew in between."""
    if before is None or before.status.incarnation != now.status.incarnation:
        return None
    seconds = max(now.at - before.at, 1e-6)
    found, sought = (b - a for a, b in zip(before.found, now.found, strict=True))
    stored, loaded = (
        sum(max(0, n - was.get(rank, 0)) for rank, n in is_now.items()) / seconds
        for was, is_now in zip(before.copied, now.copied, strict=True)
    )
    evicted = max(0, now.status.blocks_evicted - before.status.blocks_evicted)
    return Moved(found / sought if sought > 0 else None, stored, loaded, evicted / seconds)


def watch(look: Callable[[], pb.StatusResponse], given: SimpleNamespace) -> int:
    """Glance again and again: on a terminal in place, else one line or one object each time.

    A terminal that can't move its cursor (TERM=dumb) has lines, too. A daemon that answered once
    may be away for a while: its restart is what somebody watches. The status is the last look's.
    """
    looks = _looks(look, given)
    console = Console()
    if given.json or not sys.stdout.isatty() or console.is_dumb_terminal:
        for now, since in looks:
            if isinstance(now, Failure):
                now.show()
            elif given.json:
                show_json(as_json(now.status))
            else:
                click.echo(line(now, since))
        return _status_of(now)
    with _terminated_in_order(), Live(screen=True, auto_refresh=False, console=console) as live:
        for now, since in looks:
            if isinstance(now, Failure):
                live.update(Text(printable(now.message)), refresh=True)
            else:
                live.update(screen(now, since, console.size), refresh=True)
    return _status_of(now)


class _Terminated(BaseException):
    """By SIGTERM."""


@contextlib.contextmanager
def _terminated_in_order() -> Iterator[None]:
    """SIGTERM ends the process once all in here is left: the terminal has its own screen again."""

    def end(_number: int, _frame: object) -> None:
        raise _Terminated

    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_DFL:  # somebody ignores it, or heeds it in a way of his own
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _status_of(last: Glance | Failure) -> int:
    return last.exit_code if isinstance(last, Failure) else 0


def _looks(
    look: Callable[[], pb.StatusResponse], given: SimpleNamespace
) -> Iterator[tuple[Glance, Moved | None] | tuple[Failure, None]]:
    """One after the other; a Failure where nobody answers any more, and raised of the first."""
    before: Glance | None = None
    taken = 0
    while True:
        try:
            now = Glance(look(), time.monotonic())
        except Failure as error:
            if before is None or error.exit_code != EXIT_FAILED:
                raise
            yield error, None
        else:
            yield now, moved(before, now)
            before = now
        taken += 1
        if taken == given.count:
            return
        time.sleep(given.every or DEFAULT_INTERVAL)


def _ratio(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _hits(now: Glance, since: Moved | None) -> str:
    found, sought = now.found
    of_all = _ratio(found / sought if sought else None)
    return f"{of_all} since the start, {_ratio(since.hit_ratio if since else None)} now"


def _used(pool: pb.PoolStatus) -> float:
    return 1 - pool.extents_free / pool.extents if pool.extents else 0.0


def line(now: Glance, since: Moved | None) -> str:
    """All in one line, for a file or a pipe."""
    status = now.status
    jobs = sum(s.jobs_in_flight for s in status.sessions)
    rates = since or Moved(None, 0, 0, 0)
    return (
        f"{status.state}  pool {_used(status.pool):.1%} used  blocks {status.pool.slots_ready}"
        f"  hits {_hits(now, since)}  store {rates.stored_per_s / 1e9:.3f} GB/s"
        f"  load {rates.loaded_per_s / 1e9:.3f} GB/s  evicted {rates.evicted_per_s:.0f}/s"
        f"  sessions {len(status.sessions)}  jobs {jobs}"
    )


def screen(now: Glance, since: Moved | None, room: ConsoleDimensions) -> Group:
    """The whole picture. `room`: columns and lines of the terminal, which cuts off what is more."""
    status, pool = now.status, now.status.pool
    rates = since or Moved(None, 0, 0, 0)
    head = Text()
    head.append(f"kvd {status.version}  ", "bold")
    head.append(status.state, "green" if status.state == "ready" else "yellow")
    head.append(f"  up {duration(status.uptime_seconds)}  policy {status.policy}")
    figures = Table.grid(padding=(0, 3))
    figures.add_row("pool", ProgressBar(1.0, _used(pool), width=30), _occupancy(pool))
    figures.add_row("hit ratio", _hits(now, since), "of blocks that engines looked up")
    stored, loaded = rates.stored_per_s / 1e9, rates.loaded_per_s / 1e9
    figures.add_row("copies", f"stored {stored:.2f} GB/s", f"loaded {loaded:.2f} GB/s")
    figures.add_row(
        "evicted", f"{rates.evicted_per_s:.0f} blocks/s", f"{status.blocks_evicted} since the start"
    )
    is_narrow = room.width < NARROW
    rest = REST_OF_NARROW if is_narrow else REST_OF_WIDE
    shown = max(1, min(SESSIONS_SHOWN, room.height - rest))
    sessions = _sessions(status, shown, is_narrow=is_narrow)
    parts: list[RenderableType] = [head, figures, Text(), sessions]
    if len(status.sessions) > shown:
        parts.append(Text(f"and {len(status.sessions) - shown} more sessions"))
    parts += [Text(), Text("Ctrl-C ends this", "dim")]
    return Group(*parts)


def _occupancy(pool: pb.PoolStatus) -> str:
    used = size((pool.extents - pool.extents_free) * pool.extent_bytes)
    return f"{used} of {size(pool.bytes)}, {pool.slots_ready} blocks"


def _sessions(status: pb.StatusResponse, shown: int, *, is_narrow: bool) -> Table | Text:
    if not status.sessions:
        return Text("no sessions")  # in a column of a narrow terminal it would be cut
    gap = 1 if is_narrow else 2
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
    copying = () if is_narrow else ("TRANSPORT", "COPIER", "JOBS", "LEASES")
    for name in ("SESSION", "ENGINE", "RANKS", *copying, "STATE"):
        gives_way = name in ("ENGINE", "TRANSPORT", "COPIER")  # the first is as long as it likes
        table.add_column(name, no_wrap=not gives_way, min_width=len(name))
    for session in status.sessions[:shown]:
        transports = sorted({rank.transport for rank in session.ranks})
        copiers = sorted({rank.copier for rank in session.ranks})
        copies = (
            ", ".join(transports) or "-",
            ", ".join(copiers) or "-",
            str(session.jobs_in_flight),
            str(session.leases),
        )
        table.add_row(
            str(session.session_id),
            Text(printable(session.engine_id), no_wrap=True, overflow="ellipsis"),
            f"{len(session.ranks)}/{session.world_size}",
            *(() if is_narrow else copies),
            "usable" if session.usable else "waiting for ranks",
        )
    return table
