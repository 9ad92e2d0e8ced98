"""A bucket that says that it is asked too often is asked as often as it bears, and never waited for
long."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("obstore", reason="obstore is not here")

from kvd.tiers.s3 import pacing as module
from kvd.tiers.s3.pacing import FIRST_GAP_S, LONGEST_GAP_S, MOST_WAIT_S, Pacing
from kvd.tiers.s3.store import S3Store
from kvd.tiers.store import Outcome, TierError, TierReason
from tests.tiers.contract import key, late_enough, source
from tests.tiers.test_s3_answers import Answering, Curt, answering, options_of

__all__ = ["answering"]

FOR_EVER = 1e9
ANSWER_S = 0.001


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.sleeps = True

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert 0 <= seconds <= MOST_WAIT_S
        self.now_s += seconds if self.sleeps else 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(
        module, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep)
    )
    return clock


def ask(pacing: Pacing, clock: Clock, *, is_borne: bool) -> None:
    """One request after the last one."""
    pacing.take_turn(FOR_EVER)
    began = clock.now_s
    clock.now_s += ANSWER_S
    if is_borne:
        pacing.hasten()
    else:
        pacing.slow_down(began)


def test_a_bucket_is_asked_about_as_often_as_it_bears(clock: Clock) -> None:
    pacing, borne_each_s = Pacing(), 50
    allowance, last_s, asked, borne = 0.0, 0.0, 0, 0
    while clock.now_s < 120:
        pacing.take_turn(FOR_EVER)
        allowance = min(1.0, allowance + (clock.now_s - last_s) * borne_each_s)
        last_s = clock.now_s
        asked += 1
        if allowance >= 1:
            allowance -= 1
            borne += 1
            pacing.hasten()
        else:
            pacing.slow_down(last_s)
        clock.now_s += ANSWER_S
    assert borne > 0.6 * asked, "most are answered"
    assert borne > 0.3 * borne_each_s * clock.now_s, "and what may be had is had"


def test_a_bucket_that_is_as_it_was_is_asked_as_it_was(clock: Clock) -> None:
    pacing = Pacing()
    for _ in range(20):
        ask(pacing, clock, is_borne=False)
    assert pacing.gap_s == LONGEST_GAP_S
    begun_s = clock.now_s
    while pacing.gap_s:
        ask(pacing, clock, is_borne=True)
    assert clock.now_s - begun_s < 60


def test_of_requests_under_way_at_once_one_says_it_for_all(clock: Clock) -> None:
    pacing = Pacing()
    clock.now_s = 5.0
    for _ in range(16):
        pacing.slow_down(began=4.0)
    assert pacing.gap_s == FIRST_GAP_S


def test_whose_turn_comes_too_late_is_told_so_at_once(clock: Clock) -> None:
    pacing = Pacing()
    for _ in range(20):
        ask(pacing, clock, is_borne=False)
    with pytest.raises(TierError) as raised:
        pacing.take_turn(clock.now_s + 0.01)
    assert raised.value.reason is TierReason.BUSY
    clock.sleeps = False  # many wait at once
    taken = 0
    for _ in range(100):
        with contextlib.suppress(TierError):
            pacing.take_turn(FOR_EVER)
            taken += 1
    assert 1 <= taken <= 4


@pytest.mark.parametrize("status", [429, 503])
def test_a_bucket_that_bears_nothing_is_asked_for_few_of_many_blocks(
    answering: Answering,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    status: int,
) -> None:
    answering.RequestHandlerClass, answering.status = Curt, status
    store = S3Store(options_of(answering.server_port, tmp_path))
    with pytest.raises(TierError) as raised:
        store.exists([key(n) for n in range(2000)], late_enough())
    assert raised.value.reason is TierReason.BUSY
    blocks = [source(key(n), bytes(8)) for n in range(2000)]
    assert set(store.write(blocks, late_enough())) == {Outcome.FAILED}
    assert answering.asked < 400
    (note,) = store.usage().notes
    assert "asks for fewer requests" in note
    assert caplog.text.count("asks for fewer requests") == 1
    assert store.usage().errors == {TierReason.BUSY: 4000}
    store.close()
