"""The release before and this one: each one's client with the other's daemon, and a warm pool.

The release before is the last tag; as long as there is none, a commit some way back. Its client is
a wheel that is built here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.faults.probe import CLIENT, ROOT, environment_of
from tests.faults.scene import MakeScene, Scene
from tests.waiting import wait_until

COMMITS_BACK = 70  # one that starts: not each commit of a series does
COUNT = 40  # blocks of a prompt


def git(*words: str) -> str:
    ran = subprocess.run(["git", *words], cwd=ROOT, check=False, capture_output=True, text=True)
    return ran.stdout.strip() if ran.returncode == 0 else ""


def release_before() -> str:
    """The last tag, or a commit some way back; "" where the history is not here."""
    tagged = git("describe", "--tags", "--match", "v*", "--abbrev=0", "HEAD~1")
    return git("rev-parse", "-q", "--verify", f"{tagged or f'HEAD~{COMMITS_BACK}'}^{{commit}}")


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of the release before, with its client's wheel unpacked in it."""
    commit = release_before()
    if not commit:
        pytest.skip("the history is shallow: the release before can't be built")
    tree = tmp_path_factory.mktemp("before")
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", tree], input=archive.stdout, check=True)
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tree / "wheels"],
        cwd=tree / "client",
        check=False,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = (tree / "wheels").glob("kvd_client-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tree / CLIENT)
    assert where_from(tree, "kvd_client") == tree / CLIENT / "kvd_client", "it is not the wheel's"
    assert where_from(tree, "kvd") == tree / "kvd"
    return tree


def where_from(tree: Path, module: str) -> Path:
    """Where a process of that tree has a module from."""
    said = subprocess.run(
        [sys.executable, "-c", f"import {module}; print({module}.__file__)"],
        cwd=tree,
        env=os.environ | environment_of(tree),
        check=True,
        capture_output=True,
        text=True,
    )
    return Path(said.stdout.strip()).parent


def run_daemon_of(scene: Scene, tree: Path) -> None:
    """From now on the scene's daemon is of that tree."""
    scene.daemon.behind = () if tree == ROOT else ("env", "-C", str(tree))
    scene.daemon.environment = environment_of(tree)


def movers_code(scene: Scene) -> set[str]:
    """The trees that the movers run from."""
    return {str(Path(f"/proc/{pid}/cwd").readlink()) for pid in scene.daemon.movers()}


def test_client_of_the_release_before_works_with_this_daemon(
    own_scene: MakeScene, before: Path
) -> None:
    scene = own_scene()
    old, new = scene.engines("old", root=before), scene.engines("new")
    assert old[0].store("a", COUNT) == COUNT
    assert new[0].load("a", COUNT) == COUNT
    assert new[0].store("b", COUNT) == COUNT
    assert old[0].load("b", COUNT) == COUNT


def test_this_client_works_with_the_daemon_of_the_release_before(
    own_scene: MakeScene, before: Path
) -> None:
    scene = own_scene(starts=False)
    run_daemon_of(scene, before)
    scene.daemon.start()
    (engine,) = scene.engines("new")
    assert engine.store("a", COUNT) == COUNT
    assert engine.load("a", COUNT) == COUNT
    assert movers_code(scene) == {str(before)}, "it was not the old daemon"


def test_pool_stays_warm_from_the_release_before_to_this_one_and_back(
    own_scene: MakeScene, before: Path
) -> None:
    scene = own_scene(starts=False)
    run_daemon_of(scene, before)
    scene.daemon.start()
    (engine,) = scene.engines("one")
    stored = {"0": engine.store("0", COUNT)}
    for number, tree in enumerate([ROOT, before, ROOT], start=1):
        if number == 2:
            scene.kill_daemon()
        else:
            scene.end_daemon()
        run_daemon_of(scene, tree)
        scene.daemon.start()
        engine.wait_usable(after=number)
        wait_until(lambda: bool(scene.daemon.movers()), "the mover")
        assert movers_code(scene) == {str(tree)}
        for prompt, count in stored.items():
            assert engine.load(prompt, COUNT) == count == COUNT
        stored[str(number)] = engine.store(str(number), COUNT)
