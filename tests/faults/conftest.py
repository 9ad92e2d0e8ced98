"""Daemons and engines of these tests; what a module starts it ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.scene import MakeScene, Scene, scenes

Patched = Callable[[str], dict[str, str]]


@pytest.fixture(scope="module")
def shared_scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    """One daemon for all tests of a module, with the module's FLAGS; each ends its engines."""
    scene = Scene(**getattr(request.module, "FLAGS", {}))
    scene.daemon.pool_bytes, scene.daemon.extent_bytes = 256 << 20, 4 << 20
    try:
        scene.daemon.start()
        yield scene
    finally:
        scene.close()


@pytest.fixture
def scene(shared_scene: Scene) -> Iterator[Scene]:
    """The module's daemon without engines and blocks."""
    shared_scene.clear()
    yield shared_scene
    shared_scene.end_engines()


@pytest.fixture
def own_scene() -> Iterator[MakeScene]:
    """Makes scenes with settings of their own; the daemon is started."""
    with scenes() as make:
        yield make


@pytest.fixture
def patched(tmp_path: Path) -> Patched:
    """The environment of processes that run this code first; it may look beside its own file, in
    `tmp_path`."""

    def environment(code: str) -> dict[str, str]:
        (tmp_path / "sitecustomize.py").write_text(code)
        return {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}

    return environment
