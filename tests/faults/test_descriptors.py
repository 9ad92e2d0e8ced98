"""A client that takes all file descriptors it can get can't take the daemon's last ones."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from kvd.control.access import descriptors
from kvd.control.access.companion import MAX_UNSENT_MESSAGES
from kvd_client.companion import CompanionRefused, CompanionSocket
from kvd_proto.v1 import companion_pb2
from tests.control.daemon_rig import identity, namespace, open_and_close, refusal
from tests.faults.conftest import Patched
from tests.faults.probe import Probe
from tests.faults.scene import MakeScene, Scene, links, target
from tests.waiting import wait_until

LIMIT = 400
# No connection can be taken while there is a file of this name; each try is a byte of another.
FULL = """
import pathlib, socket
here, accept = pathlib.Path(__file__).parent, socket.socket.accept
def try_to_accept(listener):
    if not (here / "full").exists():
        return accept(listener)
    with (here / "tries").open("a") as tries:
        tries.write(".")
    raise OSError(23, "Too many open files in system")
socket.socket.accept = try_to_accept
"""
MOST_TRIES = 50  # in a second; without a pause they are thousands


@pytest.fixture
def stocked(own_scene: MakeScene) -> tuple[Scene, Probe]:
    """A daemon that may hold 400 descriptors, and an engine that has stored something."""
    ours, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # to be as greedy as can be
    scene = own_scene()
    resource.prlimit(scene.daemon.pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    engine = scene.engine("one")
    assert engine.store("a", 8) == 8
    assert scene.status().state == "ready"  # we have a connection from before the shortage
    resource.setrlimit(resource.RLIMIT_NOFILE, (ours, most))
    return scene, engine


def goes_on(scene: Scene, engine: Probe) -> None:
    """The engine works as before, with a new mover too."""
    assert engine.load("a", 8) == 8
    [mover] = scene.movers_of(engine)
    os.kill(mover, signal.SIGKILL)
    assert scene.status().state == "ready"


def open_another(scene: Scene, model: str = "another") -> None:
    """One more namespace, that nobody uses then."""
    fields = namespace(model=model)
    open_and_close(scene.daemon.socket, identity=identity("greedy"), namespace=fields)


def test_namespaces_without_end_are_refused_and_nobody_else_is_hurt(
    stocked: tuple[Scene, Probe],
) -> None:
    scene, engine = stocked

    def open_many() -> None:
        for number in range(LIMIT):
            open_another(scene, f"model {number}")

    with contextlib.suppress(CompanionRefused):
        assert refusal(open_many)[:2] == ("RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED")
    assert len(links(scene.daemon.pid)) < LIMIT - 50
    goes_on(scene, engine)


NO_PAGES = """
import errno, os, pathlib
make = os.memfd_create
def memfd_create(name, *rest):
    if name.startswith("kvd-page") and pathlib.Path(__file__).with_name("full").exists():
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    return make(name, *rest)
os.memfd_create = memfd_create
"""


def test_namespace_that_finds_no_memory_is_refused_and_the_daemon_goes_on(
    own_scene: MakeScene, patched: Patched, tmp_path: Path
) -> None:
    scene = own_scene(starts=False)
    scene.daemon.environment = patched(NO_PAGES)
    scene.daemon.start()
    engine = scene.engine("one")
    assert engine.store("a", 8) == 8
    (tmp_path / "full").touch()
    refused = refusal(lambda: open_another(scene))
    assert refused == ("RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED", "namespace")
    assert "no index page for another namespace (Cannot alloc" in scene.daemon.log.read_text()
    goes_on(scene, engine)
    (tmp_path / "full").unlink()
    open_another(scene)


@pytest.fixture
def limited(own_scene: MakeScene) -> Callable[[int], Scene]:
    """Makes scenes whose daemon, not started yet, may have so many descriptors."""

    def make(limit: int) -> Scene:
        scene = own_scene(starts=False)
        scene.daemon.behind = ("sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh")
        return scene

    return make


def test_namespaces_that_nobody_uses_take_no_descriptors_from_those_who_come(
    limited: Callable[[int], Scene],
) -> None:
    """They were kept until there were thousands, and by then nobody could connect."""
    scene = limited(LIMIT)
    scene.daemon.start()
    for number in range(160):
        open_another(scene, f"model {number}")
    pages = sum("kvd-page" in target(link) for link in links(scene.daemon.pid))
    assert pages <= LIMIT // 4 + 2  # and a spare one
    engine, prompts = scene.engine("one"), iter(range(1000))
    # Others' spare rows come to it as it asks for room.
    wait_until(lambda: engine.store(f"prompt {next(prompts)}", 8) == 8, "room for a prompt")


def test_memories_and_connections_without_end_are_refused_and_come_back(
    stocked: tuple[Scene, Probe],
) -> None:
    scene, engine = stocked
    with greedy(scene) as held:
        assert len(held) < LIMIT
        assert len(links(scene.daemon.pid)) < LIMIT - 50
        goes_on(scene, engine)
    again = scene.engine("two")
    assert again.load("a", 8) == 8
    assert engine.wait_usable()
    assert engine.load("a", 8) == 8


@contextlib.contextmanager
def greedy(scene: Scene) -> Iterator[list[CompanionSocket]]:
    """Connections that each offer all the memory they may, until one is refused."""
    held: list[CompanionSocket] = []
    memory = os.memfd_create("probe-greedy")
    os.ftruncate(memory, 4096)
    try:
        with pytest.raises(CompanionRefused, match="LIMIT_EXCEEDED"):
            take_all(scene, held, memory)
        yield held
    finally:
        for companion in held:
            companion.close()
        os.close(memory)


def take_all(scene: Scene, held: list[CompanionSocket], memory: int) -> None:
    while True:
        companion = CompanionSocket(scene.daemon.socket, 5.0)
        held.append(companion)
        companion.hello(companion_pb2.PEER_ROLE_WORKER, "greedy")
        for number in range(40):
            companion.offer_memory(number, memory)


def test_pages_that_nobody_takes_leave_the_daemon_its_last_descriptors(
    stocked: tuple[Scene, Probe],
) -> None:
    scene, engine = stocked
    number = scene.status().namespaces[0].namespace_id
    get_page = companion_pb2.GetPage(namespace_id=number)
    body = companion_pb2.CompanionRequest(get_page=get_page).SerializeToString()
    request = len(body).to_bytes(4, "little") + body
    held: list[CompanionSocket] = []
    try:
        for _ in range(8):
            companion = CompanionSocket(scene.daemon.socket, 5.0)
            held.append(companion)
            companion.hello(companion_pb2.PEER_ROLE_TOOL, "greedy")
        for companion in held:
            before = count = len(links(scene.daemon.pid))
            with socket.socket(fileno=os.dup(companion.fileno())) as connected:
                while before <= count < before + MAX_UNSENT_MESSAGES - 16 and count < LIMIT - 50:
                    try:
                        connected.sendall(request * 4)
                    except OSError:  # refusals wait to be read, too: it is ended
                        break
                    time.sleep(0.002)
                    count = len(links(scene.daemon.pid))
            assert count < LIMIT - 50
        goes_on(scene, engine)
    finally:
        for companion in held:
            companion.close()


def test_connections_to_the_api_without_end_leave_the_daemon_whole(
    own_scene: MakeScene,
) -> None:
    scene = own_scene()
    engine = scene.engine("one")
    assert engine.store("a", 8) == 8
    held = []
    for _ in range(600):
        connected = socket.socket(socket.AF_UNIX)
        held.append(connected)
        connected.connect(scene.daemon.socket)
        connected.sendall(os.urandom(64))
    for connected in held:
        connected.close()
    with contextlib.suppress(grpc.RpcError):
        scene.status()
    assert engine.load("a", 8) == 8
    assert scene.status().state == "ready"


def test_connection_that_can_not_be_taken_is_tried_now_and_then_and_served_later(
    own_scene: MakeScene, patched: Patched, tmp_path: Path
) -> None:
    scene = own_scene(starts=False)
    scene.daemon.environment = patched(FULL)
    scene.daemon.start()
    full, tries = tmp_path / "full", tmp_path / "tries"
    full.touch()
    with socket.socket(socket.AF_UNIX) as waits:
        waits.connect(f"{scene.daemon.socket}.companion")
        wait_until(tries.exists, "the first try")
        time.sleep(1)
        assert tries.stat().st_size < MOST_TRIES
        full.unlink()
        assert scene.status().state == "ready"  # who came later is served, too


def test_mover_that_dies_when_no_file_can_be_opened_is_replaced_later(
    own_scene: MakeScene,
) -> None:
    """What it held is given back, and its engine registers again once there are descriptors."""
    scene = own_scene()
    engine = scene.engine("one")
    assert engine.store("a", 8) == 8
    [mover] = scene.movers_of(engine)
    limits = resource.prlimit(scene.daemon.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(scene.daemon.pid, resource.RLIMIT_NOFILE, (8, limits[1]))
    os.kill(mover, signal.SIGKILL)
    wait_until(lambda: mover not in scene.daemon.movers(), "its end")
    engine.ask("pump_for", seconds=1.0)
    resource.prlimit(scene.daemon.pid, resource.RLIMIT_NOFILE, limits)
    scene.wait_replaced(engine, mover)
    assert engine.load("a", 8) == 8
    assert engine.store("b", 8) == 8


def test_daemon_that_may_have_too_few_says_so_and_does_not_start(
    limited: Callable[[int], Scene],
) -> None:
    with pytest.raises(AssertionError, match="127 file descriptors, and needs 128 at least"):
        limited(descriptors.LEAST - 1).daemon.start()


def takes_us(scene: Scene) -> bool:
    """Whether the daemon has a descriptor for us: it may not have closed the others' yet."""
    try:
        scene.status()
    except (grpc.RpcError, CompanionRefused, OSError):
        scene.forget_caller()
        return False
    return True


def test_daemon_with_the_least_that_it_takes_works_again_after_a_shortage(
    limited: Callable[[int], Scene],
) -> None:
    scene = limited(descriptors.LEAST)
    scene.daemon.start()
    assert "may have 128 file descriptors" in scene.daemon.log.read_text()
    engine = scene.engine("one")
    assert engine.store("a", 8) == 8
    held = [socket.socket(socket.AF_UNIX) for _ in range(200)]
    for number, connected in enumerate(held):
        connected.settimeout(1.0)
        with contextlib.suppress(OSError):
            connected.connect(scene.daemon.socket + (".companion" if number % 2 else ""))
    goes_on_after = engine.load("a", 8)
    for connected in held:
        connected.close()
    assert goes_on_after == 8
    wait_until(lambda: takes_us(scene), "the end of the shortage")
    [mover] = scene.movers_of(engine)
    os.kill(mover, signal.SIGKILL)
    scene.wait_replaced(engine, mover)
    other = scene.engine("two")
    assert other.load("a", 8) == 8
    assert engine.store("b", 8) == 8
