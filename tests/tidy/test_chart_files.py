"""The chart's schema and files are those of the settings, the alerts and the dashboard."""

from __future__ import annotations

import json

import pytest

from kvd import config
from tests.tidy.source import ROOT

CHART = ROOT / "helm" / "kvd"
SETTINGS_OF_THE_CHART = {
    "socket", "pool_directory", "extents_directory", "pool_bytes", "http_address", "http_port",
}  # fmt: skip


def test_the_charts_copies_are_the_files_that_are_tested() -> None:
    """Copy them again: deploy/prometheus/kvd-alerts.yaml, and deploy/grafana/kvd.json."""
    for copy, original in (
        ("kvd-alerts.yaml", "prometheus/kvd-alerts.yaml"),
        ("kvd-dashboard.json", "grafana/kvd.json"),
    ):
        assert (CHART / "files" / copy).read_text() == (ROOT / "deploy" / original).read_text()


def test_the_schema_knows_every_setting_that_the_chart_leaves_to_its_user() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = schema["properties"]["config"]["properties"].keys()
    there_are = {setting.name for setting in config.SETTINGS}
    assert known == (there_are - SETTINGS_OF_THE_CHART) | {"tenants"}


NAMED = {setting.name: setting for setting in config.SETTINGS}
OF_ITS_USER = sorted(NAMED.keys() - SETTINGS_OF_THE_CHART)


@pytest.mark.parametrize("name", OF_ITS_USER)
def test_the_schema_says_of_a_setting_what_the_daemon_takes(name: str) -> None:
    """The same words, the same names to choose from, the same bounds, and the default."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    said = schema["properties"]["config"]["properties"][name]
    setting = NAMED[name]
    assert said["description"] == setting.meaning
    allowed = said.get("enum", [])
    assert not allowed or setting.default in allowed
    for value in allowed:
        setting.read(value)
    for bound, beyond in (("minimum", -1), ("maximum", 1)):
        if bound in said:
            setting.read(said[bound])
            with pytest.raises(ValueError, match=r"number .*\d"):
                setting.read(said[bound] + beyond)
