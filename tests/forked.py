"""Python processes, forked from one that has their modules: imports are most of a start.

The tests start a thousand daemons, as many engines, and hundreds of other commands. What is forked
runs its module from the first line, with the arguments, variables and folder that it was given;
only its imports have been done before. What forks stays for a whole run of pytest, and ends with
it. Each environment that is asked for a second time has one.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import pkgutil
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO

from tests import leaks

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 1 << 17  # of an order: Linux takes up to 32 pages for one variable or argument
KVD = "kvd"
# What is imported beforehand, with all that is in it, for each module that may run.
IMPORTED = {
    KVD: "kvd.cli",
    "tests.engine.forked_engine": "examples.engine",
    "tests.faults.probe_engine": "tests.client.small_engine",
}
MOST_FORKERS = 10  # 70 MiB each; one with PyTorch 300
MOST_DESCRIPTORS = 16  # that go with an order
SECONDS = 60.0  # for a command that ends by itself
# May differ between what forks and what is forked: nothing reads it.
UNREAD = {"PYTEST_CURRENT_TEST"}
# What a module reads as it is imported; `kvd serve` sets it before it imports gRPC.
BEFORE_IMPORTS = {"GRPC_ENABLE_FORK_SUPPORT": "0", "OPENBLAS_NUM_THREADS": "1"}


class ForkedProcess:
    """What tests use of a `subprocess.Popen`, for a process that is not this one's child."""

    def __init__(self, pid: int, told: IO[bytes]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._told = told

    def poll(self) -> int | None:
        """Its exit status once it has ended, -N where signal N ended it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Likewise, once it has ended; `subprocess.TimeoutExpired` after so many seconds."""
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            text = self._told.read()
            assert text, f"what had forked {self.pid} is gone: how that ended isn't known"
            self.returncode = int(text)
            self._told.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forker:
    """The process that forks: a Python with a module's imports, done with these variables."""

    def __init__(self, python: str, module: str, environment: dict[str, str]) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [python, "-m", __name__, str(theirs.fileno()), module],
                env=environment | BEFORE_IMPORTS,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                pass_fds=(theirs.fileno(),),
            )
        leaks.kept.add(self._process.pid)

    def start(
        self,
        words: list[str],
        environment: dict[str, str],
        streams: tuple[IO[bytes], IO[bytes], IO[bytes]],
        *,
        inherited: Sequence[int] = (),
        own_session: bool = False,
    ) -> ForkedProcess:
        """The module and these words, with the same variables but for those that nobody reads."""
        reads, writes = os.pipe()
        told = os.fdopen(reads, "rb", buffering=0)
        numbers = [0, 1, 2, *inherited]
        order = json.dumps([words, environment, str(Path.cwd()), own_session, numbers]).encode()
        try:
            given = [writes, *(stream.fileno() for stream in streams), *inherited]
            socket.send_fds(self._orders, [order], given)
        finally:
            os.close(writes)
        return ForkedProcess(int(self._orders.recv(64)), told)


_Kind = tuple[str, str, frozenset[tuple[str, str]]]  # Python, module, variables that are read
_forkers: dict[_Kind, Forker] = {}
_asked: set[_Kind] = set()  # once or more often


def _forker_for(python: str, module: str, environment: dict[str, str]) -> Forker | None:
    """Who has done its imports with these variables. None: the first one does without."""
    read = frozenset((name, environment[name]) for name in environment.keys() - UNREAD)
    kind = (python, module, read)
    if kind not in _forkers and kind in _asked and len(_forkers) < MOST_FORKERS:
        _forkers[kind] = Forker(python, module, environment)
    _asked.add(kind)
    return _forkers.get(kind)


def start(
    words: list[str],
    *,
    output: IO[bytes],
    errors: IO[bytes],
    given: IO[bytes] | None = None,
    environment: dict[str, str],
    python: str = sys.executable,
    module: str = KVD,
    inherited: Sequence[int] = (),
    own_session: bool = False,
) -> ForkedProcess | subprocess.Popen[bytes]:
    """`python -m` and these words: forked where that makes no difference, else started.

    `given` is what it reads; nothing without. The module is one of `IMPORTED`. `inherited` are
    descriptors beside the three streams, which it has under the same numbers.
    """
    with Path(os.devnull).open("rb") as nothing:
        streams = (given or nothing, output, errors)
        if forker := _forker_for(python, module, environment):
            return forker.start(
                words, environment, streams, inherited=inherited, own_session=own_session
            )
        return subprocess.Popen(
            [python, "-m", module, *words],
            env=environment,
            stdin=streams[0],
            stdout=output,
            stderr=errors,
            pass_fds=inherited,
            start_new_session=own_session,
        )


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python -m kvd` and these words, to its end, with these variables beside the others."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        environment = os.environ | variables
        process = start(list(words), output=output, errors=errors, environment=environment)
        try:
            status = process.wait(SECONDS)
        finally:
            process.kill()
        for file in (output, errors):
            file.seek(0)
        out, said = output.read().decode(), errors.read().decode()
        return subprocess.CompletedProcess([KVD, *words], status, out, said)


def serve(orders: socket.socket) -> tuple[bytes, list[int]] | None:
    """Fork at each order, and tell of each end, until nobody orders.

    Returns in what was forked, too: its order, and its descriptors.
    """
    with selectors.DefaultSelector() as waits:
        waits.register(orders, selectors.EVENT_READ)
        while True:
            for key, _ in waits.select():
                if key.fileobj is not orders:  # a child's end
                    waits.unregister(key.fd)
                    os.close(key.fd)
                    _tell_end(*key.data)
                    continue
                order, received, _, _ = socket.recv_fds(orders, MOST_BYTES, MOST_DESCRIPTORS)
                if not order:
                    return None
                told, *given = received
                if (pid := os.fork()) == 0:
                    orders.detach()
                    return order, given
                for each in given:
                    os.close(each)
                waits.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, told))
                orders.send(str(pid).encode())


def _tell_end(pid: int, told: int) -> None:
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
    os.close(told)


def become(module: str, order: bytes, given: list[int]) -> None:
    """Be what `python -m` is at the module's first line, as the order says, and run to its end."""
    words, environment, folder, own_session, numbers = json.loads(order)
    if own_session:
        os.setsid()
    os.chdir(folder)
    beyond = [fcntl.fcntl(each, fcntl.F_DUPFD, max(numbers) + 1) for each in given]
    for number, each in zip(numbers, beyond, strict=True):
        os.dup2(each, number)
    close_all_but(numbers)
    os.environ.clear()
    os.environ.update(environment)
    run_as_main(module, words)


def close_all_but(numbers: Iterable[int]) -> None:
    """Every other descriptor of this process."""
    for below, above in pairwise([-1, *sorted(numbers), os.sysconf("SC_OPEN_MAX")]):
        if below + 1 < above:  # Python 3.11 takes 0 to 0 for all
            os.closerange(below + 1, above)


def run_as_main(module: str, words: Sequence[str]) -> None:
    """What `python -m` does, but for the start of a Python."""
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def do_imports(name: str) -> None:
    """A module, or a package with all that is in it."""
    room = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(room, "__path__", ()), name + "."):
        importlib.import_module(found.name)


if __name__ == "__main__":
    descriptor, module = sys.argv[1:]
    do_imports(IMPORTED[module])
    if forked := serve(socket.socket(fileno=int(descriptor))):
        become(module, *forked)
