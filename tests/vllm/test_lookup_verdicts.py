"""What vLLM's scan is told of a request's blocks, lookup after lookup."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvd_client.draft import BlockRun
from kvd_client.integrations.vllm.scheduling.lookups import Prompt, RequestLookups
from kvd_client.integrations.vllm.scheduling.requests import OffloadGroup, TrackedRequest, track
from kvd_client.scheduler.request import Knowledge, LookupState, Request
from kvd_proto.key_status import ADMITTED_BIT, HIT, MISS, PENDING, RETRY
from kvd_proto.v1 import common_pb2

HASHES = [b"a" * 32, b"b" * 32]
PROMPT = Prompt([HASHES], 40)
KEY = make_offload_key(HASHES[0], 0)


class Answers:
    """In place of the queue: the daemon's next answer, and who was asked for again, and when."""

    def __init__(self) -> None:
        self.statuses = [HIT, HIT]
        self.tier = common_pb2.TIER_HOST
        self.asked_again: list[float] = []
        self.given_up: list[int] = []  # kinds of doubt
        self.asked_alone: list[bytes] = []

    def resolve(self, request: Request, _computed_tokens: int) -> Knowledge:
        lookup = request.lookup
        lookup.state = LookupState.KNOWN
        lookup.statuses = [np.array(self.statuses, dtype=np.uint8)]
        lookup.sources = {0: np.array([self.tier] * len(HASHES), dtype=np.uint8)}
        return Knowledge.STATUSES

    def ask_again(self, _request: Request, now: float) -> None:
        self.asked_again.append(now)

    def ask_alone(self, _request: Request, run: BlockRun) -> int:
        self.asked_alone += run.block_hashes
        return PENDING | ADMITTED_BIT

    def is_doubt_too_late(self, *_: object) -> bool:
        return True

    def give_up_doubtful(self, _request: Request, _statuses: object, doubtful: int) -> None:
        self.given_up.append(doubtful)


class Scan:
    """One request of two blocks; `now` is the time in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.answers: Any = Answers()
        self.lookups = RequestLookups({0: OffloadGroup(0, 0, 16, 1, 1)}, lambda: self.now)
        self.tracked: TrackedRequest = track(ReqContext("r"), 1, "")

    def begin(self) -> None:
        assert self.lookups.begin(self.tracked, PROMPT, self.answers) is Knowledge.STATUSES

    def one(self) -> LookupResult:
        session: Any = None  # not asked of the request's own blocks
        return self.lookups.one(self.tracked, KEY, session, self.answers)


@pytest.fixture
def scan() -> Scan:
    return Scan()


def test_what_was_not_looked_up_is_a_miss(scan: Scan) -> None:
    assert scan.one() is LookupResult.MISS


def test_the_last_lookup_counts(scan: Scan) -> None:
    scan.begin()
    assert scan.one() is LookupResult.HIT
    assert scan.lookups.source(scan.tracked, KEY) is not CacheHitSource.DISK
    scan.answers.statuses, scan.answers.tier = [MISS, MISS], common_pb2.TIER_DISK
    scan.begin()
    assert scan.one() is LookupResult.MISS
    assert scan.lookups.source(scan.tracked, KEY) is CacheHitSource.DISK


@pytest.mark.parametrize("doubtful", [RETRY, PENDING])
def test_doubt_lasts_from_the_first_time_that_vllm_put_the_request_off(
    scan: Scan, doubtful: int
) -> None:
    scan.begin()
    scan.lookups.defer(scan.tracked, scan.answers)
    assert not scan.answers.asked_again, "nothing of it is doubtful"
    scan.tracked.request.lookup.statuses[0][1] = doubtful
    doubts = scan.tracked.request.lookup.doubts
    for scan.now in (1.0, 2.0):
        scan.lookups.defer(scan.tracked, scan.answers)
        assert doubts == {doubtful: 1.0}
    assert scan.answers.asked_again == [1.0, 2.0]
    assert scan.lookups.settle(scan.tracked, 17) == 2
    assert not doubts


def test_what_is_asked_again_is_given_up_before_what_is_pending(scan: Scan) -> None:
    """So that nobody waits for a pending block behind one that is a miss by then."""
    scan.tracked.request.lookup.doubts = {PENDING: 0.0, RETRY: 0.0}
    scan.begin()
    assert scan.answers.given_up == [RETRY, PENDING]


def test_of_a_tails_end_the_daemon_is_asked_where_the_page_shows_it(scan: Scan) -> None:
    scan.begin()
    shown, absent = b"s" * 32, b"t" * 32
    session: Any = SimpleNamespace(shows=lambda *block: block == (0, "", shown))
    verdicts = [
        scan.lookups.one(scan.tracked, make_offload_key(each, 0), session, scan.answers)
        for each in (absent, shown)
    ]
    assert verdicts == [LookupResult.MISS, LookupResult.HIT_PENDING]
    assert scan.answers.asked_alone == [shown]
