"""The loop of crashes with all that can befall a node: `make chaos MINUTES=`.

Each episode has a daemon, a file system for its pool (a tmpfs of its own, with or without huge
pages) and a tier anew. In it come turns: engines store and load, while daemon, movers, engines and
the tier's process are killed and frozen, the daemon dies at steps of its commits, a neighbour
fills the pool's file system, and each life of the daemon has other settings. After each turn all
must be whole again within HANG_SECONDS (waits for a processor don't count), every byte that is
loaded right, nothing that was said to be stored lost (where the pool has room for all), `kvd
verify` without a finding, and nothing held that was not held before. What must be found is kept in
a file outside.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests import leaks
from tests.chaos import held
from tests.chaos.restless import RestlessDaemon
from tests.client.small_engine import PATIENCE_S
from tests.faults.crash_loop import MOST, PROMPTS, ROUNDS, CrashLoop, Engine
from tests.faults.scene import MIB, Scene
from tests.faults.tier_strikes import TierStrikes
from tests.small_tmpfs import fill, small_tmpfs

HANG_SECONDS = 10.0
# A store or a load amid strikes, by engines that wait for an answer for PATIENCE_S: others give up.
ORDER_SECONDS = HANG_SECONDS + PATIENCE_S
TURNS = 20  # of an episode
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
SPARE_BYTES = 8 * MIB  # of the tmpfs, beyond what the pool takes: what a neighbour may fill
HUGE = ("", ",huge=never", ",huge=always", ",huge=within_size", ",huge=advise")
WATCH_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Setting:
    """What an episode is played in."""

    roomy: bool  # room for everything: then nothing may be lost
    tier: bool
    extent_bytes: int
    pages: str  # an option of the tmpfs
    own_tmpfs: bool

    @property
    def pool_bytes(self) -> int:
        return (192 if self.roomy else 8) * MIB

    @property
    def tmpfs_bytes(self) -> int:
        """With the tables, 1/32, the reserve and its 256 KiB."""
        return self.pool_bytes + self.pool_bytes // 16 + 2 * MIB + SPARE_BYTES


@dataclass(slots=True)
class Worst:
    """The largest figures of a run."""

    whole_seconds: float = 0.0
    start_seconds: float = 0.0
    descriptors: int = 0
    mib: float = 0.0
    hangs: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Chaos(CrashLoop):
    """One episode."""

    daemon: RestlessDaemon = field(kw_only=True)
    mount: Path | None = None
    expected: Path = field(kw_only=True)
    worst: Worst = field(default_factory=Worst)
    first: held.Held | None = None
    filled: Path | None = None

    def strikes(self) -> list[Callable[[], None]]:
        strikes = CrashLoop.strikes(self)
        strikes += [self.die_at_a_step] * 4 + [self.stop_in_order]
        if self.mount is not None:
            strikes += [self.fill_file_system, self.free_file_system]
        if self.below is not None and self.roomy:
            strikes.remove(self.below.lose_pool)  # after it nothing could be expected
        return strikes

    def die_at_a_step(self) -> None:
        """The daemon's next life ends at a step of its commits, if it comes so far."""
        self.scene.kill_daemon()
        self.daemon.arm()
        self.daemon.start()

    def stop_in_order(self) -> None:
        self.scene.end_daemon()
        self.daemon.disarm()
        self.daemon.start()

    def fill_file_system(self) -> None:
        assert self.mount is not None
        if self.filled is None:
            self.filled = self.mount / "a neighbour's"
            # On huge pages some are left over, and the daemon takes and frees meanwhile.
            with contextlib.suppress(AssertionError, OSError):
                fill(self.mount, self.filled.name)

    def free_file_system(self) -> None:
        if self.filled is not None:
            self.filled.unlink()
            self.filled = None

    def _suffer(self, strike: Callable[[], None]) -> None:
        """A strike may find that the daemon has died at its step, or dies meanwhile."""
        self._revive()
        try:
            strike()
        except (OSError, AssertionError, grpc.RpcError):
            if not self._revive():
                raise

    def _revive(self) -> bool:
        """Start the daemon again where it has died at a step; whether it had."""
        if not self.daemon.has_died_at_a_step():
            return False
        self.scene.forget_caller()
        self.daemon.start()
        return True

    def _answer_of(self, engine: Engine) -> dict[str, Any]:
        probe = self._probe(engine)
        while not probe.has_answered(WATCH_SECONDS):
            self._revive()
        return CrashLoop._answer_of(self, engine)

    def _make_whole(self) -> None:
        self._take_answers()
        if self.daemon.is_armed and not self._revive():
            self._work_until_it_dies()
        began, before = time.monotonic(), self._waits()
        CrashLoop._make_whole(self)
        late = max(waited - before.get(pid, 0.0) for pid, waited in self._waits().items())
        seconds = time.monotonic() - began - late
        self.worst.whole_seconds = max(self.worst.whole_seconds, seconds)
        self._note_hang("being whole again", seconds)
        if self.daemon.slowest_start > HANG_SECONDS:
            self._note_hang(f"a start of {self.daemon.said_at_slowest}", self.daemon.slowest_start)
        self.worst.start_seconds = max(self.worst.start_seconds, self.daemon.slowest_start)
        self.daemon.slowest_start = 0.0
        self._count_leaks()
        self._remember()

    def _take_answers(self) -> None:
        for engine in self.engines:
            if engine.answers_due:
                before = held.waited_seconds(self._probe(engine).pid)
                said = self._answer_of(engine)
                engine.answers_due = False
                assert said["wrong"] == [], (engine.name, said)
                self.done["loaded"] += said["loaded"]
                self.done["stored"] += said["stored"]
                late = held.waited_seconds(self._probe(engine).pid) - before
                self._note_hang(f"an order of {engine.name}", said["slowest"] - late, ORDER_SECONDS)

    def _work_until_it_dies(self) -> None:
        """The strikes are over, and the daemon has not come to its step: engines work once more."""
        prompts = self.prompts[-PROMPTS:]
        for engine in self.engines:
            probe = self._probe(engine)
            probe.order("wait_usable")
            while not probe.has_answered(WATCH_SECONDS):
                self._revive()
            probe.answer()
            probe.order("churn", prefixes=prompts, rounds=ROUNDS // 2, most=MOST)
            engine.answers_due = True
        self._take_answers()
        if self.daemon.is_armed and not self._revive():
            self.scene.kill_daemon()
            self.daemon.disarm()
            self.daemon.start()

    def _waits(self) -> dict[int, float]:
        """How long each process has waited for a processor."""
        pids = [int(title.split()[0]) for title in leaks.child_processes()]
        return {pid: held.waited_seconds(pid) for pid in (*pids, os.getpid())}

    def _note_hang(self, what: str, seconds: float, most: float = HANG_SECONDS) -> None:
        if seconds > most:
            self.worst.hangs.append(f"turn {self.turn}: {what} took {seconds:.1f} s")

    def _count_leaks(self) -> None:
        ranks = sum(2 if engine.name == "ranks" else 1 for engine in self.engines)
        processes = 1 + ranks + len(self.engines) + (1 if self.below is not None else 0)
        found, wrong = held.settled(self.scene, self.first, processes)
        self.first = self.first or found
        self.worst.descriptors = max(self.worst.descriptors, found.daemon_descriptors)
        self.worst.mib = max(self.worst.mib, found.daemon_mib)
        if wrong:
            story = f"turn {self.turn}: {'; '.join(wrong)}: {held.who_is_there(self.scene)}"
            self.worst.leaks.append(story)

    # -- what must be found -----------------------------------------------------------------

    def _remember(self) -> None:
        """In a file that is replaced whole, outside of everything that dies."""
        state = {
            "turn": self.turn,
            "stored": {model: sorted(keys) for model, keys in self.stored.items()},
            "prompts": self.prompts,
            "cleared": self.cleared,
        }
        fresh = self.expected.with_suffix(".new")
        fresh.write_text(json.dumps(state))
        fresh.replace(self.expected)

    def _check(self, prompts: list[str]) -> None:
        state = json.loads(self.expected.read_text())
        self.stored = {model: set(keys) for model, keys in state["stored"].items()}
        CrashLoop._check(self, prompts)


def drawn(dice: random.Random, *, own_tmpfs: bool) -> Setting:
    roomy = dice.random() < 0.7
    return Setting(
        roomy=roomy,
        tier=not roomy or dice.random() < 0.6,
        extent_bytes=dice.choice([MIB, 2 * MIB] if roomy else [MIB]),
        pages=dice.choice(HUGE),
        own_tmpfs=own_tmpfs,
    )


@contextlib.contextmanager
def file_system(setting: Setting, where: Path) -> Iterator[Path | None]:
    """A tmpfs of the pool's own, or None where none can be mounted."""
    if not setting.own_tmpfs:
        yield None
        return
    with contextlib.ExitStack() as stack:
        for pages in (setting.pages, ""):
            try:
                mount = where / f"pool{pages.replace(',huge=', '-')}"
                made = small_tmpfs(mount, setting.tmpfs_bytes, pages)
                yield stack.enter_context(made)
                return
            except pytest.skip.Exception:
                mount.rmdir()
        yield None


def episode(
    dice: random.Random, setting: Setting, until: float, turns: int, worst: Worst
) -> Counter[str]:
    """What was done; AssertionError or ProbeFailed, with the last words, where it went wrong."""
    before = leaks.look()
    scene = Scene(**{"submit-deadline-seconds": 2, "copy-deadline-seconds": 2})
    with file_system(setting, scene.directory) as mount:
        daemon = RestlessDaemon(scene.directory, mount or scene.directory_of_pool, dice)
        daemon.flags = scene.daemon.flags
        daemon.pool_bytes, daemon.extent_bytes = setting.pool_bytes, setting.extent_bytes
        scene.daemon = daemon
        below = TierStrikes(scene, dice) if setting.tier else None
        if not setting.roomy:
            daemon.checksums = ("on", "off", "auto")
        daemon.module = "tests.chaos.failing_daemon"
        loop = Chaos(
            scene,
            dice,
            engines_of(setting),
            below,
            setting.roomy,
            daemon=daemon,
            mount=mount,
            expected=scene.directory.with_suffix(".expected"),
            worst=worst,
        )
        try:
            daemon.start()
            loop.start()
            while time.monotonic() < until and loop.turn < turns:
                loop.one_turn()
        except Exception as error:
            error.add_note(f"{setting}, turn {loop.turn}, expected: {loop.expected}")
            error.add_note(f"{dict(loop.done)}, {dict(daemon.done)}; it said last:")
            lines = daemon.log.read_text(errors="replace").splitlines()
            error.add_note("\n".join([each for each in lines if "cygrpc" not in each][-60:]))
            raise
        finally:
            if daemon.is_started:
                held.bury_orphans(scene)
            scene.close()
    loop.expected.unlink(missing_ok=True)
    left = leaks.wait_until_clean(before, 5.0)
    if left:
        worst.leaks.append(f"after an episode: {left}")
    loop.done["turns"] = loop.turn
    return loop.done + daemon.done + (below.done if below is not None else Counter())


def engines_of(setting: Setting) -> list[Engine]:
    alike: dict[str, object] = {"model": "alike", "block_bytes": 16 << 10, "num_blocks": 256}
    engines = [Engine("one", alike), Engine("two", alike)]
    engines.append(Engine("ranks", {"model": "ranks", "world_size": 2}))
    if setting.tier:
        engines.append(Engine("salted", {**alike, "model": "salted", "salt": "another"}))
    return engines


def adopt_orphans() -> None:
    """What a killed daemon leaves becomes a child of ours, and is seen."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
