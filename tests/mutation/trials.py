"""Runs tests in forked processes of one pytest that has collected once: which lines each test runs,
and whether any of those that run a mutant's lines sees it.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType, FrameType, FunctionType
from typing import Any

import coverage
import pytest
from _pytest.runner import runtestprotocol
from hypothesis import Phase, settings

from tests.mutation.mutants import CORE, Mutant
from tests.tidy.source import ROOT

TESTS = (
    "tests/core",
    *(f"tests/contract/test_{name}.py" for name in (
        "auto_policy", "eviction_policy_contract", "slot_queue", "turns_policy",
    )),
)  # fmt: skip
"""Tests of kvd/core alone."""
SLOW_S = 0.5
"""Of the processor, while its lines are traced: a test that takes longer counts as one that runs
every line, and comes last; first of these come those that ran the line within that time."""
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
    """What one test does without a mutant: processor time, and lines by module; a slow one's are
    those of its first SLOW_S."""

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


def collect_and(
    work: Callable[[dict[str, pytest.Item]], None], tests: Sequence[str] = TESTS
) -> int:
    """The exit status of pytest."""
    words = [*tests, "-qq", "--tb=native", "--no-header", "-p", "no:cacheprovider"]
    return int(pytest.main([*words, "--rootdir", str(ROOT)], plugins=[Session(work)]))


# -- trials -------------------------------------------------------------------------------------


def traced(items: Iterable[pytest.Item], processes: int) -> Iterator[tuple[str, Seen | None]]:
    """What each test runs, in whatever order they end; None for one that fails as it is."""
    work = ((item.nodeid, partial(_trace, item)) for item in items)
    for name, said in forked(work, processes):
        if said.get("failed"):
            yield name, None
        else:
            lines, slow = said.get("lines", {}), said.get("slow", True)
            yield name, Seen(said.get("seconds", SLOW_S), lines, slow)


def _trace(item: pytest.Item, tell: Tell) -> None:
    tracer = coverage.Coverage(data_file=None, include=[f"{CORE}/*"], config_file=False)
    tracer.set_option("run:disable_warnings", ["no-data-collected"])  # a test of a test's parts

    def end(failed: bool, slow: bool) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.alarm(30)  # ends it: the tracer may have been stopped with a lock of its own held
        tracer.stop()
        data = tracer.get_data()
        lines = {os.path.relpath(f, ROOT): data.lines(f) for f in data.measured_files()}
        tell(failed=failed, seconds=time.process_time(), lines=lines, slow=slow)

    _after_seconds(SLOW_S, lambda: end(failed=False, slow=True))
    tracer.start()
    end(failed=_fails(item), slow=False)


def tried(
    mutants: Sequence[Mutant],
    items: dict[str, pytest.Item],
    seen: dict[str, Seen],
    seconds: float,
    processes: int,
) -> Iterator[tuple[Mutant, dict[str, Any]]]:
    """What became of each mutant: killed or survived, by which test, after how long.

    Quick tests come first. Once `seconds` of the processor are used up no further test begins.
    """
    functions = _functions()
    by_key = {mutant.key: mutant for mutant in mutants}

    def work() -> Iterator[Job]:
        for mutant in mutants:
            usual = [(name, each) for name, each in seen.items() if each.may_run(mutant)]
            usual.sort(key=lambda one: after_others(one[1], mutant))
            tests = [(items[name], each) for name, each in usual]
            its = functions[mutant.path, mutant.function]
            yield mutant.key, partial(_try, mutant, its, tests, seconds)

    for key, said in forked(work(), processes):
        yield by_key[key], said or {"verdict": "killed", "by": "the process died or hung"}


def after_others(seen: Seen, mutant: Mutant) -> tuple[bool, bool, float]:
    """By this tests are put in order: those that are the likeliest to see a mutant soon first."""
    return seen.slow, not seen.is_seen_to_run(mutant), seen.seconds


def _try(
    mutant: Mutant,
    functions: Sequence[FunctionType],
    tests: Sequence[tuple[pytest.Item, Seen]],
    seconds: float,
    tell: Tell,
) -> None:
    try:
        plant(mutant, functions)
    except (SyntaxError, ValueError) as error:
        tell(verdict="impossible", by=str(error))
        return
    begun = time.process_time()
    ran = 0
    for item, usual in tests:
        left = seconds - (time.process_time() - begun)
        if left <= 0:
            break
        if usual.slow:
            _after_seconds(left, partial(tell, verdict="survived", tests=ran, finished=False))
        else:
            hung = partial(tell, verdict="killed", by=f"{item.nodeid}, which hung")
            _after_seconds(PATIENCE * usual.seconds + SPARE_S, hung)
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


def _functions() -> dict[tuple[str, str], list[FunctionType]]:
    """Every function of kvd/core, by path and name; imported names are the same function."""
    found: dict[tuple[str, str], list[FunctionType]] = {}
    for each in gc.get_objects():
        if isinstance(each, FunctionType) and each.__code__.co_filename.startswith(f"{CORE}/"):
            path = os.path.relpath(each.__code__.co_filename, ROOT)
            found.setdefault((path, each.__code__.co_qualname), []).append(each)
    return found


def _fails(item: pytest.Item) -> bool:
    return any(report.failed for report in runtestprotocol(item, log=False))


def _after_seconds(seconds: float, then: Callable[[], None]) -> None:
    """Of this process's own time; `then` ends it."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        then()

    signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, max(seconds, 0.001))


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
                del running[reader]
                yield trial.name, json.loads(trial.said or b"{}")
        for trial in running.values():
            if time.monotonic() - trial.began > WALL_S:
                os.kill(trial.pid, signal.SIGKILL)


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
        pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115, PTH123
        most = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        work(lambda **said: _tell(writer, said))
    finally:
        os._exit(1)


def _tell(writer: int, said: dict[str, Any]) -> None:
    words = json.dumps(said).encode()
    while words:
        words = words[os.write(writer, words) :]
    os._exit(0)
