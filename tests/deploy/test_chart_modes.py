"""The chart's modes and what it makes beside the daemon: Kubernetes' own schemas take all of it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvd.__main__ import main
from kvd_client.integrations.vllm.options import KvdOptions
from tests.control.running_daemon import daemon
from tests.deploy.test_chart import CHART, chart, helm, objects, pod, settings
from tests.deploy.test_chart_tiers import CLUSTER, DISK

if importlib.util.find_spec("kubernetes_validate") is None and not os.environ.get("CI"):
    pytest.skip("kubernetes-validate is missing: .ci/venv charts", allow_module_level=True)

import kubernetes_validate  # only once it is known to be there

__all__ = ["chart"]

ROOT = CHART.parents[1]
SIDECAR: dict[str, Any] = {"mode": "sidecar", "pool": {"sizeGiB": 4}}
EVERYTHING: dict[str, Any] = {
    "gpu": {"enabled": True},
    "engine": {"enabled": True, "resources": {"limits": {"nvidia.com/gpu": 1}}},
    "tiers": [DISK, CLUSTER],
    "networkPolicy": {
        "enabled": True,
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
    },
    "metrics": {
        "service": {"enabled": True},
        "serviceMonitor": {"enabled": True},
        "podMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboards": {"enabled": True},
    },
    "extraEnv": [{"name": "KVD_LOG_LEVEL", "value": "debug"}],
    "nodeSelector": {"kvd": "yes"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "priorityClassName": "high",
    "imagePullSecrets": [{"name": "registry"}],
}
IN_SIDECARS = {
    **EVERYTHING,
    "mode": "sidecar",
    "networkPolicy": {"enabled": False},
    "pool": {"sizeGiB": 4, "hugePages": {"size": "2Mi"}},
}
OPERATORS = {"PodMonitor", "ServiceMonitor", "PrometheusRule"}  # no kinds of Kubernetes' own


@pytest.mark.parametrize("version", ["1.29", "1.37"])  # native sidecars are on since 1.29
@pytest.mark.parametrize(
    "values",
    [{}, EVERYTHING, SIDECAR, IN_SIDECARS],
    ids=["default", "everything", "sidecar", "everything-in-sidecars"],
)
def test_kubernetes_schemas_take_what_is_rendered(
    chart: helm.Chart, values: dict[str, Any], version: str
) -> None:
    checked = 0
    for document in objects(chart, values).values():
        if document["kind"] not in OPERATORS:
            kubernetes_validate.validate(document, version, strict=True)
            checked += 1
    assert checked >= 4


def test_a_wrong_manifest_would_be_found(chart: helm.Chart) -> None:
    wrong = objects(chart)["DaemonSet"]
    wrong["spec"]["template"]["spec"]["containers"][0]["readinessprobe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.37", strict=True)


def test_nothing_but_the_daemon_is_made_unless_asked(chart: helm.Chart) -> None:
    assert not objects(chart).keys() & {
        "Deployment-engine", "NetworkPolicy", "PodMonitor", "ServiceMonitor", "PrometheusRule",
        "ConfigMap-dashboard", "Service",
    }  # fmt: skip


# -- helm test ----------------------------------------------------------------------------------


def test_helms_test_asks_a_daemon_as_its_own_user_and_fails_where_none_answers(
    chart: helm.Chart,
) -> None:
    placed = {"nodeSelector": {"disk": "big"}, "tolerations": [{"operator": "Exists"}]}
    rendered = objects(chart, {"runDirectory": "/run/caches", **placed})
    test, daemons = rendered["Pod-test"], rendered["DaemonSet"]["spec"]["template"]["spec"]
    assert test["metadata"]["annotations"]["helm.sh/hook"] == "test"
    spec = test["spec"]
    assert {name: spec[name] for name in placed} == placed
    assert spec["securityContext"] == daemons["securityContext"]
    [volume], [container] = spec["volumes"], spec["containers"]
    assert volume["hostPath"]["path"] == "/run/caches"
    [mounted] = container["volumeMounts"]
    socket = f"--socket={mounted['mountPath']}/kvd.sock"
    assert socket in container["args"]
    with daemon() as running:
        here = [f"--socket={running.socket}" if a == socket else a for a in container["args"]]
        assert main(here) == 0
    assert main(here) != 0


def test_the_daemonset_does_not_take_helms_test_for_a_pod_of_its_own(chart: helm.Chart) -> None:
    for values in ({}, {"fullnameOverride": "a" * 63, "nameOverride": "b" * 63}):
        made = objects(chart, values)
        daemons = made.pop("DaemonSet", None) or made.pop(f"DaemonSet{'a' * 63}")
        [test] = [each["metadata"] for each in made.values() if each["kind"] == "Pod"]
        wanted = daemons["spec"]["selector"]["matchLabels"]
        assert not wanted.items() <= test["labels"].items()
        assert all(len(each) <= 63 for each in (test["name"], *test["labels"].values()))
        assert test["name"] != daemons["metadata"]["name"]


def test_in_a_sidecar_nobody_else_could_ask(chart: helm.Chart) -> None:
    assert "Pod-test" not in objects(chart, SIDECAR)


@pytest.mark.parametrize("values", [{}, SIDECAR])
def test_the_notes_say_where_the_status_page_is(chart: helm.Chart, values: dict[str, Any]) -> None:
    given = {**values, "metrics": {"port": 9999}}
    rendered = chart.render(given, name="demo", namespace="caches")
    [notes] = [text for path, text in rendered.items() if path.endswith("NOTES.txt")]
    assert "http://localhost:9999/status" in notes
    [forward] = [line.split() for line in notes.splitlines() if "port-forward" in line]
    kind, _, name = forward[-2].replace("ds/", "DaemonSet/").partition("/")
    made = objects(chart, given)
    assert any(
        each["kind"].lower() == kind.lower() and each["metadata"]["name"] == name
        for each in made.values()
    )


@pytest.mark.parametrize("values", [{}, SIDECAR])
def test_the_notes_name_no_page_that_is_not_served(
    chart: helm.Chart, values: dict[str, Any]
) -> None:
    config = {**values.get("config", {}), "status_page": False}
    rendered = chart.render({**values, "config": config}, name="demo", namespace="caches")
    [notes] = [text for path, text in rendered.items() if path.endswith("NOTES.txt")]
    assert "port-forward" not in notes
    assert "/status" not in notes
    assert "kvd status\n" in notes


# -- sidecars -----------------------------------------------------------------------------------


def engine(chart: helm.Chart, values: dict[str, Any]) -> Any:
    return objects(chart, values)["Deployment-engine"]["spec"]["template"]["spec"]


def test_a_sidecar_is_native_starts_before_its_engine_and_keeps_no_engine_unready(
    chart: helm.Chart,
) -> None:
    made = objects(chart, SIDECAR)
    assert "DaemonSet" not in made
    spec = engine(chart, SIDECAR)
    own, daemon = spec["initContainers"]
    assert (own["name"], daemon["name"]) == ("own-directories", "kvd")
    assert "restartPolicy" not in own
    assert daemon["restartPolicy"] == "Always"
    assert "livenessProbe" in daemon
    assert not daemon.keys() & {"readinessProbe", "startupProbe"}
    assert [each["name"] for each in spec["containers"]] == ["vllm"]


@pytest.mark.parametrize(("version", "is_refused"), [("v1.28.9-gke.1", True), ("v1.29.0", False)])
def test_a_sidecar_is_refused_where_kubernetes_knows_none(
    tmp_path: Path, version: str, is_refused: bool
) -> None:
    """The library knows one cluster only, so the version stands in a copy."""
    copy = shutil.copytree(CHART, tmp_path / "kvd")
    names = copy / "templates" / "_names.tpl"
    names.write_text(names.read_text().replace(".Capabilities.KubeVersion.Version", f'"{version}"'))
    with helm.Chart.load(str(copy)) as old:
        objects(old)
        if not is_refused:
            objects(old, SIDECAR)
            return
        with pytest.raises(helm.HelmRenderError, match=f"Kubernetes {version}: .* daemonset"):
            objects(old, SIDECAR)


def test_a_sidecar_needs_no_node_no_privileges_and_no_root(chart: helm.Chart) -> None:
    spec = engine(chart, SIDECAR)
    own, daemon = spec["initContainers"]
    assert "hostPath" not in json.dumps(spec)
    assert not spec.keys() & {"hostPID", "hostIPC", "hostNetwork"}
    assert spec["shareProcessNamespace"] is True
    assert "privileged" not in own["securityContext"]
    assert daemon["securityContext"] == {
        "runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001,
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip


def test_a_sidecars_pool_outlives_its_container_in_memory_of_its_own(
    chart: helm.Chart, tmp_path: Path
) -> None:
    spec = engine(chart, SIDECAR)
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["pool"]["emptyDir"]["medium"] == "Memory"
    mebibytes = int(volumes["pool"]["emptyDir"]["sizeLimit"].removesuffix("Mi"))
    read = settings(chart, tmp_path, SIDECAR)
    assert mebibytes << 20 > read.pool_bytes * 29 // 28
    for container in (spec["initContainers"][1], *spec["containers"]):
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts["run"] == str(read.socket.parent)
    huge = {volume["name"]: volume for volume in engine(chart, IN_SIDECARS)["volumes"]}
    assert huge["extents"]["emptyDir"] == {"medium": "HugePages-2Mi"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give directories away")
def test_a_sidecar_starts_in_directories_as_the_kubelet_makes_them(
    chart: helm.Chart, tmp_path: Path
) -> None:
    """The init container's script, then the daemon's own check, over directories of mode 0777."""
    from kvd.linux.own_directory import NotTrustedError, Wanted, require_own

    tmp_path.chmod(0o755)
    pool, run = tmp_path / "pool", tmp_path / "run"
    for each in (pool, run):
        each.mkdir()
        each.chmod(0o777)
    with pytest.raises(NotTrustedError):
        require_own(Wanted("pool_directory", pool))
    script = engine(chart, {**SIDECAR, "user": 1})["initContainers"][0]["command"][-1]
    script = script.replace("/var/lib/kvd/pool", str(pool)).replace("/run/kvd", str(run))
    subprocess.run(["/bin/sh", "-euc", script.replace("-o 1 ", "-o 0 ")], check=True)
    require_own(Wanted("pool_directory", pool))
    assert run.stat().st_mode & 0o777 == 0o750


def test_a_policy_for_the_engines_pod_is_refused(chart: helm.Chart) -> None:
    with pytest.raises(helm.HelmError, match="is for mode daemonset"):
        objects(chart, {**SIDECAR, "networkPolicy": {"enabled": True}})
    with pytest.raises(helm.HelmValuesError):
        chart.validate_schema({"mode": "both"})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"pool": {"hostPath": "/data/kvd"}}, r"pool\.hostPath .*goes with its pod"),
        ({"pool": {"hugePages": {"size": "2Mi", "hostPath": "/h"}}}, r"pool\.hugePages\.hostPath "),
        ({"runDirectory": "/srv/kvd"}, r"runDirectory .*go with their pod"),
        ({"hostPID": True}, r"hostPID .*process namespace"),
        ({"podSecurityContext": {"fsGroup": 7}}, r"set engine\.podSecurityContext"),
        ({"updateStrategy": {"type": "OnDelete"}}, r"updateStrategy .*Deployment"),
        ({"probes": {"startup": {"periodSeconds": 9}}}, r"probes\.startup .*need not wait"),
        ({"probes": {"readiness": {"periodSeconds": 9}}}, r"probes\.readiness .*without its cache"),
    ],
)
def test_what_would_be_ignored_in_a_sidecar_is_refused(
    chart: helm.Chart, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(helm.HelmError, match=f"{said}.*; leave it out"):
        objects(chart, {**values, "mode": "sidecar"})
    objects(chart, values)
    objects(chart, {"mode": "sidecar", "probes": {"liveness": {"periodSeconds": 9}}})


# -- an engine's pod ----------------------------------------------------------------------------


def transfer(chart: helm.Chart, values: dict[str, Any]) -> Any:
    return json.loads(objects(chart, values)["ConfigMap-connection"]["data"]["kv-transfer-config"])


@pytest.mark.parametrize("values", [{}, SIDECAR], ids=["daemonset", "sidecar"])
def test_the_connection_is_what_the_connector_takes_and_finds_the_socket(
    chart: helm.Chart, values: dict[str, Any], tmp_path: Path
) -> None:
    said = transfer(chart, values)
    assert (said["kv_connector"], said["kv_load_failure_policy"]) == ("KvdConnector", "recompute")
    extra = said["kv_connector_extra_config"]
    assert extra == {"socket_path": str(settings(chart, tmp_path, values).socket)}
    assert extra.keys() <= set(KvdOptions.__dataclass_fields__)
    more = transfer(chart, {**values, "connection": {"vllm": {"store_mode": "lazy"}}})
    assert more["kv_connector_extra_config"] == {**extra, "store_mode": "lazy"}


def test_an_engines_pod_finds_socket_group_and_flag(chart: helm.Chart) -> None:
    values = {"engine": {"enabled": True}, "gpu": {"enabled": True}, "runDirectory": "/srv/kvd"}
    spec = engine(chart, values)
    (vllm,) = spec["containers"]
    assert vllm["args"][0] == "Qwen/Qwen3-0.6B"
    assert "--kv-transfer-config=$(KV_TRANSFER_CONFIG)" in vllm["args"]
    (variable,) = vllm["env"]
    reference = variable["valueFrom"]["configMapKeyRef"]
    connection = objects(chart, values)["ConfigMap-connection"]
    assert reference["name"] == connection["metadata"]["name"]
    assert reference["key"] in connection["data"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["run"]["hostPath"] == {"path": "/srv/kvd", "type": "DirectoryOrCreate"}
    assert spec["securityContext"]["supplementalGroups"] == [10001]
    assert (spec["hostPID"], spec["runtimeClassName"]) == (True, "nvidia")


def test_the_guides_pod_is_the_one_that_the_chart_makes(chart: helm.Chart) -> None:
    import yaml

    text = (ROOT / "docs" / "kubernetes.md").read_text()
    (written,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    guides = yaml.safe_load(written)["spec"]
    made = engine(chart, {"engine": {"enabled": True}})
    (vllm,), (ours,) = guides["containers"], made["containers"]
    assert guides["securityContext"].items() <= made["securityContext"].items()
    assert vllm["command"] == ours["command"]
    assert set(vllm["args"]) <= set(ours["args"])
    assert vllm["volumeMounts"][0] in ours["volumeMounts"]
    assert guides["volumes"][0] in made["volumes"]
    (reference,) = (each["valueFrom"]["configMapKeyRef"]["key"] for each in vllm["env"])
    assert reference == ours["env"][0]["valueFrom"]["configMapKeyRef"]["key"]


def test_the_guide_names_no_pod_security_that_refuses_the_nodes_directories(
    chart: helm.Chart,
) -> None:
    made = objects(chart, {"engine": {"enabled": True}})
    for kind in ("DaemonSet", "Deployment-engine"):
        spec = made[kind]["spec"]["template"]["spec"]
        assert any("hostPath" in volume for volume in spec["volumes"])
    guide = (CHART.parents[1] / "docs/kubernetes.md").read_text()
    assert set(re.findall(r"pod-security.kubernetes.io/enforce=(\w+)", guide)) == {"privileged"}


def test_an_engines_pods_are_not_the_daemonsets(chart: helm.Chart) -> None:
    made = objects(chart, {"engine": {"enabled": True}})
    wanted = made["DaemonSet"]["spec"]["selector"]["matchLabels"]
    theirs = made["Deployment-engine"]["spec"]["template"]["metadata"]["labels"]
    assert not wanted.items() <= theirs.items()
    assert made["Deployment-engine"]["spec"]["selector"]["matchLabels"].items() <= theirs.items()


def test_an_upgrade_may_change_the_mode_of_a_release_with_engines(chart: helm.Chart) -> None:
    """Kubernetes refuses another selector for a Deployment of the same name."""
    before, after = (
        objects(chart, {"mode": mode, "engine": {"enabled": True}})["Deployment-engine"]
        for mode in ("daemonset", "sidecar")
    )
    assert before["metadata"]["name"] == after["metadata"]["name"]
    assert before["spec"]["selector"] == after["spec"]["selector"]
    theirs = after["spec"]["template"]["metadata"]["labels"]
    assert after["spec"]["selector"]["matchLabels"].items() <= theirs.items()


@pytest.mark.parametrize("groups", [[], [44, 109], [10001, 44]])
def test_an_engines_own_groups_come_beside_the_sockets(
    chart: helm.Chart, groups: list[int]
) -> None:
    """Devices of some makers want groups of their own."""
    own = {"runAsUser": 1000, "supplementalGroups": groups}
    values = {"engine": {"enabled": True, "podSecurityContext": own}}
    context = engine(chart, values)["securityContext"]
    assert sorted(context["supplementalGroups"]) == sorted({10001, *groups})
    assert (context["runAsUser"], context["seccompProfile"]) == (1000, {"type": "RuntimeDefault"})


@pytest.mark.parametrize(
    ("mode", "change", "is_new"),
    [
        ("daemonset", {"connection": {"vllm": {"store_mode": "lazy"}}}, True),
        ("sidecar", {"connection": {"vllm": {"store_mode": "lazy"}}}, True),
        ("sidecar", {"config": {"lease_share": 0.4}}, True),  # the daemon is in the engine's pod
        ("daemonset", {"config": {"lease_share": 0.4}}, False),
        ("daemonset", {"pool": {"sizeGiB": 8}}, False),
    ],
)
def test_engines_are_replaced_for_what_their_pods_hold_and_for_nothing_else(
    chart: helm.Chart, mode: str, change: dict[str, Any], is_new: bool
) -> None:
    values = {"mode": mode, "engine": {"enabled": True}}
    before, after = (
        objects(chart, each)["Deployment-engine"]["spec"]["template"]
        for each in (values, values | change)
    )
    assert (before != after) is is_new


def test_the_longest_names_leave_room_for_what_is_put_behind_them(chart: helm.Chart) -> None:
    long = {"nameOverride": "n" * 63, "fullnameOverride": "f" * 63, "engine": {"enabled": True}}
    made = objects(chart, long | {"metrics": {"service": {"enabled": True}}})
    (service,) = (each for each in made.values() if each["kind"] == "Service")
    assert len(service["metadata"]["name"]) == 63  # as Kubernetes has it for a Service
    (engines,) = (each for each in made.values() if each["kind"] == "Deployment")
    labels = engines["spec"]["template"]["metadata"]["labels"]
    assert max(map(len, labels.values())) == 63  # and for a label
    assert labels["app.kubernetes.io/name"].endswith("-engine")


@pytest.mark.parametrize("release", ["417", "true", "7e3", "my.cache"])
@pytest.mark.parametrize("values", [EVERYTHING, IN_SIDECARS], ids=["daemonset", "sidecar"])
def test_what_looks_like_another_type_stays_a_name(
    chart: helm.Chart, values: dict[str, Any], release: str
) -> None:
    import yaml

    given = {
        **values,
        "engine": {"enabled": True, "model": "@models/7b: chat"},
        "nameOverride": "12",
        "priorityClassName": "1000",
        "serviceAccount": {"create": False, "name": "007"},
        "terminationGracePeriodSeconds": 1_000_000,
    }
    chart.validate_schema(given)
    made = chart.render(given, name=release, namespace="caches")
    texts = [text for path, text in made.items() if not path.endswith(".txt")]
    for document in filter(None, (each for text in texts for each in yaml.safe_load_all(text))):
        if document["kind"] == "Service":
            assert re.fullmatch("[a-z][-a-z0-9]{,62}", document["metadata"]["name"])
        if document["kind"] not in OPERATORS:
            kubernetes_validate.validate(document, "1.37", strict=True)


def test_a_sidecars_metrics_are_not_where_its_engine_serves(chart: helm.Chart) -> None:
    """The daemon starts first, and the engine would find the port taken and end."""
    port = {"metrics": {"port": 8000}}
    with pytest.raises(helm.HelmError, match=r"metrics\.port is 8000"):
        objects(chart, SIDECAR | port)
    objects(chart, {"engine": {"enabled": True}} | port)


# -- monitoring ---------------------------------------------------------------------------------


def test_the_rules_are_the_alerts_for_the_job_that_the_monitors_name(chart: helm.Chart) -> None:
    import yaml

    written = yaml.safe_load((ROOT / "deploy/prometheus/kvd-alerts.yaml").read_text())
    made = objects(chart, EVERYTHING)
    assert made["PrometheusRule"]["spec"] == written
    assert made["PrometheusRule"]["metadata"]["labels"]["release"] == "prometheus"
    renamed = objects(
        chart, {**EVERYTHING, "nameOverride": "cache", "fullnameOverride": "demo-kvd"}
    )
    down = renamed["PrometheusRule"]["spec"]["groups"][0]["rules"][0]
    assert down["expr"] == 'up{job="cache"} == 0'
    labels = renamed["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    for kind in ("PodMonitor", "ServiceMonitor"):
        assert labels[renamed[kind]["spec"]["jobLabel"]] == "cache"


def test_the_dashboard_is_found_by_its_label(chart: helm.Chart) -> None:
    made = objects(chart, EVERYTHING)["ConfigMap-dashboard"]
    assert made["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(made["data"]["kvd.json"])["title"]


def test_the_daemons_pods_are_closed_but_for_who_reads_metrics(chart: helm.Chart) -> None:
    made = objects(chart, EVERYTHING)
    policy = made["NetworkPolicy"]["spec"]
    labels = made["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    (rule,) = policy["ingress"]
    assert rule["ports"] == [{"port": "http", "protocol": "TCP"}]
    assert rule["from"] == EVERYTHING["networkPolicy"]["metricsFrom"]
    closed = objects(chart, {"networkPolicy": {"enabled": True}})["NetworkPolicy"]["spec"]
    assert (closed["ingress"], closed["egress"]) == ([], [])


def test_security_contexts_may_be_changed_one_field_at_a_time(chart: helm.Chart) -> None:
    spec = pod(chart, {
        "podSecurityContext": {"fsGroup": 7},
        "containerSecurityContext": {"capabilities": {"add": ["SYS_NICE"]}},
    })  # fmt: skip
    assert spec["securityContext"] == {
        "runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 7,
        "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    assert spec["containers"][0]["securityContext"]["capabilities"] == {
        "drop": ["ALL"], "add": ["SYS_NICE"],
    }  # fmt: skip


def test_the_chart_packs_with_its_files_and_renders_from_the_archive(tmp_path: Path) -> None:
    archive = helm.package(str(CHART), destination=str(tmp_path))
    path = Path(str(archive))
    assert re.fullmatch(r"kvd-[\d.]+\.tgz", path.name)
    with helm.Chart.load(str(path)) as packed:
        assert objects(packed, EVERYTHING)["PrometheusRule"]["spec"]["groups"]


OWN = {"app.kubernetes.io/name": "cache"}
MODELS = [{"name": "models", "emptyDir": {}}]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"podLabels": OWN}, r"podLabels has app\.kubernetes\.io/name, .* leave it out"),
        ({**SIDECAR, "podLabels": {"app.kubernetes.io/component": "x"}}, "podLabels has"),
        ({"podAnnotations": {"kvd/config-digest": "x"}}, "podAnnotations has kvd/config-digest"),
        ({"metrics": {"dashboards": {"labels": OWN}}}, r"metrics\.dashboards\.labels has"),
        ({"extraVolumes": [{"name": "pool", "emptyDir": {}}]}, "extraVolumes has name pool"),
        ({"extraVolumeMounts": [{"name": "x", "mountPath": "/tmp"}]}, "has mountPath /tmp"),
        (
            {**SIDECAR, "extraVolumes": MODELS, "engine": {"extraVolumes": MODELS}},
            r"engine\.extraVolumes has name models, .*: rename it",
        ),
        (
            {
                "engine": {
                    "enabled": True,
                    "extraVolumeMounts": [{"name": "m", "mountPath": "/dev/shm"}],
                }
            },
            r"engine\.extraVolumeMounts has mountPath /dev/shm",
        ),
    ],
)
def test_what_would_be_in_a_manifest_twice_is_refused_with_its_field(
    chart: helm.Chart, given: dict[str, Any], said: str
) -> None:
    with pytest.raises(helm.HelmError, match=said):
        chart.render(given, name="demo", namespace="caches")


def test_labels_and_volumes_of_ones_own_come_beside_the_charts(chart: helm.Chart) -> None:
    given = {
        "podLabels": {"app.kubernetes.io/component": "cache"},
        "extraVolumes": MODELS,
        "engine": {"enabled": False, "extraVolumes": MODELS},
    }
    template = objects(chart, given)["DaemonSet"]["spec"]["template"]
    assert template["metadata"]["labels"]["app.kubernetes.io/component"] == "cache"
    assert MODELS[0] in template["spec"]["volumes"]


HTTP_PORT = {"name": "KVD_HTTP_PORT", "value": "9999"}
LEVEL = {"name": "KVD_LOG_LEVEL", "value": "debug"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"extraArgs": ["--http-port=9999"]}, r"extraArgs has --http-port, .* set metrics\.port"),
        ({"extraArgs": ["--http-port", "0"]}, r"extraArgs has --http-port, .* set metrics\.port"),
        ({"extraArgs": ["--pool-bytes=1GiB"]}, r"extraArgs has --pool-bytes, .* pool\.sizeGiB"),
        ({"extraArgs": ["--config=/mine"]}, "extraArgs has --config"),
        ({"extraArgs": ["--drain-seconds=600"]}, r"config\.drain_seconds"),
        ({"extraArgs": ["--check"]}, "extraArgs has --check, .* would not serve"),
        ({**SIDECAR, "extraArgs": ["--socket=/x"]}, "extraArgs has --socket"),
        ({"extraEnv": [HTTP_PORT]}, r"extraEnv has KVD_HTTP_PORT, .* set metrics\.port"),
        ({**SIDECAR, "extraEnv": [HTTP_PORT]}, "extraEnv has KVD_HTTP_PORT"),
        ({"extraEnv": [LEVEL, LEVEL]}, "extraEnv has name KVD_LOG_LEVEL, .*: leave one of them"),
        (
            {"gpu": {"enabled": True}, "extraEnv": [{"name": "NVIDIA_VISIBLE_DEVICES"}]},
            "extraEnv has name NVIDIA_VISIBLE_DEVICES",
        ),
        (
            {"engine": {"enabled": True, "extraArgs": ["--port=9"]}},
            r"engine\.extraArgs has --port, .* the probes ask 8000",
        ),
        (
            {**SIDECAR, "engine": {"extraArgs": ["--kv_transfer_config={}"]}},
            r"engine\.extraArgs has --kv-transfer-config, .* set connection\.vllm",
        ),
        (
            {"engine": {"enabled": True, "extraEnv": [{"name": "KV_TRANSFER_CONFIG"}]}},
            r"engine\.extraEnv has name KV_TRANSFER_CONFIG",
        ),
    ],
)
def test_a_flag_or_variable_that_would_undo_what_the_chart_sets_is_refused(
    chart: helm.Chart, given: dict[str, Any], said: str
) -> None:
    chart.validate_schema(given)
    with pytest.raises(helm.HelmError, match=said):
        chart.render(given, name="demo", namespace="caches")


def test_flags_and_variables_of_ones_own_reach_daemon_and_engine(chart: helm.Chart) -> None:
    engine = {"enabled": True, "extraArgs": ["--seed=1"], "extraEnv": [{"name": "A", "value": "b"}]}
    given = {"extraArgs": ["--log-level=debug"], "extraEnv": [LEVEL], "engine": engine}
    made = objects(chart, given)
    (daemon,) = made["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    assert (daemon["args"][-1], daemon["env"]) == ("--log-level=debug", [LEVEL])
    (vllm,) = made["Deployment-engine"]["spec"]["template"]["spec"]["containers"]
    assert (vllm["args"][-1], vllm["env"][-1]["name"]) == ("--seed=1", "A")
