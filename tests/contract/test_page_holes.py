"""Memory of an index page is given back on a thread: clients' mappings make it take long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvd.pool.holes import OneThread, Work, at_once
from kvd.pool.index_page import IndexPage
from kvd_proto import layout
from kvd_proto.page import PageReader
from tests.contract import pool_orders as orders
from tests.contract.test_page_levels import MANY, SMALL, insert, tags
from tests.waiting import wait_until

TAGS = 20_000


class Later:
    """Keeps what is to be done."""

    def __init__(self) -> None:
        self.kept: list[Work] = []

    def __call__(self, work: Work) -> None:
        self.kept.append(work)

    def do(self) -> None:
        kept, self.kept = self.kept, []
        for work in kept:
            at_once(work)


@pytest.fixture
def later() -> Later:
    return Later()


@pytest.fixture
def page(later: Later) -> Iterator[IndexPage]:
    page = IndexPage("kvd-test-page", MANY, later)
    yield page
    page.close()
    later.do()


def settle(page: IndexPage) -> None:
    for _ in range(1000):
        page.upkeep(4096)


def test_nothing_is_given_back_by_who_inserts_removes_or_looks(
    page: IndexPage, later: Later
) -> None:
    reader = PageReader(page.read_only_fd)
    assert insert(page, tags(0, TAGS)) == 0
    assert np.array(reader._words[512::512]).any()  # a client that reads all there is
    page.remove(tags(0, TAGS))
    settle(page)
    before = page.taken
    page.take_strays()
    assert page.taken == before >= layout.page_bytes(10)
    for _ in range(4):
        later.do()
        settle(page)
        page.take_strays()
    later.do()
    assert page.taken <= SMALL + 8192
    reader.close()


def test_a_table_waits_for_its_place_to_be_empty(page: IndexPage, later: Later) -> None:
    """What stood there before would stand in it again."""
    smallest = page.words
    assert insert(page, tags(0, TAGS)) == 0
    page.remove(tags(100, TAGS - 100))
    settle(page)
    assert page.words > smallest, "that one's place is not empty"
    later.do()
    settle(page)
    assert page.words == smallest
    reader = PageReader(page.read_only_fd)
    assert reader.probe(tags(0, 100)).all()
    assert not reader.probe(tags(100, 1000)).any()
    reader.close()


def test_what_is_closed_meanwhile_is_left_alone(later: Later) -> None:
    page = IndexPage("kvd-test-page", MANY, later)
    insert(page, tags(0, TAGS))
    page.close()
    later.do()
    with pytest.raises(ValueError, match="closed"):
        page._map.size()


def test_one_thread_does_a_piece_of_each_in_turn_and_ends() -> None:
    run, order = OneThread(), []
    may_begin, has_ended = threading.Event(), threading.Event()

    def work(name: str, pieces: int) -> Work:
        def piece() -> bool:
            nonlocal pieces
            may_begin.wait()
            order.append(name)
            pieces -= 1
            if name == "last":
                has_ended.set()
            return pieces > 0

        return piece

    for name, pieces in (("a", 3), ("b", 2), ("c", 1)):
        run(work(name, pieces))
    may_begin.set()
    wait_until(lambda: run._left == 0, "its end")
    assert order == ["a", "b", "c", "a", "b", "a"]
    run(work("last", 1))
    assert has_ended.wait(10), "there is a thread again"


def test_without_another_thread_it_is_done_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    run, more = OneThread(), [True, False]
    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", refuse)
        run(lambda: more.pop(0))
        assert not more
    more.append(False)
    run(lambda: more.pop(0))
    wait_until(lambda: not more, "a thread, once there may be one")


def test_the_pools_pages_are_given_back_so(shared_directory: Path) -> None:
    with orders.opened(orders.config(shared_directory)) as pool:
        orders.introduce(pool)
        assert isinstance(pool._pages[orders.NAMESPACE]._run, OneThread)
