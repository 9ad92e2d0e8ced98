"""The entry point: vLLM knows the connector by name, and an engine without kvd notices nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvd_client.integrations.vllm import plugin
from kvd_client.integrations.vllm.connector import choose_spec


def test_connector_and_spec_are_found_by_name_alone() -> None:
    [entry] = [e for e in entry_points(group="vllm.general_plugins") if e.name == "kvd"]
    register = entry.load()
    register()
    register()  # vLLM may load plugins more than once
    named = KVTransferConfig(kv_connector="KvdConnector", kv_role="kv_both")
    connector = KVConnectorFactory.get_connector_class(named)
    assert connector.__name__ == "KvdConnector"
    # As MultiConnector asks for its children's classes.
    assert KVConnectorFactory.get_connector_class_by_name("KvdConnector") is connector
    spec = OffloadingSpecFactory.get_spec_cls({"spec_name": "KvdOffloadingSpec"})
    assert spec.__name__ == "KvdOffloadingSpec"


def test_the_package_gives_the_connector_by_its_module_path() -> None:
    named = KVTransferConfig(
        kv_connector="KvdConnector",
        kv_connector_module_path="kvd_client.integrations.vllm",
        kv_role="kv_both",
    )
    assert KVConnectorFactory.get_connector_class(named).__name__ == "KvdConnector"


def test_loading_the_plugin_imports_nothing_of_vllm() -> None:
    code = (
        "import sys, kvd_client.integrations.vllm.plugin\n"
        "print([name for name in ('vllm', 'torch') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def transferring(**options: Any) -> Any:
    """What of vLLM's configuration the choice of a spec looks at."""
    transfer = SimpleNamespace(kv_connector_extra_config=options)
    return SimpleNamespace(kv_transfer_config=transfer)


@pytest.mark.parametrize("name", ["KvdOfloadingSpec", "", 7, None, ["KvdOffloadingSpec"]])
def test_what_is_no_spec_is_refused_with_its_field_and_the_way_out(name: Any) -> None:
    said = re.escape(f"kv_connector_extra_config: spec_name is {name!r}, allowed is KvdOff")
    with pytest.raises(ValueError, match=f"{said}.*leave it out"):
        choose_spec(transferring(spec_name=name))


def test_another_spec_of_vllms_or_of_a_named_module_is_left_to_vllm() -> None:
    assert choose_spec(transferring())
    assert choose_spec(transferring(spec_name="KvdOffloadingSpec"))
    assert not choose_spec(transferring(spec_name="CPUOffloadingSpec"))
    assert not choose_spec(transferring(spec_name="Theirs", spec_module_path="theirs.spec"))


@pytest.mark.parametrize(
    "factory",
    [
        SimpleNamespace(),
        SimpleNamespace(_registry={}, register_connector=lambda only_one: None),
    ],
)
def test_another_vllm_than_we_know_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, factory: Any
) -> None:
    monkeypatch.setattr(plugin, "_find", lambda module, name: factory)
    plugin.register()
    assert {"KvdConnector is not registered", "KvdOffloadingSpec is not registered"} == {
        record.getMessage().removeprefix("kvd: ").split(":")[0] for record in caplog.records
    }
    caplog.clear()
    monkeypatch.undo()
    monkeypatch.setattr(plugin, "CONNECTOR_FACTORY", "vllm.no_such_module")
    monkeypatch.setattr(plugin, "SPEC_FACTORY", "vllm")
    plugin.register()
    assert "has no KVConnectorFactory" in caplog.text
    assert "has no OffloadingSpecFactory" in caplog.text
