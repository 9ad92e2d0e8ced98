"""Blocks found, stored and loaded in batches by calls that wait, from any thread."""

from __future__ import annotations

import functools
import hashlib
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvd_client import EngineIdentity, Fragment, Group, GroupLayout, NamespaceFields, SharedMemory
from kvd_client import batches as batches_module
from kvd_client.batches import BatchOptions, BlockBatches, SoughtKeys
from kvd_client.draft import BlockRun, QueryDraft, StepDraft, in_parts
from kvd_client.worker import registrar
from kvd_client.worker.registrar import Registrar
from kvd_client.worker.registration import Registration
from kvd_proto.limits import MAX_KEYS_PER_MESSAGE, MAX_QUERIES
from tests.daemon_process import DaemonProcess
from tests.waiting import wait_until

BLOCK_BYTES, NUM_BLOCKS = 4096, 256
PATIENCE_S = 30.0


class Memory:
    """An engine's blocks in a memory file, and the batches that move them."""

    def __init__(self, socket: str, width: int = 1, **options: float) -> None:
        fd = os.memfd_create("blocks", os.MFD_CLOEXEC)
        os.ftruncate(fd, NUM_BLOCKS * BLOCK_BYTES)
        self.bytes = mmap.mmap(fd, 0)
        namespace = NamespaceFields(
            model="batches",
            kv_dtype="uint8",
            hash_algorithm="sha256",
            hash_bytes=32,
            groups=(Group(16 * width, (BLOCK_BYTES,), blocks_per_block=width),),
        )
        identity = EngineIdentity(os.urandom(8).hex(), os.urandom(16))
        self.batches = BlockBatches(socket, identity, namespace, BatchOptions(**options))
        fragment = Fragment(memory=0, base=0, stride=BLOCK_BYTES, bytes=BLOCK_BYTES)
        self.batches.register(
            [SharedMemory(fd, 0, NUM_BLOCKS * BLOCK_BYTES)],
            [GroupLayout(NUM_BLOCKS, [fragment], width)],
        )
        os.close(fd)
        assert self.batches.wait_usable(PATIENCE_S), self.batches.problem

    def write(self, block: int, value: int) -> None:
        self.bytes[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = bytes([value]) * BLOCK_BYTES

    def values(self, first: int, count: int) -> list[set[int]]:
        """The different bytes of each of some blocks."""
        return [
            set(self.bytes[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])
            for block in range(first, first + count)
        ]

    def close(self) -> None:
        self.batches.close()
        self.bytes.close()


@pytest.fixture
def memory(daemon: DaemonProcess) -> Iterator[Memory]:
    made = Memory(daemon.socket)
    yield made
    made.close()


def keys(prompt: int, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{prompt} {number}".encode()).digest() for number in range(count)]


def leased(batches: BlockBatches) -> int:
    return len(batches._answers)


def test_the_leading_run_is_found_and_a_gap_ends_it_but_for_who_wants_all(memory: Memory) -> None:
    prompt = keys(1, 8)
    there = prompt[:3] + prompt[4:6]
    assert memory.batches.store([BlockRun(0, 0, there, range(5))]) == [True]
    leading, anywhere = (
        memory.batches.find([SoughtKeys(0, prompt, leading=leading)])[0].tolist()
        for leading in (True, False)
    )
    assert leading == [True] * 3 + [False] * 5
    assert anywhere == [True] * 3 + [False] + [True] * 2 + [False] * 2
    between_ends = memory.batches.find([SoughtKeys(0, prompt[:6])])[0]
    assert between_ends.tolist() == [True] * 3 + [False] * 3


def test_threads_store_and_load_beside_each_other_and_get_their_own(memory: Memory) -> None:
    def one(number: int) -> list[set[int]]:
        first = number * 16
        for round_ in range(4):
            value = number * 4 + round_
            prompt = keys(100 + value, 8)
            for block in range(first, first + 8):
                memory.write(block, value)
            assert memory.batches.store([BlockRun(0, 0, prompt, range(first, first + 8))]) == [True]
            assert memory.batches.find([SoughtKeys(0, prompt)])[0].all()
            into = range(first + 8, first + 16)
            assert memory.batches.load([BlockRun(0, 0, prompt, into)]) == [[True] * 8]
            assert memory.values(first + 8, 8) == [{value}] * 8
        return memory.values(first + 8, 8)

    with ThreadPoolExecutor(8) as threads:
        last = list(threads.map(one, range(8)))
    assert last == [[{number * 4 + 3}] * 8 for number in range(8)]
    assert not memory.batches._jobs  # nothing is remembered of what has ended


def test_one_that_only_asks_tells_of_the_ends_of_its_requests(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd_client.leased_answers.MAX_CLAIMS", 4)
    prompt = keys(9, 2)
    assert memory.batches.store([BlockRun(0, 0, prompt, range(2))]) == [True]
    untold = []
    for _ in range(batches_module.MAX_UNTOLD_REQUESTS + 40):
        assert memory.batches.find([SoughtKeys(0, prompt)])[0].all()
        untold.append(len(memory.batches._finished))
    assert max(untold) < batches_module.MAX_UNTOLD_REQUESTS
    assert leased(memory.batches) == 4


def test_leases_end_with_the_load_however_often_a_key_was_asked_for(memory: Memory) -> None:
    prompt = keys(12, 4)
    assert memory.batches.store([BlockRun(0, 0, prompt, range(4))]) == [True]
    often = [SoughtKeys(0, [prompt[0]] * 8), SoughtKeys(0, prompt[:3]), SoughtKeys(0, prompt)]
    assert all(flags.all() for flags in memory.batches.find(often))
    assert leased(memory.batches) == 1
    assert memory.batches.load([BlockRun(0, 0, prompt, range(4))]) == [[True] * 4]
    assert leased(memory.batches) == 0


def test_leases_of_who_only_asks_end_in_time(memory: Memory) -> None:
    prompt = keys(10, 2)
    assert memory.batches.store([BlockRun(0, 0, prompt, range(2))]) == [True]
    memory.batches.options = BatchOptions(lease_s=0.01)
    for _ in range(5):
        assert memory.batches.find([SoughtKeys(0, prompt)])[0].all()
        time.sleep(0.02)
    assert leased(memory.batches) <= 2
    assert len(memory.batches._finished) <= 2


def test_what_was_found_stays_while_its_engine_only_waits(
    tmp_path: Path, shared_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon ends leases that no step renews long before `lease_s`."""
    daemon = DaemonProcess(tmp_path, shared_directory)
    daemon.flags["lease-ttl-ms"] = 200
    daemon.start()
    memory, prompt, steps = Memory(daemon.socket), keys(13, 4), list[StepDraft]()
    assert memory.batches.store([BlockRun(0, 0, prompt, range(4))]) == [True]
    send = memory.batches._connection.send_step

    def noted(step: StepDraft) -> bool:
        steps.append(step)
        return send(step)

    monkeypatch.setattr(memory.batches._connection, "send_step", noted)
    assert memory.batches.find([SoughtKeys(0, prompt)])[0].all()
    wait_until(lambda: len(steps) >= 3)
    assert leased(memory.batches) == 1
    memory.batches.options = BatchOptions(lease_s=0.1)
    wait_until(lambda: memory.batches._renewal._thread is None)
    assert leased(memory.batches) == 0
    assert steps[-1].finished, "the daemon is told"
    assert memory.batches.find([SoughtKeys(0, prompt)])[0].all()
    assert memory.batches._renewal._thread is not None
    memory.close()
    daemon.end()


def test_leases_of_a_daemon_that_comes_back_with_shorter_ones_are_renewed_in_their_time(
    tmp_path: Path, shared_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = DaemonProcess(tmp_path, shared_directory)
    daemon.flags["lease-ttl-ms"] = 60_000
    daemon.start()
    memory, prompt, steps = Memory(daemon.socket), keys(15, 4), list[StepDraft]()
    memory.batches.options = BatchOptions(lease_s=60.0)
    assert memory.batches.store([BlockRun(0, 0, prompt, range(4))]) == [True]
    assert memory.batches.find([SoughtKeys(0, prompt)])[0].all()
    daemon.kill()
    daemon.flags["lease-ttl-ms"] = 1000
    daemon.start()
    assert memory.batches.wait_usable(10.0)
    assert memory.batches.find([SoughtKeys(0, prompt)])[0].all()
    send = memory.batches._connection.send_step

    def noted(step: StepDraft) -> bool:
        steps.append(step)
        return send(step)

    monkeypatch.setattr(memory.batches._connection, "send_step", noted)
    wait_until(lambda: len(steps) >= 3)
    memory.close()
    daemon.end()


def test_without_a_thread_leases_are_not_renewed_and_all_else_works(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = keys(14, 4)
    assert memory.batches.store([BlockRun(0, 0, prompt, range(4))]) == [True]

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert memory.batches.find([SoughtKeys(0, prompt)])[0].all()
    assert memory.batches._renewal._thread is None
    assert memory.batches.load([BlockRun(0, 0, prompt, range(8, 12))]) == [[True] * 4]


def test_leases_end_with_the_load_of_all_that_was_found(memory: Memory) -> None:
    prompt = keys(2, 6)
    assert memory.batches.store([BlockRun(0, 0, prompt, range(6))]) == [True]
    memory.batches.find([SoughtKeys(0, prompt)])
    memory.batches.load([BlockRun(0, 0, prompt[:4], range(10, 14))])
    assert leased(memory.batches) == 1
    memory.batches.load([BlockRun(0, 4, prompt[4:], range(14, 16))])
    assert leased(memory.batches) == 0
    assert not memory.batches._answers._leased[0]  # nothing is remembered of what is no longer held


def test_claims_that_nobody_loads_end_oldest_first(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd_client.leased_answers.MAX_CLAIMS", 3)
    prompt = keys(3, 4)
    assert memory.batches.store([BlockRun(0, 0, prompt, range(4))]) == [True]
    for _ in range(5):
        memory.batches.find([SoughtKeys(0, prompt)])
    assert leased(memory.batches) == 3
    assert memory.batches.load([BlockRun(0, 0, prompt, range(10, 14))]) == [[True] * 4]


def test_what_nobody_loads_keeps_no_one_from_what_is_there(
    tmp_path: Path, shared_directory: Path
) -> None:
    daemon = DaemonProcess(tmp_path, shared_directory)
    daemon.flags["lease-share"] = 0.01  # two of these prompts
    daemon.start()
    memory, other = Memory(daemon.socket), Memory(daemon.socket)
    prompts = [keys(30 + number, 40) for number in range(6)]
    for number, prompt in enumerate(prompts):
        for block in range(40):
            memory.write(block, number)
        assert memory.batches.store([BlockRun(0, 0, prompt, range(40))]) == [True]
    found = [memory.batches.find([SoughtKeys(0, prompt)])[0].all() for prompt in prompts]
    assert all(found)
    assert leased(memory.batches) <= 2  # the oldest have ended
    found = [other.batches.find([SoughtKeys(0, prompt)])[0].all() for prompt in prompts]
    assert all(found)  # without a lease: the first has them all
    for number, prompt in enumerate(prompts):
        assert other.batches.load([BlockRun(0, 0, prompt, range(40))]) == [[True] * 40]
        assert other.values(0, 40) == [{number}] * 40
    memory.close()
    other.close()
    daemon.end()


def test_what_lies_in_a_tier_alone_is_asked_for_and_brought_up(
    tmp_path: Path, shared_directory: Path
) -> None:
    """The page shows none of it: it says only that there is more than it shows."""
    (place := tmp_path / "tier").mkdir()
    (settings := tmp_path / "kvd.toml").write_text(
        f'[[tiers]]\nname = "disk"\nkind = "disk"\n[tiers.options]\ndirectories = "{place}"\n'
        'directory_bytes = "64MiB"\nregion_bytes = "1MiB"\n'
    )
    daemon = DaemonProcess(tmp_path, shared_directory)
    daemon.pool_bytes = 8 << 20
    daemon.more_flags = ("--config", str(settings))
    daemon.start()
    wait_until(lambda: "tier disk serves" in daemon.log.read_text(), "the tier")
    memory = Memory(daemon.socket, pending_deadline_s=PATIENCE_S, retry_deadline_s=PATIENCE_S)
    prompts = iter(keys(500 + number, 64) for number in range(256))
    first = next(prompts)
    for block in range(64):
        memory.write(block, 7)
    assert memory.batches.store([BlockRun(0, 0, first, range(64))]) == [True]
    session = memory.batches._connection.session
    assert session is not None
    while session.present(0, "", first).any():
        assert memory.batches.store([BlockRun(0, 0, next(prompts), range(64))]) == [True]
    for leading in (True, False):
        assert memory.batches.find([SoughtKeys(0, first, leading=leading)])[0].all()
    assert memory.batches.load([BlockRun(0, 0, first, range(100, 164))]) == [[True] * 64]
    assert memory.values(100, 64) == [{7}] * 64
    memory.close()
    daemon.end()


def test_a_close_ends_the_thread_that_renews_leases(daemon: DaemonProcess) -> None:
    memory = Memory(daemon.socket)
    prompt = keys(900, 2)
    assert memory.batches.store([BlockRun(0, 0, prompt, range(2))]) == [True]
    assert memory.batches.find([SoughtKeys(0, prompt)])[0].all()
    thread = memory.batches._renewal._thread
    assert thread is not None
    assert thread.is_alive()
    memory.close()
    assert not thread.is_alive()


def test_claims_end_with_their_time(daemon: DaemonProcess) -> None:
    memory = Memory(daemon.socket, lease_s=0.1)
    prompt = keys(4, 4)
    assert memory.batches.store([BlockRun(0, 0, prompt, range(4))]) == [True]
    memory.batches.find([SoughtKeys(0, prompt)])

    def has_ended() -> bool:
        memory.batches.store([BlockRun(0, 0, prompt, range(4))])
        return leased(memory.batches) == 0

    wait_until(has_ended)
    assert not memory.batches._answers._leased[0]
    memory.close()


def test_a_load_of_what_is_not_there_brings_its_head_and_writes_no_more(memory: Memory) -> None:
    prompt = keys(5, 6)
    memory.write(0, 7)
    memory.write(1, 8)
    assert memory.batches.store([BlockRun(0, 0, prompt[:2], range(2))]) == [True]
    loaded = memory.batches.load([BlockRun(0, 0, prompt, range(20, 26))])
    assert loaded == [[True, True, False, False, False, False]]
    assert memory.values(20, 6) == [{7}, {8}, {0}, {0}, {0}, {0}]


def test_heads_of_runs_of_wide_blocks_are_asked_for_at_once(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(daemon.socket, width=2)
    prompts = [keys(n, 4) for n in (70, 71, 72)]
    for value, prompt in enumerate(prompts, start=1):
        for block in range(8):
            memory.write(block, value)
        there = len(prompt) if value == 3 else value
        assert memory.batches.store([BlockRun(0, 0, prompt[:there], range(2 * there))]) == [True]
    finds: list[int] = []
    find = memory.batches.find

    def counted(wanted: Sequence[SoughtKeys]) -> object:
        finds.append(len(wanted))
        return find(wanted)

    monkeypatch.setattr(memory.batches, "find", counted)
    runs = [BlockRun(0, 0, prompt, range(8 * n, 8 * n + 8)) for n, prompt in enumerate(prompts)]
    for block in range(24):
        memory.write(block, 9)
    assert memory.batches.load(runs) == [[True] + [False] * 3, [True] * 2 + [False] * 2, [True] * 4]
    assert memory.values(0, 24) == [{1}] * 2 + [{9}] * 6 + [{2}] * 4 + [{9}] * 4 + [{3}] * 8
    assert finds == [2]
    memory.close()


def test_engines_that_name_the_same_epoch_go_on_sharing(daemon: DaemonProcess) -> None:
    first, second, third = (Memory(daemon.socket) for _ in range(3))
    prompt = keys(6, 3)
    assert first.batches.store([BlockRun(0, 0, prompt, range(3))]) == [True]
    for each in (first, second):
        each.batches.reset("after-a-clear")
        assert each.batches.wait_usable(PATIENCE_S)
        assert not each.batches.find([SoughtKeys(0, prompt)])[0].any()
    assert first.batches.store([BlockRun(0, 0, prompt, range(3))]) == [True]
    assert second.batches.find([SoughtKeys(0, prompt)])[0].all()
    assert third.batches.find([SoughtKeys(0, prompt)])[0].all()  # of the epoch before
    for each in (first, second, third):
        each.close()


def test_what_is_stored_right_after_a_reset_is_stored(daemon: DaemonProcess) -> None:
    memory = Memory(daemon.socket, retry_deadline_s=PATIENCE_S)
    memory.batches.reset()
    assert memory.batches._store([BlockRun(0, 0, keys(75, 2), range(2))]) == [True], "at once"
    memory.close()


def test_what_was_not_taken_is_not_offered_again_after_a_reset(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was computed before, as by other weights."""
    memory = Memory(daemon.socket, retry_deadline_s=PATIENCE_S)
    store, offers = memory.batches._store, []

    def refused_at_first(runs: Sequence[BlockRun], request_id: str) -> list[bool]:
        offers.append(runs)
        if len(offers) > 1:
            return store(runs, request_id)
        memory.batches.reset()
        return [False] * len(runs)

    monkeypatch.setattr(memory.batches, "_store", refused_at_first)
    assert memory.batches.store([BlockRun(0, 0, keys(76, 2), range(2))]) == [False]
    assert memory.batches.is_usable
    assert not memory.batches.find([SoughtKeys(0, keys(76, 2))])[0].any()
    memory.close()


def test_a_run_of_any_length_is_stored_found_and_loaded(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = keys(20, MAX_KEYS_PER_MESSAGE + 1)
    places = [number % 100 for number in range(len(prompt))]
    memory.write(0, 20)
    memory.batches.options = BatchOptions(retry_deadline_s=0.0)
    assert memory.batches.load([BlockRun(0, 0, prompt, places), BlockRun(0, 0, [])]) == [
        [False] * len(prompt),
        [],
    ]
    assert memory.batches.store([BlockRun(0, 0, [])]) == [True]
    assert not memory.batches.refusals, "no step was refused"
    few = functools.partial(in_parts, most=3)
    monkeypatch.setattr("kvd_client.draft.in_parts", few)
    several = [BlockRun(0, 0, prompt[:7], range(7)), BlockRun(0, 7, prompt[7:9], range(7, 9))]
    assert memory.batches.store(several) == [True, True]
    into = [BlockRun(0, 0, prompt[:8], range(100, 108)), BlockRun(0, 0, prompt[6:10], range(4))]
    assert memory.batches.load(into) == [[True] * 8, [True] * 3 + [False]]
    assert memory.values(100, 1) == [{20}]
    assert not memory.batches._jobs


def test_a_load_that_begins_while_it_is_closed_ends(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, prompt = Memory(daemon.socket), keys(21, 2)
    assert memory.batches.store([BlockRun(0, 0, prompt, range(2))]) == [True]
    begins, closed = threading.Event(), threading.Event()
    awaited = Registrar.awaited

    def late(registrar: Registrar, timeout_s: float) -> Registration | None:
        registration = awaited(registrar, timeout_s)
        begins.set()
        closed.wait(1.0)
        return registration

    monkeypatch.setattr(Registrar, "awaited", late)
    into = BlockRun(0, 0, prompt, range(2, 4))
    load = threading.Thread(target=memory.batches.load, args=([into],), daemon=True)
    load.start()
    assert begins.wait(PATIENCE_S)
    memory.close()
    closed.set()
    load.join(PATIENCE_S)
    assert not load.is_alive()


@pytest.mark.parametrize("call", ["find", "store"])
def test_one_that_was_idle_while_its_daemon_died_often_goes_on_with_its_next_call(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(registrar, "MAX_LOST", 1)
    memory, prompt = Memory(daemon.socket), keys(22, 2)
    daemon.kill()
    daemon.start()
    wait_until(lambda: "next step" in memory.batches.problem)
    run = BlockRun(0, 0, prompt, range(2))
    match call:
        case "find":
            assert not memory.batches.find([SoughtKeys(0, prompt)])[0].any()
        case "store":
            assert memory.batches.store([run]) == [False]
    assert memory.batches.wait_usable(PATIENCE_S)
    assert memory.batches.store([run]) == [True]
    memory.close()


def test_of_requests_that_an_absent_daemon_never_heard_of_nothing_is_kept(
    daemon: DaemonProcess,
) -> None:
    memory = Memory(daemon.socket, silent_after_s=PATIENCE_S)
    try:
        daemon.kill()
        wait_until(lambda: not memory.batches.is_usable, "the daemon's end is seen")
        for number in range(20):
            request = f"prompt {number}"
            assert memory.batches.store([BlockRun(0, 0, keys(950, 1), [0])], request) == [False]
            memory.batches.end_request(request)
        assert memory.batches._finished == []
    finally:
        memory.close()


def test_any_number_of_questions_is_asked_a_few_at_a_time(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is that of one answer: the daemon takes its time for each question."""
    memory = Memory(daemon.socket, lookup_deadline_s=PATIENCE_S)
    prompt = keys(30, 8)
    assert memory.batches.store([BlockRun(0, 0, prompt, range(8))]) == [True]
    connection, at_once = memory.batches._connection, []
    start = connection.start_lookup

    def counted(queries: Sequence[QueryDraft]) -> int:
        call_id = start(queries)
        at_once.append(sum(len(call.queries) for call in connection._lookups._sent.values()))
        return call_id

    monkeypatch.setattr(connection, "start_lookup", counted)
    wanted = [SoughtKeys(0, [prompt[number % 8]], number) for number in range(MAX_QUERIES + 1)]
    assert all(found.all() for found in memory.batches.find(wanted))
    assert 0 < max(at_once) <= batches_module.QUERIES_PER_CALL
    assert not memory.batches.refusals
    memory.close()


def test_a_silent_daemon_is_not_asked_the_rest(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, prompt = Memory(daemon.socket, lookup_deadline_s=0.2), keys(34, 8)
    assert memory.batches.store([BlockRun(0, 0, prompt, range(8))]) == [True]
    connection, asked = memory.batches._connection, []
    start = connection.start_lookup

    def counted(queries: Sequence[QueryDraft]) -> int:
        asked.append(len(queries))
        return start(queries)

    monkeypatch.setattr(connection, "start_lookup", counted)
    daemon.freeze()
    wanted = [SoughtKeys(0, [prompt[number % 8]], number) for number in range(MAX_QUERIES + 1)]
    assert not any(found.any() for found in memory.batches.find(wanted))
    daemon.thaw()
    assert len(asked) == 1
    memory.close()


def test_who_finds_nothing_is_told_why(daemon: DaemonProcess) -> None:
    memory, prompt = Memory(daemon.socket, lookup_deadline_s=0.2), keys(35, 1)
    assert memory.batches.store([BlockRun(0, 0, prompt, [0])]) == [True]
    assert memory.batches.problem == ""
    daemon.freeze()
    memory.batches.find([SoughtKeys(0, prompt)])
    assert not memory.batches.is_usable
    assert "does not answer" in memory.batches.problem
    daemon.thaw()
    wait_until(lambda: memory.batches.is_usable, "the end of the silence")
    daemon.freeze()
    memory.batches.reset()
    assert "waiting for the daemon to confirm the reset" in memory.batches.problem
    daemon.thaw()
    wait_until(lambda: memory.batches.is_usable, "the reset")
    assert memory.batches.problem == ""
    memory.close()


def test_a_close_that_the_daemon_does_not_answer_says_so_in_one_line(
    daemon: DaemonProcess, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory(daemon.socket)
    daemon.freeze()
    memory.batches._worker.unregister(0.1)
    daemon.thaw()
    memory.close()
    [said] = [line for line in caplog.messages if "unregistering failed" in line]
    assert "\n" not in said
    assert "DEADLINE_EXCEEDED" in said


def test_what_can_not_be_said_of_blocks_is_refused_and_not_taken_for_others(
    memory: Memory,
) -> None:
    """Two keys of 31 and 33 bytes would be two others of 32."""
    batches = memory.batches
    long, short = keys(31, 1)[0], keys(32, 1)[0][1:]
    odd = [long + b"x", short]
    for call in (
        lambda: batches.find([SoughtKeys(0, odd)]),
        lambda: batches.store([BlockRun(0, 0, odd, range(2))]),
        lambda: batches.load([BlockRun(0, 0, odd, range(2))]),
    ):
        with pytest.raises(ValueError, match="every block hash must have 32 bytes"):
            call()
    with pytest.raises(ValueError, match=r"group is 1, allowed are 0\.\.0"):
        batches.find([SoughtKeys(1, keys(33, 1))])
    with pytest.raises(ValueError, match="engine_blocks has 1 numbers; 2 keys of group 0 take 2"):
        batches.store([BlockRun(0, 0, keys(33, 2), range(1))])
    for blocks in (-1, NUM_BLOCKS, 1 << 32, 1 << 70):
        with pytest.raises(ValueError, match=rf"has {blocks}; group 0 has blocks 0\.\.255"):
            batches.load([BlockRun(0, 0, keys(33, 1), [blocks])])
    for first in (-1, (1 << 32) - 1):
        with pytest.raises(ValueError, match=rf"first_block is {first}, allowed are 0\.\."):
            batches.find([SoughtKeys(0, keys(33, 1), first)])
    assert not batches.find([SoughtKeys(0, [long])])[0].any()
