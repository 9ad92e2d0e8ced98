"""What a lookup is told of blocks that only a tier of a real daemon may have, and how soon."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.cli.status import ask
from kvd_client.draft import BlockRun, QueryDraft
from kvd_client.session import QueryAnswer
from kvd_proto.key_status import HIT, MISS, PENDING, STATUS_BITS
from kvd_proto.v1 import common_pb2, operator_pb2
from tests.client.content import TOKENS, block_hashes
from tests.client.small_engine import SmallEngine
from tests.daemon_process import DaemonProcess
from tests.waiting import PATIENCE_SECONDS, wait_until

BLOCKS = 64  # of a prompt; the pool holds 1024
FILLING = [f"filling {number}" for number in range(20)]
DEADLINE_S = 0.5  # where it shall pass
TIER = """
[[tiers]]
name = "slow"
store = "tests.tiers.slow_store:SlowStore"
deadline_seconds = {deadline}
options = {{ pause = "{pause}" }}
"""


class Stand:
    """An engine, and a tier that has the blocks of "below" alone: host memory has lost them."""

    def __init__(
        self, daemon: DaemonProcess, place: Path, deadline_s: float = PATIENCE_SECONDS
    ) -> None:
        daemon.end()
        self.daemon = daemon
        self._pause = place / "pause"
        self.pause(0)
        file = place / "kvd.toml"
        file.write_text(TIER.format(deadline=deadline_s, pause=self._pause))
        daemon.flags["config"] = file
        daemon.pool_bytes = 4 << 20
        daemon.start()
        wait_until(lambda: self.tier().serving, "the tier")
        self.engine = SmallEngine(daemon.socket)
        self.engine.wait_usable()
        self._next = 0
        self.engine.store("below", "below", BLOCKS)
        wait_until(lambda: self.tier().blocks_written == BLOCKS, "what is written down")
        for prompt in FILLING:
            self.engine.store(prompt, prompt, BLOCKS)
            wait_until(lambda: not self.tier().bytes_down, "what is written down")

    def pause(self, seconds: float) -> None:
        """The store takes so long for an answer from now on."""
        self._pause.write_text(str(seconds))

    def tier(self) -> operator_pb2.TierStatus:
        return ask(self.daemon.socket, 10.0).tiers[0]

    def told(self, prompt: str, request: str) -> tuple[QueryAnswer, float]:
        """What one call says, and after how long."""
        context = common_pb2.ReqContext(request_id=request)
        query = QueryDraft(context, BlockRun(0, 0, block_hashes(prompt, BLOCKS)), lease_all=False)
        began = time.monotonic()
        call = self.engine.connection.start_lookup([query])
        self.engine.connection.gather([call], 5.0)
        answers = self.engine.connection.take_answers(call)
        assert answers, "no answer"
        return answers[0], time.monotonic() - began

    def found(self, prompt: str) -> tuple[int, float]:
        """Blocks that a new request finds, and after how long it knows."""
        self._next += 1
        request, began = f"r{self._next}", time.monotonic()
        self.engine.arrive(request, prompt, BLOCKS)
        tokens = self.engine.match(request)
        seconds = time.monotonic() - began
        self.engine.scheduler.request_finished(request, [()])
        self.engine.step()
        return tokens // TOKENS, seconds


@pytest.fixture
def stand(daemon: DaemonProcess, tmp_path: Path) -> Iterator[Stand]:
    made = Stand(daemon, tmp_path)
    yield made
    made.engine.close()


@pytest.fixture
def hasty(daemon: DaemonProcess, tmp_path: Path) -> Iterator[Stand]:
    made = Stand(daemon, tmp_path, DEADLINE_S)
    yield made
    made.engine.close()


def statuses(answer: QueryAnswer) -> set[int]:
    return {status & STATUS_BITS for status in answer.statuses}


def test_one_call_is_enough_where_the_tier_answers_at_once(stand: Stand) -> None:
    """On a busy machine not every answer comes at once."""
    numbers = itertools.count()

    def is_told_at_once() -> bool:
        number = next(numbers)
        return statuses(stand.told(f"nowhere {number}", f"n{number}")[0]) == {MISS}

    wait_until(is_told_at_once, "one call that was enough")
    assert statuses(stand.told("below", "b")[0]) == {PENDING}, "it is there, and not up yet"
    requests = (f"b{n}" for n in itertools.count())

    def is_up() -> bool:
        """For a request that begins a promotion of its own where the last one came too late."""
        stand.engine.step()
        return statuses(stand.told("below", next(requests))[0]) == {HIT}

    wait_until(is_up, "the blocks")


def test_no_call_waits_for_a_tier_that_takes_its_time(stand: Stand) -> None:
    stand.pause(0.2)
    first = [stand.told(f"nowhere {n}", f"n{n}") for n in range(5)]
    assert all(statuses(answer) == {PENDING} for answer, _ in first)
    assert min(seconds for _, seconds in first) < 0.1
    for n in range(5):
        wait_until(
            lambda n=n: statuses(stand.told(f"nowhere {n}", f"n{n}")[0]) == {MISS},  # type: ignore[misc]
            "the tier's answer",
        )


def test_requests_do_not_wait_for_a_tier_that_is_too_slow_until_it_is_well_again(
    hasty: Stand,
) -> None:
    """Back-pressure, from the store's calls to the engine's steps."""
    stand = hasty
    assert stand.found("nowhere")[1] < DEADLINE_S
    stand.pause(1.2 * DEADLINE_S)
    waited = [stand.found(f"slow {n}")[1] for n in range(12)]
    assert max(waited[:3]) > 0.8 * DEADLINE_S, "nobody knows yet how slow it is"
    assert sum(seconds < DEADLINE_S / 3 for seconds in waited[4:]) >= 6, (
        "at most one a second tries"
    )
    assert stand.tier().blocks_too_slow > 0
    stand.pause(0)
    wait_until(lambda: stand.found("below")[0] == BLOCKS, "it to be found again")
    after = [stand.found(f"well {n}") for n in range(5)]
    assert max(seconds for _, seconds in after) < DEADLINE_S
