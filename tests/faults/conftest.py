"""Daemons and engines of these tests; what a module starts it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.faults.scene import Scene

MakeScene = Callable[..., Scene]


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
    made: list[Scene] = []

    def make(pool_bytes: int = 32 << 20, extent_bytes: int = 1 << 20, **flags: object) -> Scene:
        scene = Scene(**{name.replace("_", "-"): value for name, value in flags.items()})
        made.append(scene)
        scene.daemon.pool_bytes, scene.daemon.extent_bytes = pool_bytes, extent_bytes
        scene.daemon.start()
        return scene

    yield make
    for scene in made:
        scene.close()
