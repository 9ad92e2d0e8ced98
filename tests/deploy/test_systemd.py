"""The units: systemd's own verdict on them, and what they promise the daemon."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvd import config

UNITS = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
INSTALLED = "/opt/kvd/bin/kvd"
VLLM = "/opt/vllm/bin/vllm"
EXPOSURE_AT_MOST = 25  # tenths, of systemd's 100: "OK" begins below 5.0


@pytest.fixture(scope="module")
def systemd_analyze() -> str:
    found = shutil.which("systemd-analyze")
    if found is None:
        pytest.skip("systemd-analyze is not installed (Debian package systemd)")
    return found


@pytest.fixture
def installed_units(tmp_path: Path) -> Path:
    """The units as they would be installed, with a kvd that exists on this machine."""
    kvd = Path(sys.executable).with_name("kvd")
    for unit in UNITS.glob("*.[sm]*"):
        text = unit.read_text().replace(INSTALLED, str(kvd)).replace(VLLM, sys.executable)
        (tmp_path / unit.name).write_text(text)
    return tmp_path


@pytest.fixture
def extended_units(installed_units: Path) -> Path:
    """The same with every drop-in of the service."""
    folder = installed_units / "kvd.service.d"
    folder.mkdir()
    for extension in UNITS.glob("kvd-*.conf"):
        (folder / extension.name).write_text(extension.read_text())
    return installed_units


def service(file: str = "kvd.service") -> configparser.SectionProxy:
    """The [Service] section; of a repeated key the last value."""
    return sections(file)["Service"]


def sections(file: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNITS / file)
    return parser


@pytest.mark.parametrize(
    "unit",
    [
        "kvd.service",
        "kvd-gateway.service",
        "vllm.service",
        "var-lib-kvd-pool.mount",
        "var-lib-kvd-extents.mount",
    ],
)
def test_systemd_finds_nothing_wrong(
    systemd_analyze: str, installed_units: Path, unit: str
) -> None:
    command = [systemd_analyze, "verify", "--man=no", str(installed_units / unit)]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


def test_systemd_finds_nothing_wrong_with_what_is_added(
    systemd_analyze: str, extended_units: Path
) -> None:
    command = [systemd_analyze, "verify", "--man=no", str(extended_units / "kvd.service")]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (found.returncode, found.stdout + found.stderr) == (0, "")
    broken = extended_units / "kvd.service.d" / "kvd-gpu.conf"
    broken.write_text(broken.read_text().replace("PrivateDevices=no", "PrivateDevices=perhaps"))
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    assert "perhaps" in found.stderr, "the drop-in was not read"


def test_systemd_reads_what_is_added_for_a_disk(systemd_analyze: str, extended_units: Path) -> None:
    broken = extended_units / "kvd.service.d" / "kvd-disk.conf"
    broken.write_text(broken.read_text().replace("=best-effort", "=worst-effort"))
    command = [systemd_analyze, "verify", "--man=no", str(extended_units / "kvd.service")]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    assert "worst-effort" in found.stderr, "the drop-in was not read"


def test_the_engines_unit_gives_vllm_what_the_connector_takes() -> None:
    text = (UNITS / "vllm.service").read_text()
    (config_text,) = re.findall(r"^Environment='KV_TRANSFER_CONFIG=(.*)'$", text, re.MULTILINE)
    said = json.loads(config_text)
    assert (said["kv_connector"], said["kv_load_failure_policy"]) == ("KvdConnector", "recompute")
    assert "--kv-transfer-config ${KV_TRANSFER_CONFIG}" in service("vllm.service")["ExecStart"]
    assert service("vllm.service")["SupplementaryGroups"] == service()["Group"]
    assert "kvd.service" not in sections("vllm.service")["Unit"].get("Requires", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give directories away")
def test_the_sockets_directory_is_there_before_the_daemon(tmp_path: Path) -> None:
    program = shutil.which("systemd-tmpfiles")
    if program is None:
        pytest.skip("systemd-tmpfiles is not installed (Debian package systemd)")
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "passwd").write_text("root:x:0:0::/:/bin/sh\nkvd:x:777:778::/:/bin/sh\n")
    (etc / "group").write_text("root:x:0:\nkvd:x:778:\n")
    old = tmp_path / "var/lib/kvd/pool/extent"
    old.parent.mkdir(parents=True)
    old.touch()
    command = [program, "--create", "--clean", f"--root={tmp_path}", str(UNITS / "kvd.tmpfiles")]
    made = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (made.returncode, made.stderr) == (0, "")
    found = (tmp_path / "run/kvd").stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (777, 778, 0o750)
    assert f"{found.st_mode & 0o7777:04o}" == service()["RuntimeDirectoryMode"]
    assert old.exists()


def test_a_broken_unit_is_found(systemd_analyze: str, installed_units: Path) -> None:
    unit = installed_units / "kvd.service"
    unit.write_text(unit.read_text().replace("Type=notify", "Type=notifies"))
    found = subprocess.run(
        [systemd_analyze, "verify", "--man=no", str(unit)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert "notifies" in found.stderr


@pytest.mark.parametrize("unit", ["kvd.service", "kvd-gateway.service"])
def test_daemon_and_gateway_can_do_little_beside_their_work(
    systemd_analyze: str, installed_units: Path, unit: str
) -> None:
    found = subprocess.run(
        [
            systemd_analyze, "security", "--offline=yes", "--no-pager",
            f"--threshold={EXPOSURE_AT_MOST}", str(installed_units / unit),
        ],
        check=False,
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-400:]


def test_the_unit_allows_every_call_that_kvd_makes_by_libc(systemd_analyze: str) -> None:
    """A call that is refused may only make kvd slower, so nothing else would tell."""
    rooms = UNITS.parents[1] / "kvd"
    made = {
        found[1]
        for path in [*rooms.rglob("*.py"), *rooms.rglob("*.c")]
        for found in re.finditer(r"\b(?:_?libc\.|SYS_)([a-z_0-9]+)", path.read_text())
    }
    assert {"mincore", "fallocate", "close_range"} <= made
    words = service()["SystemCallFilter"].split()
    allowed = set(words).union(*(calls_of(systemd_analyze, word) for word in words if "@" in word))
    assert made - allowed == {"memset", "syscall"}, "what is no call into the kernel"


def calls_of(systemd_analyze: str, group: str) -> set[str]:
    """The system calls of one of systemd's groups, and of those that it is made of."""
    command = [systemd_analyze, "syscall-filter", group]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    words = {line.strip() for line in said.splitlines() if line.startswith("    ")}
    words = {word for word in words if word and not word.startswith("#")}
    groups = {word for word in words if word.startswith("@")}
    return (words - groups).union(*(calls_of(systemd_analyze, each) for each in groups))


def test_the_pools_mount_is_the_directory_that_the_service_waits_for() -> None:
    mount = (UNITS / "var-lib-kvd-pool.mount").read_text()
    unit = (UNITS / "kvd.service").read_text()
    assert "Where=/var/lib/kvd/pool\n" in mount
    assert "RequiresMountsFor=/var/lib/kvd/pool\n" in unit


def test_the_service_stops_its_daemon_before_its_movers() -> None:
    assert service()["KillMode"] == "mixed"


def test_what_would_break_shared_memory_or_credentials_is_not_set() -> None:
    settings = service()
    for name in ("PrivateUsers", "PrivateIPC", "PrivateDevices", "MemoryDenyWriteExecute"):
        assert name not in settings
    assert settings["RemoveIPC"] == "no"


def test_no_device_is_reached_but_by_what_is_added_for_gpus() -> None:
    bare = (UNITS / "kvd.service").read_text()
    assert "DevicePolicy=closed\n" in bare
    assert "DeviceAllow" not in bare
    added = (UNITS / "kvd-gpu.conf").read_text().splitlines()
    allowed = [line.partition("=")[2] for line in added if line.startswith("DeviceAllow=")]
    groups = [name for name, access in map(str.split, allowed) if access == "rw"]
    assert groups == ["char-nvidia", "char-nvidia-frontend", "char-nvidia-uvm"]


def test_what_is_added_for_gpus_takes_back_what_would_break_them() -> None:
    added = service("kvd-gpu.conf")
    for name in ("PrivateDevices", "PrivateIPC", "MemoryDenyWriteExecute"):
        assert added[name] == "no"
    assert added["LimitMEMLOCK"] == service()["LimitMEMLOCK"] == "infinity"
    assert "CapabilityBoundingSet" not in added, "pinning and mapping need none"


def test_the_huge_pages_mount_is_where_the_daemon_looks_for_its_extents() -> None:
    added = sections("kvd-hugepages.conf")
    where = sections("var-lib-kvd-extents.mount")["Mount"]["Where"]
    name, _, directory = added["Service"]["Environment"].partition("=")
    assert added["Unit"]["RequiresMountsFor"] == directory == where
    assert f"/var/lib/{added['Service']['StateDirectory']}" == where
    read = config.load({"config": str(UNITS / "kvd.toml")}, {name: directory})
    assert read.extents_directory == Path(where)


def test_a_disk_tier_may_write_to_its_directories_alone_and_may_be_missing(tmp_path: Path) -> None:
    added = sections("kvd-disk.conf")
    directories = added["Service"]["ReadWritePaths"].split()
    assert all(each.startswith("-/") for each in directories), "a missing disk would stop kvd"
    mounts = added["Unit"]["After"].split()
    assert mounts == added["Unit"]["Wants"].split()
    assert "RequiresMountsFor" not in added["Unit"]
    for directory, mount in zip(directories, mounts, strict=True):
        assert directory.removeprefix("-/").partition("/")[0] == mount.removesuffix(".mount")
    comment = (UNITS / "kvd-disk.conf").read_text()
    written = [line.removeprefix("#   ") for line in comment.splitlines() if line[:4] == "#   "]
    file = tmp_path / "kvd.toml"
    file.write_text((UNITS / "kvd.toml").read_text() + "\n".join(written))
    read = config.load({"config": str(file)}, {})
    assert read.tiers[0].options["directories"] == [each.removeprefix("-") for each in directories]
    assert added["Service"]["LimitNOFILE"] == service()["LimitNOFILE"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize(("pool", "more"), [("there", []), ("missing", []), ("there", ["--check"])])
def test_a_pool_that_the_unit_may_not_write_to_is_refused_with_the_units_setting(
    tmp_path: Path, pool: str, more: list[str]
) -> None:
    """As ProtectSystem=strict leaves a tmpfs that ReadWritePaths= does not name."""
    place = tmp_path / "place"
    script = (
        f"mkdir {place}; mount -t tmpfs -o size=96m,mode=0700 kvd {place}; mkdir -m 700"
        f' {place}/there; mount -o remount,ro,bind {place}; exec "$@"'
    )
    serve = [sys.executable, "-m", "kvd", "serve", *more, "--http-port=0", "--pool-bytes=16MiB"]
    where = [f"--pool-directory={place}/{pool}", f"--socket={tmp_path}/run/kvd.sock"]
    said = subprocess.run(
        ["unshare", "-m", "/bin/sh", "-euc", script, "sh", *serve, *where],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert said.returncode in (1, 3)
    assert f"pool_directory {place}/{pool} can't be " in said.stdout + said.stderr
    assert "ReadWritePaths=" in said.stdout + said.stderr


def test_the_daemon_accepts_the_example_settings() -> None:
    read = config.load({"config": str(UNITS / "kvd.toml")}, {})
    assert read.pool_directory == Path("/var/lib/kvd/pool")
    assert read.socket == Path("/run/kvd/kvd.sock")


def test_the_service_waits_longer_than_the_daemon_drains() -> None:
    read = config.load({"config": str(UNITS / "kvd.toml")}, {})
    assert float(service()["TimeoutStopSec"]) > read.drain_seconds + 30


def test_a_restart_keeps_the_sockets_directory_that_containers_have_mounted() -> None:
    assert service()["RuntimeDirectoryPreserve"] == "yes"


def test_no_guide_puts_the_pool_where_others_can_fill_it() -> None:
    default = next(s.default for s in config.SETTINGS if s.name == "pool_directory")
    assert default == "/var/lib/kvd/pool" == sections("var-lib-kvd-pool.mount")["Mount"]["Where"]
    assert sections("var-lib-kvd-pool.mount")["Mount"]["Type"] == "tmpfs"
    root = UNITS.parents[1]
    for guide in ("README.md", "deploy/README.md", "docs/gpu.md", "docs/vllm.md"):
        for line in (root / guide).read_text().splitlines():
            assert "src=/dev/shm" not in line, guide
            assert not ("--pool-directory" in line and "/dev/shm" in line), guide
        for command in (root / guide).read_text().split("```")[1::2]:
            if re.search(r"kvd(:cuda12)? serve", command):
                assert "mount -t tmpfs" in command, f"{guide}: {command}"


def test_what_docker_is_told_to_mount_is_made_in_the_same_block() -> None:
    """It refuses to start a container where the source of a mount of type bind is missing."""
    root, mounts = UNITS.parents[1], 0
    for guide in ("deploy/README.md", "docs/gpu.md"):
        for block in (root / guide).read_text().split("```")[1::2]:
            made, found, run = block.partition("docker run")
            for source in re.findall(r"type=bind,src=([^,\s]+)", run if found else ""):
                making = rf"(?m)(mkdir -p|install -d .*) {source}$"
                assert re.search(making, made), f"{guide}: {source}"
                mounts += 1
    assert mounts == 4


def test_it_reloads_restarts_whatever_ended_it_and_does_not_try_wrong_settings_again() -> None:
    settings = service()
    assert settings["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert settings["Restart"] == "always"
    assert settings["RestartPreventExitStatus"] == "2"


@pytest.mark.parametrize("unit", ["kvd.service", "kvd-gateway.service"])
def test_what_never_comes_up_is_not_started_for_ever(unit: str) -> None:
    """Five starts in 10 s, systemd's own limit, are too many for one that fails in a second."""
    limits, settings = sections(unit)["Unit"], service(unit)
    slow_start_s = 10
    tries_take_s = int(limits["StartLimitBurst"]) * (int(settings["RestartSec"]) + slow_start_s)
    assert tries_take_s < int(limits["StartLimitIntervalSec"])


def test_a_mover_that_the_kernel_ended_for_lack_of_memory_takes_no_daemon_along() -> None:
    assert service()["OOMPolicy"] == "continue"
