"""Of what an engine looks for in batches, the daemon is asked what may be there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvd_client.batches import SoughtKeys
from kvd_client.draft import BlockRun, QueryDraft
from tests.client.test_batches import Memory, keys
from tests.daemon_process import DaemonProcess


@pytest.mark.parametrize(
    ("is_leading", "asked"),
    [(True, [3]), (False, [6])],
    ids=["up to the first gap", "up to the last that is there"],
)
def test_what_can_be_of_no_use_is_not_asked_for(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, is_leading: bool, asked: list[int]
) -> None:
    memory, prompt = Memory(daemon.socket), keys(1, 8)
    connection = memory.batches._connection
    lengths: list[int] = []
    start = connection.start_lookup

    def noted(queries: Sequence[QueryDraft]) -> int:
        lengths.extend(len(query.run.block_hashes) for query in queries)
        return start(queries)

    monkeypatch.setattr(connection, "start_lookup", noted)
    try:
        assert memory.batches.store([BlockRun(0, 0, prompt[:3] + prompt[4:6], range(5))]) == [True]
        memory.batches.find([SoughtKeys(0, keys(2, 8), leading=is_leading)])
        assert lengths == []
        memory.batches.find([SoughtKeys(0, prompt, leading=is_leading)])
        assert lengths == asked
    finally:
        memory.close()
