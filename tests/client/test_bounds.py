"""What the client piles up while nobody takes it, to the bound and one beyond."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvd_client import EngineIdentity, backoff, connection
from kvd_client.backoff import MAX_DOUBLINGS
from kvd_client.companion import MAX_DESCRIPTORS, CompanionRefused, CompanionSocket
from kvd_client.connection import MAX_QUEUED_MESSAGES, MAX_REMEMBERED_STEPS
from kvd_client.draft import (
    BlockRun,
    JobDraft,
    LookupCounts,
    QueryDraft,
    RequestLookup,
    StepDraft,
    request_context,
)
from kvd_client.lookup_calls import LookupCalls
from kvd_client.outgoing import step_bytes
from kvd_client.session import MAX_SEEDS, DaemonSession
from kvd_client.worker import registrar
from kvd_client.worker.cuda_memory import Gpu
from kvd_client.worker.jobs import MAX_UNASKED, Half, JobLedger
from kvd_client.worker.rank_memory import RegisteredMemory
from kvd_client.worker.registrar import MAX_GPU_DOUBLINGS, RankPlace, Registrar
from kvd_proto.board import BoardRecord
from kvd_proto.limits import MAX_KEYS_PER_MESSAGE
from kvd_proto.tags import account_seed
from kvd_proto.v1 import companion_pb2, engine_pb2
from tests.client.content import block_hashes
from tests.client.small_engine import SmallEngine
from tests.client.test_unsayable import ended
from tests.daemon_process import DaemonProcess
from tests.waiting import wait_until


class Stuck:
    """A writer thread that stands still with a step in its hands, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._holds = threading.Event()
        self._go_on = threading.Event()
        monkeypatch.setattr(connection, "step_bytes", self._step_bytes)

    def _step_bytes(self, step: StepDraft, sequence: int) -> tuple[bytes, list[int]]:
        self._holds.set()
        self._go_on.wait(60)
        return step_bytes(step, sequence)

    def take(self, engine: SmallEngine) -> None:
        """It has taken a step of this engine, and takes no more."""
        assert engine.connection.send_step(StepDraft())
        assert self._holds.wait(20)

    def let_go(self) -> None:
        self._go_on.set()


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    made = Stuck(monkeypatch)
    yield made
    made.let_go()


def query(*keys: bytes) -> QueryDraft:
    return QueryDraft(request_context("r", "", 0, ()), BlockRun(0, 0, keys), lease_all=False)


def test_seeds_of_so_many_accounts_are_remembered_and_then_computed_anew() -> None:
    opened = engine_pb2.SessionOpened(epoch=engine_pb2.EpochOpened(group_seeds=[11, 12]))
    found = DaemonSession(1, opened, 16).seeds
    users = [f"user {number}" for number in range(MAX_SEEDS)]
    seeds = [found.of(1, user) for user in users]
    assert len(found.of_accounts) == MAX_SEEDS
    assert found.of(1, "one more") == account_seed(12, "one more")
    assert len(found.of_accounts) == 1
    assert [found.of(1, user) for user in users] == seeds


def test_as_many_messages_wait_as_may_and_with_one_more_the_session_begins_anew(
    engine: SmallEngine, stuck: Stuck
) -> None:
    stuck.take(engine)
    assert all(engine.connection.send_step(StepDraft()) for _ in range(MAX_QUEUED_MESSAGES))
    held = engine.connection.session
    assert held is not None
    assert not engine.connection.send_step(StepDraft())
    assert engine.connection.session is not held
    stuck.let_go()
    engine.wait_usable()
    engine.store("a", "hello", 4)
    assert engine.load("b", "hello", 4) == 4


def test_however_many_lookups_wait_the_session_stays_and_steps_leave_between_them(
    engine: SmallEngine, stuck: Stuck
) -> None:
    long = query(*block_hashes("long", MAX_KEYS_PER_MESSAGE))
    stuck.take(engine)
    held, connection = engine.connection.session, engine.connection
    calls = [connection.start_lookup([long]) for _ in range(MAX_QUEUED_MESSAGES + 2)]
    assert all(calls)
    assert connection.session is held
    for unwanted in calls[:-2]:
        connection.give_up(unwanted)
    stuck.let_go()
    engine.store("a", "hello", 4)
    connection.gather(calls[-2:], 20.0)
    for wanted in calls[-2:]:
        answers = connection.take_answers(wanted)
        assert answers is not None
        assert [len(answer.statuses) for answer in answers] == [MAX_KEYS_PER_MESSAGE]
    assert engine.connection.sessions == 1


def test_lookups_leave_one_by_one_in_the_order_in_which_they_were_asked() -> None:
    calls = LookupCalls()
    assert calls.start([query(b"a")], 0.0) == 1
    assert calls.start([query(b"b")], 0.0) == 2  # goes along
    calls.close_open()  # a step leaves
    assert calls.is_leaving
    assert calls.start([query(b"c")], 0.0) == 3  # of it the stream hears with the first
    first, others_wait = calls.leave()
    assert first is not None
    assert first.askers == [(1, 1), (2, 1)]
    assert others_wait
    second, others_wait = calls.leave()
    assert second is not None
    assert second.askers == [(3, 1)]
    assert not others_wait
    is_leaving = calls.is_leaving
    assert not is_leaving, "the stream hears of the next one"


def test_a_lookup_that_nobody_wants_any_more_lets_none_behind_it_leave_early() -> None:
    calls = LookupCalls()
    calls.start([query(b"a")], 1.0)
    calls.close_open()
    calls.start([query(b"b")], 2.0)
    calls.give_up(1)
    assert calls.leave() == (None, True)
    assert calls.sent_since_s == 2.0, "nothing is due for what never left"
    second, _ = calls.leave()
    assert second is not None
    assert second.askers == [(2, 1)]


@pytest.mark.parametrize(
    "answered", [[b"\1\1"], [b""], [], [b"\1", b"\1"]], ids=["more keys", "fewer", "none", "more"]
)
def test_a_reply_to_other_keys_than_were_asked_for_is_none_and_its_leases_go_back(
    answered: list[bytes],
) -> None:
    calls = LookupCalls()
    calls.start([query(b"a")], 0.0)
    call, _ = calls.leave()
    assert call is not None
    answers = [engine_pb2.Answer(statuses=each, lease_id=7) for each in answered]
    calls.take_reply(engine_pb2.LookupReply(call_id=call.number, answers=answers))
    assert calls.take_answers(1) == ()
    assert calls.stray_leases == [7] * len(answered)


@pytest.mark.parametrize(("later", "sessions"), [(2, 1), (3, 2)])
def test_refusal_is_understood_of_as_many_steps_as_are_remembered(
    daemon: DaemonProcess,
    engine: SmallEngine,
    stuck: Stuck,
    monkeypatch: pytest.MonkeyPatch,
    later: int,
    sessions: int,
) -> None:
    """The oldest of three remembered steps is refused, and then one that was forgotten."""
    assert MAX_REMEMBERED_STEPS == MAX_QUEUED_MESSAGES  # whatever waits can be refused
    monkeypatch.setattr(connection, "MAX_REMEMBERED_STEPS", 3)
    stuck.take(engine)
    context = request_context("bad", "", 0, ())
    wrong = JobDraft(10_000, context, [BlockRun(7, 0, [bytes(32)], [1])])  # there is no group 7
    assert engine.connection.send_step(StepDraft(stores=[wrong]))
    for _ in range(later):
        assert engine.connection.send_step(StepDraft())
    last = engine.connection._sequence + 1 + later
    daemon.freeze()  # else it may refuse the first before the others have left
    stuck.let_go()
    wait_until(lambda: engine.connection._sequence == last, "all steps to leave")
    daemon.thaw()
    if sessions == 1:
        assert ended(engine, 10_000) is False
    else:
        wait_until(lambda: engine.connection.sessions == sessions, "another session")
    engine.wait_usable()
    engine.store("a", "hello", 4)
    assert engine.load("b", "hello", 4) == 4
    assert engine.connection.sessions == sessions


def test_of_requests_that_a_sent_step_tells_of_the_counts_alone_are_remembered(
    engine: SmallEngine,
) -> None:
    context, prompt = request_context("r", "", 0, ()), block_hashes("recorded", 64)
    told = RequestLookup(context, 64, 0, 0, prompt=prompt)
    counts = LookupCounts(requests=1, blocks=64, told=[told])
    sent = len(engine.connection._steps)
    assert engine.connection.send_step(StepDraft(finished=["r"], lookups=counts))
    wait_until(lambda: len(engine.connection._steps) > sent, "the step to leave")
    last = list(engine.connection._steps.values())[-1].ends
    assert (last.finished, last.lookups) == (["r"], counts)  # which compares no single request
    assert last.lookups.told == []
    assert counts.told == [told], "the message has them"


def test_ends_that_nobody_asked_about_are_kept_up_to_a_bound_and_the_oldest_goes() -> None:
    ledger = JobLedger()
    ledger.take(BoardRecord(job, 1, 1, 4096, 1) for job in range(1, MAX_UNASKED + 1))
    assert ledger.begin([1], Half.STORE, None) == []
    assert [end.done for end in ledger.take_ended()] == [True]
    ledger.told()
    ledger.take(BoardRecord(job, 1, 1, 4096, 1) for job in (1, MAX_UNASKED + 1))
    ledger.begin([2, 3], Half.STORE, None)  # nothing is known of 2, and there is no daemon
    assert [(end.job_id, end.done) for end in ledger.take_ended()] == [(2, False), (3, True)]


class Refused(Registrar):
    """One whose daemon always says no; it stops after so many pauses, and sleeps none of them."""

    def __init__(self, gpu: Gpu | None, pauses: int) -> None:
        self.slept_s: list[float] = []
        self._pauses = pauses
        place = RankPlace(0, 1, 0)
        identity = EngineIdentity("e", bytes(16))
        super().__init__("/nowhere", identity, place, RegisteredMemory((), (), gpu))
        self.start()

    def _hold_registration(self) -> None:
        raise CompanionRefused("NO", "never")

    def _sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self._stopping = len(self.slept_s) >= self._pauses

    def pauses_s(self) -> list[float]:
        self._thread.join(20)
        assert self.stop(1.0)
        return self.slept_s


def test_pauses_of_a_refused_rank_double_up_to_a_bound_and_further_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backoff, "REFUSED_BACKOFF_S", (1.0, 1.0))
    for gpu, doublings in ((None, MAX_DOUBLINGS), (Gpu("GPU-0", 0, 0), MAX_GPU_DOUBLINGS)):
        pauses_s = Refused(gpu, doublings + 3).pauses_s()
        assert pauses_s == [float(1 << min(n, doublings)) for n in range(doublings + 3)]


# -- descriptors --------------------------------------------------------------------------------


class Listening:
    """In the daemon's place on the companion socket, with one client."""

    def __init__(self, directory: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / "kvd.sock.companion"))
        self._listener.listen()
        self.client = CompanionSocket(str(directory / "kvd.sock"), 5.0)
        self._connected = self._listener.accept()[0]

    def answers(self, fds: int, messages: int = 1) -> None:
        """Hello with so many descriptors, in each of so many pieces of it."""
        content = companion_pb2.CompanionResponse(
            welcome=companion_pb2.Welcome(token="t" * 64)
        ).SerializeToString()
        framed = struct.pack("<I", len(content)) + content
        with Path(os.devnull).open() as file:
            for number in range(messages):
                last = number == messages - 1
                piece = framed[number:] if last else framed[number : number + 1]
                socket.send_fds(self._connected, [piece], [file.fileno()] * fds)

    def close(self) -> None:
        self.client.close()
        self._connected.close()
        self._listener.close()


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Listening]:
    there = Listening(tmp_path)
    yield there
    there.close()


def null_descriptors() -> int:
    return sum(str(fd.resolve()) == os.devnull for fd in Path("/proc/self/fd").iterdir())


def hello(client: CompanionSocket) -> str:
    return client.hello(companion_pb2.PEER_ROLE_TOOL, "test").token


def test_as_many_descriptors_as_may_come_with_a_message_are_taken(listening: Listening) -> None:
    before = null_descriptors()
    listening.answers(MAX_DESCRIPTORS)
    assert hello(listening.client)
    assert null_descriptors() == before + MAX_DESCRIPTORS
    listening.client.close()
    assert null_descriptors() == before


@pytest.mark.parametrize(("fds", "messages"), [(MAX_DESCRIPTORS + 1, 1), (MAX_DESCRIPTORS, 2)])
def test_more_descriptors_than_may_come_end_the_connection_and_none_is_kept(
    listening: Listening, fds: int, messages: int
) -> None:
    before = null_descriptors()
    listening.answers(fds, messages)
    with pytest.raises(CompanionRefused, match=r"PROTOCOL: .* descriptors"):
        hello(listening.client)
    listening.client.close()
    assert null_descriptors() == before


def has_lost(keeper: Registrar, count: int) -> bool:
    return len(keeper.lost) == count


def test_an_engine_that_takes_no_steps_keeps_few_registrations_that_it_lost(
    daemon: DaemonProcess, engine: SmallEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registrar, "MAX_LOST", 2)
    engine.store("a", "hello", 4)
    worker = engine.ranks[0].worker
    keeper = worker._registrar
    assert keeper is not None
    for count in (1, 2):
        assert worker.wait_registered(20.0)
        daemon.kill()
        daemon.start()
        wait_until(partial(has_lost, keeper, count))
    assert not worker.wait_registered(2.0)
    assert worker.problem == "waiting for the engine's next step"
    engine.step()
    engine.wait_usable()
    assert keeper.lost == []
    assert engine.load("b", "hello", 4) == 4
