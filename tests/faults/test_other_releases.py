"""A client and a daemon of different releases: no storm, and each log says it once."""

from __future__ import annotations

import pytest

from tests.faults.conftest import Patched
from tests.faults.scene import MakeScene, Scene
from tests.waiting import wait_until

# As of a client of the release before: it can't read what this daemon hands out.
OLDER_PAGE = "import kvd_proto.layout as layout; layout.PAGE_VERSION -= 1"
OLDER_RING = "import kvd_proto.layout as layout; layout.LAYOUT_VERSION -= 1"
# As of a newer one: what it says at each step is nothing that this daemon knows.
NEWER_STEPS = """
import kvd_client.connection as connection
connection.step_bytes = lambda step, sequence: (bytes([0xFA, 7, 2, 1, 1]), [])
"""
# As if the daemon's code had been replaced while it ran.
BROKEN_MOVERS = """
import os, sys
if "kvd.mover" in sys.orig_argv:
    os._exit(3)
"""
TRIES = 4  # each waits longer than the one before
PATIENCE_SECONDS = 60.0


@pytest.mark.parametrize(
    ("code", "again", "said"),
    [
        (
            OLDER_PAGE,
            "kvd.control.sessions.session: session",
            "ValueError: an index page of layout",
        ),
        (OLDER_RING, "kvd.control.services.worker: engine", "ValueError: a ready ring of"),
    ],
    ids=["older page", "older ring"],
)
def test_client_of_another_release_says_so_once_however_often_it_tries(
    own_scene: MakeScene,
    patched: Patched,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    again: str,
    said: str,
) -> None:
    scene = own_scene()
    monkeypatch.setenv("PYTHONPATH", patched(code)["PYTHONPATH"])
    scene.start_engine("other")
    wait_until(lambda: attempts(scene, again) >= TRIES, "its attempts", PATIENCE_SECONDS)
    log = (scene.directory / "other.log").read_text()
    lines = [line for line in log.splitlines() if ":kvd_client." in line]  # no traceback's
    assert sum(said in line for line in lines) == 1, log
    assert log.count("Traceback") <= 1, log


def test_messages_that_the_daemon_does_not_know_are_told_once_and_cost_no_session(
    own_scene: MakeScene, patched: Patched, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = own_scene()
    monkeypatch.setenv("PYTHONPATH", patched(NEWER_STEPS)["PYTHONPATH"])
    probe = scene.start_engine("other")
    probe.ask("pump_for", seconds=1.0)
    said = (scene.directory / "other.log").read_text()
    assert said.count("message refused: UNKNOWN_MESSAGE") == 1, said
    assert attempts(scene, "kvd.control.sessions.session: session") == 1


def attempts(scene: Scene, again: str) -> int:
    lines = scene.daemon.log.read_text().splitlines()
    return sum(again in line and " ends: " not in line for line in lines)


def test_movers_that_can_not_start_cost_the_daemons_log_a_line_each(
    own_scene: MakeScene, patched: Patched
) -> None:
    scene = own_scene(starts=False)
    scene.daemon.environment = patched(BROKEN_MOVERS)
    scene.daemon.start()
    scene.start_engine("one")
    said = "no mover for a rank: the mover process ended at its start"

    wait_until(lambda: attempts(scene, said) >= TRIES, "its attempts", PATIENCE_SECONDS)
    assert "Traceback" not in scene.daemon.log.read_text()
    log = (scene.directory / "one.log").read_text()
    assert log.count("ended at its start") == 1, log
