"""A daemon whose files were replaced starts no process of another release."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

import pytest

from kvd.mover.process import MoverStartError
from kvd.processes import release
from kvd.processes.release import Release, ReleaseChangedError
from tests.control.mover_rig import on_loop, rig


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    root = tmp_path / "site" / "kvd"
    (root / "mover").mkdir(parents=True)
    (root / "__init__.py").write_text('__version__ = "1.0.0"\n')
    (root / "mover" / "child.py").write_text("WORDS = 1\n")
    return root


def remembered(root: Path) -> Release:
    ours = Release("1.0.0", [root])
    ours.remember()
    ours.require_unchanged()
    return ours


def test_the_same_code_installed_again_is_no_other(installed: Path, tmp_path: Path) -> None:
    ours = remembered(installed)
    shutil.copytree(installed, tmp_path / "again")
    shutil.rmtree(installed)
    (tmp_path / "again").rename(installed)
    (installed / "mover" / "child.pyc").write_bytes(b"what Python wrote itself")
    ours.require_unchanged()


def test_another_release_is_refused_by_name_and_with_the_fix(installed: Path) -> None:
    ours = remembered(installed)
    (installed / "__init__.py").write_text('__version__ = "1.1.0"\n')
    for _ in range(2):
        with pytest.raises(ReleaseChangedError, match=r"1\.0\.0 runs.*by kvd 1\.1\.0.*restart"):
            ours.require_unchanged()
    (installed / "__init__.py").write_text('__version__ = "1.0.0"\n')
    ours.require_unchanged()  # it was taken back


def test_code_that_can_not_be_read_for_lack_of_descriptors_is_no_other(installed: Path) -> None:
    ours = remembered(installed)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files") as raised:
            ours.require_unchanged()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not isinstance(raised.value, ReleaseChangedError)
    ours.require_unchanged()


@pytest.mark.parametrize("change", ["another size", "same size", "more", "less", "gone"])
def test_any_change_of_the_code_counts(installed: Path, change: str) -> None:
    ours = remembered(installed)
    child = installed / "mover" / "child.py"
    match change:
        case "another size":
            child.write_text("WORDS = 12\n")
        case "same size":
            before = child.stat()
            (installed / "new").write_text("WORDS = 2\n")
            (installed / "new").rename(child)
            os.utime(child, ns=(before.st_atime_ns, before.st_mtime_ns))
        case "more":
            (installed / "mover" / "frames.py").touch()
        case "less":
            child.unlink()
        case _:
            shutil.rmtree(installed)
    with pytest.raises(ReleaseChangedError, match="restart the daemon"):
        ours.require_unchanged()


def test_where_nothing_was_remembered_nothing_is_refused(installed: Path) -> None:
    ours = Release("1.0.0", [installed])
    shutil.rmtree(installed)
    ours.require_unchanged()


@on_loop
async def test_a_mover_of_another_release_is_not_started(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = remembered(installed)
    monkeypatch.setattr(release, "OURS", ours)
    async with rig() as r:
        (installed / "mover" / "child.py").write_text("WORDS = 2\n")
        with pytest.raises(MoverStartError, match="restart the daemon"):
            await r.start()
        (installed / "mover" / "child.py").write_text("WORDS = 1\n")
        await r.start()
