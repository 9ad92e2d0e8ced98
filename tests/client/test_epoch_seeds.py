"""Probes of the index page while another thread resets the cache."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvd.pool.index_page import IndexPage
from kvd_client.session import DaemonSession
from kvd_proto import tags
from kvd_proto.v1 import engine_pb2

HASH_BYTES = 16
KEY = bytes(range(HASH_BYTES))
FIRST, NEXT = 11, 22  # seeds of the one group, by epoch


@pytest.fixture
def page() -> Iterator[IndexPage]:
    made = IndexPage("seeds", 1024)
    yield made
    made.close()


@pytest.fixture
def session(page: IndexPage) -> Iterator[DaemonSession]:
    opened = engine_pb2.SessionOpened(epoch=engine_pb2.EpochOpened(group_seeds=[FIRST]))
    made = DaemonSession(1, opened, HASH_BYTES)
    made.map_page(os.dup(page.read_only_fd))
    yield made
    assert made._page is not None
    made._page.close()


def test_blocks_of_the_next_epoch_are_found_though_it_began_amid_a_probe_of_the_last(
    page: IndexPage, session: DaemonSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    account_seed = tags.account_seed

    def seed_late(seed: int, account: str) -> int:
        if seed == FIRST:  # what another thread does meanwhile
            session.enter_epoch("next", [NEXT])
        return account_seed(seed, account)

    monkeypatch.setattr(tags, "account_seed", seed_late)
    assert not session.shows(0, "", KEY)
    page.insert(tags.tags_of(tags.hash_words(KEY, HASH_BYTES), account_seed(NEXT, "")))
    assert session.shows(0, "", KEY)
    assert session.present(0, "", [KEY]).all()
