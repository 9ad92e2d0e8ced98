"""Where no process and no thread can be had any more, who has them goes on, and others wait."""

from __future__ import annotations

import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvd.cli.verify import ask
from tests.faults.conftest import Patched
from tests.faults.scene import MakeScene, Scene
from tests.few_processes import FewProcesses, few_processes
from tests.ports import free_port
from tests.waiting import wait_until


@pytest.fixture
def group() -> Iterator[FewProcesses]:
    with few_processes() as made:
        yield made


@pytest.fixture
def scene(group: FewProcesses, own_scene: MakeScene) -> Scene:
    scene = own_scene(starts=False)
    scene.daemon.behind = group.behind
    scene.daemon.flags["http-port"] = free_port()
    scene.daemon.start()
    return scene


@pytest.mark.parametrize("allowed", [3, 10])
def test_a_start_without_threads_ends_and_names_the_limits(
    group: FewProcesses, own_scene: MakeScene, allowed: int
) -> None:
    scene = own_scene(starts=False)
    scene.daemon.behind = group.behind
    group.allow(allowed)
    scene.daemon.launch()
    wait_until(lambda: scene.daemon.has_ended, "its end", 60.0)
    assert re.search(
        r"needs \d+ threads, and finds \d+: there are as many.*TasksMax", log_of(scene)
    )
    assert "Traceback" not in log_of(scene)


def test_a_start_that_then_finds_no_thread_for_the_pool_names_the_limits(
    own_scene: MakeScene, patched: Patched, tmp_path: Path
) -> None:
    scene = own_scene(starts=False)
    scene.daemon.environment = patched(NO_THREADS)
    (tmp_path / "full").touch()
    scene.daemon.launch()
    wait_until(lambda: scene.daemon.has_ended, "its end", 60.0)
    assert "there are as many processes and threads as there may be" in log_of(scene)
    assert "Traceback" not in log_of(scene)


def test_a_daemon_that_may_not_watch_its_movers_says_so_and_does_not_start(
    own_scene: MakeScene, patched: Patched
) -> None:
    scene = own_scene(starts=False)
    scene.daemon.environment = patched(NO_PIDFDS)
    scene.daemon.launch()
    wait_until(lambda: scene.daemon.has_ended, "its end", 60.0)
    assert "(Function not implemented): let it call pidfd_open(2)" in log_of(scene)
    assert "Traceback" not in log_of(scene)
    assert not any(scene.daemon.pool.iterdir())


def test_a_daemon_that_lost_a_thread_ends_and_the_next_one_serves(
    own_scene: MakeScene, patched: Patched, tmp_path: Path
) -> None:
    """It can't tell which of gRPC's it can do without."""
    scene = own_scene(starts=False)
    scene.daemon.environment = patched(ENDING_THREAD)
    scene.daemon.start()
    scene.forget_caller()
    (tmp_path / "ends").touch()
    wait_until(lambda: scene.daemon.has_ended, "its end", 60.0)
    assert re.search("CRITICAL.*the one that ends ended(\n.*)*MemoryError", log_of(scene))
    scene.daemon.environment = {}
    scene.daemon.start()
    assert scene.status().state == "ready"


def log_of(scene: Scene) -> str:
    return scene.daemon.log.read_text()


@pytest.mark.parametrize(
    ("more", "said"), [(0, "the mover process can't be started"), (2, "the mover has no threads")]
)
def test_who_finds_no_process_for_its_mover_hurts_nobody_and_gets_one_later(
    group: FewProcesses, scene: Scene, more: int, said: str
) -> None:
    one = scene.engine("one")
    assert one.store("before", 20) == 20
    group.allow(more)
    others = [scene.start_engine(name) for name in ("two", "three")]
    wait_until(lambda: log_of(scene).count("no mover for a rank") > 2, "some refusals", 30.0)
    assert one.load("before", 20) == 20
    assert one.store("meanwhile", 20) == 20
    assert f"no mover for a rank: {said}: there are as many" in log_of(scene)
    assert "Traceback" not in log_of(scene)
    group.allow(None)
    for other in others:
        other.wait_usable()
        assert other.load("meanwhile", 20) == 20


def test_verify_and_the_page_of_metrics_say_that_there_is_no_thread(
    group: FewProcesses, scene: Scene
) -> None:
    engine = scene.engine("one")
    assert engine.store("some", 20) == 20
    port = scene.daemon.flags["http-port"]
    group.allow(0)
    with pytest.raises(grpc.RpcError, match="no thread to read bytes in: there are as many"):
        ask(scene.daemon.socket, 20.0, with_bytes=True)
    assert ask(scene.daemon.socket, 20.0, with_bytes=False).blocks
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20)
    assert refused.value.code == 503
    assert b"TasksMax" in refused.value.read()
    assert "Traceback" not in log_of(scene)
    group.allow(None)
    assert ask(scene.daemon.socket, 20.0, with_bytes=True).bytes


NO_PIDFDS = """
import os
def refuse(pid, flags=0):
    raise OSError(38, "Function not implemented")
os.pidfd_open = refuse
"""
ENDING_THREAD = """
import pathlib, threading, time
def end():
    while not (pathlib.Path(__file__).parent / "ends").exists():
        time.sleep(0.05)
    raise MemoryError
threading.Thread(target=end, name="the one that ends", daemon=True).start()
"""
NO_THREADS = """
import pathlib
from concurrent.futures import ThreadPoolExecutor
submit = ThreadPoolExecutor.submit
def submit_if_any(self, *work):
    if pathlib.Path(__file__).with_name("full").exists():
        raise RuntimeError("can't start new thread")
    return submit(self, *work)
ThreadPoolExecutor.submit = submit_if_any
"""


def test_a_rank_leaves_in_order_where_no_thread_can_be_had(
    own_scene: MakeScene, patched: Patched, tmp_path: Path
) -> None:
    scene = own_scene(starts=False)
    scene.daemon.environment = patched(NO_THREADS)
    scene.daemon.start()
    engine = scene.engine("one")
    (tmp_path / "full").touch()
    engine.close()
    wait_until(lambda: not scene.status().sessions, "its end")
    assert "new thread" not in log_of(scene)


NO_NEW_THREADS = """
import pathlib
import signal
import threading
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it (nohup)
start = threading.Thread.start
def start_if_any(self):
    if pathlib.Path(__file__).with_name("full").exists():
        raise RuntimeError("can't start new thread")
    start(self)
threading.Thread.start = start_if_any
"""


def test_a_reload_that_finds_no_thread_says_so_and_changes_nothing(
    own_scene: MakeScene, patched: Patched, tmp_path: Path
) -> None:
    scene = own_scene(starts=False)
    scene.daemon.environment = patched(NO_NEW_THREADS)
    scene.daemon.start()
    wait_until(lambda: "serves on" in log_of(scene), "all of its threads")
    (tmp_path / "full").touch()
    os.kill(scene.daemon.pid, signal.SIGHUP)
    said = "the settings were not reloaded, and nothing has changed: there are as many"
    wait_until(lambda: said in log_of(scene), "a line")
    assert "Traceback" not in log_of(scene)
    (tmp_path / "full").unlink()
    os.kill(scene.daemon.pid, signal.SIGHUP)
    wait_until(lambda: "the settings were reloaded" in log_of(scene), "a reload")
