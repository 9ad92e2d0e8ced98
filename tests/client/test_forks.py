"""A process that an engine forks has nothing of the engine's, and takes nothing from it."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable

import pytest

from kvd_client import EngineIdentity, SharedMemory, Worker
from kvd_client.batches import SoughtKeys
from kvd_client.draft import BlockRun
from kvd_client.event_watch import EventWatch, key_of
from kvd_client.forks import FORKED
from tests.client.test_batches import Memory, keys
from tests.daemon_process import DaemonProcess

PATIENCE_S = 30


def said_by_child(say: Callable[[], object]) -> str:
    """What a forked child says; it is ended where it hangs."""
    read_fd, write_fd = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # to fork beside threads is the test
        child = os.fork()
    if not child:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(PATIENCE_S)
            os.write(write_fd, repr(say()).encode())
        finally:
            os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def test_a_child_finds_stores_and_loads_nothing_and_says_why(daemon: DaemonProcess) -> None:
    memory = Memory(daemon.socket)
    batches, prompt = memory.batches, keys(1, 4)
    assert batches.store([BlockRun(0, 0, prompt, range(4))]) == [True]

    def try_all() -> object:
        found = batches.find([SoughtKeys(0, prompt)])[0].tolist()
        stored = batches.store([BlockRun(0, 0, keys(2, 4), range(4))])
        loaded = batches.load([BlockRun(0, 0, prompt, range(4, 8))])
        return found, stored, loaded, batches.problem

    assert said_by_child(try_all) == repr(([False] * 4, [False], [[False] * 4], FORKED))
    memory.close()


def test_a_childs_load_does_not_end_with_its_parents(daemon: DaemonProcess) -> None:
    """Both count their jobs from the same number on, and see the same board."""
    memory = Memory(daemon.socket)
    batches, prompt = memory.batches, keys(1, 4)
    assert batches.store([BlockRun(0, 0, prompt, range(4))]) == [True]
    loaded: list[str] = []
    child = threading.Thread(
        target=lambda: loaded.append(
            said_by_child(lambda: batches.load([BlockRun(0, 0, keys(2, 4), range(4, 8))]))
        )
    )
    child.start()
    while child.is_alive():
        assert batches.load([BlockRun(0, 0, prompt, range(8, 12))]) == [[True] * 4]
        time.sleep(0.01)
    child.join()
    assert loaded == [repr([[False] * 4])]
    memory.close()


@pytest.mark.parametrize("is_load", [False, True])
def test_a_call_fails_in_a_child_that_is_made_amid_it(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, is_load: bool
) -> None:
    """As by a signal's handler: parent and child both go on in the midst of the wait."""
    memory = Memory(daemon.socket, load_deadline_s=PATIENCE_S, store_deadline_s=PATIENCE_S)
    sleep, caller = time.sleep, threading.current_thread()
    read_fd, write_fd = os.pipe()
    run = BlockRun(0, 0, keys(1, 4), range(4))
    if is_load:
        assert memory.batches.store([run]) == [True]
    children: list[int] = []

    def fork_once(seconds: float) -> None:
        if threading.current_thread() is caller and not children:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                children.append(os.fork())
            if not children[0]:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(PATIENCE_S)
            else:
                daemon.thaw()
        sleep(seconds)

    daemon.freeze()
    monkeypatch.setattr(time, "sleep", fork_once)
    try:
        said = repr((memory.batches.load if is_load else memory.batches.store)([run]))
    except ValueError as error:
        said = repr(error)
    if not children[0]:
        os.write(write_fd, said.encode())
        os._exit(0)
    monkeypatch.undo()
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        in_child = pipe.read()
    os.waitpid(children[0], 0)
    assert (said, in_child) == (
        (repr([[True] * 4]), repr([[False] * 4])) if is_load else ("[True]", "[False]")
    )
    memory.close()


def test_a_child_that_closes_takes_nothing_from_its_parent(daemon: DaemonProcess) -> None:
    memory = Memory(daemon.socket)
    prompt = keys(1, 4)
    movers = daemon.movers()
    assert said_by_child(memory.batches.close) == "None"
    assert memory.batches.store([BlockRun(0, 0, prompt, range(4))]) == [True]
    assert daemon.movers() == movers
    memory.close()


def test_a_child_waits_for_no_lock_that_its_parent_held(daemon: DaemonProcess) -> None:
    memory = Memory(daemon.socket)
    batches = memory.batches
    with batches._lock, batches._connection._changed, batches._worker._lock:
        said = said_by_child(
            lambda: (batches.find([SoughtKeys(0, keys(1, 1))])[0].tolist(), batches.is_usable)
        )
    assert said == repr(([False], False))
    memory.close()


def test_a_child_that_registers_its_parents_rank_hears_that_it_needs_its_own() -> None:
    worker = Worker("/nowhere", EngineIdentity("e", bytes(16)))
    fd = os.memfd_create("kv")
    memory = [SharedMemory(fd, 0, 64)]
    worker.register(memory, [])

    def register() -> str:
        try:
            worker.register(memory, [])
        except ValueError as error:
            return str(error)
        return ""

    assert register() == "this rank is registered; unregister it first"
    assert said_by_child(lambda: (register(), worker.unregister(), register())) == repr(
        (FORKED, True, FORKED)
    )
    worker.close()
    os.close(fd)


def test_a_child_of_one_that_watches_events_has_no_news_and_waits_for_no_lock() -> None:
    watch = EventWatch("/nowhere", "test")
    watch.follow(1, "")
    key = key_of(0, keys(1, 1)[0])
    watch.announce([key])

    def try_all() -> object:
        watch.follow(2, "other")
        said = watch.take(), watch.announce([key]), watch.take_and_announce([key])
        watch.forget()
        watch.close()
        return said, watch._thread

    with watch._lock:
        said = said_by_child(try_all)
    assert said == repr((([], [key], ([], [])), None))
    assert watch.announce([key]) == []  # the parent has said so
    watch.close()
