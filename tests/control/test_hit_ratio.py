"""Two engines and one daemon: the hit ratio that Prometheus reads is the one that they counted."""

from __future__ import annotations

import itertools

from benchmarks.soak.engine import made_up
from benchmarks.told_ratio import drive, scraped
from tests.control.daemon_rig import daemon
from tests.ports import free_port

REQUESTS = 60


def test_the_hit_ratio_through_prometheus_is_the_engines_own() -> None:
    port = free_port()
    with daemon("--http-port", str(port), "--pool-bytes", "2MiB", "--extent-bytes", "1MiB") as run:
        traces = [itertools.islice(made_up(1), REQUESTS) for _ in range(2)]
        own = drive(run.socket, traces, REQUESTS)
        said = scraped(port, REQUESTS)
    assert own == said
    assert 0.1 < own["found"] / own["offered"] < 0.99, "nothing was missed, or nothing found"
