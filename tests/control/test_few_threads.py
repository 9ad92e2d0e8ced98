"""Where no thread can be had, what wanted one is done later, or never, and not in between."""

from __future__ import annotations

import _thread
import asyncio
import resource
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvd.control import memory_return
from kvd.control.access import door
from kvd.control.access.door import Door
from kvd.runtime import threads
from kvd.runtime.threads import NoThread, require_threads, to_its_end


def _no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


@pytest.fixture
def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No thread starts, until this is undone."""
    monkeypatch.setattr(threading.Thread, "start", _no_thread)
    monkeypatch.setattr(_thread, "start_new_thread", _no_thread)
    return monkeypatch


async def test_work_that_found_no_thread_is_never_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever wanted it tries again, and then lets go of what it works on."""
    loop = asyncio.get_running_loop()
    executor = ThreadPoolExecutor(2)
    loop.set_default_executor(executor)
    may_end, done = threading.Event(), list[str]()
    busy = loop.run_in_executor(None, may_end.wait)  # of the threads that there are
    monkeypatch.setattr(threading.Thread, "start", _no_thread)
    with pytest.raises(RuntimeError, match="new thread"):
        await to_its_end(done.append, "a row is zeroed")
    may_end.set()
    await busy
    assert executor._idle_semaphore.acquire(timeout=20.0)  # its thread is idle a moment later
    executor._idle_semaphore.release()
    await to_its_end(done.append, "another, behind it")
    monkeypatch.undo()
    assert done == ["another, behind it"]


@pytest.mark.parametrize(
    ("limited", "said"),
    [
        (None, ""),
        (resource.RLIMIT_AS, "300 MiB of addresses, and each thread takes some: raise LimitAS"),
        (resource.RLIMIT_DATA, "300 MiB of data, and each thread takes some: raise LimitDATA"),
    ],
)
def test_who_finds_no_thread_is_told_of_memory_where_that_is_limited(
    no_more_threads: pytest.MonkeyPatch, limited: int | None, said: str
) -> None:
    def getrlimit(which: int) -> tuple[int, int]:
        limit = 300 << 20 if which == limited else resource.RLIM_INFINITY
        return limit, limit

    no_more_threads.setattr(resource, "getrlimit", getrlimit)
    with pytest.raises(NoThread, match="TasksMax") as told:
        require_threads()
    assert said in str(told.value)
    assert ("each thread takes some" in str(told.value)) is bool(said)


def test_a_thread_that_finds_no_memory_for_its_first_line_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Linux had a stack for it, and then it ends without a word."""
    start = _thread.start_new_thread
    monkeypatch.setattr(_thread, "start_new_thread", lambda *_: start(lambda: None, ()))
    monkeypatch.setattr(threads, "BEGINS_S", 0.01)
    with pytest.raises(NoThread, match="finds 0"):
        require_threads()


class TakesAndFails:
    """A loop whose executor finds no thread for the work, which one that it has takes from it."""

    def __init__(self) -> None:
        self.taken = threading.Event()

    def run_in_executor(self, _executor: None, work: Callable[[], None]) -> None:
        threading.Thread(target=work).start()
        self.taken.wait(10)
        raise RuntimeError("can't start new thread")


async def test_work_that_a_thread_has_taken_all_the_same_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, failing = asyncio.get_running_loop(), TakesAndFails()
    begun, may_end, ended = asyncio.Event(), threading.Event(), list[str]()

    def work(name: str) -> None:
        failing.taken.set()
        loop.call_soon_threadsafe(begun.set)
        may_end.wait(10)
        ended.append(name)

    monkeypatch.setattr(asyncio, "get_running_loop", lambda: failing)
    working = loop.create_task(to_its_end(work, "it"))
    await begun.wait()
    monkeypatch.undo()
    assert not working.done()
    may_end.set()
    await working
    assert ended == ["it"]


async def test_the_door_looks_again(no_more_threads: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_more_threads.setattr(door, "LOOK_SECONDS", 0.002)
    looked, tried, counted = asyncio.Event(), asyncio.Event(), list[int]()
    loop = asyncio.get_running_loop()

    class CountingDoor(Door):
        def look(self) -> int:
            loop.call_soon_threadsafe(looked.set)
            return 0

    def count() -> int:
        counted.append(len(counted))
        if len(counted) == 6:  # two a look
            tried.set()
        return 1 << 20 | len(counted)  # many, and each time another number

    no_more_threads.setattr(door, "count_own_descriptors", count)
    kept = CountingDoor(str(tmp_path / "grpc"), lambda _: False)
    kept.begin()
    await asyncio.wait_for(tried.wait(), 10)
    assert not looked.is_set()
    no_more_threads.undo()
    no_more_threads.setattr(door, "count_own_descriptors", count)
    await asyncio.wait_for(looked.wait(), 10)
    kept.close()


async def test_memory_is_given_back_later(no_more_threads: pytest.MonkeyPatch) -> None:
    no_more_threads.setattr(memory_return, "LOOK_SECONDS", 0.002)
    given, tried, looks = asyncio.Event(), asyncio.Event(), list[int]()
    loop = asyncio.get_running_loop()

    def held() -> int:
        looks.append(0)
        if len(looks) == 4:
            tried.set()
        return 0 if len(looks) == 1 else 1 << 30

    def give_back() -> None:
        loop.call_soon_threadsafe(given.set)

    back = memory_return.MemoryReturn(give_back, held)
    back.begin()
    await asyncio.wait_for(tried.wait(), 10)
    no_more_threads.undo()
    await asyncio.wait_for(given.wait(), 10)
    back.close()
