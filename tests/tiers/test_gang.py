"""Threads that do a call's pieces at once: nothing of a call goes on when it has ended."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest

from kvd.tiers.gang import Flow, Gang
from tests.tiers.valkey_rig import until


@pytest.fixture
def gang() -> Iterator[Gang]:
    with closing(Gang("test", 3)) as gang:
        yield gang


def test_a_flow_ends_when_what_its_pieces_added_has_ended(gang: Gang) -> None:
    done: list[int] = []

    def descend(flow: Flow, depth: int) -> None:
        done.append(depth)
        if depth:
            flow.add([partial(descend, flow, depth - 1)] * 2)

    with gang.flow() as flow:
        flow.add([partial(descend, flow, 6)])
    assert sorted(done) == sorted(6 - depth for depth in range(7) for _ in range(2**depth))


def test_pieces_begin_while_others_are_still_added(gang: Gang) -> None:
    began = threading.Event()
    with gang.flow() as flow:
        flow.add([began.set])
        assert began.wait(20)
        flow.add([began.clear])
    assert not began.is_set()


def test_calls_of_many_threads_end_each_with_its_own_pieces(gang: Gang) -> None:
    wrong: list[int] = []

    def call(number: int) -> None:
        done: list[int] = []
        with gang.flow() as flow:
            for _ in range(50):
                flow.add([partial(done.append, number)] * 3)
        if done != [number] * 150:
            wrong.append(number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_piece_that_would_end_its_thread_fails_its_call_alone(gang: Gang) -> None:
    for _ in range(4):
        with pytest.raises(AssertionError, match="SystemExit"):
            gang.do([partial(sys.exit, "a store's own word")])
    done: list[int] = []
    gang.do([partial(done.append, number) for number in range(4)])
    assert sorted(done) == [0, 1, 2, 3]


def test_a_small_call_does_not_wait_for_all_pieces_of_a_large_one(gang: Gang) -> None:
    may_end, begun = threading.Semaphore(0), threading.Semaphore(0)

    def piece() -> None:
        begun.release()
        assert may_end.acquire(timeout=20)

    large = threading.Thread(target=gang.do, args=([piece] * 300,))
    large.start()
    assert all(begun.acquire(timeout=20) for _ in range(3)), "each thread has one"
    small = threading.Thread(target=gang.do, args=([lambda: None] * 2,))
    small.start()
    for _ in range(20):
        may_end.release()
    small.join(20)
    ended = not small.is_alive()
    for _ in range(280):
        may_end.release()
    for thread in (large, small):
        thread.join(20)
        assert not thread.is_alive()
    assert ended, "it waited for what came before it"


def test_pieces_of_a_patient_call_give_way_but_for_one_in_some() -> None:
    with closing(Gang("test", 1)) as gang:
        begun, may_begin, done = threading.Event(), threading.Event(), list[str]()

        def first() -> None:
            begun.set()
            assert may_begin.wait(20)

        calls = [threading.Thread(target=gang.do, args=([first],))]
        for name, is_patient in (("write", True), ("read", False)):
            pieces = [partial(done.append, name)] * 20
            given = {"is_patient": is_patient}
            calls.append(threading.Thread(target=gang.do, args=(pieces,), kwargs=given))
        for call in calls:
            call.start()
            assert begun.wait(20)
        until(lambda: len(gang._turns._calls) == len(gang._turns._patient) == 1)
        may_begin.set()
        for call in calls:
            call.join(20)
    turns = "".join(name[0] for name in done)
    assert turns == "rrrw" * 6 + "rrw" + "w" * 13


def test_what_was_given_before_the_end_is_done() -> None:
    gang, done = Gang("test", 1), list[int]()
    began, may = threading.Event(), threading.Event()

    def first() -> None:
        began.set()
        may.wait(20)

    pieces = [first, *[partial(done.append, number) for number in range(9)]]
    call = threading.Thread(target=gang.do, args=(pieces,))
    call.start()
    assert began.wait(20)
    threading.Timer(0.1, may.set).start()
    gang.close()
    call.join(20)
    assert done == list(range(9))


def test_a_piece_that_breaks_is_told_once_the_others_have_ended(gang: Gang) -> None:
    done: list[int] = []
    with pytest.raises(AssertionError, match="a piece of a call broke"), gang.flow() as flow:
        flow.add([lambda: done.append(1 // 0), *[partial(done.append, n) for n in range(9)]])
    assert sorted(done) == list(range(9))


def test_who_breaks_while_he_adds_waits_for_what_he_added(gang: Gang) -> None:
    may, done = threading.Event(), list[int]()

    def late() -> None:
        may.wait(20)
        done.append(1)

    def call() -> None:
        with gang.flow() as flow:
            flow.add([late, may.set])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        call()
    assert done == [1]


def test_nothing_to_do_is_done(gang: Gang) -> None:
    gang.do([])
    with gang.flow() as flow:
        flow.add([])
