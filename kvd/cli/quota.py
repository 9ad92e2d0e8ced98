"""`kvd quota`: shows tenants' quotas, or sets one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import click

from kvd.cli.calls import MORE_TIME, Link, linked
from kvd.cli.options import WORDS, daemon_options
from kvd.cli.printing import show_json, show_lines, size, table
from kvd.config.values import read_quota
from kvd_proto.v1 import operator_pb2 as pb


@click.command("quota")
@click.argument("tenant", required=False, type=WORDS)
@click.argument("quota", required=False, metavar="[SIZE|none]")
@daemon_options
def command(**flags: Any) -> int:
    """Show the tenants' quotas, or give TENANT another one.

    SIZE is in bytes, such as 8GiB, or a share of the pool, such as 25%; none takes the quota away.
    It holds at once, until the daemon starts again, or reloads its settings and finds another
    quota in the file than before. `tenants` in the configuration file lasts.
    """
    given = SimpleNamespace(**flags)
    if given.tenant is not None and given.quota is None:
        raise click.UsageError("give the tenant's quota too: a size, or none")
    with linked(given, "kvd quota") as daemon:
        status = daemon.operator.Status(pb.StatusRequest(), **daemon.terms())
        if given.tenant is None:
            _show(status, as_json=given.json)
            return 0
        quota_bytes = _read(given.quota, status.pool.bytes)
        evicted = _set(daemon, given.tenant, quota_bytes)
    if given.json:
        show_json({"tenant": given.tenant, "quota_bytes": quota_bytes, "blocks_evicted": evicted})
    else:
        said = size(quota_bytes) if quota_bytes else "none"
        show_lines([f"quota of {given.tenant}: {said}; {evicted} blocks evicted"])
    return 0


def _read(text: str, pool_bytes: int) -> int:
    if text == "none":
        return 0
    try:
        return read_quota(text, pool_bytes)
    except ValueError as error:
        raise click.UsageError(f"{text!r} must be {error}, or none") from None


def _set(daemon: Link, tenant: str, quota_bytes: int) -> int:
    request = pb.SetQuotaRequest(tenant=tenant, quota_bytes=quota_bytes)
    evicted: int = daemon.operator.SetQuota(request, **daemon.terms(MORE_TIME)).blocks_evicted
    return evicted


def _show(status: pb.StatusResponse, *, as_json: bool) -> None:
    if as_json:
        found = [
            {
                "tenant": each.tenant,
                "quota_bytes": each.quota_bytes,
                "bytes_used": each.bytes_used,
                "bytes_leased": each.bytes_leased,
            }
            for each in status.tenants
        ]
        show_json({"tenants": found})
        return
    rows = [
        (t.tenant, size(t.bytes_used), size(t.quota_bytes) if t.quota_bytes else "none")
        for t in status.tenants
    ]
    show_lines(table(("TENANT", "USED", "QUOTA"), rows, "no tenants yet"))
