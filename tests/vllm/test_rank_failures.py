"""The rank side while its daemon is killed, hung, or comes late: bounded, and no wrong byte."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.daemon_process import DaemonProcess
from tests.vllm.conftest import StartRig
from tests.vllm.rank_rig import PATIENCE_S, RankRig


@pytest.fixture
def daemon(make_daemon: Callable[[], DaemonProcess]) -> Iterator[DaemonProcess]:
    """A daemon that this test alone may harm."""
    made = make_daemon()
    made.start()
    yield made
    made.end()


def wait_registered(rig: RankRig) -> None:
    """Until every rank has a mover again."""
    deadline = time.monotonic() + PATIENCE_S
    for rank in rig.ranks:
        while not rank.worker.get_handshake_metadata().registered:
            assert time.monotonic() < deadline


def test_a_load_begun_before_the_daemons_death_ends_once_and_the_rank_comes_back(
    daemon: DaemonProcess, start_rig: StartRig
) -> None:
    rig = start_rig(daemon)
    (rank,) = rig.ranks
    stored = [rank.block(0, 1), rank.block(0, 2)]
    rig.store("kept", [1, 2])
    daemon.freeze()
    lone = rig.draft("kept", [11, 12])  # the daemon never hears of it
    rig.run(rig.metadata(loads=[lone]))
    assert rig.ended == [{1: True}]
    daemon.kill()
    rig.run_until_ended(lone)
    assert rig.was_done(lone) == [False]
    assert rig.failed == [["kept"]]
    daemon.start()
    wait_registered(rig)
    rig.load_when_back("kept", [21, 22])
    assert torch.equal(rank.block(0, 21), stored[0])
    assert torch.equal(rank.block(0, 22), stored[1])


def test_a_killed_mover_fails_its_jobs_and_the_next_one_serves_the_rank(
    daemon: DaemonProcess, start_rig: StartRig
) -> None:
    rig = start_rig(daemon)
    rig.store("kept", [1])
    daemon.freeze()
    load, store = rig.draft("kept", [11]), rig.draft("lost", [3])
    rig.run(rig.metadata(loads=[load], stores=[store]))
    movers = daemon.movers()
    rig.kill_movers(movers)
    rig.run_until_ended(load, store)
    assert rig.was_done(load) == rig.was_done(store) == [False]
    daemon.thaw()
    wait_registered(rig)
    rig.load_when_back("kept", [12])


def test_a_flushed_load_that_a_hung_daemon_keeps_open_costs_its_mover_and_no_byte(
    daemon: DaemonProcess, start_rig: StartRig
) -> None:
    rig = start_rig(daemon, load_flush_timeout_s=0.2, flush_timeout_s=0.1)
    (rank,) = rig.ranks
    stored = rank.block(0, 1)
    rig.store("kept", [1])
    daemon.freeze()
    load = rig.draft("kept", [11])
    rig.run(rig.metadata(loads=[load]))
    movers = daemon.movers()
    step = rig.metadata(flush=[load.job_id])
    rank.worker.handle_preemptions(step)
    assert not rig.still_run(movers)
    rank.memory.zero_()
    rig.collect()
    assert rig.was_done(load) == [False]
    daemon.thaw()
    wait_registered(rig)
    assert not rank.memory.any(), "somebody wrote after the flush"
    rig.load_when_back("kept", [12])
    assert torch.equal(rank.block(0, 12), stored)


def test_a_flushed_store_that_a_hung_daemon_keeps_open_is_given_up(
    daemon: DaemonProcess, start_rig: StartRig
) -> None:
    rig = start_rig(daemon, flush_timeout_s=0.05)
    (rank,) = rig.ranks
    daemon.freeze()
    job = rig.draft("given up", [1])
    rig.send(stores=[job])
    rig.run(rig.metadata(stores=[job]))
    rig.run(rig.metadata(flush=[job.job_id]))
    assert rig.was_done(job) == [False]
    rank.memory.zero_()
    daemon.thaw()
    rig.wait_usable()
    late = rig.load("given up", [5])
    assert rig.was_done(late) == [False], "a torn block became readable"
    rig.store("whole", [2])
    rig.load_when_back("whole", [6])


def test_sleep_takes_the_kv_back_from_a_hung_daemon(
    daemon: DaemonProcess, start_rig: StartRig
) -> None:
    rig = start_rig(daemon)
    (rank,) = rig.ranks
    rig.store("kept", [1])
    daemon.freeze()
    load = rig.draft("kept", [11])
    rig.run(rig.metadata(loads=[load]))
    movers = daemon.movers()
    rank.worker.unregister_kv_caches()
    assert not rig.still_run(movers)
    rig.collect()
    assert rig.was_done(load) == [False]
    daemon.thaw()
    rank.worker.restore_kv_caches()
    wait_registered(rig)
    rig.load_when_back("kept", [12])


def test_a_daemon_that_comes_late_serves_a_rank_that_has_long_begun(
    make_daemon: Callable[[], DaemonProcess], start_rig: StartRig
) -> None:
    daemon = make_daemon()
    rig = start_rig(daemon, comes_late=True, register_wait_s=0.05)
    assert [shake.registered for shake in rig.handshakes] == [False]
    early = rig.draft("early", [1])
    rig.run(rig.metadata(stores=[early]))
    assert rig.was_done(early) == [False]
    daemon.start()
    rig.wait_usable()
    assert rig.was_done(rig.store("late", [1])) == [True]


def test_jobs_of_a_lost_session_end_when_the_scheduler_says_so(
    daemon: DaemonProcess, start_rig: StartRig
) -> None:
    rig = start_rig(daemon)
    load, store = rig.draft("nothing", [11]), rig.draft("unsent", [3])
    rig.run(rig.metadata(loads=[load], stores=[store]))  # the daemon never hears of them
    assert rig.ended == [{}]
    rig.run(rig.metadata(lost=(load.job_id, store.job_id)))
    assert rig.ended == [{load.job_id: False, store.job_id: False}]
    assert rig.failed == [["nothing"]]
    rig.run(rig.metadata(lost=(load.job_id, store.job_id)))
