"""What a signal's handler raises amid a call that waits for copies leaves none of them behind."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import pytest

from kvd.cli.status import ask
from kvd_client.batches import BatchOptions, SoughtKeys
from kvd_client.draft import BlockRun, QueryDraft, StepDraft
from kvd_client.lookup_calls import SharedCall
from kvd_client.outgoing import Message
from kvd_client.worker.registration import Registration
from kvd_proto.v1 import common_pb2
from tests.client.interrupts import Interrupted
from tests.client.test_batches import Memory, keys, leased, memory
from tests.daemon_process import DaemonProcess
from tests.waiting import PATIENCE_SECONDS, wait_until

__all__ = ["memory"]  # a fixture


class Waiting(deque[SharedCall]):
    """One whose methods can be replaced."""


@pytest.fixture
def interrupt_amid(daemon: DaemonProcess) -> Iterator[Callable[[], threading.Thread]]:
    """Raise Interrupted in this thread once the daemon has a job of ours under way."""

    def interrupt(*_told: object) -> None:
        raise Interrupted

    def is_amid() -> bool:
        return any(session.jobs_in_flight for session in ask(daemon.socket, 10.0).sessions)

    def wait_and_interrupt(thread: int) -> None:
        wait_until(is_amid, "a job")
        signal.pthread_kill(thread, signal.SIGUSR1)

    def begin() -> threading.Thread:
        started = threading.Thread(target=wait_and_interrupt, args=(threading.get_ident(),))
        started.start()
        return started

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield begin
    signal.signal(signal.SIGUSR1, before)


def test_an_interrupted_load_raises_once_no_copy_goes_on(
    memory: Memory, daemon: DaemonProcess, interrupt_amid: Callable[[], threading.Thread]
) -> None:
    hashes = keys(6, 4)
    for block in range(4):
        memory.write(block, 7)
    assert memory.batches.store([BlockRun(0, 0, hashes, range(4))]) == [True]
    (mover,) = daemon.movers()
    os.kill(mover, signal.SIGSTOP)
    interrupting = interrupt_amid()

    def wake() -> None:
        interrupting.join()
        time.sleep(0.5)  # in which a load that does not wait for its copy would raise
        os.kill(mover, signal.SIGCONT)

    waker = threading.Thread(target=wake)
    waker.start()
    with pytest.raises(Interrupted):
        memory.batches.load([BlockRun(0, 0, hashes, range(8, 12))])
    for block in range(8, 12):
        memory.write(block, 9)
    waker.join()
    assert memory.batches.load([BlockRun(0, 0, hashes, range(16, 20))]) == [[True] * 4]
    assert memory.values(16, 4) == [{7}] * 4
    assert memory.values(8, 4) == [{9}] * 4, "a copy went on after the load had raised"
    assert leased(memory.batches) == 0


def test_an_interrupted_store_is_given_up(
    memory: Memory, daemon: DaemonProcess, interrupt_amid: Callable[[], threading.Thread]
) -> None:
    hashes = keys(7, 4)
    for block in range(4):
        memory.write(block, 7)
    (mover,) = daemon.movers()
    os.kill(mover, signal.SIGSTOP)
    interrupting = interrupt_amid()
    with pytest.raises(Interrupted):
        memory.batches.store([BlockRun(0, 0, hashes, range(4))])
    interrupting.join()
    for block in range(4):
        memory.write(block, 9)
    os.kill(mover, signal.SIGCONT)
    # It asks the daemon whether it is there, and leaves one that is not heard of alone for a while.
    one = [BlockRun(0, 0, keys(8, 1), range(1))]
    wait_until(lambda: memory.batches.store(one) == [True], "a store")
    found = memory.batches.load([BlockRun(0, 0, hashes, range(8, 12))])[0]
    assert all(values == {7} for values in memory.values(8, found.count(True)))


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("call", ["start_loads", "finish_step", "get_finished"])
def test_an_interrupt_as_a_job_begins_leaves_no_copy_behind(
    memory: Memory, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, call: str, begun: bool
) -> None:
    """A signal's handler may raise between any two calls."""
    hashes = keys(9 + 2 * begun + (call == "start_loads"), 4)
    for block in range(4):
        memory.write(block, 7)
    one = [BlockRun(0, 0, hashes, range(4))]
    loads = call == "start_loads"
    if loads:
        assert memory.batches.store(one) == [True]
    (mover,) = daemon.movers()
    os.kill(mover, signal.SIGSTOP)
    waker = threading.Timer(0.3, os.kill, (mover, signal.SIGCONT))
    worker = memory.batches._worker
    original, calls = getattr(worker, call), []

    def interrupted(*given: object) -> object:
        calls.append(given)
        if len(calls) > 1:
            return original(*given)
        if begun:
            original(*given)
        if loads:
            waker.start()
        raise Interrupted

    monkeypatch.setattr(worker, call, interrupted)
    move = memory.batches.load if loads else memory.batches.store
    with pytest.raises(Interrupted):
        move([BlockRun(0, 0, hashes, range(8, 12))] if loads else one)
    monkeypatch.undo()
    for block in [*range(4), *range(8, 12)]:
        memory.write(block, 9)
    if loads:
        waker.join()
    os.kill(mover, signal.SIGCONT)
    wait_until(
        lambda: memory.batches.store([BlockRun(0, 0, keys(8, 1), [20])]) == [True], "a store"
    )
    found = memory.batches.load([BlockRun(0, 0, hashes, range(12, 16))])[0]
    assert all(values == {7} for values in memory.values(12, found.count(True)))
    assert memory.values(8, 4) == [{9}] * 4, "a copy went on after the call had raised"
    assert leased(memory.batches) == 0
    assert not memory.batches._jobs


def test_a_load_that_is_interrupted_again_and_again_raises_once_no_copy_goes_on(
    memory: Memory, daemon: DaemonProcess, interrupt_amid: Callable[[], threading.Thread]
) -> None:
    hashes = keys(13, 4)
    assert memory.batches.store([BlockRun(0, 0, hashes, range(4))]) == [True]
    (mover,) = daemon.movers()
    os.kill(mover, signal.SIGSTOP)
    interrupting, loading, woken = interrupt_amid(), threading.get_ident(), threading.Event()

    def interrupt_and_wake() -> None:
        interrupting.join()
        for _ in range(3):
            time.sleep(0.1)
            signal.pthread_kill(loading, signal.SIGUSR1)
        time.sleep(0.1)
        woken.set()
        os.kill(mover, signal.SIGCONT)

    waker = threading.Thread(target=interrupt_and_wake)
    waker.start()
    with pytest.raises(Interrupted):
        memory.batches.load([BlockRun(0, 0, hashes, range(8, 12))])
    assert woken.is_set(), "the second interrupt ended the wait for the copy"
    waker.join()


@pytest.mark.parametrize("call", ["gather", "take_answers"])
def test_an_interrupted_question_leaves_nothing_leased(
    memory: Memory, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Every step would renew it, for as long as the engine lives."""
    sought = [SoughtKeys(0, keys(14, 4))]
    assert memory.batches.store([BlockRun(0, 0, sought[0].keys, range(4))]) == [True]
    original = getattr(memory.batches._connection, call)

    def interrupted(*given: object) -> None:
        original(*given)
        raise Interrupted

    monkeypatch.setattr(memory.batches._connection, call, interrupted)
    with pytest.raises(Interrupted):
        memory.batches.find(sought)
    monkeypatch.undo()

    def is_none_leased() -> bool:
        assert memory.batches.store([BlockRun(0, 0, keys(15, 1), [5])]) == [True]  # by a step
        return ask(daemon.socket, 10.0).sessions[0].leases == 0

    wait_until(is_none_leased, "the lease's end")
    assert not memory.batches._connection._lookups._answers


def test_an_interrupt_loses_no_end_that_another_thread_waits_for(
    memory: Memory, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks takes the ends of all jobs, and may be interrupted before they are noted."""
    hashes = keys(16, 4)
    assert memory.batches.store([BlockRun(0, 0, hashes, range(4))]) == [True]
    (mover,) = daemon.movers()
    os.kill(mover, signal.SIGSTOP)
    worker, loaded = memory.batches._worker, list[list[list[bool]]]()

    def load() -> None:
        loaded.append(memory.batches.load([BlockRun(0, 0, hashes, range(8, 12))]))

    loading = threading.Thread(target=load, daemon=True)
    loading.start()
    wait_until(lambda: bool(memory.batches._jobs), "a load")
    (theirs,) = memory.batches._jobs
    original = worker.get_finished

    def is_lost() -> bool:
        return any(report.job_id == theirs for report in original().ended)

    def interrupted() -> None:
        monkeypatch.undo()
        os.kill(mover, signal.SIGCONT)
        wait_until(is_lost, "the end of the other thread's load")
        raise Interrupted

    with memory.batches._lock:
        monkeypatch.setattr(worker, "get_finished", interrupted)
        with pytest.raises(Interrupted):
            memory.batches._take_ends()
    loading.join(PATIENCE_SECONDS)
    assert loaded == [[[False] * 4]], "it waits for an end that was lost"


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("call", ["_put", "_lookups.start", "_lookups._waiting.append"])
def test_after_an_interrupted_question_others_are_answered(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, call: str, begun: bool
) -> None:
    """What leaves next is told to the stream's writer once, until it has left."""
    sought = [SoughtKeys(0, keys(17, 4))]
    assert memory.batches.store([BlockRun(0, 0, sought[0].keys, range(4))]) == [True]
    *path, name = f"batches._connection.{call}".split(".")
    if name == "append":
        monkeypatch.setattr(memory.batches._connection._lookups, "_waiting", Waiting())
    owner = functools.reduce(getattr, path, memory)
    original = getattr(owner, name)

    def interrupted(*given: object) -> None:
        if begun:
            original(*given)
        raise Interrupted

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(Interrupted):
        memory.batches.find(sought)
    monkeypatch.setattr(owner, name, original)
    for _ in range(2):
        assert memory.batches.find(sought)[0].all()


def is_none_leased(memory: Memory, daemon: DaemonProcess) -> bool:
    memory.batches.store([BlockRun(0, 0, keys(19, 1), [5])])  # by a step, which renews the others
    return ask(daemon.socket, 10.0).sessions[0].leases == 0


@pytest.mark.parametrize("call", ["_connection.send_step", "_answers._end"])
def test_after_an_interrupted_step_the_daemon_hears_of_leases_that_have_ended(
    memory: Memory, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The next step does: each renews all leases of whose end nobody tells."""
    sought = [SoughtKeys(0, keys(18, 4))]
    assert memory.batches.store([BlockRun(0, 0, sought[0].keys, range(4))]) == [True]
    assert memory.batches.find(sought)[0].all()
    memory.batches.options = BatchOptions(lease_s=0.0)
    owner, name = call.split(".")

    def interrupted(*_given: object) -> None:
        raise Interrupted

    monkeypatch.setattr(getattr(memory.batches, owner), name, interrupted)
    with pytest.raises(Interrupted):
        memory.batches.store([BlockRun(0, 0, keys(19, 1), [5])])
    monkeypatch.undo()
    wait_until(lambda: is_none_leased(memory, daemon), "the lease's end")


@pytest.mark.parametrize("call", ["_step_message", "_put"])
def test_after_an_interrupted_step_the_daemon_hears_of_leases_that_nobody_wants(
    memory: Memory, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Their answers came after whoever asked had given up: the request itself goes on."""
    hashes, connection = keys(25, 4), memory.batches._connection
    assert memory.batches.store([BlockRun(0, 0, hashes, range(4))]) == [True]
    asked = connection.start_lookup(
        [QueryDraft(common_pb2.ReqContext(request_id="goes on"), BlockRun(0, 0, hashes), True)]
    )
    connection.gather([asked], PATIENCE_SECONDS)
    connection.give_up(asked)

    def interrupted(*_given: object) -> None:
        raise Interrupted

    monkeypatch.setattr(connection, call, interrupted)
    with pytest.raises(Interrupted):
        memory.batches.store([BlockRun(0, 0, keys(26, 1), [5])])
    monkeypatch.undo()
    wait_until(lambda: is_none_leased(memory, daemon), "the lease's end")


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("call", ["_put", "_lookups.close_open", "_session.enter_epoch"])
def test_after_an_interrupted_reset_blocks_are_kept_and_found(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, call: str, begun: bool
) -> None:
    """No session would be usable again if the daemon had nothing to confirm."""
    *path, name = f"batches._connection.{call}".split(".")
    owner = functools.reduce(getattr, path, memory)
    original = getattr(owner, name)

    def interrupted(*given: object) -> None:
        monkeypatch.undo()
        if begun:
            original(*given)
        raise Interrupted

    memory.batches.reset()
    assert memory.batches.wait_usable(PATIENCE_SECONDS)
    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(Interrupted):
        memory.batches.reset()
    assert memory.batches.wait_usable(PATIENCE_SECONDS), memory.batches.problem
    one = BlockRun(0, 0, keys(27, 4), range(4))
    wait_until(lambda: memory.batches.store([one]) == [True], "a store")
    wait_until(lambda: bool(memory.batches.find([SoughtKeys(0, one.block_hashes)])[0].all()), "it")


def test_an_interrupted_step_uses_up_no_number(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon would miss it, and the session would begin anew."""
    connection = memory.batches._connection
    original = connection._step_message

    def interrupted(step: StepDraft) -> Message:
        original(step)
        raise Interrupted

    monkeypatch.setattr(connection, "_step_message", interrupted)
    with pytest.raises(Interrupted):
        memory.batches.store([BlockRun(0, 0, keys(20, 1), [5])])
    monkeypatch.undo()
    for number in range(21, 24):
        assert memory.batches.store([BlockRun(0, 0, keys(number, 1), [5])]) == [True]
    assert connection.sessions == 1


@pytest.mark.parametrize("call", ["_mark_ready", "_jobs.mark_ready"])
def test_a_load_that_was_interrupted_before_its_mover_heard_ends_before_its_deadline(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    memory = Memory(daemon.socket, load_deadline_s=20.0)
    hashes = keys(24, 4)
    assert memory.batches.store([BlockRun(0, 0, hashes, range(4))]) == [True]
    movers = daemon.movers()
    *path, name = f"batches._worker.{call}".split(".")
    owner = functools.reduce(getattr, path, memory)
    original = getattr(owner, name)

    def interrupted(*_given: object) -> None:
        monkeypatch.setattr(owner, name, original)
        raise Interrupted

    monkeypatch.setattr(owner, name, interrupted)
    began = time.monotonic()
    with pytest.raises(Interrupted):
        memory.batches.load([BlockRun(0, 0, hashes, range(8, 12))])
    assert time.monotonic() - began < memory.batches.options.load_deadline_s
    assert memory.batches.load([BlockRun(0, 0, hashes, range(8, 12))]) == [[True] * 4]
    assert daemon.movers() == movers
    memory.close()


@pytest.mark.parametrize("begun", [False, True])
def test_a_load_ends_though_a_handler_raises_as_its_dead_mover_is_noticed(
    memory: Memory, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    hashes = keys(28, 4)
    assert memory.batches.store([BlockRun(0, 0, hashes, range(4))]) == [True]
    (mover,) = daemon.movers()
    os.kill(mover, signal.SIGSTOP)
    jobs = memory.batches._worker._jobs
    original = jobs.bury

    def interrupted(lost: Registration) -> None:
        monkeypatch.undo()
        if begun:
            original(lost)
        raise Interrupted

    monkeypatch.setattr(jobs, "bury", interrupted)
    raised: list[BaseException] = []

    def load() -> None:
        try:
            memory.batches.load([BlockRun(0, 0, hashes, range(8, 12))])
        except Interrupted as error:
            raised.append(error)

    loading = threading.Thread(target=load, daemon=True)
    loading.start()
    wait_until(lambda: any(s.jobs_in_flight for s in ask(daemon.socket, 10.0).sessions), "a job")
    os.kill(mover, signal.SIGKILL)
    loading.join(PATIENCE_SECONDS)
    assert not loading.is_alive(), "it waits for a mover that is dead"
    assert len(raised) == 1


def test_a_close_that_was_interrupted_can_be_had_again(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not close a descriptor twice either: the second may be another's by then."""
    made = Memory(daemon.socket)
    original, closed = os.close, list[int]()
    wake_fd = made.batches._worker._registrar._wake_fd  # type: ignore[union-attr]

    def interrupted(fd: int) -> None:
        closed.append(fd)
        original(fd)
        if fd == wake_fd and closed.count(fd) == 1:
            raise Interrupted

    monkeypatch.setattr(os, "close", interrupted)
    with pytest.raises(Interrupted):
        made.close()
    made.close()
    assert closed.count(wake_fd) == 1
    assert not ask(daemon.socket, 10.0).sessions


def test_one_thread_renews_leases_though_the_first_was_interrupted_as_it_began(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, begun = threading.Thread.start, list[threading.Thread]()

    def interrupted(thread: threading.Thread) -> None:
        original(thread)
        if thread.name == "kvd-leases":
            begun.append(thread)
            if len(begun) == 1:
                raise Interrupted

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    prompt = keys(29, 4)
    assert memory.batches.store([BlockRun(0, 0, prompt, range(4))]) == [True]
    with pytest.raises(Interrupted):
        memory.batches.find([SoughtKeys(0, prompt)])
    assert memory.batches.find([SoughtKeys(0, prompt)])[0].all()
    wait_until(lambda: not begun[0].is_alive(), "the first thread's end")
    assert len(begun) == 2
    assert memory.batches._renewal._thread is not None
