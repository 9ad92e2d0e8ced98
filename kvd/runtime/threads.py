"""Work in a thread: one that is not left behind, or one that may be."""

from __future__ import annotations

import _thread
import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kvd.processes.complaints import why_no_thread

# Of a daemon that serves nobody: all but gRPC's one for each processor, and a few for work.
LEAST_THREADS = 12
OF_GRPC = (4, 16)  # from, and up to; without them gRPC tries again for ever, and serves nobody
BEGINS_S = 5.0  # for a thread's first line; one that finds no memory as it begins never comes there
Given = TypeVar("Given")
Found = TypeVar("Found")


class NoThread(RuntimeError):
    """None can be had now; says which limits to raise."""


def require_threads() -> None:
    """NoThread where a daemon could not have the threads without which it serves nobody.

    They are tried: the kernel counts by user and by each control group above this one.
    """
    least, most = OF_GRPC
    wanted = LEAST_THREADS + min(max(least, os.cpu_count() or 1), most)
    begun = 0
    begins, ends, may_end = threading.Semaphore(0), threading.Semaphore(0), threading.Event()

    def try_one() -> None:
        try:
            begins.release()
            may_end.wait()
        finally:
            ends.release()

    try:
        while begun < wanted:
            _thread.start_new_thread(try_one, ())  # Thread.start has no bound for its wait
            if not begins.acquire(timeout=BEGINS_S):
                raise MemoryError
            begun += 1
    except (RuntimeError, MemoryError):
        raise NoThread(
            f"a daemon needs {wanted} threads, and finds {begun}: {why_no_thread()}"
        ) from None
    finally:
        may_end.set()
        for _ in range(begun):
            ends.acquire(timeout=BEGINS_S)


async def to_its_end(work: Callable[[Given], None], given: Given) -> None:
    """Do it in a thread; who is cancelled meanwhile waits until it is done all the same.

    A thread can't be stopped, and what it works on may be another's once nobody waits for it. A
    RuntimeError that there are no more threads means that it is not done, now or later.
    """
    done: Future[None] = Future()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            work(given)
        except BaseException as error:
            done.set_exception(error)
            raise
        done.set_result(None)

    try:
        working = asyncio.get_running_loop().run_in_executor(None, run)
    except RuntimeError:
        # It stands in the executor's queue all the same, and a thread that there is may have it.
        if done.cancel():
            raise
        working = asyncio.wrap_future(done)
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise


async def apart(work: Callable[[], Found]) -> Found:
    """Do it in a thread of its own, for which nobody waits any more who is cancelled.

    Nor does the end of the process: for what only looks, and may look for ever. NoThread where
    there are as many as there may be.
    """
    found: Future[Found] = Future()
    found.set_running_or_notify_cancel()  # so that the thread may always say what came of it

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            found.set_exception(error)

    try:
        threading.Thread(target=run, name="kvd-apart", daemon=True).start()
    except RuntimeError:
        raise NoThread(why_no_thread()) from None
    return await asyncio.wrap_future(found)
