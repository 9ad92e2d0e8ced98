"""`kvd status`: what a running daemon does, as a table, as JSON, or live."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import click
from google.protobuf.json_format import MessageToDict

from kvd.cli.calls import linked
from kvd.cli.options import AN_HOUR, Checked, daemon_options
from kvd.cli.printing import duration, show_json, show_lines, size, table
from kvd.config.values import number, whole_number
from kvd_proto.v1 import operator_pb2

WASTE_SHOWN = 0.01  # of extents; less is not worth a line
LEAST_INTERVAL = 0.2
DEFAULT_INTERVAL = 2.0
# Fields whose text may look like a number.
_TEXTS = frozenset({"engine_id", "tenant", "fingerprint", "version", "directory", "policy"}) | {
    "name",
    "driver_version",
}


@click.command("status")
@click.option("--watch", is_flag=True, help="Show it live, until Ctrl-C.")
@click.option(
    "--every",
    type=Checked(number(LEAST_INTERVAL, AN_HOUR), "seconds"),
    metavar="SECONDS",
    help=f"With --watch, how often to look (default {DEFAULT_INTERVAL:g}).",
)
@click.option(
    "--count",
    type=Checked(whole_number(1, 1 << 31), "count"),
    metavar="N",
    help="With --watch, end after N looks.",
)
@daemon_options
def command(**flags: Any) -> int:
    """Show what a running daemon does and holds."""
    given = SimpleNamespace(**flags)
    for flag, value in (("--every", given.every), ("--count", given.count)):
        if value is not None and not given.watch:
            raise click.UsageError(f"{flag} goes with --watch")
    if given.watch:
        from kvd.cli import watching  # noqa: PLC0415 - rich, for this alone

        return watching.watch(lambda: look(given), given)
    status = look(given)
    if given.json:
        show_json(as_json(status))
    else:
        show_lines(as_text(status))
    return 0


def look(given: SimpleNamespace) -> operator_pb2.StatusResponse:
    """The status of the daemon that the flags name."""
    with linked(given, "kvd status") as daemon:
        return whole_status(lambda request: daemon.operator.Status(request, **daemon.terms()))


def ask(path: str, timeout_s: float) -> operator_pb2.StatusResponse:
    """The same of the daemon on this socket."""
    return look(SimpleNamespace(socket=path, config=None, remote=None, timeout=timeout_s))


def whole_status(
    call: Callable[[operator_pb2.StatusRequest], operator_pb2.StatusResponse],
) -> operator_pb2.StatusResponse:
    """The first page, with the sessions and namespaces of all further ones added to it."""
    whole = page = call(operator_pb2.StatusRequest())
    sessions, namespaces = page.more_sessions, page.more_namespaces
    while sessions or namespaces:
        last_session = whole.sessions[-1].session_id if whole.sessions else 0
        last_namespace = whole.namespaces[-1].namespace_id if whole.namespaces else 0
        page = call(
            operator_pb2.StatusRequest(
                after_session_id=last_session, after_namespace_id=last_namespace
            )
        )
        whole.sessions.extend(page.sessions)
        whole.namespaces.extend(page.namespaces)
        sessions, namespaces = page.more_sessions, page.more_namespaces
    whole.more_sessions = whole.more_namespaces = False
    return whole


def as_json(status: operator_pb2.StatusResponse) -> dict[str, object]:
    """The message with its own field names, numbers as numbers, bytes as hex."""
    message = MessageToDict(
        status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    shown: dict[str, object] = {name: _numbers(value, name) for name, value in message.items()}
    shown["incarnation"] = status.incarnation.hex()
    return shown


def _numbers(value: object, name: str = "") -> object:
    """Protobuf writes 64-bit integers as strings: take them back where they are figures."""
    if isinstance(value, dict):
        if name == "fields":  # maps of texts have no order of their own, and two calls differ
            return dict(sorted(value.items()))
        if name == "differs":  # by a namespace's id
            return {k: value[k] for k in sorted(value, key=int)}
        return {k: _numbers(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_numbers(v, name) for v in value]
    if isinstance(value, str) and value.isdigit() and name not in _TEXTS:
        return int(value)
    return value


def as_text(status: operator_pb2.StatusResponse) -> Iterator[str]:
    """The lines of the readable form."""
    pool = status.pool
    yield (
        f"kvd {status.version}  {status.state}  pid {status.process_id}"
        f"  up {duration(status.uptime_seconds)}  policy {status.policy}"
    )
    used = pool.extents - pool.extents_free
    yield (
        f"pool {pool.directory}: {size(pool.bytes)} in {pool.extents} extents of"
        f" {size(pool.extent_bytes)}, {used} in use,"
        f" {size(pool.extents_free * pool.extent_bytes)} free for any group"
    )
    yield (
        f"blocks: {pool.slots_ready} ready ({size(pool.bytes_ready)}),"
        f" {pool.slots_reserved} reserved, {pool.slots_quarantined} quarantined,"
        f" {pool.slots_free} free in extents in use; {status.recovered_blocks} recovered at start"
    )
    why = f" ({pool.checksums_reason})" if pool.checksums_reason else ""
    yield f"checksums of the blocks' bytes: {'on' if pool.checksums else 'off'}{why}"
    if status.blocks_not_leased:
        yield (
            f"{status.blocks_not_leased} times a block was there and could not be held:"
            " leases had their share of the pool or quota (lease_share; docs/sizing.md)"
        )
    yield ""
    yield from table(
        ("SESSION", "ENGINE", "NAMESPACE", "UID", "RANKS", "JOBS", "LEASES", "STATE"),
        [
            (
                s.session_id,
                s.engine_id,
                s.namespace_id,
                s.uid,
                f"{len(s.ranks)}/{s.world_size}",
                s.jobs_in_flight,
                s.leases,
                _state(s),
            )
            for s in status.sessions
        ],
        "no sessions",
    )
    yield from _ranks(status)
    yield from _tiers(status)
    yield from _tenants_and_namespaces(status)


def _state(session: operator_pb2.SessionStatus) -> str:
    if session.usable:
        return "usable"
    return "waiting for movers' ends" if awaits_ends(session) else "waiting for ranks"


def awaits_ends(session: operator_pb2.SessionStatus) -> bool:
    """Whether one that is not usable lacks no rank: its movers are ending, or one of them. A
    session that has ended has no world size."""
    return len(session.ranks) >= session.world_size


def _ranks(status: operator_pb2.StatusResponse) -> Iterator[str]:
    rows = [
        (
            s.session_id,
            r.rank,
            r.mover_pid,
            r.worker_pid,
            r.transport,
            r.copier,
            f"{size(r.bytes_stored)} at {size(r.store_bytes_per_second)}/s",
            f"{size(r.bytes_loaded)} at {size(r.load_bytes_per_second)}/s",
        )
        for s in status.sessions
        for r in s.ranks
    ]
    if rows:
        yield ""
        yield from table(
            ("SESSION", "RANK", "MOVER", "WORKER", "TRANSPORT", "COPIER", "STORED", "LOADED"),
            rows,
            "",
        )
    yield from (
        f"  session {s.session_id} rank {r.rank} copies by {r.copier}: {r.copier_note}"
        for s in status.sessions
        for r in s.ranks
        if r.copier and r.copier_note  # an earlier daemon names no copier
    )
    yield from _gpus(status)


def _gpus(status: operator_pb2.StatusResponse) -> Iterator[str]:
    """The ranks whose memory lies on a GPU, and what is wrong with any."""
    ranks = [(s.session_id, r) for s in status.sessions for r in s.ranks if r.HasField("gpu")]
    rows = [
        (
            session,
            r.rank,
            r.gpu.uuid,
            size(r.gpu.context_bytes) if r.gpu.context_bytes else "unknown",
            size(r.gpu.registered_bytes),
            r.gpu.numa_node if r.gpu.numa_node >= 0 else "unknown",
        )
        for session, r in ranks
    ]
    if rows:
        yield ""
        heads = ("SESSION", "RANK", "GPU", "CONTEXT", "PINNED", "NODE")
        yield from table(heads, rows, "")
    for session, r in ranks:
        where = f"  WARNING: session {session} rank {r.rank}:"
        if r.gpu.unregistered_extents:
            yield (
                f"{where} {r.gpu.unregistered_extents} extents can't be pinned for the GPU, and"
                " their copies go through a buffer, slower; the log says why"
            )
        if r.gpu.staged_bytes:
            yield f"{where} {size(r.gpu.staged_bytes)} went through the buffer so far"


def how_it_flaps(tier: operator_pb2.TierStatus) -> str:
    """Of a tier that serves, after processes that ended soon."""
    often = f"{tier.short_lives} times in a row it served for less than a minute"
    return f"tier {tier.name} serves, but {often}: {tier.problem}"


def _tiers(status: operator_pb2.StatusResponse) -> Iterator[str]:
    rows = [
        (
            tier.name,
            "serving" if tier.serving else "away",
            f"{tier.blocks} ({size(tier.bytes)})",
            size(tier.capacity_bytes) if tier.capacity_bytes else "unknown",
            f"{tier.hits} of {tier.hits + tier.misses}",
            tier.blocks_promoted,
            tier.blocks_written,
            tier.blocks_dropped,
            tier.blocks_failed + tier.blocks_unwritten,
        )
        for tier in status.tiers
    ]
    if rows:
        yield ""
        heads = ("TIER", "STATE", "BLOCKS", "CAPACITY", "FOUND", "LOADED UP", "WRITTEN", "DROPPED")
        yield from table((*heads, "FAILED"), rows, "")
    for tier in status.tiers:
        if tier.problem and not tier.serving:
            yield f"  WARNING: tier {tier.name}: {tier.problem}"
        elif tier.short_lives > 1:
            yield f"  WARNING: {how_it_flaps(tier)}"
        yield from (f"  tier {tier.name}: {note}" for note in tier.notes)
        if tier.namespaces_undeleted or tier.all_undeleted:
            count = tier.namespaces_undeleted
            which = f"{count} namespace{'s' * (count > 1)}" if count else "every namespace"
            yield (
                f"  tier {tier.name}: has yet to delete what was cleared of {which}, and is not"
                " asked for it, nor given any of it, until that is done"
            )
        if tier.blocks_too_slow:
            yield (
                f"  tier {tier.name}: it was too slow for {tier.blocks_too_slow} blocks; an answer"
                f" takes {tier.answer_seconds:.3f} s now, a copy {tier.read_seconds:.3f} s"
            )


def _tenants_and_namespaces(status: operator_pb2.StatusResponse) -> Iterator[str]:
    yield ""
    yield from table(
        ("TENANT", "USED", "LEASED", "QUOTA", "FOUND"),
        [
            (
                t.tenant,
                size(t.bytes_used),
                size(t.bytes_leased),
                size(t.quota_bytes) if t.quota_bytes else "none",
                found(t.lookups),
            )
            for t in status.tenants
        ],
        "no tenants yet",
    )
    yield ""
    yield from namespace_lines(status)


def namespace_lines(status: operator_pb2.StatusResponse) -> Iterator[str]:
    """The namespaces, what they waste, and in what they differ."""
    yield from table(
        ("NAMESPACE", "TENANT", "MODEL", "KV DTYPE", "BLOCKS", "BYTES", "SESSIONS", "FOUND"),
        [
            (
                n.namespace_id,
                n.tenant,
                n.fields.get("model", ""),
                n.fields.get("kv_dtype", ""),
                n.blocks,
                size(n.bytes),
                n.sessions,
                found(n.lookups),
            )
            for n in status.namespaces
        ],
        "no namespaces yet",
    )
    yield from _waste(status)
    yield from _differences(status)


def found(told: operator_pb2.LookupFigures) -> str:
    """How much of what engines looked for they found."""
    if not told.blocks:
        return "not told yet"
    return f"{told.blocks_found / told.blocks:.1%} of {told.blocks} blocks"


def _waste(status: operator_pb2.StatusResponse) -> Iterator[str]:
    """Groups whose blocks leave much of their extents unused."""
    for namespace in status.namespaces:
        for group, share in enumerate(namespace.wasted_shares):
            if share > WASTE_SHOWN:
                yield (
                    f"  namespace {namespace.namespace_id} group {group}: {share:.1%} of its"
                    " extents is used by no block"
                )


def _differences(status: operator_pb2.StatusResponse) -> Iterator[str]:
    """Why namespaces of one tenant and model don't share; each pair once.

    The daemon compares each with a few others, the first ones. Of those that none of these names
    in turn one is shown: a thousand namespaces of one model have a thousand lines.
    """
    by_id = {n.namespace_id: n for n in status.namespaces}
    for one in status.namespaces:
        others = [by_id[two] for two in sorted(map(int, one.differs)) if two in by_id]
        shown = [other for other in others if one.namespace_id < other.namespace_id]
        unnamed = [n for n in others if str(one.namespace_id) not in n.differs]
        shown += [other for other in unnamed if other.namespace_id < one.namespace_id][:1]
        yield from (_difference(one, other) for other in shown)


def _difference(one: operator_pb2.NamespaceStatus, other: operator_pb2.NamespaceStatus) -> str:
    pairs = {
        name: (one.fields.get(name, ""), other.fields.get(name, ""))
        for name in sorted({*one.fields, *other.fields})
    }
    shown = [f"{name}: {a!r}, {b!r}" for name, (a, b) in pairs.items() if a != b]
    numbers = f"{one.namespace_id} and {other.namespace_id}"
    return f"  namespaces {numbers} differ in {'; '.join(shown)}"
