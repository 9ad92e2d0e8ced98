"""The size of extents as an operator meets it: chosen, kept, said, and refused where it wastes."""

from __future__ import annotations

import pytest

from kvd.cli.status import as_text
from tests.control.daemon_rig import Caller, RawScheduler, daemon, group, namespace, refusal
from tests.control.running_daemon import RunningDaemon

MIB = 1 << 20


def opening(socket: str, part_bytes: int, groups: int = 1) -> RawScheduler:
    fields = namespace(groups=[group(shard_bytes=[part_bytes]) for _ in range(groups)])
    return RawScheduler(socket, namespace=fields)


def shown(running: RunningDaemon) -> tuple[int, int, int]:
    """Extents, their size, and namespaces."""
    caller = Caller(running.socket)
    status = caller.status()
    caller.close()
    return status.pool.extents, status.pool.extent_bytes, len(status.namespaces)


def test_waste_is_refused_with_the_setting_and_what_is_left_is_said() -> None:
    with daemon("--extent-bytes", "1MiB", "--pool-bytes", "32MiB") as running:
        refused = opening(running.socket, 600 << 10)
        assert refusal(lambda: refused.opened) == (
            "FAILED_PRECONDITION",
            "EXTENT_WASTE",
            "groups[0]",
        )
        refused.close()
        refused = opening(running.socket, 64 << 10, groups=33)
        assert refusal(lambda: refused.opened)[1] == "TOO_FEW_EXTENTS"
        refused.close()
        taken = opening(running.socket, 100 << 10)
        assert taken.opened.session_id
        status = Caller(running.socket)
        told = status.status()
        (only,) = told.namespaces
        assert list(only.wasted_shares) == pytest.approx([1 - 1000 / 1024])
        line = "  namespace 1 group 0: 2.3% of its extents is used by no block"
        assert line in list(as_text(told))
        for each in (taken, status):
            each.close()
        log = running.log.read_text()
        assert "namespace 1; its blocks leave 2.3% of their extents unused" in log
        assert "fewer than 32" not in log


def test_a_pool_that_is_there_stays_warm_where_the_size_is_left_to_the_daemon() -> None:
    with daemon("--extent-bytes", "1MiB", "--pool-bytes", "8MiB") as running:
        first = opening(running.socket, 64 << 10)
        assert first.opened.session_id
        first.close()
        running.stop()
        running.more_flags = ("--extent-bytes", "auto", "--pool-bytes", "8MiB")
        running.start()
        assert shown(running) == (8, MIB, 1)
        running.stop()
        running.more_flags = ("--extent-bytes", "auto", "--pool-bytes", "12MiB")
        running.start()
        assert shown(running) == (3, 4 * MIB, 0)
        assert "the pool has 3 extents of 4MiB, fewer than 32" in running.log.read_text()
