"""The bucket of an S3 tier: one object a block, its sealed record first, then its parts.

    PREFIX/NAMESPACE/REST OF THE SCOPE/BLOCK

so that all of a scope, of a namespace, and of the tier lie below one name.

A bucket that does not answer is not asked for a while: a dead one costs one wait a while, not one
a call.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Self

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store as Objects

from kvd.processes.complaints import log_limited
from kvd.tiers.gang import require_time
from kvd.tiers.options import content_of, secret_of
from kvd.tiers.s3.answers import (
    WORDLESS,
    first_line,
    had_no_answer,
    has_panicked,
    meaning_of,
    translated,
    was_hung_up,
)
from kvd.tiers.s3.hosts import kept_to_endpoint
from kvd.tiers.s3.options import S3Options
from kvd.tiers.s3.pacing import Pacing
from kvd.tiers.sealing import (
    has_lengths_of,
    lengths_in,
    proves,
    record_bytes,
    record_in,
    sound_record_of,
    wipe,
)
from kvd.tiers.store import (
    NAMESPACE_BYTES,
    SCOPE_BYTES,
    Outcome,
    TierBlock,
    TierError,
    TierKey,
    TierReason,
    TierTimeout,
    TierUnusable,
)
from kvd_proto.limits import MAX_RANKS

log = logging.getLogger(__name__)

QUIET_SECONDS = 1.0  # after a request without an answer
HUNG_UP_SECONDS = 1.0  # in which a request is sent again whose connection was ended
RENEW_SECONDS = 1.0  # between two looks whether a refused bucket's files hold something else
HEAR_SECONDS = 1.0  # between two questions why a HEAD is refused
LOG_SECONDS = 60.0  # between two lines about what is wrong with it
LISTED_AT_ONCE = 1000  # that are listed in one request
REMOVED_AT_ONCE = 100  # S3 takes ten times as many, and may take too long over them
UNANSWERED_S = 60.0  # a write that had no answer may happen for so long
READ_BYTES = 1 << 20  # copied at once
_WITNESS = "zzzzzzzz."  # behind blocks' names, which have no dot
_BUSY = "the bucket asks for fewer requests (503, 429)"


class Bucket:
    """Any thread may call. TierError says what the bucket or the way to it refused."""

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._quiet = ("", 0.0)  # why nothing is asked, and until when
        self._renew_at = self._say_at = self._say_busy_at = 0.0
        self._hear_at = self._say_failure_at = 0.0
        self._failure = ("", 0.0)  # what it answered in place of what was asked, and when, last
        self._has_said_no_word = False  # the log's last line of a refusal
        self._pacing = Pacing()
        # Namespaces, and until when a write may happen; at first the prefix, which is above all:
        # what the process before this one had no answer to, nobody knows any more.
        self._unanswered = {options.prefix: time.monotonic() + UNANSWERED_S}
        self._left: set[str] = set()  # witnesses that no clear has use for, and that may stand
        self.problem = ""  # that it did not answer last, or refused us, and why
        self._secrets = self._read_files()
        self._objects, self._on_new_connections = self._open()

    def meet(self) -> None:
        """Look whether it may be used. TierUnusable where not; who is away is met later."""
        try:
            for _ in self.names(self._options.prefix, self._a_while(), at_once=1):
                break
        except TierError as error:
            if error.reason is TierReason.REFUSED:
                raise TierUnusable(f"bucket: {self._options.bucket} refuses us: {error}") from None
            log.warning("the bucket %s: %s", self._options.bucket, error)

    def name_of(self, key: TierKey) -> str:
        block = base64.urlsafe_b64encode(key.block).rstrip(b"=").decode()
        return f"{self._below(key.scope)}/{block}"

    def below_scopes(self, scope: bytes) -> str:
        """What lies above all scopes that begin with these bytes, and maybe others."""
        if NAMESPACE_BYTES <= len(scope) < SCOPE_BYTES:
            return self._below(scope[:NAMESPACE_BYTES])
        return self._below(scope) if len(scope) == SCOPE_BYTES else self._options.prefix

    def is_of(self, name: str, scope: bytes) -> bool:
        """Whether an object is a block, and of a scope that begins with these bytes.

        Also somebody's folder is an object: it is listed without the slash that its name ends in,
        and nobody can remove it by that. A witness is left to its own clear.
        """
        below = name.removeprefix(self._options.prefix + "/").split("/")
        own = "".join(below[:-1])
        is_block = len(own) == 2 * SCOPE_BYTES and not below[-1].startswith(_WITNESS)
        return is_block and own.startswith(scope.hex())

    def _below(self, scope: bytes) -> str:
        parts = [scope[:NAMESPACE_BYTES].hex(), scope[NAMESPACE_BYTES:].hex()]
        return "/".join([self._options.prefix, *filter(None, parts)])

    # -- blocks -------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        try:
            self._ask_for(obstore.head, name)
        except FileNotFoundError:
            return False
        except TierError as error:
            if error.reason is TierReason.REFUSED:
                self._hear_why(name)
            raise
        return True

    def _hear_why(self, name: str) -> None:
        """A HEAD of it was refused: a GET is told why, and `problem` has that then."""
        now = time.monotonic()
        with self._lock:
            if now < self._hear_at:
                return
            self._hear_at = now + HEAR_SECONDS
        with contextlib.suppress(TierError, FileNotFoundError):
            self._head(name, 1)

    def write(self, name: str, block: TierBlock) -> Outcome:
        """DONE or DAMAGED; an object of parts of these lengths that is there already stays."""
        record = sound_record_of(block)
        if record is None:
            return Outcome.DAMAGED
        content = [record, *block.parts]
        if self._options.conditional_put:
            try:
                self._put(name, content, "create", FileExistsError)
            except FileExistsError:
                pass
            else:
                return Outcome.DONE
        if not self._has_lengths_of(name, block):
            self._put(name, content, "overwrite")
        return Outcome.DONE

    def read(self, name: str, block: TierBlock) -> Outcome:
        """DONE, MISSING, or FAILED where it proves wrong; then it is removed."""
        size = record_bytes(len(block.parts))
        try:
            found = self._ask_for(obstore.get, name)
            total = found.meta["size"]
            if total != size + block.nbytes:
                return Outcome.MISSING if self._is_whole(name, total) else Outcome.FAILED
            record = bytearray(size)
            with _answered(self):
                _scatter(found.stream(READ_BYTES), [memoryview(record), *block.parts])
        except FileNotFoundError:
            return Outcome.MISSING
        if not has_lengths_of(bytes(record), block):
            wipe(block)  # what came is of other parts, or of none
            return Outcome.MISSING if _tells_size(bytes(record), total) else Outcome.FAILED
        return Outcome.DONE if proves(bytes(record), block) else Outcome.FAILED

    def _is_whole(self, name: str, size: int) -> bool:
        """Whether an object is as long as its own record says: of other parts than were wanted."""
        if not size:
            return False
        end = min(size, record_bytes(MAX_RANKS))
        return _tells_size(record_in(self._head(name, end)), size)

    def _head(self, name: str, size: int) -> bytes:
        """So many bytes of its beginning: no more are taken, whatever comes."""
        found = self._ask_for(obstore.get, name, options={"range": (0, size)})
        head = bytearray(size)
        with _answered(self):
            _scatter(found.stream(READ_BYTES), [memoryview(head)])
        return bytes(head)

    def _put(self, name: str, content: list[Any], mode: Any, *expected: type[OSError]) -> None:
        with _answered(self, *expected) as asked:
            namespace = asked.may_happen_late = name.rsplit("/", 2)[0]
            more = {"mode": mode, "use_multipart": False}
            self._sent(obstore.put, name, content, may_happen_late=namespace, **more)

    def _has_lengths_of(self, name: str, block: TierBlock) -> bool:
        size = record_bytes(len(block.parts))
        try:
            meta = self._ask_for(obstore.head, name)
            if meta["size"] != size + block.nbytes:
                return False
            record = self._head(name, size)
        except FileNotFoundError:
            return False
        return has_lengths_of(record, block)

    # -- names --------------------------------------------------------------------------------

    def names(
        self, below: str, deadline: float, at_once: int = LISTED_AT_ONCE
    ) -> Iterator[list[str]]:
        """All names below one, some at once. TierTimeout where the next ones come too late."""
        listed: Any = None
        last: str | None = None

        def following(objects: Objects) -> Any:
            nonlocal listed
            listed = listed or obstore.list(objects, below, offset=last, chunk_size=at_once)
            try:
                return asyncio.run(_next_of(listed, deadline))
            except BaseError:
                listed = None  # it gives nothing more
                raise

        with _answered(self):
            while some := self._sent(following):
                yield [each["path"] for each in some]
                last = some[-1]["path"]

    def _a_while(self) -> float:
        """Until when a request has had its time."""
        options = self._options
        seconds = options.connect_timeout_seconds + options.request_timeout_seconds
        return time.monotonic() + seconds

    def bear_witness(self, below: str) -> str:
        """Put an object there that stands last in a list of all below this name: the object's name.

        A list that does not have it is none, or not all of it: a page for people that stands before
        a bucket is an empty list to the client, and so is an error that is answered with 200.

        Those that could not be removed before go first: there would be more with each try.
        """
        self._remove_left()
        name = f"{below}/{_WITNESS}{secrets.token_hex(8)}"  # clears at once have one each
        try:
            with _answered(self):
                self._sent(obstore.put, name, b"kvd", use_multipart=False)
        except TierError:  # it may be there, or come
            with self._lock:
                self._left.add(name)
            raise
        return name

    def dismiss(self, witness: str) -> None:
        """Remove it, now or before the next one."""
        with self._lock:
            self._left.add(witness)
        with contextlib.suppress(TierError):  # one that stays does no harm
            self._remove_left()

    def _remove_left(self) -> None:
        with self._lock:
            left = list(self._left)
        self.remove(left)
        with self._lock:
            self._left.difference_update(left)

    def require_no_late_writes(self, below: str) -> None:
        """TierTimeout while a write that had no answer may put an object below this name: it would
        come after what is there was listed."""
        with self._lock:
            self._forget_unanswered()
            left = list(self._unanswered)
        if any(f"{each}/".startswith(f"{below}/") or below.startswith(f"{each}/") for each in left):
            raise TierTimeout("a write that had no answer may happen yet")

    def remove(self, names: list[str]) -> None:
        """Remove them, where they are there."""
        for begin in range(0, len(names), REMOVED_AT_ONCE):
            with _answered(self):
                self._sent(obstore.delete, names[begin : begin + REMOVED_AT_ONCE])

    # -- requests -----------------------------------------------------------------------------

    def _ask_for(self, call: Any, name: str, **more: Any) -> Any:
        """Of an object. FileNotFoundError: it is not there."""
        with _answered(self, FileNotFoundError):
            return self._sent(call, name, **more)

    def _sent(self, call: Any, *given: Any, may_happen_late: str = "", **more: Any) -> Any:
        """What a request is answered with. `may_happen_late`: the namespace that it writes to.

        A server, or what stands before it, may end a connection that was kept, at any time: the
        request is sent on a new one then. What was ended late was under way, and sent again it
        could take twice the time that a request may.
        """
        until = time.monotonic() + HUNG_UP_SECONDS
        try:
            return call(self._objects, *given, **more)
        except BaseError as error:
            if not was_hung_up(error) or time.monotonic() >= until:
                raise
        if may_happen_late:
            self.note_unanswered(may_happen_late)
        self.require_answering()
        return call(self._on_new_connections, *given, **more)

    def take_turn(self, deadline: float) -> None:
        """Before a request: wait where the bucket asks for fewer. TierError: not in time."""
        require_time(deadline)
        self._pacing.take_turn(deadline)

    @property
    def notes(self) -> tuple[str, ...]:
        """What an operator should know."""
        notes = [f"the bucket {self.problem}"] if self.problem else []
        failure, failed_at = self._failure
        if failure and time.monotonic() < failed_at + LOG_SECONDS:
            notes.append(f"the bucket fails requests: {failure}")
        if gap_s := self._pacing.gap_s:
            notes.append(f"{_BUSY}: {1 / gap_s:.0f} a second are sent, some blocks are misses")
        return tuple(notes)

    def require_answering(self) -> None:
        """TierError where it did not answer a moment ago."""
        why, until = self._quiet
        if time.monotonic() < until:
            raise TierError(why, TierReason.UNREACHABLE)

    def note_unanswered(self, namespace: str) -> None:
        """A write to it may happen yet."""
        with self._lock:
            self._unanswered.pop(namespace, None)  # the last one is to stand last
            self._unanswered[namespace] = time.monotonic() + UNANSWERED_S
            self._forget_unanswered()

    def _forget_unanswered(self) -> None:
        """Those that happen no more."""
        now = time.monotonic()
        while self._unanswered and next(iter(self._unanswered.values())) <= now:
            del self._unanswered[next(iter(self._unanswered))]

    def note(self, error: TierError | None, began: float) -> None:
        """How a request went that began then."""
        if error is not None and error.reason is TierReason.BUSY:
            self._slow_down(error, began)
            return
        if error is None:
            self._pacing.hasten()
        with self._lock:
            if error is None:
                self.problem = ""
                return
            is_silent = error.reason in (TierReason.TIMEOUT, TierReason.UNREACHABLE)
            now = time.monotonic()
            if not is_silent and error.reason is not TierReason.REFUSED:
                self._note_failure(str(error), now)
                return
            problem = f"{'does not answer' if is_silent else 'refuses us'}: {error}"
            if is_silent:
                self._quiet = problem, now + QUIET_SECONDS
            has_word = not is_silent and WORDLESS not in problem
            is_due = not self.problem and now >= self._say_at
            if is_due or (has_word and self._has_said_no_word):
                self._say_at = now + LOG_SECONDS
                self._has_said_no_word = not is_silent and not has_word
                log.warning("the bucket %s %s", self._options.bucket, problem)
            if is_silent or has_word or not self._has_its_word:
                self.problem = problem
            if now >= self._renew_at:
                self._renew_at = now + RENEW_SECONDS
                self._renew()

    def _note_failure(self, said: str, now: float) -> None:
        """It answers, and doesn't do what is asked."""
        self._failure = said, now
        if now >= self._say_failure_at:
            self._say_failure_at = now + LOG_SECONDS
            log.warning("the bucket %s fails requests: %s", self._options.bucket, said)

    @property
    def _has_its_word(self) -> bool:
        """Whether the problem is a refusal, in the bucket's own words."""
        return self.problem.startswith("refuses us") and WORDLESS not in self.problem

    def _slow_down(self, error: TierError, began: float) -> None:
        self._pacing.slow_down(began)
        now = time.monotonic()
        with self._lock:
            self.problem = ""  # it answers
            if now < self._say_busy_at:
                return
            self._say_busy_at = now + LOG_SECONDS
        log.warning("%s: %s", _BUSY, error)

    def _renew(self) -> None:
        """Take what the files with credentials and authorities hold by now."""
        try:
            found = self._read_files()
            if found != self._secrets:
                self._secrets = found
                self._objects, self._on_new_connections = self._open()
                log.info(
                    "the bucket %s is asked with what its files hold now", self._options.bucket
                )
        except TierUnusable as error:
            log_limited(f"the bucket's files can't be read again, what they held stays: {error}")

    def _read_files(self) -> dict[str, str | bytes]:
        """What the files hold that options name, by option. TierUnusable."""
        found: dict[str, str | bytes] = {}
        for option in ("access_key_file", "secret_key_file", "session_token_file"):
            file = getattr(self._options, option)
            if file is not None:
                found[option] = secret_of(option, file)
        if self._options.ca_file is not None:
            found["ca_file"] = content_of("ca_file", self._options.ca_file)
        return found

    def _open(self) -> tuple[Objects, Objects]:
        """The client, and one that keeps no connection."""
        options = self._options
        config: Any = {
            "region": options.region,
            "virtual_hosted_style_request": options.virtual_hosted,
            "conditional_put": "etag",
        }
        if options.endpoint:
            config["endpoint"] = options.endpoint.rstrip("/")
        of_files: dict[str, Any] = {}
        if "access_key_file" in self._secrets:
            # A session token that the environment has beside keys of its own is none of theirs.
            keys = {
                "access_key_id": self._secrets["access_key_file"],
                "secret_access_key": self._secrets["secret_key_file"],
                "token": self._secrets.get("session_token_file"),
                "expires_at": None,
            }
            of_files["credential_provider"] = lambda: keys
        client: Any = {
            "timeout": timedelta(seconds=options.request_timeout_seconds),
            "connect_timeout": timedelta(seconds=options.connect_timeout_seconds),
            "allow_http": options.allow_http,
            **kept_to_endpoint(options),
        }
        if "ca_file" in self._secrets:
            client["root_certificate"] = self._secrets["ca_file"]
        retry: Any = {
            "max_retries": options.retries,
            "retry_timeout": timedelta(seconds=options.request_timeout_seconds),
        }
        more = {"config": config, "retry_config": retry, **of_files}
        keeps_none: Any = {**client, "pool_max_idle_per_host": "0"}
        try:
            return (
                Objects(options.bucket, client_options=client, **more),
                Objects(options.bucket, client_options=keeps_none, **more),
            )
        except BaseError as error:
            raise TierUnusable(f"the client refuses the options: {first_line(error)}") from None


class _answered:  # noqa: N801 - it reads as a statement
    """Around a request: what goes wrong is a TierError, or one of those that are `expected`.

    These are FileNotFoundError and FileExistsError. A server or what stands before it may answer so
    whatever it is asked: that says of an object what it says only where the question was that.
    """

    def __init__(self, bucket: Bucket, *expected: type[OSError]) -> None:
        self._bucket = bucket
        self._expected = expected
        self.may_happen_late = ""  # the namespace that it writes to
        bucket.require_answering()
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._bucket.note(None, self._began)
            return
        if not isinstance(error, BaseError | OSError) and not has_panicked(error):
            return
        means = meaning_of(error)
        if means in self._expected:
            self._bucket.note(None, self._began)
            raise means from None
        if self.may_happen_late and had_no_answer(error):
            self._bucket.note_unanswered(self.may_happen_late)
        self._bucket.note(translated(error), self._began)
        raise translated(error) from None


def _tells_size(record: bytes, size: int) -> bool:
    """Whether an object of so many bytes is as long as its record says."""
    lengths = lengths_in(record)
    return lengths is not None and len(record) + sum(lengths) == size


async def _next_of(listed: Any, deadline: float) -> Any:
    """The next names of a list, none at its end. TierTimeout.

    A bucket may say again and again that there are more, and name none: each such answer is in
    time, and only who can be told to stop stops at the deadline.
    """
    try:
        return await asyncio.wait_for(anext(listed), deadline - time.monotonic())
    except StopAsyncIteration:
        return ()
    except TimeoutError:
        raise TierTimeout("the deadline passed before the bucket had named all") from None


def _scatter(source: Any, buffers: list[memoryview]) -> None:
    """Fill the buffers one after the other. Less than enough leaves the rest as it was."""
    left = iter(buffers)
    buffer = next(left)
    for piece in source:
        view = memoryview(piece)
        while view.nbytes:
            if not buffer.nbytes:
                buffer = next(left, memoryview(b""))
                if not buffer.nbytes:
                    return
            step = min(view.nbytes, buffer.nbytes)
            buffer[:step] = view[:step]
            view, buffer = view[step:], buffer[step:]
