"""What the cluster would refuse of a release is made as it takes it, or refused with its field."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from typing import Any

import pytest

from kvd_client.integrations.vllm.options import VLLM_KEYS, KvdOptions
from tests.deploy.test_chart import CHART, chart, helm

__all__ = ["chart"]

NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL = re.compile("([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
DISK: dict[str, Any] = {
    "name": "disk",
    "kind": "disk",
    "volumes": [{"hostPath": {"path": "/data1"}}],
}
ALL_OBJECTS: dict[str, Any] = {
    "engine": {"enabled": True},
    "networkPolicy": {"enabled": True},
    "metrics": {
        name: {"enabled": True}
        for name in ("service", "serviceMonitor", "podMonitor", "prometheusRule", "dashboards")
    },
}

NO_PROBES = {
    "startup": {"periodSeconds": None, "failureThreshold": None},
    "liveness": {"periodSeconds": None, "timeoutSeconds": None, "failureThreshold": None},
    "readiness": {"periodSeconds": None, "timeoutSeconds": None, "failureThreshold": None},
}


def documents(chart: helm.Chart, values: dict[str, Any], release: str = "demo") -> list[Any]:
    import yaml

    chart.validate_schema(values)
    made = chart.render(values, name=release, namespace="caches")
    texts = [text for path, text in made.items() if not path.endswith(".txt")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


@pytest.mark.parametrize("cut", [".more", "--more"])
@pytest.mark.parametrize("room", [52, 55, 57, 62])
def test_no_name_ends_where_kubernetes_lets_none_end(
    chart: helm.Chart, cut: str, room: int
) -> None:
    name = "n" * room + cut
    for values in ({"fullnameOverride": name}, {"nameOverride": name}):
        for made in documents(chart, ALL_OBJECTS | values, "a.release--of-53-letters" + "r" * 29):
            metadata = made["metadata"]
            assert NAME.fullmatch(metadata["name"])
            template = made["spec"].get("template") if "spec" in made else None
            pods = template["metadata"]["labels"] if template else {}
            for value in [*metadata["labels"].values(), *pods.values()]:
                assert LABEL.fullmatch(value)
                assert len(value) <= 63


@pytest.mark.parametrize("name", ["a..b", "a.-b", "a-.b", "a.", ".a"])
@pytest.mark.parametrize("field", ["nameOverride", "fullnameOverride"])
def test_a_name_that_kubernetes_does_not_take_is_refused(
    chart: helm.Chart, field: str, name: str
) -> None:
    with pytest.raises(helm.HelmValuesError, match=field):
        chart.validate_schema({field: name})


@pytest.mark.parametrize("field", ["user", "group"])
def test_a_number_of_a_user_is_one_that_kubernetes_takes(chart: helm.Chart, field: str) -> None:
    chart.validate_schema({field: 2**31 - 1})
    with pytest.raises(helm.HelmValuesError, match=field):
        chart.validate_schema({field: 2**31})


@pytest.mark.parametrize(
    ("mode", "place"),
    [
        ("daemonset", "podSecurityContext"),
        ("daemonset", "containerSecurityContext"),
        ("sidecar", "containerSecurityContext"),
    ],
)
@pytest.mark.parametrize(("key", "value"), [("runAsUser", "user"), ("runAsGroup", "group")])
def test_a_daemon_that_would_not_own_its_directories_is_refused(
    chart: helm.Chart, mode: str, place: str, key: str, value: str
) -> None:
    for other, shown in ((8, "8"), (0, "0"), ("7", '"7"'), (1000680000, "1000680000")):
        given = rf"{place}\.{key} is {shown}, but "
        said = rf".* belong to {value} 7, .*: leave it out, and set {value}"
        with pytest.raises(helm.HelmError, match=given + said):
            chart.render({"mode": mode, value: 7, place: {key: other}}, name="demo")
    documents(chart, {"mode": mode, value: 7, place: {key: 7}})


@pytest.mark.parametrize("mode", ["daemonset", "sidecar"])
def test_sockets_of_a_group_that_the_daemon_is_not_in_are_refused(
    chart: helm.Chart, mode: str
) -> None:
    said = r"config\.socket_group is \S+, but .* of group 7, .*: leave it out, and set group"
    for other in ("8", "inference"):
        with pytest.raises(helm.HelmError, match=said):
            chart.render({"mode": mode, "group": 7, "config": {"socket_group": other}}, name="demo")
    documents(chart, {"mode": mode, "group": 7, "config": {"socket_group": "7"}})


@pytest.mark.parametrize(("name", "key"), [("417", "2026"), ("true", "no"), ("7e3", "a.b-C_d")])
def test_a_secret_may_be_named_like_a_number(chart: helm.Chart, name: str, key: str) -> None:
    tier = DISK | {"secretFiles": {"password_file": {"name": name, "key": key}}}
    (daemons,) = (m for m in documents(chart, {"tiers": [tier]}) if m["kind"] == "DaemonSet")
    volumes = daemons["spec"]["template"]["spec"]["volumes"]
    (secrets,) = (volume["projected"]["sources"] for volume in volumes if "projected" in volume)
    items = [{"key": key, "path": "password_file"}]
    assert secrets == [{"secret": {"name": name, "items": items}}]


@pytest.mark.parametrize("mode", ["daemonset", "sidecar"])
def test_a_page_size_with_nothing_behind_it_is_none(chart: helm.Chart, mode: str) -> None:
    nothing = {"mode": mode, "pool": {"hugePages": {"size": None}}}
    assert documents(chart, nothing) == documents(chart, {"mode": mode})


def test_probes_may_be_left_to_kubernetes(chart: helm.Chart) -> None:
    (without,) = (
        made["spec"]["template"]["spec"]["containers"][0]
        for made in documents(chart, {"probes": NO_PROBES})
        if made["kind"] == "DaemonSet"
    )
    for name in NO_PROBES:
        assert without[f"{name}Probe"].keys() == {"httpGet"}


def test_an_update_strategy_with_nothing_behind_a_key_is_the_clusters(chart: helm.Chart) -> None:
    documents(chart, {"updateStrategy": {"rollingUpdate": {"maxSurge": None}}})


@pytest.mark.parametrize(
    ("nothing", "named"),
    [
        ({"mode": None}, "mode"),
        ({"runDirectory": None}, "runDirectory"),
        ({"pool": {"hugePages": {"size": "2Mi", "hostPath": None}}}, "hostPath"),
        ({"engine": {"enabled": True, "model": None}}, "model"),
        ({"engine": {"enabled": True, "shmGiB": None}}, "shmGiB"),
        ({"engine": {"enabled": True, "image": {"tag": None}}}, "tag"),
    ],
)
def test_a_value_that_must_be_there_is_named_where_nothing_is_behind_it(
    chart: helm.Chart, nothing: dict[str, Any], named: str
) -> None:
    with pytest.raises(helm.HelmValuesError, match=f"missing property '{named}'"):
        chart.validate_schema(nothing)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"updateStrategy": {"rollingupdate": {}}}, "rollingupdate"),
        ({"updateStrategy": {"rollingUpdate": {"maxUnavailabel": 2}}}, "maxUnavailabel"),
        ({"updateStrategy": {"type": "Recreate"}}, "/updateStrategy/type"),
        ({"resources": {"limts": {"cpu": 4}}}, "limts"),
        ({"engine": {"resources": {"limits": {}, "request": {}}}}, "request"),
        ({"extraEnv": [{"name": "TZ", "value": 1}]}, "/extraEnv/0/value"),
        ({"engine": {"extraEnv": [{"name": "HF_OFF", "value": True}]}}, "/engine/extraEnv/0/value"),
        ({"connection": {"vllm": {"min_load_token": 64}}}, "min_load_token"),
        ({"connection": {"vllm": {"eviction_policy": "lru"}}}, "eviction_policy"),
        ({"connection": {"vllm": {"store_mode": "lazily"}}}, "/connection/vllm/store_mode"),
        ({"connection": {"vllm": {"trust_page": "false"}}}, "/connection/vllm/trust_page"),
        ({"extraVolumes": [{}, {}]}, "/extraVolumes/0': missing property 'name'"),
        ({"extraVolumes": [{"name": None}]}, "/extraVolumes/0/name"),
        ({"extraVolumeMounts": [{"name": "a"}]}, "missing property 'mountPath'"),
        ({"engine": {"extraVolumes": [{"emptyDir": {}}]}}, "/engine/extraVolumes/0"),
        ({"engine": {"podSecurityContext": {"supplementalGroups": 5}}}, "supplementalGroups"),
        ({"tiers": [DISK | {"volumes": [{"name": "data"}]}]}, "/tiers/0/volumes/0"),
        ({"tiers": [DISK | {"volumes": [{"hostPath": None}]}]}, "/tiers/0/volumes/0/hostPath"),
        ({"terminationGracePeriodSeconds": 1e20}, "/terminationGracePeriodSeconds"),
    ],
)
def test_what_is_misspelt_or_of_another_type_is_named(
    chart: helm.Chart, wrong: dict[str, Any], named: str
) -> None:
    with pytest.raises(helm.HelmValuesError, match=named):
        chart.validate_schema(wrong)


def test_the_chart_knows_the_connectors_options_and_their_bounds() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = schema["properties"]["connection"]["properties"]["vllm"]["properties"]
    own = {option.name: option for option in dataclasses.fields(KvdOptions)}
    assert known.keys() == own.keys() | VLLM_KEYS
    for name, option in own.items():
        said, meant = known[name], option.metadata
        assert said["description"] == meant["meaning"], name
        assert said.get("enum") == (list(meant["choices"]) if "choices" in meant else None), name
        bounds = (said.get("minimum"), said.get("maximum"))
        assert bounds == meant.get("range", (None, None)), name


@pytest.mark.parametrize(
    "right",
    [
        {"block_size": "32", "blocks_per_chunk": None, "offload_prompt_only": False},
        {"hand_off_s": 0.001, "min_load_tokens": 1 << 30, "store_mode": "lazy", "tenant": ""},
    ],
)
def test_what_the_connector_takes_the_chart_takes(chart: helm.Chart, right: dict[str, Any]) -> None:
    KvdOptions.from_extra_config(right)
    chart.validate_schema({"connection": {"vllm": right}})


@pytest.mark.parametrize("kind", ["limits", "requests"])
@pytest.mark.parametrize("name", ["cpu", "memory"])
def test_an_amount_with_nothing_behind_it_is_left_out_and_the_other_stays(
    chart: helm.Chart, kind: str, name: str
) -> None:
    """The cluster would take it for 0."""
    amounts = {"limits": {"memory": "19Gi"}, "requests": {"cpu": "1", "memory": "19Gi"}}
    amounts[kind].pop(name, None)
    (daemons,) = (
        made
        for made in documents(chart, {"resources": {kind: {name: None}}})
        if made["kind"] == "DaemonSet"
    )
    (container,) = daemons["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == amounts


def test_options_and_numbers_of_any_form_reach_the_daemon_as_they_are(chart: helm.Chart) -> None:
    """It refuses them with their names; a file that is no TOML it could only refuse whole."""
    options = {"a b": "x", "c.d": 1, "x\ny": "z", "large": 1e20, "least": -1e300}
    values = {
        "config": {"extent_bytes": 4096 * 10**20},
        "tiers": [{"name": "a", "kind": "valkey", "options": options}],
    }
    (texts,) = (
        made["data"]["kvd.toml"]
        for made in documents(chart, values)
        if made["kind"] == "ConfigMap" and "kvd.toml" in made["data"]
    )
    read = tomllib.loads(texts)
    assert read["tiers"][0]["options"] == options
    assert read["extent_bytes"] == 4096e20
