"""The Helm chart: linted, rendered, and its kvd.toml read by the daemon's own reader."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd import config
from kvd.pool import PoolConfig
from kvd.pool.capacity_check import PROCESS_BYTES, SpaceFigures, require_space

CHART = Path(__file__).resolve().parents[2] / "helm" / "kvd"
GIB = 1 << 30

if importlib.util.find_spec("helm_python") is None and not os.environ.get("CI"):
    # CI installs it, so there its absence is a failure and not a reason to skip.
    pytest.skip("helm-python-sdk (75 MB) is missing: .ci/venv charts", allow_module_level=True)

import helm_python as helm  # noqa: E402 - only once it is known to be there
import yaml  # noqa: E402

DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
__all__ = ["chart", "helm", "objects", "pod", "settings"]  # tests of other values use them


@pytest.fixture(scope="module")
def chart() -> Iterator[helm.Chart]:
    with helm.Chart.load(str(CHART)) as loaded:
        yield loaded


def objects(chart: helm.Chart, values: dict[str, Any] | None = None) -> dict[str, Any]:
    """Kind → manifest, of everything rendered; of a second one with what its name adds."""
    chart.validate_schema(values or {})
    rendered = chart.render(values or {}, name="demo", namespace="caches")
    documents = [
        document
        for path, text in rendered.items()
        if not path.endswith(".txt")
        for document in yaml.safe_load_all(text)
        if document
    ]
    by_kind = {
        document["kind"]
        + document["metadata"]["name"].removeprefix("demo-kvd").removesuffix("-metrics"): document
        for document in documents
    }
    assert len(by_kind) == len(documents)
    return by_kind


def pod(chart: helm.Chart, values: dict[str, Any] | None = None) -> Any:
    return objects(chart, values)["DaemonSet"]["spec"]["template"]["spec"]


def settings(chart: helm.Chart, tmp_path: Path, values: dict[str, Any] | None = None) -> Any:
    """What the daemon reads from the chart's ConfigMap."""
    file = tmp_path / "kvd.toml"
    file.write_text(objects(chart, values)["ConfigMap"]["data"]["kvd.toml"])
    return config.load({"config": str(file)}, {})


def test_lint_finds_no_error() -> None:
    found = helm.lint(str(CHART))
    assert found["errors"] == []
    assert [m["error"] for m in found["messages"]] == ["icon is recommended"]


def test_by_default_there_is_one_daemon_a_node_and_its_settings(chart: helm.Chart) -> None:
    assert objects(chart).keys() == {
        "DaemonSet", "ConfigMap", "ConfigMap-connection", "ServiceAccount", "Pod-test",
    }  # fmt: skip


def test_the_daemon_accepts_the_settings_and_finds_the_mounted_paths(
    chart: helm.Chart, tmp_path: Path
) -> None:
    read = settings(chart, tmp_path, {"pool": {"sizeGiB": 3}})
    assert read.pool_bytes == 3 * GIB
    (container,) = pod(chart)["containers"]
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {str(read.pool_directory), str(read.socket.parent)} <= mounted
    assert (read.http_address, read.http_port) == ("::", 9470)


def test_settings_and_tenants_of_the_values_reach_the_daemon(
    chart: helm.Chart, tmp_path: Path
) -> None:
    given = {
        "extent_bytes": 33554432,
        "lease_share": 0.5,
        "operators": [1000],
        "policy": "arc",
        "tenants": {"acme": {"uids": [1001, 1002], "quota": "1GiB"}},
    }
    read = settings(chart, tmp_path, {"config": given})
    assert (read.extent_bytes, read.lease_share, read.policy) == (32 << 20, 0.5, "arc")
    assert read.operators == (1000,)
    (acme,) = read.tenants
    assert (acme.tenant, acme.uids, acme.quota_bytes) == ("acme", {1001, 1002}, GIB)


@pytest.mark.parametrize(
    "wrong",
    [
        {"user": 0},
        {"pool": {"sizeGiB": "sixteen"}},
        {"pool": {"sizeGiB": 16, "hostPath": "relative"}},
        {"config": {"polcy": "lru"}},
        {"config": {"policy": "fifo"}},
        {"config": {"payload_checksums": "perhaps"}},
        {"metrics": {"port": 80}},
        {"pool": {"sizeGiB": 1, "hostPath": "/x", "headroomGiB": 8192}},
        {"engine": {"shmGiB": 8192}},
        {"engine": {"replicas": 2**31}},
        {"fullnameOverride": "Not_a name"},
        {"nameOverride": "-kvd"},
        {"probes": {"liveness": {"periodSecond": 10}}},
        {"probes": {"liveness": {"successThreshold": 2}}},
        {"probes": {"readiness": {"terminationGracePeriodSeconds": 5}}},
        {"replicaCount": 3},
        {"image": {"repository": ""}},
        {"updateStrategy": {"rollingUpdate": 1}},
        {"image": {"repository": "here/kvd: 1"}},
        {"image": {"repository": "{{ .Values.here }}"}},
        {"image": {"repository": "kvd", "tag": "1.0 "}},
        {"image": {"repository": "kvd", "tag": "a: b"}},
        {"engine": {"image": {"repository": "a b", "tag": "1"}}},
        {"engine": {"image": {"repository": "vllm", "tag": ""}}},
        {"gpu": {"enabled": "yes"}},
        {"gpu": {"count": 1}},
        {"pool": {"sizeGiB": 1, "hostPath": "/x", "hugePages": {"size": "4Mi"}}},
        {"pool": {"sizeGiB": 8192}},
        {"config": {"tenants": {"a": {}}}},
        {"config": {"tenants": {"a": {"uids": []}}}},
        {"config": {"tenants": {"a": {"uids": [2**32 - 1]}}}},
        {"config": {"tenants": {"": {"uids": [1]}}}},
        {"config": {"tenants": {"a": {"uids": [1], "quota": "lots"}}}},
        {"config": {"tenants": {"a": {"uids": [1], "quota": 25}}}},
        {"config": {"operators": [2**32 - 1]}},
        {"config": {"extent_bytes": "lots"}},
        {"extraEnv": [{"value": "no name"}]},
        {"config": {"extent_bytes": 100}},
        {"config": {"gpu_context_bytes": "10%"}},
        {"config": {"gpu_staging_bytes": 1}},
        {"config": {"socket_mode": "0400"}},
        {"tiers": [{"name": "a", "kind": "tape"}]},
        {"tiers": [{"name": "a", "kind": "disk", "queue_keys": 65537}]},
        {"tiers": [{"name": "a", "kind": "disk", "reuse": 3}]},
    ],
)
def test_a_wrong_value_is_refused(chart: helm.Chart, wrong: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmValuesError):
        chart.validate_schema(wrong)


NULLS = [(name,) for name in DEFAULTS] + [
    (outer, inner) for outer, values in DEFAULTS.items() if isinstance(values, dict)
    for inner in values
]  # fmt: skip


@pytest.mark.parametrize("path", NULLS, ids=".".join)
def test_a_key_with_nothing_below_it_renders_or_is_named(
    chart: helm.Chart, path: tuple[str, ...]
) -> None:
    values: dict[str, Any] = {"engine": {"enabled": True}}
    *outer, last = path
    (values.setdefault(outer[0], {}) if outer else values)[last] = None
    said = ""
    try:
        objects(chart, values)
    except helm.HelmValuesError as refused:
        said = str(refused)
    assert not said or f"missing property '{last}'" in said


@pytest.mark.parametrize(
    "right",
    [
        {"tenants": {"a": {"gids": [0, 2**32 - 2], "uids": [], "quota": 0}}},
        {"tenants": {"a": {"uids": [1], "quota": 4096}, "b": {"uids": [2], "quota": "12.5 %"}}},
        {"tenants": {"a": {"uids": [1], "quota": "1 gib"}, "b": {"uids": [2], "quota": "500MB"}}},
        {"extent_bytes": "auto"},
        {"extent_bytes": "8MiB", "gpu_context_bytes": 0, "gpu_staging_bytes": "1GiB"},
        {"extent_bytes": 4096, "gpu_context_bytes": "16GiB", "gpu_staging_bytes": 1 << 20},
        {"socket_mode": "0600"},
    ],
)
def test_a_value_at_its_limit_is_taken_by_chart_and_daemon(
    chart: helm.Chart, tmp_path: Path, right: dict[str, Any]
) -> None:
    read = settings(chart, tmp_path, {"config": right})
    assert len(read.tenants) == len(right.get("tenants", {}))


def test_the_pool_outlives_the_pod(chart: helm.Chart) -> None:
    volumes = {volume["name"]: volume for volume in pod(chart)["volumes"]}
    assert volumes["pool"]["hostPath"] == {
        "path": "/var/lib/kvd/pool", "type": "DirectoryOrCreate",
    }  # fmt: skip
    assert volumes["run"]["hostPath"]["path"] == "/run/kvd"


def test_the_pool_has_a_mount_of_its_own_on_the_node(chart: helm.Chart) -> None:
    spec = pod(chart)
    (init,) = spec["initContainers"]
    (mount,) = (m for m in init["volumeMounts"] if m["name"] == "pool")
    assert mount["mountPropagation"] == "Bidirectional"
    assert init["securityContext"]["privileged"] is True
    (container,) = spec["containers"]
    assert all("mountPropagation" not in mount for mount in container["volumeMounts"])


def test_nodes_that_have_a_mount_need_no_privileged_container(chart: helm.Chart) -> None:
    (init,) = pod(chart, {"pool": {"sizeGiB": 1, "hostPath": "/x", "mount": False}})[
        "initContainers"
    ]
    assert init["securityContext"]["allowPrivilegeEscalation"] is False
    assert "privileged" not in init["securityContext"]
    assert "mount" not in init["command"][-1]
    assert all("mountPropagation" not in mount for mount in init["volumeMounts"])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a tmpfs")
def test_the_init_container_mounts_a_tmpfs_that_the_pool_fits_and_enlarges_it(
    chart: helm.Chart, tmp_path: Path
) -> None:
    mount = tmp_path / "pool"
    mount.mkdir()
    found = []
    for size in (1, 1, 3):
        (init,) = pod(chart, {"pool": {"sizeGiB": size}})["initContainers"]
        script = init["command"][-1].replace("/var/lib/kvd/pool", str(mount))
        script = script.replace("/run/kvd", str(tmp_path / "run"))
        found.append(script)
    ask = f"stat -c %u:%g:%a {mount}; stat -f -c '%T %b %S' {mount}; grep -c {mount} /proc/mounts"
    whole = "\n".join(["set -eu", *(f"{script}\n{ask}" for script in found)])
    said = subprocess.run(
        ["unshare", "-m", "/bin/sh", "-euc", whole], check=False, capture_output=True, text=True
    )
    if said.returncode and "not permitted" in said.stderr:
        pytest.skip(f"no tmpfs can be mounted: {said.stderr}")
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()
    assert len(lines) == 9
    for size, (owner, kind, mounts) in zip((1, 1, 3), batched(lines, 3), strict=True):
        assert owner == "10001:10001:700"
        name, blocks, block_bytes = kind.split()
        assert name == "tmpfs"
        config = PoolConfig(mount, size * GIB)
        need = size * GIB + config.table_bytes + config.reserve_bytes
        assert int(blocks) * int(block_bytes) >= need
        assert mounts == "1"


def batched(lines: list[str], size: int) -> list[list[str]]:
    return [lines[start : start + size] for start in range(0, len(lines), size)]


def test_the_pods_memory_holds_pool_slot_table_and_processes(chart: helm.Chart) -> None:
    for size in (1, 16, 64, 500, 4000):
        (container,) = pod(chart, {"pool": {"sizeGiB": size}})["containers"]
        limit = container["resources"]["limits"]["memory"]
        assert container["resources"]["requests"]["memory"] == limit
        given = int(limit.removesuffix("Gi")) * GIB
        taken_by_others = 2 * GIB - PROCESS_BYTES  # of the headroom
        config = PoolConfig(Path("/var/lib/kvd/pool"), size * GIB)
        plenty = 2 * given
        figures = SpaceFigures(plenty, 0, 0, plenty, given - taken_by_others)
        require_space(config, figures)


def test_without_a_gpu_the_pod_asks_for_nothing_of_one(chart: helm.Chart) -> None:
    spec = pod(chart)
    assert "runtimeClassName" not in spec
    assert spec["hostPID"] is False
    assert "env" not in spec["containers"][0]


def test_with_gpus_the_pod_sees_all_of_them_and_claims_none(chart: helm.Chart) -> None:
    own = [{"name": "KVD_LOG_LEVEL", "value": "debug"}]
    spec = pod(chart, {"gpu": {"enabled": True}, "extraEnv": own})
    assert (spec["runtimeClassName"], spec["hostPID"]) == ("nvidia", True)
    assert "hostIPC" not in spec
    (container,) = spec["containers"]
    assert container["env"] == [
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
        {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "compute,utility"},
        *own,
    ]
    claimed = container["resources"]["limits"].keys() | container["resources"]["requests"].keys()
    assert claimed == {"cpu", "memory"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_nodes_own_runtime_and_pid_namespaces_may_be_kept(chart: helm.Chart) -> None:
    spec = pod(chart, {"gpu": {"enabled": True, "runtimeClassName": "", "hostPID": False}})
    assert "runtimeClassName" not in spec
    assert spec["hostPID"] is False
    assert pod(chart, {"hostPID": True})["hostPID"] is True


def test_orphans_of_an_exec_are_reaped_by_the_pods_first_process(chart: helm.Chart) -> None:
    """Kubernetes takes no pod that shares the node's pids and its own."""
    assert pod(chart)["shareProcessNamespace"] is True
    for values in ({"hostPID": True}, {"gpu": {"enabled": True}}):
        assert "shareProcessNamespace" not in pod(chart, values)


@pytest.mark.parametrize("size", ["2Mi", "1Gi"])
def test_a_pool_in_huge_pages_claims_them_and_no_common_memory_for_its_blocks(
    chart: helm.Chart, tmp_path: Path, size: str
) -> None:
    values = {"pool": {"sizeGiB": 64, "hugePages": {"size": size}}}
    if size == "1Gi":
        values |= {"config": {"extent_bytes": "1GiB"}}
    read = settings(chart, tmp_path, values)
    spec = pod(chart, values)
    (container,) = spec["containers"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(read.extents_directory) == mounted["extents"]
    for kind in ("requests", "limits"):
        asked = container["resources"][kind]
        assert asked[f"hugepages-{size}"] == "64Gi"
        assert 2 + 64 * 128 / 4096 <= int(asked["memory"].removesuffix("Gi")) < 10
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["extents"]["hostPath"]["path"] == "/dev/hugepages/kvd"
    (init,) = spec["initContainers"]
    assert f"-m 0700 {mounted['extents']}" in init["command"][-1]


@pytest.mark.parametrize(
    ("given", "requests", "limits"),
    [
        ({"requests": {"cpu": 4}}, {"cpu": 4, "memory": "19Gi"}, {"memory": "19Gi"}),
        ({"limits": {"cpu": 8}}, {"cpu": "1", "memory": "19Gi"}, {"cpu": 8, "memory": "19Gi"}),
        (
            {"limits": {"cpu": "500m"}},
            {"cpu": "500m", "memory": "19Gi"},
            {"cpu": "500m", "memory": "19Gi"},
        ),
        ({"limits": {"cpu": 0.5}}, {"cpu": 0.5, "memory": "19Gi"}, {"cpu": 0.5, "memory": "19Gi"}),
        (
            {"limits": {"cpu": "1k"}},
            {"cpu": "1", "memory": "19Gi"},
            {"cpu": "1k", "memory": "19Gi"},
        ),
        (
            {"limits": {"cpu": "2e3m"}},
            {"cpu": "1", "memory": "19Gi"},
            {"cpu": "2e3m", "memory": "19Gi"},
        ),
        ({"limits": {"memory": "9Gi"}}, {"cpu": "1", "memory": "9Gi"}, {"memory": "9Gi"}),
        ({"requests": {"memory": "40Gi"}}, {"cpu": "1", "memory": "40Gi"}, {"memory": "40Gi"}),
        (
            {"requests": {"memory": "20Gi"}, "limits": {"memory": "30Gi"}},
            {"cpu": "1", "memory": "20Gi"},
            {"memory": "30Gi"},
        ),
        ({"claims": [{"name": "gpus"}]}, {"cpu": "1", "memory": "19Gi"}, {"memory": "19Gi"}),
    ],
    ids=[
        "cpu",
        "cpu limit",
        "low limit",
        "lower limit",
        "thousands",
        "exponent",
        "memory limit",
        "memory request",
        "both",
        "claims",
    ],
)
def test_what_resources_do_not_say_of_memory_is_what_the_pool_needs(
    chart: helm.Chart, given: dict[str, Any], requests: dict[str, Any], limits: dict[str, Any]
) -> None:
    pool = {"sizeGiB": 16, "headroomGiB": 2}
    (container,) = pod(chart, {"resources": given, "pool": pool})["containers"]
    asked = container["resources"]
    assert (asked["requests"], asked["limits"]) == (requests, limits)
    assert asked.get("claims") == given.get("claims")


def test_resources_keep_the_claim_on_huge_pages(chart: helm.Chart) -> None:
    values = {
        "resources": {"requests": {"cpu": 4}},
        "pool": {"sizeGiB": 64, "hugePages": {"size": "2Mi"}},
    }
    (container,) = pod(chart, values)["containers"]
    for kind in ("requests", "limits"):
        assert container["resources"][kind]["hugepages-2Mi"] == "64Gi"


@pytest.mark.parametrize("extent", [None, "auto", "64MiB", "1.5GiB", "1GB", "0GiB", 1 << 26])
def test_huge_pages_of_a_gibibyte_want_extents_as_large(
    chart: helm.Chart, extent: str | int | None
) -> None:
    values = {
        "pool": {"hugePages": {"size": "1Gi"}},
        "config": {} if extent is None else {"extent_bytes": extent},
    }
    with pytest.raises(helm.HelmError, match="set it to 1GiB"):
        objects(chart, values)
    for good in ("1GiB", "2 GiB", "1024MiB", "1tib", "1.0GiB", 1 << 30):
        objects(chart, {**values, "config": {"extent_bytes": good}})


def test_a_million_engines_are_a_whole_number(chart: helm.Chart) -> None:
    engines = {"engine": {"enabled": True, "replicas": 10**6}}
    assert "\n  replicas: 1000000\n" in "".join(chart.render(engines, name="demo").values())


def test_a_pod_is_given_the_time_to_drain(chart: helm.Chart) -> None:
    for grace, drain in ((14, None), (90, 86), (90, 85.5), (30, 600)):
        config = {} if drain is None else {"drain_seconds": drain}
        with pytest.raises(helm.HelmError, match="it would be killed"):
            objects(chart, {"terminationGracePeriodSeconds": grace, "config": config})
    for grace, drain in ((15, 10), (90, 85), (11, 0), (605, 600)):
        values = {"terminationGracePeriodSeconds": grace, "config": {"drain_seconds": drain}}
        assert pod(chart, values)["terminationGracePeriodSeconds"] == grace


@pytest.mark.parametrize("surge", [1, "25%"])
def test_an_update_that_would_wait_for_the_old_daemons_pool_for_ever_is_refused(
    chart: helm.Chart, surge: int | str
) -> None:
    wrong = {"updateStrategy": {"rollingUpdate": {"maxSurge": surge, "maxUnavailable": 0}}}
    with pytest.raises(helm.HelmRenderError, match=f"maxSurge is {surge}: .* set it to 0"):
        objects(chart, wrong)
    for right in (0, "0%"):
        objects(chart, {"updateStrategy": {"rollingUpdate": {"maxSurge": right}}})
    objects(chart, {"updateStrategy": {"type": "OnDelete"}})


def test_a_pool_in_common_memory_has_its_extents_in_its_directory(
    chart: helm.Chart, tmp_path: Path
) -> None:
    assert settings(chart, tmp_path).extents_directory is None
    volumes = {volume["name"] for volume in pod(chart)["volumes"]}
    assert "extents" not in volumes


def notes(chart: helm.Chart, values: dict[str, Any]) -> str:
    (text,) = (
        text
        for path, text in chart.render(values, name="demo", namespace="caches").items()
        if path.endswith("NOTES.txt")
    )
    return " ".join(str(text).split())


def test_the_notes_say_what_engines_on_gpus_need(chart: helm.Chart) -> None:
    without = notes(chart, {})
    assert "gpu.enabled is false" in without
    assert "hostPID is false" in without
    with_gpus = notes(chart, {"gpu": {"enabled": True}})
    assert "also need `hostPID: true`" in with_gpus
    assert "hostPID is false" not in with_gpus
    assert "huge pages of 2Mi" in notes(chart, {"pool": {"hugePages": {"size": "2Mi"}}})


def test_the_daemon_runs_without_root_and_without_capabilities(chart: helm.Chart) -> None:
    spec = pod(chart)
    assert spec["securityContext"]["runAsNonRoot"] is True
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.parametrize("mode", ["daemonset", "sidecar"])
def test_large_users_and_groups_are_written_out(chart: helm.Chart, mode: str) -> None:
    """Numbers of a file of values are floats, which would be written as 1.00066e+09."""
    volumes: list[Any] = [{"emptyDir": {}}]
    disk = {"name": "disk", "kind": "disk", "volumes": volumes}
    huge = {"sizeGiB": 16, "hugePages": {"size": "2Mi"}}
    values = {"user": 1000660000, "group": 1000670000, "mode": mode, "tiers": [disk], "pool": huge}
    chart.validate_schema(values)
    rendered = chart.render(values, name="demo", namespace="caches")
    assert "e+" not in "".join(rendered.values())
    made = objects(chart, values)
    kind = "DaemonSet" if mode == "daemonset" else "Deployment-engine"
    script = made[kind]["spec"]["template"]["spec"]["initContainers"][0]["command"][-1]
    assert script.count("install -d -o 1000660000 -g 1000670000 ") == 4
    assert made["ConfigMap-connection"]["data"]["group"] == "1000670000"


def test_kubernetes_sets_no_variables_that_the_daemon_takes_for_settings(
    chart: helm.Chart,
) -> None:
    assert pod(chart)["enableServiceLinks"] is False


def test_the_probes_ask_the_http_port(chart: helm.Chart) -> None:
    (container,) = pod(chart)["containers"]
    asked = {kind: container[kind]["httpGet"]["path"] for kind in container if "Probe" in kind}
    assert asked == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }
    assert container["ports"][0]["containerPort"] == 9470


def test_prometheus_finds_the_metrics_either_way(chart: helm.Chart) -> None:
    asked = {
        "service": {"enabled": True},
        "serviceMonitor": {"enabled": True},
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    }
    made = objects(chart, {"metrics": asked})
    assert made.keys() >= {"Service", "ServiceMonitor", "PodMonitor"}
    assert made["PodMonitor"]["metadata"]["labels"]["release"] == "prometheus"
    labels = made["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    for kind in ("ServiceMonitor", "PodMonitor"):
        assert made[kind]["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_a_service_monitor_without_a_service_is_refused(chart: helm.Chart) -> None:
    with pytest.raises(helm.HelmError, match=r"needs metrics\.service\.enabled"):
        objects(chart, {"metrics": {"serviceMonitor": {"enabled": True}}})


def test_a_changed_setting_makes_new_pods(chart: helm.Chart) -> None:
    def digest(values: dict[str, Any]) -> str:
        metadata = objects(chart, values)["DaemonSet"]["spec"]["template"]["metadata"]
        return str(metadata["annotations"]["kvd/config-digest"])

    assert digest({}) == digest({})
    assert digest({}) != digest({"config": {"policy": "arc"}})


@pytest.mark.parametrize(
    "image",
    [
        {"repository": "Registry.Example:5000/a/b__c/kvd", "tag": "v0.1.0_rc-1.B"},
        {"repository": "10.0.0.1:5000/kvd", "tag": ""},
        {"repository": "kvd", "tag": "x" * 128},
    ],
)
def test_the_name_of_any_image_is_taken(chart: helm.Chart, image: dict[str, str]) -> None:
    (container,) = pod(chart, {"image": image})["containers"]
    assert container["image"].startswith(f"{image['repository']}:{image['tag']}")


def test_an_image_pinned_by_digest_is_a_reference_that_can_be_pulled(chart: helm.Chart) -> None:
    digest = "sha256:" + "a" * 64
    spec = pod(chart, {"image": {"repository": "reg/kvd", "tag": "1", "digest": digest}})
    images = {each["image"] for each in (*spec["containers"], *spec["initContainers"])}
    assert images == {f"reg/kvd@{digest}"}


def test_an_engine_as_the_notes_say_may_start_before_the_daemon(chart: helm.Chart) -> None:
    rendered = chart.render({}, name="demo", namespace="caches")
    [notes] = [text for path, text in rendered.items() if path.endswith("NOTES.txt")]
    assert "hostPath: {path: /run/kvd, type: DirectoryOrCreate}" in notes
