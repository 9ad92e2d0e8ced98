"""`kvd record`: an anonymised trace of what engines ask a running daemon for."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import secrets
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import IO, Any

import click
import grpc

from kvd.cli.calls import linked
from kvd.cli.exits import EXIT_FAILED, EXIT_MISUSED, Failure
from kvd.cli.options import (
    NAMESPACE_ID,
    Checked,
    FilePath,
    json_option,
    socket_options,
    timeout_option,
)
from kvd.cli.printing import duration, show_json
from kvd.config.values import number
from kvd_client.backoff import DETAILS_KEY
from kvd_proto.v1 import operator_pb2 as pb

MAX_RECORD_SECONDS = 7 * 86400.0
MAX_REQUESTS_RECORDED = 10_000_000
SAVED_EVERY_S = 0.5
_ID_BITS = 63  # what a trace may have
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndSignals:
    """Ctrl-C, and SIGTERM and a terminal that goes alike: KeyboardInterrupt, but in no line.

    What nohup ignores stays ignored.
    """

    def __init__(self) -> None:
        self._in_line = self._has_come = False

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """They end what is done in here. On the main thread."""
        before = {which: signal.getsignal(which) for which in _ENDING}
        for which, handler in before.items():
            if handler in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(which, self._heard)
        try:
            yield
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)

    @contextlib.contextmanager
    def put_off(self) -> Iterator[None]:
        """One that comes in here ends it at its end: a packed file cut in a call is not whole."""
        self._in_line = True
        try:
            yield
        finally:
            self._in_line = False
        if self._has_come:
            raise KeyboardInterrupt

    def _heard(self, _number: int, _frame: FrameType | None) -> None:
        self._has_come = True
        if not self._in_line:
            raise KeyboardInterrupt


@dataclass(slots=True)
class Trace:
    """Requests on their way to a file. The key is nowhere else, and goes with this object."""

    file: IO[bytes]
    key: bytes
    ends: EndSignals = field(default_factory=EndSignals)
    requests: int = 0
    blocks: int = 0
    lost: int = 0
    last_ms: int = 0
    saved_s: float = 0.0

    def add(self, message: pb.RecordedRequest) -> None:
        """Write a request as a line, its blocks under keyed numbers."""
        width = message.hash_bytes
        scope = f"{message.namespace_id}/{message.epoch!r}/{message.account!r}/".encode()
        ids = dict.fromkeys(
            self._number(scope + message.hashes[at : at + width])
            for at in range(0, len(message.hashes), width)
        )
        self.last_ms = max(self.last_ms, message.at_ms)
        line = {
            "timestamp": self.last_ms,
            "input_length": message.prompt_tokens,
            "output_length": 0,
            "hash_ids": list(ids),
        }
        with self.ends.put_off():
            self.file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            self.requests += 1
            self.blocks += len(ids)

    def save(self) -> None:
        """Now and then, what was recorded to the file: who is killed leaves that much."""
        if (now := time.monotonic()) >= self.saved_s + SAVED_EVERY_S:
            with self.ends.put_off():
                self.file.flush()
            self.saved_s = now

    def _number(self, name: bytes) -> int:
        digest = hashlib.blake2b(name, digest_size=8, key=self.key).digest()
        return int.from_bytes(digest, "little") >> (64 - _ID_BITS)


@click.command("record")
@click.argument("file", type=FilePath())
@click.option(
    "--seconds",
    type=Checked(number(0.001, MAX_RECORD_SECONDS), "seconds"),
    metavar="SECONDS",
    help="How long (default: until Ctrl-C).",
)
@click.option(
    "--requests",
    type=click.IntRange(1, MAX_REQUESTS_RECORDED),
    default=MAX_REQUESTS_RECORDED,
    metavar="N",
    help="End after so many requests (default 10000000).",
)
@click.option("--namespace", type=NAMESPACE_ID, default=None, metavar="ID", help="This one alone.")
@socket_options
@timeout_option(5.0)
@json_option
def command(**flags: Any) -> int:
    """Record what engines ask for to FILE, as a trace that `kvd replay` reads.

    A line has when a request began, its tokens and its blocks. Blocks are numbers under a key that
    is thrown away: equal blocks have equal numbers, and nothing tells what was in them. FILE must
    be new; where its name ends in .gz it is packed. A request that this command is too slow for is
    left out and counted. Ctrl-C, SIGTERM and SIGHUP end the recording; the file is whole.
    """
    given = SimpleNamespace(**flags)
    began = time.monotonic()
    try:
        opened = os.open(given.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise Failure(f"{given.file} can't be made: {error.strerror}", EXIT_MISUSED) from None
    made = os.fstat(opened)
    try:
        trace = _trace(given, opened, made)
    except OSError as error:  # as late as when the rest is written and the file is closed
        _remove_empty(given.file, made)
        raise Failure(f"{given.file} can't be written: {error.strerror}", EXIT_FAILED) from None
    if not _is_in_place(given.file, made):
        raise Failure(_gone(given.file, trace), EXIT_FAILED)
    seconds = time.monotonic() - began
    if given.json:
        said = {"requests": trace.requests, "blocks": trace.blocks, "lost": trace.lost}
        show_json(said | {"seconds": seconds, "file": str(given.file)})
    else:
        click.echo(
            f"{trace.requests} requests with {trace.blocks} blocks in {duration(seconds)};"
            f" {trace.lost} left out"
        )
    return 0


def _trace(given: SimpleNamespace, opened: int, made: os.stat_result) -> Trace:
    """All that was recorded, in the file that is open. OSError where it can't be written.

    `made`: what that file is, wherever its name leads by now.
    """
    with os.fdopen(opened, "wb") as plain:
        packed = gzip.GzipFile(fileobj=plain, mode="wb") if given.file.suffix == ".gz" else None
        trace = Trace(packed or plain, secrets.token_bytes(32))  # type: ignore[arg-type]
        try:
            with trace.ends.heard():
                _record(given, trace)
        except KeyboardInterrupt:
            pass  # the usual end
        except Failure as error:
            if not trace.requests:
                _remove(given.file, made)
                raise
            kept = f"{given.file} has the {trace.requests} requests that came before, and is whole"
            if not _is_in_place(given.file, made):
                kept = _gone(given.file, trace)
            raise Failure(f"{error.message}; {kept}", error.exit_code) from None
        except BaseException:
            if not trace.requests:
                _remove(given.file, made)
            raise
        finally:
            if packed is not None:
                packed.close()
    return trace


def _is_in_place(path: Path, made: os.stat_result) -> bool:
    """Whether the file that was made still has its name: others may remove it, or put another
    there."""
    try:
        return os.path.samestat(path.lstat(), made)
    except OSError:
        return False


def _gone(path: Path, trace: Trace) -> str:
    return f"{path} was removed or renamed meanwhile; its {trace.requests} requests went with it"


def _remove(path: Path, made: os.stat_result) -> None:
    """The next try may want the name."""
    if _is_in_place(path, made):
        path.unlink(missing_ok=True)


def _remove_empty(path: Path, made: os.stat_result) -> None:
    """Of a file that took no byte nothing is lost."""
    with contextlib.suppress(OSError):
        if not path.stat().st_size:
            _remove(path, made)


def _record(given: SimpleNamespace, trace: Trace) -> None:
    with linked(given, "kvd record") as daemon:
        request = pb.RecordRequest(namespace_id=given.namespace or 0)
        stream = daemon.operator.Record(request, metadata=daemon.metadata, timeout=given.seconds)
        try:
            for message in stream:
                trace.lost = message.lost
                for each in message.requests:
                    trace.add(each)
                    if trace.requests == given.requests:
                        return
                if message.requests:
                    trace.save()
        except grpc.RpcError as error:
            if not (given.seconds and _is_over(error)):
                raise
        finally:
            stream.cancel()


def _is_over(error: Any) -> bool:
    """Whether the call has lasted as long as it might: with details it's the daemon that ended it,
    as one whose reader takes nothing."""
    is_ours = DETAILS_KEY not in dict(error.trailing_metadata() or ())
    return is_ours and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
