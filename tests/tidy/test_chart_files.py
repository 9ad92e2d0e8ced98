"""The chart's schema and files are those of the settings, the alerts and the dashboard."""

from __future__ import annotations

import json
import re
import sys

import pytest

from kvd import config
from kvd.config.settings import MAX_TENANTS
from kvd.config.tiers import KINDS, MEDIA, TIER_KEYS, WRITES
from kvd.pool.config import MAX_POOL_BYTES
from kvd.tiers.process import MAX_KEYS_QUEUED, MAX_READS_QUEUED, MAX_WRITES_QUEUED
from kvd_proto.limits import MAX_TIERS
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


def test_the_schema_bounds_pool_tenants_and_tiers_as_the_daemon_does() -> None:
    """What the schema lets through and the daemon refuses ends pods, one node after the other."""
    known = json.loads((CHART / "values.schema.json").read_text())["properties"]
    assert known["pool"]["properties"]["sizeGiB"]["maximum"] == MAX_POOL_BYTES >> 30
    assert known["config"]["properties"]["tenants"]["maxProperties"] == MAX_TENANTS
    tier = known["tiers"]["items"]["properties"]
    assert known["tiers"]["maxItems"] == MAX_TIERS
    assert tier["kind"]["enum"] == list(KINDS)
    assert tier["medium"]["enum"] == list(MEDIA)
    assert tier["write"]["enum"] == list(WRITES)
    assert tier.keys() == TIER_KEYS | {"volumes", "secretFiles"}
    queues = {"keys": MAX_KEYS_QUEUED, "reads": MAX_READS_QUEUED, "writes": MAX_WRITES_QUEUED}
    assert {name: tier[f"queue_{name}"]["maximum"] for name in queues} == queues


def test_the_example_of_a_sites_own_store_can_be_imported() -> None:
    """Python finds its own modules first: a package of such a name is never reached."""
    (package,) = re.findall(r"(?m)^# +store: (\w+)\.", (CHART / "values.yaml").read_text())
    assert package not in sys.stdlib_module_names


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
