"""A daemon that is absent, killed, hung or slow costs a bounded delay, and no wrong byte."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvd_client.worker.registrar import Registrar
from tests.daemon_process import DaemonProcess
from tests.sglang.rig import HURRIED, PAGE_TOKENS, PATIENT, Rank, wait_for

TOKENS = list(range(3000, 3000 + PAGE_TOKENS * 30))
LONG_S = 30.0  # no call may take so long, on however slow a machine


@pytest.fixture
def daemon(make_daemon: Callable[[], DaemonProcess]) -> DaemonProcess:
    return make_daemon()


@pytest.fixture
def rank(daemon: DaemonProcess) -> Iterator[Rank]:
    """A rank that began before its daemon."""
    started = Rank(daemon.socket, options=HURRIED | {"register_wait_s": 0.0})
    yield started
    daemon.thaw()
    started.close()


def test_an_absent_daemon_is_a_miss_and_is_used_once_it_is_there(
    daemon: DaemonProcess, rank: Rank
) -> None:
    stored = rank.fill(TOKENS, seed=1)
    assert rank.backup(TOKENS, stored) == 0
    assert rank.prefetch(TOKENS)[0] == 0
    daemon.start()
    rank.wait_usable()
    assert rank.backup(TOKENS, stored) == len(TOKENS)
    done, found = rank.prefetch(TOKENS)
    assert done == len(TOKENS)
    assert not rank.wrong_pages(found, done, seed=1)


def test_a_daemon_that_refuses_is_not_called_an_absent_one(
    daemon: DaemonProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = tmp_path / "kvd.toml"
    settings.write_text(f"[tenants.others]\nuids = [{os.getuid() + 1}]\n")
    daemon.more_flags = ("--config", str(settings))
    daemon.start()
    Rank(daemon.socket, options=PATIENT | {"register_wait_s": 3.0}).close()
    [said] = [line for line in caplog.messages if "it is tried again" in line]
    assert "not usable yet (PERMISSION_DENIED: no tenant has uid" in said
    assert "no daemon" not in said


def test_a_refusal_is_told_before_the_rank_has_met_the_daemon(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its mover takes long to start."""
    may_meet, meet = threading.Event(), Registrar._hold_registration

    def meet_late(registrar: Registrar) -> None:
        may_meet.wait(LONG_S)
        meet(registrar)

    monkeypatch.setattr(Registrar, "_hold_registration", meet_late)
    daemon.start()
    rank = Rank(daemon.socket, options={"tenant": "nobody", "register_wait_s": 0.0})
    try:
        [batches] = rank.backend._opened
        wait_for(lambda: "is not tenant 'nobody'" in batches.problem)
    finally:
        may_meet.set()
        rank.close()


def test_a_daemon_killed_in_mid_run_takes_nothing_along(daemon: DaemonProcess, rank: Rank) -> None:
    daemon.start()
    rank.wait_usable()
    assert rank.backup(TOKENS, rank.fill(TOKENS, seed=2)) == len(TOKENS)
    killer = threading.Timer(0.2, daemon.kill)
    killer.start()
    began, rounds = time.monotonic(), 0
    while killer.is_alive() or not rounds:
        done, found = rank.prefetch(TOKENS)
        assert not rank.wrong_pages(found, done, seed=2)
        rank.free(found)
        rounds += 1
    killer.join()
    assert rank.prefetch(TOKENS)[0] == 0
    assert time.monotonic() - began < LONG_S
    daemon.start()
    rank.wait_usable()
    done, found = rank.prefetch(TOKENS)
    assert done == len(TOKENS)  # the pool outlives its daemon
    assert not rank.wrong_pages(found, done, seed=2)


def test_a_hung_daemon_is_left_alone_and_comes_back(daemon: DaemonProcess, rank: Rank) -> None:
    daemon.start()
    rank.wait_usable()
    stored = rank.fill(TOKENS, seed=3)
    assert rank.backup(TOKENS, stored) == len(TOKENS)
    other = [token + 10_000 for token in TOKENS]
    unknown = rank.fill(other, seed=4)
    daemon.freeze()
    began = time.monotonic()
    for _ in range(3):
        assert rank.backup(other, unknown) == 0
        assert rank.prefetch(TOKENS)[0] == 0
    assert time.monotonic() - began < LONG_S
    daemon.thaw()
    wait_for(lambda: rank.prefetch(TOKENS)[0] == len(TOKENS), seconds=2 * LONG_S)
    done, found = rank.prefetch(TOKENS)
    assert not rank.wrong_pages(found, done, seed=3)


def test_every_byte_is_right_under_sglangs_own_delays_and_failures(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.01")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.2")
    daemon.start()
    ranks = [Rank(daemon.socket) for _ in range(2)]
    try:
        for each in ranks:
            each.wait_usable()
            assert type(each.backend).__name__ == "HiCacheStorageFailureInjector"
        draw, came = random.Random(7), 0
        for number in range(40):
            seed = draw.randrange(6)
            tokens = [seed * 5000 + place for place in range(PAGE_TOKENS * 12)]
            rank = ranks[number % 2]
            stored = rank.fill(tokens, seed=100 + seed)
            rank.backup(tokens, stored)
            other = ranks[draw.randrange(2)]
            done, found = other.prefetch(tokens)
            assert not other.wrong_pages(found, done, seed=100 + seed)
            came += done
            rank.free(stored)
            other.free(found)
        assert came  # some have
    finally:
        for each in ranks:
            each.close()
