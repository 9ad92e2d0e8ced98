"""The Helm chart's tiers: the daemon reads them and finds their directories and secrets."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.test_chart import chart, helm, objects, pod, settings

__all__ = ["chart"]

DISK: dict[str, Any] = {
    "name": "fast_disk",
    "kind": "disk",
    "write": "reuse",
    "reuse": 3,
    "deadline_seconds": 2.5,
    "options": {"directory_bytes": "500GiB", "threads": 8, "direct": False},
    "volumes": [
        {"hostPath": {"path": "/data1/kvd", "type": "DirectoryOrCreate"}},
        {"persistentVolumeClaim": {"claimName": "cache"}},
        {
            "ephemeral": {
                "volumeClaimTemplate": {
                    "spec": {
                        "accessModes": ["ReadWriteOncePod"],
                        "resources": {"requests": {"storage": "520Gi"}},
                    }
                }
            }
        },
    ],
}
CLUSTER: dict[str, Any] = {
    "name": "cluster",
    "store": "acme.tiers:open_store",
    "medium": "REMOTE",
    "options": {"addresses": ["cache-0.cache:6379", "cache-1.cache:6379"], "username": 'a"b\\c'},
    "secretFiles": {
        "password_file": {"name": "cache", "key": "password"},
        "ca_file": {"name": "cache-tls", "key": "ca.crt"},
    },
}
TIERS = {"tiers": [DISK, CLUSTER], "config": {"tenants": {"acme": {"uids": [1001]}}}}


def test_the_daemon_reads_tiers_in_their_order(chart: helm.Chart, tmp_path: Path) -> None:
    read = settings(chart, tmp_path, TIERS)
    disk, cluster = read.tiers
    assert (disk.name, disk.write, disk.reuse, disk.deadline_seconds) == (
        "fast_disk", "reuse", 3, 2.5,
    )  # fmt: skip
    assert disk.options == {
        "directories": [f"/var/lib/kvd/tiers/fast_disk/{place}" for place in range(3)],
        "directory_bytes": "500GiB",
        "threads": 8,
        "direct": False,
    }
    assert (cluster.store, cluster.medium) == ("acme.tiers:open_store", "REMOTE")
    assert cluster.options == {
        **CLUSTER["options"],
        "password_file": "/etc/kvd-secrets/cluster/password_file",
        "ca_file": "/etc/kvd-secrets/cluster/ca_file",
    }
    assert [tenant.tenant for tenant in read.tenants] == ["acme"]


def test_each_directory_is_a_volume_that_is_the_daemons_own(chart: helm.Chart) -> None:
    spec = pod(chart, TIERS)
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    (container,), (init,) = spec["containers"], spec["initContainers"]
    for place, source in enumerate(DISK["volumes"]):
        name, path = f"tier-0-{place}", f"/var/lib/kvd/tiers/fast_disk/{place}"
        assert volumes[name] == {"name": name, **source}
        mount = {"name": name, "mountPath": path}
        assert mount in container["volumeMounts"]
        assert mount in init["volumeMounts"]
        assert f"install -d -o 10001 -g 10001 -m 0700 {path}\n" in init["command"][-1] + "\n"
    assert container["securityContext"]["readOnlyRootFilesystem"] is True


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give directories away")
def test_a_claim_that_the_kubelet_opened_to_a_group_is_the_daemons_alone_again(
    chart: helm.Chart, tmp_path: Path
) -> None:
    """With fsGroup it does so before each pod that mounts what an earlier one wrote."""
    (init,) = pod(chart, {"tiers": [DISK], "user": 1, "podSecurityContext": {"fsGroup": 2000}})[
        "initContainers"
    ]
    lines = [line for line in init["command"][-1].splitlines() if "/tiers/" in line]
    for place in range(3):
        slab = tmp_path / f"fast_disk/{place}/slab"
        slab.parent.mkdir(parents=True)
        slab.touch()
        os.chown(slab, 1, 2000)
        slab.chmod(0o660)
    script = "\n".join(lines).replace("/var/lib/kvd/tiers", str(tmp_path))
    subprocess.run(["/bin/sh", "-euc", script], check=True)
    modes = [(tmp_path / f"fast_disk/{n}/slab").stat().st_mode & 0o777 for n in range(3)]
    assert modes == [0o660, 0o600, 0o600], "a hostPath is opened by somebody else, if at all"


def test_secrets_come_as_files_and_stand_in_no_config(chart: helm.Chart) -> None:
    made = objects(chart, TIERS)
    spec = made["DaemonSet"]["spec"]["template"]["spec"]
    (container,), (init,) = spec["containers"], spec["initContainers"]
    (volume,) = (each for each in spec["volumes"] if each["name"] == "tier-1-secrets")
    found = [each["secret"] for each in volume["projected"]["sources"]]
    assert sorted(found, key=lambda secret: str(secret["name"])) == [
        {"name": "cache", "items": [{"key": "password", "path": "password_file"}]},
        {"name": "cache-tls", "items": [{"key": "ca.crt", "path": "ca_file"}]},
    ]
    assert {
        "name": "tier-1-secrets",
        "mountPath": "/etc/kvd-secrets/cluster",
        "readOnly": True,
    } in container["volumeMounts"]
    assert "tier-1-secrets" not in {mount["name"] for mount in init["volumeMounts"]}
    assert "Secret" not in made


def test_a_secret_of_the_environment_is_a_reference(chart: helm.Chart) -> None:
    reference = {"secretKeyRef": {"name": "s3", "key": "secret"}}
    variable = {"name": "AWS_SECRET_ACCESS_KEY", "valueFrom": reference}
    (container,) = pod(chart, {**TIERS, "extraEnv": [variable]})["containers"]
    assert variable in container["env"]


def test_without_tiers_nothing_of_them_is_there(chart: helm.Chart, tmp_path: Path) -> None:
    assert settings(chart, tmp_path).tiers == ()
    assert not any(volume["name"].startswith("tier-") for volume in pod(chart)["volumes"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "disk"},
        {"name": "disk"},
        {"name": "disk", "kind": "disk", "store": "a.b:c"},
        {"name": "Disk", "kind": "disk"},
        {"name": "disk", "store": "no module path"},
        {"name": "disk", "kind": "disk", "medium": "GPU"},
        {"name": "disk", "kind": "disk", "write": "back"},
        {"name": "disk", "kind": "disk", "reuse": 1},
        {"name": "disk", "kind": "disk", "volumes": [{}]},
        {"name": "disk", "kind": "disk", "options": {"threads": {"many": 1}}},
        {"name": "disk", "kind": "disk", "secretFiles": {"password_file": "plain"}},
    ],
)
def test_a_wrong_tier_is_refused(chart: helm.Chart, wrong: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmValuesError):
        chart.validate_schema({"tiers": [wrong]})


def test_more_tiers_than_a_daemon_may_have_are_refused(chart: helm.Chart) -> None:
    tiers = [{"name": f"disk{number}", "kind": "disk"} for number in range(9)]
    chart.validate_schema({"tiers": tiers[:8]})
    with pytest.raises(helm.HelmValuesError):
        chart.validate_schema({"tiers": tiers})


SECRET = {"name": "s3", "key": "ca.crt"}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([CLUSTER, CLUSTER], "tiers has two of the name cluster: rename one"),
        ([{"name": "d", "kind": "disk"}], "tier d is a disk without a directory: give it volumes"),
        (
            [{**DISK, "options": {"directories": ["/data"]}}],
            "tier fast_disk has options.directories beside volumes",
        ),
        (
            [{**CLUSTER, "options": {"ca_file": "/ca"}, "secretFiles": {"ca_file": SECRET}}],
            "ca_file among options and secretFiles",
        ),
    ],
    ids=["name", "nowhere", "directories", "secret"],
)
def test_a_tier_with_which_no_daemon_would_serve_is_refused(
    chart: helm.Chart, wrong: list[dict[str, Any]], says: str
) -> None:
    with pytest.raises(helm.HelmRenderError, match=says):
        objects(chart, {"tiers": wrong})
