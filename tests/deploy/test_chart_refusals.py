"""What the cluster would refuse of a release is made as it takes it, or refused with its field."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.deploy.test_chart import chart, helm

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
    ],
)
def test_what_is_misspelt_or_of_another_type_is_named(
    chart: helm.Chart, wrong: dict[str, Any], named: str
) -> None:
    with pytest.raises(helm.HelmValuesError, match=named):
        chart.validate_schema(wrong)
