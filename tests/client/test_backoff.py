"""How soon the client tries again, and what its log says of it."""

from __future__ import annotations

import errno
import os
from typing import Any

import grpc
import pytest

from kvd_client import backoff
from kvd_client.backoff import BACKOFF_S, QUICK_TRIES, REFUSED_BACKOFF_S, Backoff
from kvd_client.companion import CompanionRefused

LONGEST_S = REFUSED_BACKOFF_S[1] * (1 << backoff.MAX_DOUBLINGS)


class Clock:
    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(backoff, "time", made)
    return made


class Failed(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, reason: str = "", details: str = "") -> None:
        self._code, self._reason, self._details = code, reason, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return ((backoff.DETAILS_KEY, f"\n\x08{self._reason}\x12".encode()),)


class Raising:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def __call__(self) -> None:
        raise self._error


def is_quick(pause_s: float) -> bool:
    return pause_s <= BACKOFF_S[1]


def test_an_absent_daemon_is_looked_for_often_for_ever() -> None:
    tries = Backoff()
    assert all(is_quick(tries.after(OSError())) for _ in range(100))


def test_sessions_that_break_as_soon_as_they_are_open_come_at_longer_intervals(
    clock: Clock,
) -> None:
    tries = Backoff()
    pauses = []
    for _ in range(12):
        tries.meet()
        tries.hold()
        clock.now_s += 1.0
        pauses.append(tries.after(None))
    assert all(map(is_quick, pauses[:QUICK_TRIES]))
    assert pauses[QUICK_TRIES] >= REFUSED_BACKOFF_S[0]
    least = LONGEST_S * REFUSED_BACKOFF_S[0] / REFUSED_BACKOFF_S[1]
    assert all(least <= pause <= LONGEST_S for pause in pauses[-3:])


def test_one_that_held_for_long_is_had_again_at_once(clock: Clock) -> None:
    tries = Backoff()
    for _ in range(8):
        tries.after(CompanionRefused("NO", "no"))
    tries.hold()
    clock.now_s += backoff.STEADY_S
    assert is_quick(tries.after(None))


def test_a_connection_that_fails_behind_the_greeting_counts_as_broken() -> None:
    tries = Backoff()
    pauses = []
    for _ in range(QUICK_TRIES + 1):
        tries.meet()
        pauses.append(tries.after(OSError()))
    assert not is_quick(pauses[-1])
    assert is_quick(tries.after(OSError()))  # nobody was met: it was stopped, and is expected again


def test_a_mover_that_never_starts_is_tried_less_and_less_often() -> None:
    tries = Backoff()
    error = Failed(grpc.StatusCode.UNAVAILABLE, "MOVER_START_FAILED")
    assert max(tries.after(error) for _ in range(20)) > LONGEST_S / 2


def test_a_daemon_that_drains_is_followed_closely_by_its_next_life() -> None:
    tries = Backoff()
    error = Failed(grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert max(tries.after(error) for _ in range(20)) <= REFUSED_BACKOFF_S[1]


def test_a_problem_is_said_once_whatever_its_figures_and_again_when_it_is_old(
    clock: Clock,
) -> None:
    tries = Backoff()
    said = [tries.is_news(f"{what} of rank {n}") for n in range(50) for what in ("end", "refusal")]
    assert said == [True, True] + [False] * 98
    clock.now_s += backoff.SAID_AGAIN_S
    assert tries.is_news("end of rank 7")


def test_a_problem_after_a_steady_time_is_news(clock: Clock) -> None:
    tries = Backoff()
    assert tries.is_news("it ended")
    tries.hold()
    clock.now_s += backoff.STEADY_S
    tries.after(None)
    assert tries.is_news("it ended")


def test_problems_without_end_are_not_all_remembered() -> None:
    tries = Backoff()
    for first in "abcdefgh":
        for second in "abcdefgh":
            tries.is_news(first + second)
    assert len(tries._said) == backoff.MAX_SAID


def test_an_error_that_nobody_expects_is_logged_whole_and_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries = Backoff()
    for error in (KeyError("a slip"), KeyError("a slip"), OSError(2, "nobody there")):
        raised = backoff.error_of(Raising(error))
        assert raised is error
        tries.warn("kvd", backoff.problem_of(raised, "/run/kvd.sock"), raised)
    assert [record.message for record in caplog.records] == [
        "kvd: KeyError: 'a slip'",
        "kvd: /run/kvd.sock: [Errno 2] nobody there",
    ]
    assert [record.exc_info is not None for record in caplog.records] == [True, False]
    assert backoff.error_of(lambda: None) is None


def test_a_cancelled_registration_counts_as_broken_off() -> None:
    tries = Backoff()
    pauses = [tries.after(grpc.FutureCancelledError()) for _ in range(QUICK_TRIES + 1)]
    assert all(map(is_quick, pauses[:QUICK_TRIES]))
    assert not is_quick(pauses[-1])


@pytest.mark.parametrize(("why", "is_kept_out"), [(errno.EACCES, True), (errno.ENOENT, False)])
def test_who_is_kept_out_for_a_while_is_told_so(why: int, is_kept_out: bool) -> None:
    words = f"failed to connect to all addresses; error: {os.strerror(why)}"
    problem = backoff.describe(Failed(grpc.StatusCode.UNAVAILABLE, details=words))
    assert words in problem
    assert ("connected again and again" in problem) is is_kept_out
