"""The servers of a Valkey tier: who has which slot, who answers, and the connections to them.

Every thread that calls has a line of its own to each server. What a server does not answer in time
makes it *silent*: nothing more is sent to it until the thread that watches has had an answer. So a
dead one costs one wait, not one a call, and the others go on. Slots that move are not followed;
their blocks are misses until the move is known.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import re
import ssl
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from kvd.tiers.options import content_of, secret_of
from kvd.tiers.sealing import record_bytes
from kvd.tiers.store import TierError, TierReason, TierTimeout, TierUnusable
from kvd.tiers.valkey.line import Answer, Command, Line, Room, ServerRefusal
from kvd.tiers.valkey.names import SLOTS
from kvd.tiers.valkey.options import ValkeyOptions
from kvd_proto.limits import MAX_RANKS

log = logging.getLogger(__name__)

Home = str  # a server, as "host:port"
NOBODY = ""
LOOK_SECONDS = 1.0  # between looks at the servers
HEAD_BYTES = record_bytes(MAX_RANKS) + 1  # any record, and whether something follows it
_HEAD_END = b"%d" % (HEAD_BYTES - 1)
_WITHOUT_SLOTS = 8  # words that CLUSTER NODES has of a server without slots
MAX_DIGITS = 18  # of a number that a server says of itself: less than 2**63
EMPTIED = 10  # of which less than such a part is left, a look later
MAX_DOUBTS = 64  # lines on which writes were given up that may still happen
ELSEWHERE = -2  # in place of a value's length
_ELSEWHERE = {"MOVED", "ASK", "TRYAGAIN", "READONLY"}  # a slot has moved, or is about to
_NOT_THERE = _ELSEWHERE | {"WRONGTYPE"}  # a name that somebody gave to a list, or the like
_REFUSED_LOGIN = {"NOAUTH", "WRONGPASS"}
_ENDS_LINE = _REFUSED_LOGIN | {"READONLY"}  # another may have the server's name by now
_OF_NO_SERVER = {"MOVED", "ASK", "TRYAGAIN", "WRONGTYPE", "OOM"}  # but of one value, or a slot
_IS_NO_CLUSTER = "cluster support disabled"
# Said to whoever connects, before the connection is ended: there is no room for one more, or
# (protected-mode) nobody from another machine is taken.
_TURNS_AWAY = re.compile(r"max number of clients|^DENIED\b")
REFUSAL_NOTED_S = 10.0  # since a server refused the last time
REFUSAL_SAID_S = 60.0  # between two lines of the log about refusals, and about one's silence


class LoginRefused(TierError):
    """A server does not let us in."""

    reason = TierReason.REFUSED


class Silence(NamedTuple):
    """Why nothing is sent to a server, and what an operator should know of it."""

    reason: TierReason
    note: str


class Servers:
    """Any thread may call. TierError says what a server or the way to it refused."""

    def __init__(self, options: ValkeyOptions) -> None:
        self._options = options
        self._own = threading.local()
        self._lock = threading.Lock()
        self._lines: set[Line] = set()
        self._peers: dict[Home, set[str]] = {}  # the addresses that a server is met at
        self._slots = [NOBODY] * SLOTS
        self._homes: list[Home] = []  # that have slots
        self._silent: dict[Home, Silence] = {}
        self._doubts: list[tuple[Home, Line]] = []
        self._said: set[Home] = set()  # that they are silent, by now
        self._say_at: dict[Home, float] = {}  # when the next line about it may come
        self._refusals: dict[Home, tuple[str, float]] = {}  # what each said last, and when
        self._say_refusal_at = 0.0
        self.told: dict[Home, dict[str, str]] = {}  # what each server says of itself
        self.was_emptied = False  # some server was, or started anew, since somebody asked
        self._wake = threading.Event()
        self._closing = False
        self._watcher = threading.Thread(target=self._watch, name="kvd-valkey-watch", daemon=True)

    def open(self) -> None:
        """Meet the servers. TierUnusable where they refuse us; who is away is met later."""
        try:
            self._look()
        except TierUnusable:
            self.close()
            raise
        except TierError as error:
            self._say("", str(error))
        self._watcher.start()

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        if self._watcher.ident is not None:
            self._watcher.join()
        with self._lock:
            doubtful = [line for _, line in self._doubts]
            for line in itertools.chain(self._lines, doubtful):
                line.close()
            self._lines.clear()
            self._doubts.clear()

    # -- who has what -------------------------------------------------------------------------

    def home_of(self, slot: int) -> str:
        """The server that has the slot; NOBODY where nobody is known to."""
        return self._slots[slot]

    def homes(self) -> list[str]:
        """Every server that has slots. TierError where some slot has none."""
        if NOBODY in self._slots:
            raise TierError("some of the cluster's slots have no server", TierReason.UNREACHABLE)
        return list(self._homes)

    def holders(self, deadline: float) -> list[str]:
        """Likewise, and those that have no slot yet: the first may be on its way there."""
        homes = self.homes()
        (said,) = self.run(homes[0], [["CLUSTER", "NODES"]], deadline)
        return [*homes, *_without_slots(said)] if isinstance(said, bytes) else homes

    def require_answering(self, home: Home) -> None:
        """TierError where it is known that nobody answers there, or lets us in."""
        if home == NOBODY:
            raise TierError("no server answers", TierReason.UNREACHABLE)
        if (silence := self._silent.get(home)) is not None:
            raise TierError(silence.note, silence.reason)

    @property
    def notes(self) -> tuple[str, ...]:
        """What an operator should know."""
        notes = [silence.note for _, silence in sorted(self._silent.items())]
        since = time.monotonic() - REFUSAL_NOTED_S
        for home, (said, at) in sorted(self._refusals.items()):
            if at >= since and home in self._homes and home not in self._silent:
                notes.append(f"{home} refuses: {said}")
        if not self._homes:
            notes.append("no server answers")
        elif NOBODY in self._slots:
            notes.append(f"{self._slots.count(NOBODY)} of the cluster's slots have no server")
        told = list(self.told.values())  # at once: the watch may hear of another server meanwhile
        policies = {said.get("maxmemory_policy", "") for said in told}
        if any(said.get("maxmemory") == "0" for said in told):
            notes.append("a server has no maxmemory: it grows until the machine has no more")
        if "noeviction" in policies and not self._options.ttl_seconds:
            notes.append("a server's maxmemory-policy is noeviction: when it is full, it stays so")
        return tuple(notes)

    def refresh(self) -> None:
        """Learn anew who has which slot. TierError where nobody says."""
        failed: TierError | None = None
        known = sorted(self._homes, key=self._silent.__contains__)
        for home in dict.fromkeys([*known, *self._options.addresses]):
            try:
                self._learn_slots(home)
            except TierUnusable:
                raise
            except TierError as error:
                if _is_login([error]):
                    raise LoginRefused(str(error)) from None
                failed = failed or TierError(str(error), error.reason)
            else:
                return
        raise failed or TierError("there is no server", TierReason.UNREACHABLE)

    # -- calls --------------------------------------------------------------------------------

    def run(
        self,
        home: Home,
        commands: Sequence[Command],
        deadline: float,
        *,
        changes: bool = False,
        into: Sequence[Room] = (),
    ) -> list[Answer]:
        """Commands of one key each, in their order; what was refused is a TierError in its place.

        changes: what has no answer may still happen. into: as in `Line.run`.
        """
        self.require_answering(home)
        _left(deadline)
        if changes and len(self._doubts) >= MAX_DOUBTS:
            raise TierError("too many writes are given up and may happen yet")
        return self._run(home, commands, deadline, changes=changes, into=into)

    def set(self, home: Home, commands: Sequence[Command], deadline: float) -> list[Answer]:
        """SETs, in their order; what is not OK is a TierError in its place."""
        answers = self.run(home, commands, deadline, changes=True)
        others: list[ServerRefusal] = []
        for number, answer in enumerate(answers):
            if answer != b"OK" and not isinstance(answer, ServerRefusal):
                said = answer[:40] if isinstance(answer, bytes) else type(answer).__name__
                answers[number] = ServerRefusal(f"SET is answered with {said!r}, not with OK")
                others.append(answers[number])
        self._note_refusal(home, others)
        return answers

    def heads(self, home: Home, names: Sequence[bytes], deadline: float) -> list[bytes]:
        """What values begin with, HEAD_BYTES at most; nothing where there is no value, or where
        its slot is no longer there."""
        commands: list[Command] = [[b"GETRANGE", name, b"0", _HEAD_END] for name in names]
        heads = _found(self.run(home, commands, deadline))
        return [head if isinstance(head, bytes) else b"" for head in heads]

    def fill(
        self, home: Home, names: Sequence[bytes], into: Sequence[Room], deadline: float
    ) -> list[int | None]:
        """Have values written into memory; how long each is, None where it is not there.

        -1: it is longer than its memory. ELSEWHERE: this server does not know, its slot moves.
        Nothing is written any more when this returns.
        """
        answers = self.run(home, [[b"GET", name] for name in names], deadline, into=into)
        for number, answer in enumerate(answers):
            if isinstance(answer, ServerRefusal) and answer.code in _ELSEWHERE:
                answers[number] = ELSEWHERE
        return _found(answers)

    def run_of(self, home: Home, deadline: float) -> str:
        """Which run of the server it is: another after it was started again."""
        (told,) = self.run(home, [["INFO", "server"]], deadline)
        if isinstance(told, ServerRefusal):
            raise told
        return _parsed(told).get("run_id", "") if isinstance(told, bytes) else ""

    def settle_doubts(self, deadline: float) -> None:
        """Wait until writes that were given up have happened, or never will. TierError."""
        for doubt in list(self._doubts):
            home, line = doubt
            if home in self._homes:
                self.require_answering(home)
                left = deadline - time.monotonic()
                if not line.has_ended(min(left, self._options.request_timeout_seconds)):
                    raise TierTimeout(f"{home} has not come to what it was sent before")
            self._settled(doubt)

    def _settled(self, doubt: tuple[Home, Line]) -> None:
        with self._lock:
            if doubt in self._doubts:
                self._doubts.remove(doubt)
        doubt[1].close()

    def _run(
        self,
        home: Home,
        commands: Sequence[Command],
        deadline: float = math.inf,
        *,
        changes: bool = False,
        into: Sequence[Room] = (),
    ) -> list[Answer]:
        while True:
            line, is_new = self._line(home, deadline)
            seconds = min(self._options.request_timeout_seconds, _left(deadline))
            try:
                answers = line.run(commands, seconds, into)
            except OSError as error:
                self._give_up(home, line, changes=changes)
                if isinstance(error, ConnectionError) and not is_new:
                    continue  # the server has ended a line that was idle
                is_late = isinstance(error, TimeoutError)
                if not is_late or seconds >= self._options.request_timeout_seconds:
                    self._fall_silent(home, str(error), TierReason.UNREACHABLE)
                    self._wake.set()
                if is_late:
                    raise TierTimeout(f"{home}: {error}") from None
                raise TierError(f"{home}: {error}", TierReason.UNREACHABLE) from None
            except BaseException:  # its answers may still come
                self._give_up(home, line, changes=changes)
                raise
            refused = [answer for answer in answers if isinstance(answer, ServerRefusal)]
            self._note_refusal(home, refused)
            codes = {answer.code for answer in refused}
            if codes & _ELSEWHERE:
                self._wake.set()
            if codes & _ENDS_LINE:
                self._give_up(home, line, changes=False)
            return answers

    def _note_refusal(self, home: Home, refused: Sequence[ServerRefusal]) -> None:
        """An operator reads what a server refuses: only who runs it can mend that."""
        words = (str(each) for each in refused if each.code not in _OF_NO_SERVER)
        said = next((word for word in words if _IS_NO_CLUSTER not in word), "")
        if not said:
            return
        now = time.monotonic()
        with self._lock:
            left = {each: told for each, told in self._refusals.items() if each in self._homes}
            self._refusals = {**left, home: (said, now)}
            is_due = now >= self._say_refusal_at
            if is_due:
                self._say_refusal_at = now + REFUSAL_SAID_S
        if is_due:
            log.warning("%s refuses: %s", home, said)

    def _fall_silent(self, home: Home, why: str, reason: TierReason) -> None:
        if home in self._homes:
            why = why.removeprefix(f"{home}: ")
            is_away = reason is TierReason.UNREACHABLE
            note = f"{home} does not answer" if is_away else f"{home} can't be asked: {why}"
            self._silent[home] = Silence(reason, note)
            self._say(home, why)

    # -- lines --------------------------------------------------------------------------------

    def _line(self, home: Home, deadline: float) -> tuple[Line, bool]:
        """This thread's own to the server, and whether it is new. TierError: it can't be had."""
        mine: dict[Home, Line] = self._own.__dict__.setdefault("lines", {})
        line = mine.get(home)
        if line is not None and line.peer in self._peers[home]:
            return line, False
        before = line
        if before is not None:  # its name means another one, by now or in turn
            self._give_up(home, before, changes=False)
        seconds = min(self._options.connect_timeout_seconds, _left(deadline))
        try:
            line = mine[home] = self._connect(home, seconds)
        except TierTimeout:
            raise
        except TierError as error:
            self._fall_silent(home, str(error), error.reason)
            raise
        with self._lock:
            self._lines.add(line)
            met = self._peers.setdefault(home, set())
            is_back = before is not None and before.peer == line.peer  # so it means both
            if line.peer not in met and not is_back:
                met.clear()
            met.add(line.peer)
        return line, True

    def _give_up(self, home: Home, line: Line, *, changes: bool) -> None:
        self._own.lines.pop(home, None)
        with self._lock:
            self._lines.discard(line)
        if changes:
            line.say_no_more()
            with self._lock:
                self._doubts.append((home, line))
        else:
            line.close()

    def _connect(self, home: Home, seconds: float) -> Line:
        """TierError: it can't be had, TierTimeout: not in less time than it may take."""
        host, _, port = home.rpartition(":")
        hello: list[Command] = [["CLIENT", "SETNAME", "kvd"]]
        if self._options.password_file is not None:
            secret = secret_of("password_file", self._options.password_file)
            user = [self._options.username] if self._options.username else []
            hello.insert(0, ["AUTH", *user, secret])
        tls = self._tls() if self._options.tls else None
        try:
            line = Line(host.strip("[]"), int(port), seconds, tls)
            try:
                said = _greeted(home, line, hello, seconds)
            except (OSError, TierError):
                line.close()
                raise
        except (OSError, UnicodeError) as error:  # a name that can't be looked up
            is_short = seconds < self._options.connect_timeout_seconds
            if is_short and isinstance(error, TimeoutError):
                raise TierTimeout(f"{home}: {error}") from None
            raise TierError(f"{home}: {error}", TierReason.UNREACHABLE) from None
        refused = [answer for answer in said if isinstance(answer, ServerRefusal)]
        if (len(hello) > 1 and isinstance(said[0], ServerRefusal)) or _is_login(refused):
            line.close()
            raise LoginRefused(f"{home}: {refused[0]}")
        return line

    def _tls(self) -> ssl.SSLContext:
        """As the options say. TierUnusable names the file that is none."""
        options = self._options
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        name = "ca_file"
        try:
            if options.ca_file is None:
                context.load_default_certs()
            else:
                pem = content_of(name, options.ca_file).decode(errors="replace")
                context.load_verify_locations(cadata=pem)
            if options.cert_file is not None:
                name = "cert_file, key_file"
                context.load_cert_chain(options.cert_file, options.key_file)
        except (OSError, ValueError) as error:
            raise TierUnusable(f"{name}: can't be used: {error}") from None
        return context

    # -- watching -----------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closing:
            self._wake.wait(LOOK_SECONDS)
            self._wake.clear()
            time.sleep(LOOK_SECONDS / 20)  # what fails will not do better in a moment
            if not self._closing:
                try:
                    self._look()
                except TierError as error:
                    self._say("", str(error))

    def _look(self) -> None:
        """Who has which slot, and what each server says. TierError where none says anything."""
        try:
            self.refresh()
        except TierError as error:
            if _is_login([error]):
                why = f"password_file, username: the servers refuse them: {error}"
                raise TierUnusable(why) from None
            raise
        for home in list(self._homes):
            with contextlib.suppress(TierError):
                (told,) = self._run(home, [["INFO"]])
                if isinstance(told, bytes):
                    self._hear(home, _parsed(told))
        for doubt in list(self._doubts):
            if doubt[1].has_ended(0.0):
                self._settled(doubt)
        self._said.discard("")

    def _hear(self, home: Home, said: dict[str, str]) -> None:
        if (before := self.told.get(home)) is not None:
            is_another = before.get("run_id") != said.get("run_id")
            self.was_emptied |= is_another or keys_of(said) * EMPTIED < keys_of(before)
        self.told[home] = said
        if said.get("loading", "0") == "0":
            self._silent.pop(home, None)
            self._said.discard(home)

    def _learn_slots(self, asked: Home) -> None:
        slots, homes = [NOBODY] * SLOTS, [asked]
        (ranges,) = self._run(asked, [["CLUSTER", "SLOTS"]])
        if isinstance(ranges, ServerRefusal):
            if _IS_NO_CLUSTER not in str(ranges):
                raise ranges
            if len(self._options.addresses) > 1:
                raise TierUnusable("addresses: there are several, and they are no cluster")
            slots = [asked] * SLOTS
        else:
            slots, homes = _slots_of(ranges, asked)
        self._slots, self._homes = slots, list(dict.fromkeys(homes))
        for home in set(self._silent).difference(homes):
            self._silent.pop(home, None)
        self.told = {home: said for home, said in self.told.items() if home in homes}

    def _say(self, home: Home, why: str) -> None:
        """Once for each server that falls silent; where it does again and again, now and then."""
        now = time.monotonic()
        if home in self._said:
            return
        self._said.add(home)
        if now >= self._say_at.get(home, 0.0):
            later = {each: at for each, at in self._say_at.items() if at > now}
            self._say_at = {**later, home: now + REFUSAL_SAID_S}
            log.warning("%s: %s", home or "the tier's servers", why)


def _greeted(home: Home, line: Line, hello: Sequence[Command], seconds: float) -> list[Answer]:
    """What the server says to each. TierError where it turns us away: it says so, asked or not,
    and ends the connection. OSError as in `Line.run`."""
    try:
        said = line.run(hello, seconds)
        word = str(said[0]) if isinstance(said[0], ServerRefusal) else ""
    except ConnectionError:
        word = line.last_word()
        if not _TURNS_AWAY.search(word):
            raise
    if _TURNS_AWAY.search(word):
        raise TierError(f"{home}: {word}", TierReason.REFUSED)
    return said


def _left(deadline: float) -> float:
    """Seconds. TierTimeout where there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TierTimeout("the deadline passed")
    return left


def _found(answers: list[Answer]) -> list[Answer]:
    """Values; None where a slot is no longer there, or what is there is no value.

    Raises what else was refused.
    """
    for number, answer in enumerate(answers):
        if isinstance(answer, ServerRefusal):
            if answer.code not in _NOT_THERE:
                raise answer
            answers[number] = None
    return answers


def _is_login(errors: Sequence[TierError]) -> bool:
    return any(
        isinstance(error, LoginRefused)
        or (isinstance(error, ServerRefusal) and error.code in _REFUSED_LOGIN)
        for error in errors
    )


def _slots_of(ranges: Answer, asked: Home) -> tuple[list[Home], list[Home]]:
    """Who has which slot, and all who have any. TierError where that is not what was said."""
    slots, homes = [NOBODY] * SLOTS, []
    left = SLOTS  # each slot has one server
    try:
        for begin, end, (named, port, *_), *_ in ranges:
            if not (0 <= begin <= end < SLOTS and 0 < port < 1 << 16):
                raise ValueError
            left -= end + 1 - begin
            if left < 0:
                raise ValueError
            host = named.decode() if named else asked.rpartition(":")[0]
            slots[begin : end + 1] = [f"{host}:{port}"] * (end + 1 - begin)
            homes.append(f"{host}:{port}")
    except (TypeError, ValueError, AttributeError):
        raise TierError(f"{asked}: it names slots that can't be", TierReason.REFUSED) from None
    return slots, homes


def _without_slots(said: bytes) -> list[Home]:
    """Of what a server says of the cluster's servers, those that could take slots and have none."""
    away = {"fail", "fail?", "handshake", "noaddr"}
    found: list[Home] = []
    for line in said.decode(errors="replace").splitlines():
        words = line.split()
        flags = set(words[2].split(",")) if len(words) == _WITHOUT_SLOTS else set()
        home = words[1].partition("@")[0] if flags else NOBODY
        if "master" in flags and not flags & away and home.rpartition(":")[2].isdigit():
            found.append(home)
    return found


def keys_of(said: dict[str, str]) -> int:
    """How many names a server has: of "db0:keys=12,expires=0,..."."""
    counts = (part.partition("=") for part in said.get("db0", "").split(","))
    return count_in({word: count for word, _, count in counts}, "keys")


def count_in(said: dict[str, str], word: str) -> int:
    """What a server counts; 0 where it says nothing of it, or no number that can be."""
    count = said.get(word, "")
    is_one = count.isascii() and count.isdigit() and len(count) <= MAX_DIGITS
    return int(count) if is_one else 0


def _parsed(told: bytes) -> dict[str, str]:
    """What a server says of itself, by its words."""
    lines = told.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)
