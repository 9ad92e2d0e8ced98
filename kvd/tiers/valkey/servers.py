"""The servers of a Valkey tier: who has which slot, who answers, and the connections to them.

Every thread that calls has a client of its own for each server: Valkey's client for clusters lets
all wait for one that is frozen, and begins with none. What a server does not answer in time makes
it *silent*: nothing more is sent to it until the thread that watches has had an answer. So a dead
one costs one wait, not one a call, and the others go on. Slots that move are not followed; their
blocks are misses until the move is known.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from glide_shared.exceptions import ClosingError, ConfigurationError, GlideError
from glide_shared.exceptions import ConnectionError as GlideConnectionError
from glide_shared.exceptions import TimeoutError as GlideTimeoutError
from glide_sync import (
    AdvancedGlideClientConfiguration,
    Batch,
    GlideClient,
    GlideClientConfiguration,
    Logger,
    LogLevel,
    NodeAddress,
    ServerCredentials,
    TlsAdvancedConfiguration,
)

from kvd.tiers.gang import require_time
from kvd.tiers.options import content_of, secret_of
from kvd.tiers.store import TierError, TierReason, TierTimeout, TierUnusable
from kvd.tiers.valkey.names import SLOTS
from kvd.tiers.valkey.options import ValkeyOptions

log = logging.getLogger(__name__)

Home = str  # a server, as "host:port"
Client = Any  # a GlideClient, whose calls are typed for what we never give it
Command = list[Any]
Answer = Any  # what came back of one command: a value, or a TierError
NOBODY = ""
COPIED_BYTES = 256 << 10  # values up to here are asked for in one go, and copied
LOOK_SECONDS = 1.0  # between looks at the servers
_T = TypeVar("_T")
_REFUSED_LOGIN = ("NOAUTH", "WRONGPASS")
_AWAY = ("CLUSTERDOWN", "MASTERDOWN", "Connection refused", "timed out", "IoError")
_MOVED = ("Moved", "MOVED", "Ask:", "ASK ", "TRYAGAIN")


class Servers:
    """Any thread may call. TierError says what a server or the way to it refused."""

    def __init__(self, options: ValkeyOptions) -> None:
        Logger.set_logger_config(LogLevel.OFF)
        self._options = options
        self._own = threading.local()
        self._lock = threading.Lock()
        self._clients: list[Client] = []
        self._slots = [NOBODY] * SLOTS
        self._homes: list[Home] = []  # that have slots
        self._silent: set[Home] = set()
        self._doubts: set[tuple[int, Home]] = set()  # clients that gave up a write to a server
        self._said: dict[Home, str] = {}
        self.told: dict[Home, dict[str, str]] = {}  # what each server says of itself
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
            clients, self._clients = self._clients, []
        for client in clients:
            client.close()

    # -- who has what -------------------------------------------------------------------------

    def home_of(self, slot: int) -> str:
        """The server that has the slot; NOBODY where nobody is known to."""
        return self._slots[slot]

    def homes(self) -> list[str]:
        """Every server that has slots. TierError where some slot has none."""
        if NOBODY in self._slots:
            raise TierError("some of the cluster's slots have no server", TierReason.UNREACHABLE)
        return list(self._homes)

    def require_answering(self, home: Home) -> None:
        """TierError where it is known that nobody answers there."""
        if home == NOBODY or home in self._silent:
            raise TierError(f"{home or 'no server'} does not answer", TierReason.UNREACHABLE)

    @property
    def notes(self) -> tuple[str, ...]:
        """What an operator should know."""
        notes = [f"{home} does not answer" for home in sorted(self._silent)]
        if not self._homes:
            notes.append("no server answers")
        elif NOBODY in self._slots:
            notes.append(f"{self._slots.count(NOBODY)} of the cluster's slots have no server")
        policies = {said.get("maxmemory_policy", "") for said in self.told.values()}
        if any(said.get("maxmemory") == "0" for said in self.told.values()):
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
                self._learn_slots(home, self._client(home))
            except TierUnusable:
                raise
            except TierError as error:
                failed = failed or TierError(str(error), error.reason)
                if _is_login(error):
                    break
            else:
                return
        raise failed or TierError("there is no server", TierReason.UNREACHABLE)

    # -- calls --------------------------------------------------------------------------------

    def ask(self, home: Home, command: Sequence[Any]) -> Answer:
        """One command for the server."""
        return self._call(home, lambda client: client.custom_command(list(command)))

    def values(self, home: Home, names: list[bytes]) -> list[bytes | None]:
        """Short values, None where there is none, or where its slot is no longer there."""
        values: list[bytes | None] = []
        for answer in self.run(home, [["GET", name] for name in names], changes=False):
            if isinstance(answer, TierError):
                if not _is_elsewhere(answer):
                    raise answer
                answer = None  # noqa: PLW2901 - a miss
            values.append(answer)
        return values

    def fill(
        self, home: Home, names: list[bytes], buffers: list[memoryview], deadline: float
    ) -> list[int | None]:
        """Have values written into memory; how long each is, None where it is not there.

        -1: it is longer than its memory. Nothing is written any more when this returns.
        """
        if max(buffer.nbytes for buffer in buffers) <= COPIED_BYTES:
            values = self.values(home, names)
            return list(map(_copy, values, buffers))
        lengths: list[int | None] = []
        for begin, end in _of_one_slot(names):
            require_time(deadline)
            try:
                lengths += self._fill_at_once(home, names[begin:end], buffers[begin:end])
            except TierError as error:
                if "exceeds buffer" not in str(error) and not _is_elsewhere(error):
                    raise
                lengths += [None if _is_elsewhere(error) else -1] * (end - begin)
        return lengths

    def _fill_at_once(
        self, home: Home, names: list[bytes], buffers: list[memoryview]
    ) -> list[int | None]:
        found = self._call(home, lambda client: client.mget(names, buffers=buffers))
        return [None if length is None else int(length) for length in found]

    def run(self, home: Home, commands: list[Command], *, changes: bool) -> list[Answer]:
        """Commands of one key each, in their order; what was refused is a TierError in its place.

        changes: what has no answer may still happen.
        """

        def run(client: Client) -> list[Answer]:
            batch = Batch(is_atomic=False)
            for command in commands:
                _add(batch, command)
            answered: list[Answer] = client.exec(batch, raise_on_error=False)
            return answered

        answers = self._call(home, run, changes=changes)
        return [self._answered(a) if isinstance(a, GlideError) else a for a in answers]

    def settle_doubts(self) -> None:
        """Wait until writes that were given up have happened, or never will. TierError."""
        for doubt in list(self._doubts):
            number, home = doubt
            with self._lock:
                client = next((c for c in self._clients if id(c) == number), None)
            if client is not None and home in self._homes:
                self.require_answering(home)
                try:
                    client.custom_command(["PING"])  # comes after them on its connection
                except GlideError as error:
                    raise _translated(error) from None
            self._doubts.discard(doubt)

    def _call(self, home: Home, call: Callable[[Client], _T], *, changes: bool = False) -> _T:
        self.require_answering(home)
        try:
            client = self._client(home)
        except TierError as error:
            self._fall_silent(home, str(error))
            raise
        try:
            return call(client)
        except GlideError as error:
            self._note(client, home, error, changes=changes)
            raise self._answered(error) from None  # held by no name: views hang on its frames

    def _answered(self, error: GlideError) -> TierError:
        found = _translated(error)
        if _is_elsewhere(found):
            self._wake.set()
        return found

    def _note(self, client: Client, home: Home, error: GlideError, *, changes: bool) -> None:
        found = _translated(error)
        if found.reason in (TierReason.TIMEOUT, TierReason.UNREACHABLE):
            if changes:
                self._doubts.add((id(client), home))
            self._fall_silent(home, str(found))
            self._wake.set()
        if isinstance(error, ClosingError) or _is_login(found):
            self._drop(home, client)

    def _fall_silent(self, home: Home, why: str) -> None:
        self._silent.add(home)
        self._say(home, why)

    # -- clients ------------------------------------------------------------------------------

    def _client(self, home: Home) -> Client:
        """This thread's own for the server. TierError where it can't be had."""
        mine: dict[Home, Client] = self._own.__dict__.setdefault("clients", {})
        client = mine.get(home)
        if client is None:
            client = mine[home] = self._connect(home)
            with self._lock:
                self._clients.append(client)
        return client

    def _drop(self, home: Home, client: Client) -> None:
        self._own.clients.pop(home, None)
        with self._lock:
            if client in self._clients:
                self._clients.remove(client)
        client.close()

    def _connect(self, home: Home) -> Client:
        options = self._options
        host, _, port = home.rpartition(":")
        extra = AdvancedGlideClientConfiguration(
            connection_timeout=round(options.connect_timeout_seconds * 1000),
            tls_config=self._tls() if options.tls else None,
        )
        try:
            return GlideClient.create(
                GlideClientConfiguration(
                    [NodeAddress(host.strip("[]"), int(port))],
                    use_tls=options.tls,
                    credentials=self._credentials(),
                    request_timeout=round(options.request_timeout_seconds * 1000),
                    client_name="kvd",
                    advanced_config=extra,
                )
            )
        except ConfigurationError as error:
            raise TierUnusable(f"the client refuses the options: {error}") from None
        except GlideError as error:
            raise _translated(error) from None

    def _credentials(self) -> ServerCredentials | None:
        if self._options.password_file is None:
            return None
        secret = secret_of("password_file", self._options.password_file)
        return ServerCredentials(password=secret, username=self._options.username or None)

    def _tls(self) -> TlsAdvancedConfiguration:
        options = self._options
        return TlsAdvancedConfiguration(
            root_pem_cacerts=content_of("ca_file", options.ca_file) if options.ca_file else None,
            client_cert_path=options.cert_file,
            client_key_path=options.key_file,
        )

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
            if _is_login(error):
                why = f"password_file, username: the servers refuse them: {error}"
                raise TierUnusable(why) from None
            raise
        for home in list(self._homes):
            client: Client = None
            try:
                client = self._client(home)
                self._hear(home, _parsed(client.custom_command(["INFO"])))
            except GlideError as error:
                self._note(client, home, error, changes=False)
            except TierError as error:
                self._fall_silent(home, str(error))
        self._said.pop("", None)

    def _hear(self, home: Home, said: dict[str, str]) -> None:
        self.told[home] = said
        if said.get("loading", "0") == "0":
            self._silent.discard(home)
            self._said.pop(home, None)

    def _learn_slots(self, asked: Home, client: Client) -> None:
        slots, homes = [NOBODY] * SLOTS, [asked]
        try:
            ranges = client.custom_command(["CLUSTER", "SLOTS"])
        except GlideError as error:
            if "cluster support disabled" not in str(error):
                self._note(client, asked, error, changes=False)
                raise _translated(error) from None
            if len(self._options.addresses) > 1:
                raise TierUnusable(
                    "addresses: there are several, and they are no cluster"
                ) from None
            slots = [asked] * SLOTS
        else:
            homes = []
            for begin, end, primary, *_ in ranges:
                host = primary[0].decode() if primary[0] else asked.rpartition(":")[0]
                home = f"{host}:{primary[1]}"
                slots[begin : end + 1] = [home] * (end + 1 - begin)
                homes.append(home)
        self._slots, self._homes = slots, list(dict.fromkeys(homes))
        self._silent.intersection_update(homes)
        self.told = {home: said for home, said in self.told.items() if home in homes}

    def _say(self, home: Home, why: str) -> None:
        """Once for each server that falls silent."""
        if home not in self._said:
            self._said[home] = why
            log.warning("%s: %s", home or "the tier's servers", why)


def _add(batch: Any, command: Command) -> None:
    """The batch knows the commonest ones, and copies their values once less."""
    match command:
        case ["SET", name, value]:
            batch.set(name, value)
        case ["GET", name]:
            batch.get(name)
        case _:
            batch.custom_command(command)


def _copy(value: bytes | None, buffer: memoryview) -> int | None:
    if value is None:
        return None
    if len(value) > buffer.nbytes:
        return -1
    buffer[: len(value)] = value
    return len(value)


def _of_one_slot(names: list[bytes]) -> Iterator[tuple[int, int]]:
    """Runs of names of one block."""
    begin = 0
    for _, run in itertools.groupby(names, lambda name: name[: name.index(b"}")]):
        end = begin + len(list(run))
        yield begin, end
        begin = end


def _translated(error: GlideError) -> TierError:
    said = str(error)
    if isinstance(error, GlideTimeoutError):
        return TierTimeout(f"no answer in time: {said}")
    if said.startswith("OOM") or ": OOM" in said:
        return TierError(said, TierReason.NO_SPACE)
    away = isinstance(error, ClosingError | GlideConnectionError)
    if any(word in said for word in _REFUSED_LOGIN):
        return TierError(said, TierReason.REFUSED)
    if away or any(word in said for word in _AWAY):
        return TierError(said, TierReason.UNREACHABLE)
    return TierError(said, TierReason.REFUSED)


def _is_elsewhere(error: TierError) -> bool:
    """Whether a slot has moved, or is about to."""
    return any(word in str(error) for word in _MOVED)


def _is_login(error: TierError) -> bool:
    return any(word in str(error) for word in _REFUSED_LOGIN)


def _parsed(told: bytes) -> dict[str, str]:
    """What a server says of itself, by its words."""
    lines = told.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)
