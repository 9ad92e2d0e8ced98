"""Runs tests in forked processes of one pytest that has collected once: which lines each test runs,
and whether any of those that run a mutant's lines sees it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import coverage
import pytest
from _pytest.runner import runtestprotocol
from _pytest.warnings import catch_warnings_for_item
from hypothesis import Phase, settings

from tests.mutation.mutants import Mutant
from tests.mutation.rooms import Room
from tests.tidy.source import ROOT

CHILD = Path(__file__).parent / "child"
"""On the path of what a trial starts: its module is run by each Python process first."""
MARK = "KVD_MUTATION_TRIAL"
"""In the environment of all that a trial starts: its number, by which it is ended with the trial.
"""

PATIENCE = 10
"""A test hangs that takes so many times what it takes without a mutant, and SPARE_S."""
SPARE_S = 3.0
MEMORY_BYTES = 4 << 30  # more than a trial has at its start: one that takes it fails
WALL_S = 600.0  # a trial that waits for something that never comes

Lines = dict[str, list[int]]
Tell = Callable[..., None]  # what a process says last: it ends with it
Job = tuple[str, Callable[[Tell], None]]


@dataclass(frozen=True)
class Seen:
    """What one test does without a mutant: time by its room's clock, and lines by module; a slow
    one's are those of its first `slow_s`."""

    seconds: float
    lines: Lines
    slow: bool = False

    def is_seen_to_run(self, mutant: Mutant) -> bool:
        return not set(mutant.lines).isdisjoint(self.lines.get(mutant.path, ()))

    def may_run(self, mutant: Mutant) -> bool:
        return self.slow or self.is_seen_to_run(mutant)


class Session:
    """A plugin of pytest's: does `work` with the tests that were collected, runs none itself."""

    def __init__(self, work: Callable[[dict[str, pytest.Item]], None]) -> None:
        self._work = work

    def pytest_collection(self) -> None:
        """Before any test is imported. One failure ends a trial: it need not be the smallest."""
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutation", settings.get_profile("ci"), phases=phases)
        settings.load_profile("mutation")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for item in session.items:
            # It collects garbage at each module's end, and tests of one trial are of many modules.
            if "_nothing_left_behind" in getattr(item, "fixturenames", ()):
                item.fixturenames.remove("_nothing_left_behind")  # type: ignore[attr-defined]
        self._work({item.nodeid: item for item in session.items})
        return True


def collect_and(work: Callable[[dict[str, pytest.Item]], None], tests: Sequence[str]) -> int:
    """The exit status of pytest."""
    words = [*tests, "-qq", "--tb=native", "--no-header", "-p", "no:cacheprovider"]
    return int(pytest.main([*words, "--rootdir", str(ROOT)], plugins=[Session(work)]))


# -- trials -------------------------------------------------------------------------------------


def traced(
    items: Iterable[pytest.Item], room: Room, processes: int
) -> Iterator[tuple[str, Seen | None]]:
    """What each test runs, in whatever order they end; None for one that fails as it is."""
    work = ((item.nodeid, partial(_trace, item, room)) for item in items)
    for name, said in forked(work, processes):
        if said.get("failed"):
            yield name, None
        else:
            lines, slow = said.get("lines", {}), said.get("slow", True)
            yield name, Seen(said.get("seconds", room.slow_s), lines, slow)


def _trace(item: pytest.Item, room: Room, tell: Tell) -> None:
    _limit_memory(room)
    of_children = place_of(os.getpid()) / "lines"
    if room.has_processes:
        own_place(item)
        of_children.touch()
        begin_children(KVD_TRACE=str(of_children), KVD_TRACED=":".join(map(str, room.paths())))
    include = [f"{path}/*" if path.is_dir() else str(path) for path in room.paths()]
    tracer = coverage.Coverage(data_file=None, include=include, config_file=False)
    tracer.set_option("run:disable_warnings", ["no-data-collected"])  # a test of a test's parts
    begun = _now(room)

    def end(failed: bool, slow: bool) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.alarm(30)  # ends it: the tracer may have been stopped with a lock of its own held
        tracer.stop()
        data = tracer.get_data()
        found = {(f, line) for f in data.measured_files() for line in data.lines(f) or ()}
        for words in of_children.read_text().splitlines() if room.has_processes else ():
            place = words.rpartition(":")
            found.add((place[0], int(place[2])))
        lines: Lines = {}
        for path, line in sorted(found):
            if room.has(path):
                lines.setdefault(os.path.relpath(path, ROOT), []).append(line)
        tell(failed=failed, seconds=_now(room) - begun, lines=lines, slow=slow)

    _after_seconds(room, room.slow_s, lambda: end(failed=False, slow=True))
    tracer.start()
    end(failed=_fails(item), slow=False)


def tried(
    mutants: Sequence[Mutant],
    items: dict[str, pytest.Item],
    seen: dict[str, Seen],
    room: Room,
    seconds: float,
    processes: int,
) -> Iterator[tuple[Mutant, dict[str, Any]]]:
    """What became of each mutant: killed or survived, by which test, after how long.

    Quick tests come first. Once `seconds` by the room's clock are used up no further test begins.
    """
    functions = _functions(room)
    by_key = {mutant.key: mutant for mutant in mutants}

    def work() -> Iterator[Job]:
        for mutant in mutants:
            usual = [(name, each) for name, each in seen.items() if each.may_run(mutant)]
            usual.sort(key=lambda one: after_others(one[1], mutant))
            tests = [(items[name], each) for name, each in usual]
            its = functions.get((mutant.path, mutant.function), [])
            yield mutant.key, partial(_try, mutant, its, tests, room, seconds)

    for key, said in forked(work(), processes):
        yield by_key[key], said or {"verdict": "killed", "by": "the process died or hung"}


def after_others(seen: Seen, mutant: Mutant) -> tuple[bool, bool, float]:
    """By this tests are put in order: those that are the likeliest to see a mutant soon first."""
    return seen.slow, not seen.is_seen_to_run(mutant), seen.seconds


def _try(
    mutant: Mutant,
    functions: Sequence[FunctionType],
    tests: Sequence[tuple[pytest.Item, Seen]],
    room: Room,
    seconds: float,
    tell: Tell,
) -> None:
    _limit_memory(room)
    try:
        plant(mutant, functions)
    except (SyntaxError, ValueError) as error:
        tell(verdict="impossible", by=str(error))
        return
    if room.has_processes:
        place = own_place(tests[0][0] if tests else None)
        told = place / "mutant.json"
        told.write_text(json.dumps({"path": str(ROOT / mutant.path), "text": mutant.text}))
        begin_children(KVD_MUTANT=str(told))
    begun = _now(room)
    ran = 0
    for item, usual in tests:
        left = seconds - (_now(room) - begun)
        if left <= 0:
            break
        if usual.slow:
            _after_seconds(room, left, partial(tell, verdict="survived", tests=ran, finished=False))
        else:
            hung = partial(tell, verdict="killed", by=f"{item.nodeid}, which hung")
            _after_seconds(room, PATIENCE * usual.seconds + SPARE_S, hung)
        if _fails(item):
            tell(verdict="killed", by=item.nodeid)
            return
        ran += 1
    tell(verdict="survived", tests=ran, finished=ran == len(tests))


def plant(mutant: Mutant, functions: Sequence[FunctionType]) -> None:
    """The functions' code becomes the mutant's; ValueError where it has other free variables."""
    compiled = compile(mutant.text, str(ROOT / mutant.path), "exec", dont_inherit=True)
    codes = [code for code in _codes(compiled) if code.co_qualname == mutant.function]
    assert len(codes) == 1, f"{mutant.key}: {len(codes)} functions have its name"
    for function in functions:
        function.__code__ = codes[0]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _functions(room: Room) -> dict[tuple[str, str], list[FunctionType]]:
    """Every function of the room, by path and name; imported names are the same function."""
    found: dict[tuple[str, str], list[FunctionType]] = {}
    for each in gc.get_objects():
        if isinstance(each, FunctionType) and room.has(each.__code__.co_filename):
            path = os.path.relpath(each.__code__.co_filename, ROOT)
            found.setdefault((path, each.__code__.co_qualname), []).append(each)
    return found


def _fails(item: pytest.Item) -> bool:
    config, hook = item.config, item.ihook
    with catch_warnings_for_item(config=config, ihook=hook, when="runtest", item=item):  # its marks
        return any(report.failed for report in runtestprotocol(item, log=False))


def _limit_memory(room: Room) -> None:
    """What a trial takes beyond it fails. A fake GPU reserves more address space than any limit:
    with processes only memory of their own that they may write counts."""
    pages = Path("/proc/self/statm").read_text().split()
    limit, has = (resource.RLIMIT_AS, 0) if not room.has_processes else (resource.RLIMIT_DATA, 5)
    most = int(pages[has]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(limit, (most, most))


def _now(room: Room) -> float:
    return time.monotonic() if room.has_processes else time.process_time()


_timer: threading.Timer | None = None


def _after_seconds(room: Room, seconds: float, then: Callable[[], None]) -> None:
    """By the room's clock, from now and not from an earlier call; `then` ends this process."""
    global _timer
    if room.has_processes:  # the tests' own timer is the wall's, by its signal
        if _timer is not None:
            _timer.cancel()
        _timer = threading.Timer(seconds, then)
        _timer.daemon = True
        _timer.start()
        return

    def end(_signal: int, _frame: FrameType | None) -> None:
        then()

    signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, max(seconds, 0.001))


# -- what a trial starts ------------------------------------------------------------------------


def place_of(trial: int) -> Path:
    """Where a trial's tests lay their files; sockets' paths are short."""
    return Path(tempfile.gettempdir()) / f"kvd-trial-{trial}"


def own_place(item: pytest.Item | None) -> Path:
    """This process's tests lay their files in its own place, which goes with it."""
    place = place_of(os.getpid())
    place.mkdir()
    if item is not None:
        item.config._tmp_path_factory._basetemp = place  # type: ignore[attr-defined]
    tempfile.tempdir = os.environ["TMPDIR"] = str(place)
    return place


def begin_children(**environment: str) -> None:
    """Every Python process that this one starts runs `child/sitecustomize.py` first."""
    paths = [str(CHILD), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ.update(environment)
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ[MARK] = str(os.getpid())


def end_children(trial: int) -> None:
    """End all that a trial left running, stopped processes too, and remove its files."""
    mark = f"{MARK}={trial}".encode()
    left = True
    while left:
        left = False
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != os.getpid():
                with contextlib.suppress(OSError):  # it ended meanwhile
                    if mark in (folder / "environ").read_bytes().split(b"\0"):
                        os.kill(int(folder.name), signal.SIGKILL)
                        left = True
    shutil.rmtree(place_of(trial), ignore_errors=True)
    for path in Path("/dev/shm").glob(f"kvd-test-{trial}-*"):
        shutil.rmtree(path, ignore_errors=True)


# -- processes ----------------------------------------------------------------------------------


@dataclass
class _Trial:
    name: str
    pid: int
    began: float
    said: bytes = b""


def forked(work: Iterable[Job], processes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each piece of work in a process of its own, so many at a time; what it told, or {}."""
    gc.collect()
    gc.freeze()  # what is here is shared with the forks, not written by their collections
    try:
        yield from _at_a_time(iter(work), processes)
    finally:
        gc.unfreeze()


def _at_a_time(waiting: Iterator[Job], processes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    running: dict[int, _Trial] = {}
    ended = False
    while running or not ended:
        while not ended and len(running) < processes:
            job = next(waiting, None)
            if job is None:
                ended = True
            else:
                reader, trial = _fork(*job)
                running[reader] = trial
        for reader in select.select(list(running), [], [], 1.0)[0] if running else ():
            trial = running[reader]
            part = os.read(reader, 1 << 16)
            trial.said += part
            if not part:
                os.close(reader)
                os.waitpid(trial.pid, 0)
                end_children(trial.pid)
                del running[reader]
                yield trial.name, json.loads(trial.said or b"{}")
        for trial in running.values():
            if time.monotonic() - trial.began > WALL_S:
                os.killpg(trial.pid, signal.SIGKILL)
                end_children(trial.pid)


def _fork(name: str, work: Callable[[Tell], None]) -> tuple[int, _Trial]:
    reader, writer = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(writer)
        return reader, _Trial(name, pid, time.monotonic())
    try:
        os.close(reader)
        os.setpgid(0, 0)
        for descriptor in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        work(lambda **said: _tell(writer, said))
    finally:
        os._exit(1)


def _tell(writer: int, said: dict[str, Any]) -> None:
    words = json.dumps(said).encode()
    while words:
        words = words[os.write(writer, words) :]
    os._exit(0)
