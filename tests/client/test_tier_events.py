"""An engine hears from a real daemon which of its blocks the tiers hold."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvd.cli.status import ask
from kvd_client.event_watch import DOUBT_S, EventWatch
from kvd_client.session import DaemonSession
from kvd_client.tier_record import HOST, Key, Residence
from kvd_proto.v1 import operator_pb2
from tests.client.small_engine import SmallEngine
from tests.client.test_event_watch import PATIENCE_S
from tests.client.test_event_watch import keys_of as keys_of_blocks
from tests.control.daemon_rig import Caller
from tests.daemon_process import DaemonProcess
from tests.tiers.gated_store import Gate
from tests.waiting import wait_until

BLOCKS = 64  # of a prompt: no more than tiers are given at once. The pool holds 1024
PROMPTS = [f"prompt {number}" for number in range(20)]
DISK = Residence("STORAGE", "LOCAL", "disk")
FAR = Residence("STORAGE", "REMOTE", "far")
# A write that is late is not tried again, so no tier's deadline is one that a busy machine misses.
TIERS = """
[[tiers]]
name = "disk"
store = "tests.tiers.memory_store:MemoryStore"
deadline_seconds = 60.0

[[tiers]]
name = "far"
store = "tests.tiers.memory_store:MemoryStore"
deadline_seconds = 60.0
medium = "REMOTE"
"""


def keys_of(prompt: str) -> list[Key]:
    return keys_of_blocks(prompt, BLOCKS)


class Router:
    """Knows by an engine's events alone where its blocks lie."""

    def __init__(
        self, daemon: DaemonProcess, engine: str = "e0", *, with_tiers: bool = True
    ) -> None:
        self.daemon = daemon
        self.engine = SmallEngine(daemon.socket, engine, model=f"of {engine}")
        self.engine.wait_usable()
        self.now = 0.0
        self.watch = EventWatch(
            daemon.socket, "test", clock=lambda: self.now, with_tiers=with_tiers
        )
        self.knows: dict[Residence, set[Key]] = {HOST: set(), DISK: set(), FAR: set()}
        session = self.engine.connection.session
        assert isinstance(session, DaemonSession)
        self.session = session
        self.watch.follow(session.namespace_id, session.epoch)

    def store(self, prompt: str) -> None:
        """Store it, say so, and leave the stream all the time that it takes to say so, too.

        For a stream that is behind for longer than DOUBT_S the blocks are removed, and stay so.
        """
        self.engine.store(prompt, prompt, BLOCKS)
        self.knows[HOST].update(self.watch.announce(keys_of(prompt)))
        self.hears(lambda: not self.watch._doubtful)
        self.now += DOUBT_S

    def hears(self, until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not until():
            counts = {place.tier or "host": len(keys) for place, keys in self.knows.items()}
            assert time.monotonic() < deadline, f"it knows of {counts}"
            for news in self.watch.take():
                known = self.knows[news.place]
                assert known >= set(news.keys) if news.removed else not known & set(news.keys)
                known ^= set(news.keys)
            time.sleep(0.01)

    def close(self) -> None:
        self.watch.close()
        self.engine.close()
        del self.session, self.engine  # with their mappings; pytest keeps the last test's values


@pytest.fixture
def tiered(daemon: DaemonProcess, tmp_path: Path) -> DaemonProcess:
    """A daemon of 1024 blocks with a disk and a tier that nodes share."""
    daemon.end()
    file = tmp_path / "kvd.toml"
    file.write_text(TIERS)
    daemon.flags["config"] = file
    daemon.pool_bytes = 4 << 20
    daemon.start()
    wait_until(lambda: all(tier.serving for tier in ask(daemon.socket, 10.0).tiers), "tiers")
    return daemon


@pytest.fixture
def router(tiered: DaemonProcess) -> Iterator[Router]:
    made = Router(tiered)
    yield made
    made.close()


def test_a_router_knows_host_memory_disk_and_cluster_apart(router: Router) -> None:
    first = set(keys_of(PROMPTS[0]))
    router.store(PROMPTS[0])
    router.hears(lambda: first <= router.knows[DISK] & router.knows[FAR])
    for prompt in PROMPTS[1:]:
        router.store(prompt)
    router.hears(lambda: not first & router.knows[HOST])
    assert first <= router.knows[DISK] & router.knows[FAR], "evicted from host memory alone"
    router.engine.load("again", PROMPTS[0], BLOCKS)
    router.hears(lambda: first <= router.knows[HOST])


def test_a_tier_whose_process_died_holds_nothing_until_it_is_found_there(router: Router) -> None:
    first = set(keys_of(PROMPTS[0]))
    router.store(PROMPTS[0])
    router.hears(lambda: first <= router.knows[DISK] & router.knows[FAR])
    (pid,) = tier_processes(router.daemon, "disk")
    os.kill(pid, signal.SIGKILL)
    router.hears(lambda: not router.knows[DISK])
    assert first <= router.knows[FAR] & router.knows[HOST]


def tier_processes(daemon: DaemonProcess, name: str) -> list[int]:
    """Tiers are started in their order; the first of their processes is the first tier's."""
    children = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children").read_text().split()
    tiers = [int(pid) for pid in children if "kvd-tier" in Path(f"/proc/{pid}/comm").read_text()]
    return tiers[:1] if name == "disk" else tiers[1:]


def test_a_cleared_namespace_is_nowhere(router: Router) -> None:
    first = set(keys_of(PROMPTS[0]))
    router.store(PROMPTS[0])
    router.hears(lambda: first <= router.knows[DISK] & router.knows[FAR])
    caller = Caller(router.daemon.socket)
    request = operator_pb2.ClearRequest(namespace_id=router.session.namespace_id)
    caller.call(caller.operator.Clear, request)
    caller.close()
    router.hears(lambda: not any(router.knows.values()))


def test_who_does_not_ask_for_tiers_hears_of_host_memory_alone(tiered: DaemonProcess) -> None:
    router = Router(tiered, with_tiers=False)
    for prompt in PROMPTS:
        router.store(prompt)
    first = set(keys_of(PROMPTS[0]))
    router.hears(lambda: not first & router.knows[HOST])
    assert not router.knows[DISK] | router.knows[FAR]
    router.close()


SMALL = """
[[tiers]]
name = "disk"
kind = "disk"
deadline_seconds = 60.0

[tiers.options]
directories = ["{directory}"]
directory_bytes = "2MiB"
region_bytes = "1MiB"
"""


def restart(daemon: DaemonProcess, directory: Path, tiers: str) -> None:
    """With these tiers, and a small pool."""
    daemon.end()
    file = directory / "kvd.toml"
    file.write_text(tiers)
    daemon.flags["config"] = file
    daemon.pool_bytes = 4 << 20
    daemon.start()
    wait_until(lambda: ask(daemon.socket, 10.0).tiers[0].serving, "the first tier")


def test_a_router_hears_what_a_disk_gave_up(daemon: DaemonProcess, tmp_path: Path) -> None:
    """20 prompts of 64 blocks, of which the disk holds 512."""
    restart(daemon, tmp_path, SMALL.format(directory=tmp_path / "disk"))
    router = Router(daemon)
    for prompt in PROMPTS:
        router.store(prompt)
        router.hears(lambda prompt=prompt: set(keys_of(prompt)) <= router.knows[DISK])  # type: ignore[misc]
    first = set(keys_of(PROMPTS[0]))
    router.hears(lambda: not first & router.knows[DISK])
    router.hears(lambda: len(router.knows[DISK]) == ask(daemon.socket, 10.0).tiers[0].blocks)
    assert len(router.knows[DISK]) <= 512
    # Host memory lacks it, too: it is computed again, and the disk is given it again.
    router.hears(lambda: not first & router.knows[HOST])
    router.store(PROMPTS[0])
    router.hears(lambda: first <= router.knows[DISK])
    router.close()


GATED_S = 4.0
GATED = """
[[tiers]]
name = "disk"
store = "tests.tiers.gated_store:GatedStore"
deadline_seconds = {deadline}
options = {{ signs = "{signs}" }}
"""


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "signs")


@pytest.fixture
def gated(daemon: DaemonProcess, tmp_path: Path, gate: Gate) -> Iterator[Router]:
    restart(daemon, tmp_path, GATED.format(deadline=GATED_S, signs=tmp_path / "signs"))
    made = Router(daemon)
    yield made
    made.close()


def once_written(router: Router, prompts: int) -> operator_pb2.TierStatus:
    """What the tier says of itself, once a second, when it has so many prompts' blocks."""

    def tier() -> operator_pb2.TierStatus:
        return ask(router.daemon.socket, 10.0).tiers[0]

    wait_until(lambda: tier().blocks_written == prompts * BLOCKS, "the tier's word on them")
    return tier()


def test_a_question_that_was_late_tells_nobody_that_the_block_is_gone(
    gated: Router, gate: Gate
) -> None:
    router = gated
    for prompt in PROMPTS:
        router.store(prompt)
        router.hears(lambda prompt=prompt: set(keys_of(prompt)) <= router.knows[DISK])  # type: ignore[misc]
    first = set(keys_of(PROMPTS[0]))
    router.hears(lambda: not first & router.knows[HOST])
    before = once_written(router, len(PROMPTS))
    with gate.held("exists"):
        router.engine.arrive("late", PROMPTS[0], BLOCKS)
        router.engine.scheduler.get_num_new_matched_tokens("late", 0)
        router.engine.step()
        gate.wait_for("exists")
        assert router.engine.match("late") == 0, "it was answered"
    router.store("another")  # whatever was to be told of the first has been told by then
    router.hears(lambda: set(keys_of("another")) <= router.knows[DISK])
    assert first <= router.knows[DISK]
    after = once_written(router, len(PROMPTS) + 1)
    # Of the last prompt's as many as were asked for in time.
    assert after.misses <= before.misses + BLOCKS, "the late question's count, too"


def test_what_a_repeated_deletion_took_along_is_known_to_be_gone(gated: Router, gate: Gate) -> None:
    router = gated
    caller = Caller(router.daemon.socket)
    router.store(PROMPTS[0])
    router.hears(lambda: set(keys_of(PROMPTS[0])) <= router.knows[DISK])
    with gate.held("delete"):
        caller.call(caller.operator.Clear, operator_pb2.ClearRequest())
        gate.wait_for("delete")
        other = Router(router.daemon, "e1")  # it opens a namespace that nobody cleared
        other.store(PROMPTS[1])
        other.hears(lambda: set(keys_of(PROMPTS[1])) <= other.knows[DISK])
        time.sleep(GATED_S + 1.5)  # the deletion's deadline, and until it is tried again
    caller.close()
    other.hears(lambda: not other.knows[DISK])
    router.hears(lambda: not router.knows[DISK])
    other.close()
