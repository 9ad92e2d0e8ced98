"""A real Prometheus scrapes a daemon at work, and answers every query of the dashboard."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.control.running_daemon import RunningDaemon, daemon
from tests.ports import free_port
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = shutil.which("prometheus")
WAIT_S = 60.0
EXAMPLE = ROOT / "examples" / "embed_engine.py"
# Nothing of these happens here, so there is no series; the answer is empty and no error.
MAY_BE_EMPTY = (
    "kvd_jobs_refused_total", "kvd_hinted_blocks_total", "kvd_unserved_seconds_total",
)  # fmt: skip

pytestmark = pytest.mark.skipif(
    PROMETHEUS is None, reason="there is no Prometheus (Debian package prometheus)"
)


def queries() -> list[str]:
    panels = json.loads((ROOT / "deploy" / "grafana" / "kvd.json").read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    return sorted({query.replace("$instance", ".*") for query in asked})


def work(running: RunningDaemon) -> None:
    """An engine looks up, stores or loads; a second run of it finds what the first stored."""
    subprocess.run([sys.executable, EXAMPLE, running.socket], check=True, capture_output=True)


class Asked:
    """A Prometheus that scrapes one daemon twice a second."""

    def __init__(self, port: int) -> None:
        self._port = port

    def get(self, path: str, **parameters: str) -> Any:
        said = urllib.parse.urlencode(parameters)
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{said}"
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            told = json.loads(answer.read())
        assert told["status"] == "success", told
        return told["data"]

    def value(self, query: str) -> list[float]:
        return [float(each["value"][1]) for each in self.get("query", query=query)["result"]]

    def answers(self, query: str) -> bool:
        try:
            return bool(self.value(query))
        except OSError:  # it starts
            return False


def has_found(made: Asked, running: RunningDaemon) -> bool:
    """Whether a run after the first loaded blocks; on a busy machine it may rightly not wait."""
    loaded = "and on (instance) kvd_loaded_blocks_total > 0"
    if made.answers(f"rate(kvd_found_blocks_total[5m]) > 0 {loaded}"):
        return True
    work(running)
    return False


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    place = tmp_path_factory.mktemp("prometheus")
    disk = place / "disk"
    disk.mkdir(mode=0o700)
    settings = place / "kvd.toml"
    settings.write_text(
        '[[tiers]]\nname = "disk"\nkind = "disk"\n[tiers.options]\n'
        f'directories = ["{disk}"]\ndirectory_bytes = "64MiB"\n'
    )
    http, port = free_port(), free_port()
    file = place / "prometheus.yaml"
    scrape = {"job_name": "kvd", "static_configs": [{"targets": [f"127.0.0.1:{http}"]}]}
    rules = str(ROOT / "deploy" / "prometheus" / "kvd-alerts.yaml")
    every = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    file.write_text(
        json.dumps({"global": every, "scrape_configs": [scrape], "rule_files": [rules]})
    )
    command = [
        str(PROMETHEUS), f"--config.file={file}", f"--storage.tsdb.path={place / 'series'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
    ]  # fmt: skip
    with daemon("--http-port", str(http), "--config", str(settings)) as running:
        work(running)
        with subprocess.Popen(command) as process:
            try:
                made = Asked(port)
                wait_until(lambda: made.answers("kvd_stored_blocks_total > 0"), "a scrape", WAIT_S)
                wait_until(lambda: has_found(made, running), "a run that found blocks", WAIT_S)
                yield made
            finally:
                process.terminate()


@pytest.mark.parametrize("query", queries())
def test_the_dashboards_query_is_answered(asked: Asked, query: str) -> None:
    found = asked.value(query)
    assert found or any(name in query for name in MAY_BE_EMPTY), "nothing to draw"


def test_the_variables_and_the_alerts_work(asked: Asked) -> None:
    assert asked.get("label/instance/values", **{"match[]": "kvd_build_info"})
    assert asked.value('up{job="kvd"}') == [1.0]
    (group,) = asked.get("rules")["groups"]
    assert len(group["rules"]) > 5
    assert {rule.get("lastError", "") for rule in group["rules"]} == {""}
    firing = {rule["name"] for rule in group["rules"] if rule["state"] == "firing"}
    assert firing == set(), "nothing is wrong here"
