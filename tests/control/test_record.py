"""A recording of a running daemon: what is in it, what is not, and that it is replayed."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from kvd.cli.calls import said_plainly
from kvd.cli.exits import EXIT_FAILED, Failure
from kvd.cli.record import Trace, command
from kvd.cli.replay.trace import TraceError, read_trace
from kvd.control.errors import DeadlinePassed, rich_details, status_code
from kvd.core.errors import LimitExceeded
from kvd.core.keys import NamespaceId
from kvd.runtime.recorder import (
    MAX_RECORDED_BYTES,
    MAX_RECORDED_WAITING,
    MAX_RECORDINGS,
    Recorder,
    Recording,
    RequestRecord,
)
from kvd.runtime.told_lookups import MAX_COUNTED
from kvd_proto.limits import MAX_PROMPT_BLOCKS, MAX_REQUESTS_TOLD, MAX_STRING_BYTES
from kvd_proto.v1 import engine_pb2, operator_pb2
from tests.control.daemon_rig import (
    Caller,
    RawScheduler,
    RunningDaemon,
    hashes,
    identity,
    namespace,
    refusal,
)
from tests.forked import run
from tests.small_tmpfs import small_tmpfs

NAMESPACE = NamespaceId(1)


def told(request: str, *blocks: int, tokens: int = 0) -> engine_pb2.RequestLookup:
    """A request with these blocks, as a client tells of it while somebody records."""
    return engine_pb2.RequestLookup(
        request_id=request,
        prompt_tokens=tokens or 16 * len(blocks) + 1,
        prompt_hashes=hashes(*blocks),
    )


def recording(running: RunningDaemon, file: Path, *more: str) -> subprocess.Popen[str]:
    words = ["record", str(file), "--socket", running.socket, *more]
    heeding = ["env", "--default-signal=HUP"]  # also where the tests run under nohup
    return subprocess.Popen(
        [*heeding, sys.executable, "-m", "kvd", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def unpacked(file: Path) -> bytes:
    """What is whole of it."""
    written = file.read_bytes()
    return zlib.decompressobj(wbits=31).decompress(written) if file.suffix == ".gz" else written


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_run_is_recorded_and_replayed(running: RunningDaemon, tmp_path: Path, name: str) -> None:
    engine = RawScheduler(running.socket, capabilities=["prompts"], identity=identity(name))
    other = RawScheduler(
        running.socket, namespace=namespace(model="other"), identity=identity(f"other-{name}")
    )
    process = recording(running, tmp_path / name, "--requests", "4", "--json")
    assert engine.next("recording").prompts
    engine.step(requests=[told("a", 1, 2, 3), told("b", 1, 2, 4)], end_step=True)
    other.step(requests=[told("c", 1)], end_step=True)
    engine.step(requests=[told("short", tokens=5)], end_step=True)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert {k: json.loads(out)[k] for k in ("requests", "blocks", "lost")} == {
        "requests": 4,
        "blocks": 7,
        "lost": 0,
    }
    assert not engine.next("recording").prompts
    first, second, third, short = read_trace(tmp_path / name)
    assert first.blocks[:2].tolist() == second.blocks[:2].tolist()
    assert first.blocks[2] != second.blocks[2]
    assert third.blocks[0] not in first.blocks, "another namespace's block is another block"
    assert (first.input_tokens, short.blocks.size) == (49, 0)
    assert hashes(1)[:8].hex() not in (tmp_path / name).read_bytes().hex()
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    replay = ["replay", "--trace", str(tmp_path / name), "--policy", "lru"]
    said = run(*replay, "--capacity-blocks", "8")
    assert said.returncode == 0, said.stderr
    engine.close()
    other.close()


def test_what_a_client_names_beyond_the_bounds_is_cut_or_passed_over(
    running: RunningDaemon,
) -> None:
    engine = RawScheduler(running.socket, capabilities=["prompts"], identity=identity("beyond"))
    tool = Caller(running.socket)
    stream = iter(
        tool.operator.Record(operator_pb2.RecordRequest(), metadata=tool.metadata, timeout=60)
    )
    next(stream)
    engine.next("recording")
    broken, long = told("broken", 1), told("long")
    broken.prompt_hashes += b"x"
    long.account, long.prompt_tokens = "a" * (MAX_STRING_BYTES + 1), 2**64 - 1
    long.prompt_hashes = bytes(32 * (MAX_PROMPT_BLOCKS + 1))
    many = [told(f"many-{number}", 1) for number in range(MAX_REQUESTS_TOLD)]
    engine.step(requests=[broken, long, *many], end_step=True)
    engine.step(requests=[told("last", 1, 2)], end_step=True)
    found: list[operator_pb2.RecordedRequest] = []
    while not found or len(found[-1].hashes) != len(hashes(1, 2)):
        found += next(stream).requests
    first = found[0]
    assert (first.account, first.prompt_tokens) == ("a" * MAX_STRING_BYTES, MAX_COUNTED)
    assert len(first.hashes) == 32 * MAX_PROMPT_BLOCKS
    assert len(found) == MAX_REQUESTS_TOLD, "one was broken, two too many"
    tool.close()
    engine.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_the_file_is_whole(
    running: RunningDaemon, tmp_path: Path, number: signal.Signals
) -> None:
    engine = RawScheduler(running.socket, capabilities=["prompts"])
    process = recording(running, tmp_path / "trace.gz")
    engine.next("recording")
    engine.step(requests=[told("a", 1)], end_step=True)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "left out" in out
    assert gzip.decompress((tmp_path / "trace.gz").read_bytes()).count(b"\n") in (0, 1)
    assert not engine.next("recording").prompts
    engine.close()


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_killed_it_leaves_what_came_before(
    running: RunningDaemon, tmp_path: Path, name: str
) -> None:
    engine = RawScheduler(running.socket, capabilities=["prompts"], identity=identity(f"k-{name}"))
    process = recording(running, tmp_path / name)
    engine.next("recording")
    engine.step(requests=[told("a", 1)], end_step=True)
    deadline = time.monotonic() + 60
    while b"\n" not in (lines := unpacked(tmp_path / name)):
        assert time.monotonic() < deadline, "nothing is saved"
        time.sleep(0.05)
    process.kill()
    process.communicate()
    assert json.loads(lines)["input_length"] == 17
    if name.endswith("gz"):
        with pytest.raises(TraceError, match=r"save the whole lines: zcat "):
            read_trace(tmp_path / name)
    engine.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_told_to_end_in_the_middle_of_a_line_it_ends_behind_it(number: signal.Signals) -> None:
    class Interrupted(io.BytesIO):
        def write(self, content: Any, /) -> int:
            os.kill(os.getpid(), number)
            return super().write(content)

    trace = Trace(Interrupted(), b"key")
    request = operator_pb2.RecordedRequest(hash_bytes=32, hashes=hashes(1))
    with pytest.raises(KeyboardInterrupt), trace.ends.heard():
        trace.add(request)
    assert trace.file.getvalue().endswith(b"}\n")  # type: ignore[attr-defined]
    assert trace.requests == 1


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
@pytest.mark.parametrize("requests", [40, 4000], ids=["at its end", "on the way"])
def test_a_file_that_there_is_no_room_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, requests: int
) -> None:
    def record(_given: object, trace: Trace) -> None:
        for number in range(requests):
            blocks = hashes(*range(20 * number, 20 * number + 20))
            trace.add(operator_pb2.RecordedRequest(hash_bytes=32, hashes=blocks))

    monkeypatch.setattr("kvd.cli.record._record", record)
    room = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, room[1]))  # Python ignores the signal
    try:
        ended = CliRunner().invoke(command, [str(tmp_path / name)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, room)
    assert ended.exit_code == EXIT_FAILED, ended.exception
    assert f"{tmp_path / name} can't be written" in ended.output


def test_a_recording_ends_by_itself_and_never_overwrites(
    running: RunningDaemon, tmp_path: Path
) -> None:
    file = tmp_path / "trace"
    process = recording(running, file, "--seconds", "0.5")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    again = recording(running, file, "--seconds", "0.5")
    _, err = again.communicate(timeout=60)
    assert again.returncode == 2
    assert "File exists" in err


def test_an_engine_that_comes_while_somebody_records_is_told(
    running: RunningDaemon, tmp_path: Path
) -> None:
    first = RawScheduler(running.socket, capabilities=["prompts"], identity=identity("first"))
    old = RawScheduler(running.socket, identity=identity("old"))
    process = recording(running, tmp_path / "trace", "--requests", "1")
    assert first.next("recording").prompts
    second = RawScheduler(running.socket, capabilities=["prompts"], identity=identity("second"))
    assert second.next("recording").prompts
    old.step(requests=[told("old", tokens=100)], end_step=True)  # no prompt: left out
    second.step(requests=[told("new", 1)], end_step=True)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "1 requests with 1 blocks" in out
    assert "; 1 left out" in out
    for each in (first, second, old):
        each.close()


def record(size: int = 32, *, is_told: bool = True) -> RequestRecord:
    return RequestRecord(1, NAMESPACE, "", "", 17, 32, bytes(size), is_told)


def test_a_reader_that_is_too_slow_loses_whole_requests_and_is_told() -> None:
    slow = Recording(NAMESPACE)
    for _ in range(MAX_RECORDED_WAITING + 3):
        slow.put(record())
    assert (len(slow.waiting), slow.lost) == (MAX_RECORDED_WAITING, 3)
    taken = asyncio.run(slow.take(MAX_REQUESTS_TOLD))
    assert len(taken) == MAX_REQUESTS_TOLD
    slow.put(record())
    assert slow.lost == 3


def test_bytes_that_wait_are_bounded_too() -> None:
    slow = Recording(NAMESPACE)
    slow.put(record(MAX_RECORDED_BYTES))
    slow.put(record())
    assert (len(slow.waiting), slow.lost) == (1, 1)
    asyncio.run(slow.take(1))
    slow.put(record())
    assert slow.lost == 1


def test_so_many_record_at_once_and_clients_are_told_of_the_first_and_the_last() -> None:
    told_clients: list[bool] = []
    recorder = Recorder(told_clients.append)
    held = [recorder.recording(NAMESPACE) for _ in range(MAX_RECORDINGS)]
    for each in held:
        each.__enter__()
    with pytest.raises(LimitExceeded), recorder.recording(NAMESPACE):
        pass
    for each in held:
        each.__exit__(None, None, None)
    assert told_clients == [True, False]


def test_one_namespace_alone_is_recorded() -> None:
    recorder = Recorder(lambda _: None)
    with recorder.recording(NamespaceId(2)) as two, recorder.recording(NamespaceId(0)) as every:
        recorder.put(record())
    assert (len(two.waiting), len(every.waiting)) == (0, 1)


@pytest.mark.parametrize("name", ["trace", "trace.gz"])
def test_a_recording_that_cannot_begin_leaves_no_file(tmp_path: Path, name: str) -> None:
    ended = CliRunner().invoke(command, [str(tmp_path / name), "--socket", "/nowhere"])
    assert ended.exit_code == EXIT_FAILED
    assert "no daemon answers" in ended.output
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_what_a_daemon_said_before_its_end_is_kept_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def record(_given: object, trace: Trace) -> None:
        trace.add(operator_pb2.RecordedRequest(hash_bytes=32, hashes=hashes(1, 2)))
        raise Failure("the daemon did not answer")

    monkeypatch.setattr("kvd.cli.record._record", record)
    ended = CliRunner().invoke(command, [str(tmp_path / name)])
    assert ended.exit_code == EXIT_FAILED
    assert f"did not answer; {tmp_path / name} has the 1 requests that came" in ended.output
    assert len(read_trace(tmp_path / name)) == 1


@pytest.mark.parametrize("ends_by", [None, Failure("the daemon did not answer")])
def test_a_recording_whose_file_was_removed_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_by: Failure | None
) -> None:
    def record(given: SimpleNamespace, trace: Trace) -> None:
        trace.add(operator_pb2.RecordedRequest(hash_bytes=32, hashes=hashes(1, 2)))
        given.file.unlink()
        given.file.write_text("another's")
        if ends_by is not None:
            raise ends_by

    monkeypatch.setattr("kvd.cli.record._record", record)
    ended = CliRunner().invoke(command, [str(tmp_path / "trace")])
    assert ended.exit_code == EXIT_FAILED
    assert "was removed or renamed meanwhile; its 1 requests went with it" in ended.output


class EndedByTheDaemon(grpc.RpcError):
    """What a call raises that the daemon ended because its reader took nothing."""

    def __init__(self) -> None:
        self._error = DeadlinePassed("the reader took no message for 60 s")

    def code(self) -> grpc.StatusCode:
        return status_code(self._error)

    def details(self) -> str:
        return str(self._error)

    def trailing_metadata(self) -> Any:
        return rich_details(self._error)


def test_a_recording_that_the_daemon_ended_is_not_said_to_have_lasted_as_long_as_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream:
        def __iter__(self) -> Iterator[operator_pb2.RecordResponse]:
            request = operator_pb2.RecordedRequest(hash_bytes=32, hashes=hashes(1, 2))
            yield operator_pb2.RecordResponse(requests=[request])
            raise EndedByTheDaemon

        def cancel(self) -> None:
            pass

    @contextlib.contextmanager
    def linked(*_: object) -> Iterator[SimpleNamespace]:
        with said_plainly("a socket"):
            operator = SimpleNamespace(Record=lambda *_, **_terms: Stream())
            yield SimpleNamespace(operator=operator, metadata=())

    monkeypatch.setattr("kvd.cli.record.linked", linked)
    ended = CliRunner().invoke(command, [str(tmp_path / "trace"), "--seconds", "3600"])
    assert ended.exit_code == EXIT_FAILED
    assert "took no message for 60 s" in ended.output
    assert "has the 1 requests that came before" in ended.output


def test_a_recording_of_nothing_removes_no_file_of_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(given: SimpleNamespace, _trace: Trace) -> None:
        given.file.unlink()
        given.file.write_text("another's")
        raise Failure("the daemon did not answer")

    monkeypatch.setattr("kvd.cli.record._record", record)
    ended = CliRunner().invoke(command, [str(tmp_path / "trace")])
    assert ended.exit_code == EXIT_FAILED
    assert (tmp_path / "trace").read_text() == "another's"


@pytest.mark.parametrize(
    ("name", "requests"),
    [("trace", 1), ("trace", 4000), ("trace.gz", 0), ("trace.gz", 1), ("trace.gz", 4000)],
)
def test_a_recording_that_a_full_disk_takes_nothing_of_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, requests: int
) -> None:
    def record(_given: object, trace: Trace) -> None:
        for number in range(requests):
            trace.add(operator_pb2.RecordedRequest(hash_bytes=32, hashes=hashes(number)))

    monkeypatch.setattr("kvd.cli.record._record", record)
    with small_tmpfs(tmp_path / "full", 4096) as full:
        (full / "other").write_bytes(bytes(4096))
        ended = CliRunner().invoke(command, [str(full / name)])
        left = [each.name for each in full.iterdir()]
    assert ended.exit_code == EXIT_FAILED
    assert "No space left on device" in ended.output
    assert left == ["other"]


def test_a_namespace_that_is_not_there_is_refused(running: RunningDaemon) -> None:
    tool = Caller(running.socket)

    def first() -> object:
        request = operator_pb2.RecordRequest(namespace_id=99)
        return next(iter(tool.operator.Record(request, metadata=tool.metadata, timeout=20)))

    assert refusal(first)[1] == "UNKNOWN_NAMESPACE"
    tool.close()


def test_a_reader_without_its_companion_connection_is_told_so(running: RunningDaemon) -> None:
    tool = Caller(running.socket)
    # The deadline only ends a test that fails.
    stream = tool.operator.Record(operator_pb2.RecordRequest(), metadata=tool.metadata, timeout=20)
    next(iter(stream))
    tool.companion.close()
    with pytest.raises(grpc.RpcError) as ended:
        next(iter(stream))
    assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "names no live companion connection" in str(ended.value.details())
    tool.close()


def test_numbers_of_two_recordings_have_nothing_in_common(tmp_path: Path) -> None:
    message = operator_pb2.RecordedRequest(
        namespace_id=1, prompt_tokens=33, hash_bytes=32, hashes=hashes(1, 2)
    )
    lines = []
    for key in (b"one", b"two"):
        with (tmp_path / key.decode()).open("wb") as file:
            Trace(file, key).add(message)
        lines += read_trace(tmp_path / key.decode())
    assert not set(lines[0].blocks.tolist()) & set(lines[1].blocks.tolist())
