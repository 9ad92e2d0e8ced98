"""Building the native library: with a compiler, with a broken one, with none, and sanitized."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvd import native
from kvd.native import hatch_build

ROOT = Path(__file__).resolve().parents[2]
needs_a_compiler = pytest.mark.skipif(not hatch_build.compilers(), reason="there is no C compiler")
SANITIZE = ("-g", "-O1", "-std=c11", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """No compiler is on the path."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    return monkeypatch


@needs_a_compiler
def test_what_is_built_is_of_this_source_and_loads(tmp_path: Path) -> None:
    target = tmp_path / "copies.so"
    target.write_text("an older one")
    assert hatch_build.build(target) == ""
    assert native.load(target).kvd_level() >= 0
    assert [path.name for path in tmp_path.iterdir()] == ["copies.so"]


@needs_a_compiler
@pytest.mark.parametrize(
    "source",
    [
        "int other;",
        'const char *kvd_source(void) { return "old"; }',
        "char *kvd_source() { return 0; }",
    ],
)
def test_a_library_of_another_source_is_not_used_whatever_it_lacks(
    tmp_path: Path, source: str
) -> None:
    made = tmp_path / "copies.so"
    (tmp_path / "other.c").write_text(source)
    command = [*hatch_build.compilers()[0], "-shared", "-fPIC", "-o", str(made)]
    subprocess.run([*command, str(tmp_path / "other.c")], check=True)
    with pytest.raises(OSError, match="from another copies"):
        native.load(made)


@needs_a_compiler
def test_it_is_built_for_every_processor_and_not_for_the_builders() -> None:
    for compiler in hatch_build.compilers():
        command = [*compiler, *hatch_build.FLAGS, "-dM", "-E", "-x", "c", os.devnull]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert "__GNUC__" in told
        assert not {"__SSE3__", "__AVX__", "__AVX2__"} & set(told.split()), compiler


def test_without_a_compiler_one_line_says_so_and_nothing_is_made(
    bare: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flaw = hatch_build.build(tmp_path / "copies.so")
    hatch_build.say(flaw)
    assert capsys.readouterr().err == "kvd: there is no C compiler: kvd copies by numpy\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("compiler", "word"), [("false", "no word of why"), ("/no/such compiler", "No such file")]
)
def test_a_compiler_that_fails_fails_no_install(
    bare: pytest.MonkeyPatch, tmp_path: Path, compiler: str, word: str
) -> None:
    bare.setenv("PATH", "/usr/bin:/bin")
    bare.setenv("CC", compiler)
    flaw = hatch_build.build(tmp_path / "copies.so")
    assert "so kvd copies by numpy" in flaw
    assert word in flaw
    assert "\n" not in flaw
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_hangs_is_given_up(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bare.setenv("PATH", "/usr/bin:/bin")
    bare.setenv("CC", "sh -c 'sleep 60'")
    bare.setattr(hatch_build, "COMPILE_S", 0.1)
    assert "timed out" in hatch_build.build(tmp_path / "copies.so")


def wheel(directory: Path, **changes: str) -> tuple[str, list[str]]:
    """Build kvd's wheel; its name, and what of kvd/native is in it."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", directory],
        cwd=ROOT,
        env={**os.environ, **changes},
        check=True,
        capture_output=True,
    )
    (built,) = directory.iterdir()
    with zipfile.ZipFile(built) as archive:
        names = [Path(name) for name in archive.namelist()]
    return built.name, sorted(name.name for name in names if name.parent == Path("kvd/native"))


@needs_a_compiler
def test_a_wheel_carries_the_library_and_says_its_platform(tmp_path: Path) -> None:
    name, files = wheel(tmp_path)
    assert "-py3-none-linux_" in name
    assert files == [
        "__init__.py",
        "copies.c",
        "copies.so",
        "file_moves.py",
        "ghost_table.py",
        "hatch_build.py",
        "key_index.py",
    ]


def test_a_wheel_without_a_compiler_is_for_any_platform(tmp_path: Path) -> None:
    name, files = wheel(tmp_path, CC="false")
    assert name.endswith("-py3-none-any.whl")
    assert files == [
        "__init__.py",
        "copies.c",
        "file_moves.py",
        "ghost_table.py",
        "hatch_build.py",
        "key_index.py",
    ]


@needs_a_compiler
def test_every_level_is_clean_under_the_sanitizers(tmp_path: Path) -> None:
    (compiler, *_) = hatch_build.compilers()
    empty, driver = tmp_path / "empty.c", tmp_path / "driver"
    empty.write_text("int main(void) { return 0; }\n")
    tried = subprocess.run(
        [*compiler, *SANITIZE, "-o", driver, empty], check=False, capture_output=True, text=True
    )
    if tried.returncode:
        pytest.skip(f"{compiler[0]} has no sanitizers: {tried.stderr:.100}")
    source = Path(__file__).with_name("driver.c")
    subprocess.run([*compiler, *SANITIZE, "-Wall", "-Wextra", "-o", driver, source], check=True)
    ran = subprocess.run(
        [driver, "300"],
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.endswith("levels are clean\n")


@needs_a_compiler
def test_the_library_needs_nothing_but_libc(tmp_path: Path) -> None:
    if shutil.which("readelf") is None:
        pytest.skip("readelf is missing")
    target = tmp_path / "copies.so"
    assert hatch_build.build(target) == ""
    said = subprocess.run(
        ["readelf", "-d", target], check=True, capture_output=True, text=True
    ).stdout
    needed = [line.split("[")[1] for line in said.splitlines() if "(NEEDED)" in line]
    assert needed in ([], ["libc.so.6]"])
    assert ctypes.sizeof(ctypes.c_void_p) == 8
