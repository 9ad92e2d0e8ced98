"""Metrics, alerts, runbook and dashboard say the same names, and Prometheus's tool agrees."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

import kvd
from kvd.cli import metrics_page
from kvd.observability.metrics import Metrics
from tests.control.running_daemon import daemon
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "deploy" / "prometheus" / "kvd-alerts.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "kvd.json"
EXAMPLE = ROOT / "examples" / "embed_engine.py"
METRIC = re.compile(r"\bkvd_\w+")


@pytest.fixture(scope="module")
def names() -> set[str]:
    """Every series that Prometheus would have."""
    found = set()
    for each in metrics_page.described():
        found |= {each.name}
        if each.kind == "histogram":
            found |= {f"{each.name}_{part}" for part in ("bucket", "count", "sum")}
    return found


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    return found


def alerts() -> list[str]:
    return re.findall(r"- alert: (\w+)", ALERTS.read_text())


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_the_page_of_metrics_is_the_one_that_the_code_makes() -> None:
    written = (ROOT / "docs" / metrics_page.PAGE).read_text()
    assert written == metrics_page.page(), "run: python -m kvd.cli.metrics_page"


def test_a_daemon_at_work_shows_what_the_page_of_metrics_says_and_nothing_else() -> None:
    told = {each.name: (each.kind, frozenset(each.labels)) for each in metrics_page.described()}
    port = free_port()
    with daemon("--http-port", str(port)) as running:
        subprocess.run([sys.executable, EXAMPLE, running.socket], check=True, capture_output=True)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    shown = {
        family.name + ("_total" if family.type == "counter" else ""): family for family in families
    }
    assert shown.keys() <= told.keys()
    assert {name for name in told if not name.startswith("kvd_tier_")} <= shown.keys()
    for name, family in shown.items():
        kind, labels = told[name]
        assert family.type == kind
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == labels, sample


def test_guides_name_counters_as_prometheus_has_them(names: set[str]) -> None:
    """Prometheus says nothing of a series that is not there: an alert on it never fires."""
    wrong = {
        (page.name, name)
        for page in (ROOT / "docs").rglob("*.md")
        for name in re.findall(r"(?<!:)\bkvd_\w+", page.read_text())
        if name not in names and f"{name}_total" in names
    }
    assert wrong == set()


def test_alerts_ask_for_metrics_that_there_are(names: set[str]) -> None:
    rules = "\n".join(
        line for line in ALERTS.read_text().splitlines() if "runbook" not in line
    ).replace('job="kvd"', "")
    asked = set(METRIC.findall(rules))
    assert len(asked) > 8
    assert asked <= names


def test_the_dashboard_asks_for_metrics_that_there_are(names: set[str]) -> None:
    asked = {name for expression in expressions() for name in METRIC.findall(expression)}
    assert len(asked) > 10
    assert asked <= names


def test_every_alert_has_a_runbook_entry_and_a_test() -> None:
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    assert headings == alerts()
    tested = ALERTS.with_name("kvd-alerts.test.yaml").read_text()
    for name in alerts():
        assert f"runbook: docs/runbook.md#{name.lower()}" in ALERTS.read_text()
        assert f'alertname="{name}"' in tested


@pytest.mark.parametrize(
    "arguments",
    [["check", "rules", "kvd-alerts.yaml"], ["test", "rules", "kvd-alerts.test.yaml"]],
    ids=["check", "test"],
)
def test_prometheus_takes_the_alerts(promtool: str, arguments: list[str]) -> None:
    told = subprocess.run(
        [promtool, *arguments], cwd=ALERTS.parent, check=False, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stdout + told.stderr


def test_prometheus_finds_nothing_wrong_with_the_metrics(promtool: str) -> None:
    metrics = Metrics(kvd.__version__)
    told = subprocess.run(
        [promtool, "check", "metrics"],
        input=generate_latest(metrics.registry),
        check=False,
        capture_output=True,
    )
    assert (told.returncode, told.stdout, told.stderr) == (0, b"", b"")


def test_prometheus_can_read_every_query_of_the_dashboard(promtool: str, tmp_path: Path) -> None:
    rules = [
        {"record": f"query:{number}", "expr": expression.replace("$instance", ".*")}
        for number, expression in enumerate(expressions())
    ]
    file = tmp_path / "queries.yaml"
    file.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    told = subprocess.run(
        [promtool, "check", "rules", str(file)], check=False, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stdout + told.stderr
