"""What a release is made of: one version everywhere, and an sdist that all of it builds from."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import kvd

ROOT = Path(__file__).resolve().parents[2]


def test_the_chart_has_the_version_of_what_it_runs() -> None:
    chart = (ROOT / "helm/kvd/Chart.yaml").read_text()
    versions = re.findall(r"^(?:version|appVersion): (\S+)$", chart, re.MULTILINE)
    assert versions == [kvd.__version__] * 2


def build(folder: Path, kind: str, into: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(into)]
    built = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (made,) = into.iterdir()
    return made


@pytest.mark.parametrize("package", ["client", "."], ids=["kvd-client", "kvd"])
def test_the_sdist_builds_the_wheel_that_the_tree_builds(package: str, tmp_path: Path) -> None:
    places = {name: tmp_path / name for name in ("sdist", "unpacked", "again", "wheel")}
    for place in places.values():
        place.mkdir()
    with tarfile.open(build(ROOT / package, "sdist", places["sdist"])) as packed:
        packed.extractall(places["unpacked"], filter="data")
    (unpacked,) = places["unpacked"].iterdir()
    names = []
    for folder, into in ((ROOT / package, "wheel"), (unpacked, "again")):
        with zipfile.ZipFile(build(folder, "wheel", places[into])) as wheel:
            names.append(sorted(wheel.namelist()))
    assert names[0] == names[1]
    if package == ".":
        assert "kvd/observability/status_page.html" in names[0]
        assert any(name.endswith("share/man/man1/kvd.1") for name in names[0])


def forms() -> list[Path]:
    return sorted((ROOT / ".github").rglob("*.yml"))


@pytest.mark.parametrize("form", forms(), ids=lambda path: path.name)
def test_github_can_read_what_is_for_it(form: Path) -> None:
    yaml = pytest.importorskip("yaml")
    said: Any = yaml.safe_load(form.read_text())
    if form.parent.name == "workflows":
        steps = [step for job in said["jobs"].values() for step in job["steps"]]
        assert any(step.get("run") == "bash .ci/run" for step in steps)
        assert said["permissions"] == {"contents": "read"}
    elif form.name != "config.yml":
        assert {"name", "description", "body"} <= said.keys()
        ids = [part["id"] for part in said["body"] if "id" in part]
        assert len(ids) == len(set(ids)) > 1
        assert all(part["attributes"] for part in said["body"])


def test_who_finds_a_hole_is_told_whom_to_tell_and_not_in_public() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert "Report a vulnerability" in text
    assert "SECURITY.md" in (ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text()
