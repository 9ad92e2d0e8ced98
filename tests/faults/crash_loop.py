"""kill -9 of daemon, movers and engines in any order, for as long as wanted.

Every byte that is loaded is checked, and what was said to be stored is expected to be found: the
pool has room for all of it, so nothing may be missing but what an operator cleared.

With a tier the pool has room for a small part, and the rest is on two disks, which fail, lie and
are damaged, and whose process is killed and frozen, too. Then nothing is expected to be found, but
that most of what is comes from the disks; and what was cleared stays gone.

    python -m tests.faults.crash_loop --seconds 600 --seed 1
    python -m tests.faults.crash_loop --tier --seconds 3000 --turns 200 --seed 1
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvd.cli.verify import ask
from tests.client.content import block_hashes
from tests.faults.probe import Probe, ProbeFailed
from tests.faults.scene import Scene
from tests.faults.tier_strikes import TierStrikes
from tests.waiting import wait_until

MOST = 40  # blocks of a prompt
PROMPTS = 5  # a turn, for each model
ROUNDS = 12  # stores and loads that an engine does in a turn
TURNS_BETWEEN_CLEARS = 30
TURNS_BETWEEN_TIERED_CLEARS = 12
OLD_PROMPTS = 3  # looked for after a turn; with a tier more, to have it read
OLD_TIERED_PROMPTS = 10
SETTLED_SECONDS = 30.0
VERIFY_SECONDS = 60.0
LINES_SHOWN = 60  # of the daemon's log, where something is wrong
DEADLINES = {"submit-deadline-seconds": 2, "copy-deadline-seconds": 2}


@dataclass(slots=True)
class Engine:
    """One engine's place: its process comes and goes."""

    name: str
    changes: dict[str, object]
    probe: Probe | None = None
    answers_due: bool = False  # for the churn that it was given

    @property
    def model(self) -> str:
        return str(self.changes["model"])


@dataclass(slots=True)
class CrashLoop:
    """Remembers outside the daemon what must be there."""

    scene: Scene
    dice: random.Random
    engines: list[Engine]
    below: TierStrikes | None = None
    roomy: bool = False  # there is a tier, and the pool has room for everything all the same
    stored: dict[str, set[str]] = field(default_factory=dict)  # keys by model, in hex
    prompts: list[str] = field(default_factory=list)
    cleared: list[str] = field(default_factory=list)  # prompts that must not be found
    done: Counter[str] = field(default_factory=Counter)
    killed: set[int] = field(default_factory=set)  # movers, in this turn
    turn: int = 0

    def start(self) -> None:
        for engine in self.engines:
            self.stored.setdefault(engine.model, set())
            self._start(engine)
        for engine in self.engines:
            self._probe(engine).wait_usable()

    def one_turn(self) -> None:
        """Everybody works, some are killed; then all is whole again and nothing is missing."""
        self.turn += 1
        prompts = [f"turn {self.turn} prompt {number}" for number in range(PROMPTS)]
        self.prompts += prompts
        for engine in self.engines:
            self._probe(engine).order("churn", prefixes=prompts, rounds=ROUNDS, most=MOST)
            engine.answers_due = True
        self.killed.clear()
        for strike in self.dice.choices(self.strikes(), k=self.dice.randint(1, 4)):
            time.sleep(self.dice.uniform(0.0, 0.3))
            self._suffer(strike)
            self.done[strike.__name__] += 1
        self._make_whole()
        if self.below is None or self.roomy:
            self._check(self._with_some_old(prompts, OLD_PROMPTS))
            between = TURNS_BETWEEN_CLEARS
        else:
            self._check_below(self.below, self._with_some_old(prompts, OLD_TIERED_PROMPTS))
            between = TURNS_BETWEEN_TIERED_CLEARS
        if self.turn % between == 0:
            self._clear()

    def strikes(self) -> list[Callable[[], None]]:
        """What may happen in a turn; what stands there twice is twice as likely."""
        return [
            self.kill_daemon,
            self.kill_daemon,
            self.kill_mover,
            self.kill_mover,
            self.kill_engine,
            self.freeze_daemon,
            self.freeze_mover,
            self.verify,
            *(self.below.every_one() if self.below is not None else ()),
        ]

    def _suffer(self, strike: Callable[[], None]) -> None:
        strike()

    def _with_some_old(self, prompts: list[str], count: int) -> list[str]:
        return [*self.dice.sample(self.prompts, min(count, len(self.prompts))), *prompts]

    def _clear(self) -> None:
        self.scene.clear()
        self.cleared = self.dice.sample(self.prompts, min(OLD_TIERED_PROMPTS, len(self.prompts)))
        self.prompts.clear()
        for keys in self.stored.values():
            keys.clear()
        if self.below is not None:
            self.below.lost_pool = False
            self._check_cleared()

    # -- strikes ----------------------------------------------------------------------------

    def kill_daemon(self) -> None:
        self.scene.kill_daemon()
        time.sleep(self.dice.choice([0.0, 0.0, 0.1, 0.6]))
        self.scene.daemon.start()

    def kill_mover(self) -> None:
        movers = self.scene.daemon.movers()
        if movers:
            mover = self.dice.choice(movers)
            self.killed.add(mover)
            with contextlib.suppress(ProcessLookupError):
                os.kill(mover, signal.SIGKILL)

    def kill_engine(self) -> None:
        engine = self.dice.choice(self.engines)
        self._probe(engine).kill()
        engine.answers_due = False
        self._start(engine)

    def freeze_daemon(self) -> None:
        self.scene.daemon.freeze()
        time.sleep(self.dice.uniform(0.1, 1.5))
        self.scene.daemon.thaw()

    def freeze_mover(self) -> None:
        movers = self.scene.daemon.movers()
        if not movers:
            return
        mover = self.dice.choice(movers)
        with contextlib.suppress(ProcessLookupError):
            os.kill(mover, signal.SIGSTOP)
            time.sleep(self.dice.choice([0.1, 0.9, 3.0]))
            os.kill(mover, signal.SIGCONT)

    def verify(self) -> None:
        """`kvd verify` while everybody works."""
        self._verify()

    def _verify(self) -> None:
        report = ask(self.scene.daemon.socket, VERIFY_SECONDS)
        assert not report.findings, report.findings
        self.done["blocks verified by the daemon"] += report.blocks

    # -- after them -------------------------------------------------------------------------

    def _start(self, engine: Engine) -> None:
        if engine.probe in self.scene.probes:
            self.scene.probes.remove(engine.probe)
        engine.probe = self.scene.start_engine(engine.name, **engine.changes)

    def _probe(self, engine: Engine) -> Probe:
        assert engine.probe is not None, "it was never started"
        return engine.probe

    def _make_whole(self) -> None:
        for engine in self.engines:
            if engine.answers_due:
                said = self._answer_of(engine)
                engine.answers_due = False
                assert said["wrong"] == [], (engine.name, said)
                self.done["loaded"] += said["loaded"]
                self.done["stored"] += said["stored"]
        if self.below is not None:
            self.below.heal()
        for engine in self.engines:
            probe = self._probe(engine)
            probe.wait_usable()
            wait_until(partial(self._is_whole, probe), f"{engine.name}'s ranks")
            assert probe.ask("pump")["idle"], f"a job of {engine.name} never ends"
        for engine in self.engines:
            self.stored[engine.model].update(self._probe(engine).ask("take_stored"))
        wait_until(self._is_quiet, "the slots", SETTLED_SECONDS)
        self._verify()

    def _answer_of(self, engine: Engine) -> dict[str, Any]:
        said: dict[str, Any] = self._probe(engine).answer()
        return said

    def _is_whole(self, probe: Probe) -> bool:
        """Once nobody takes a mover for alive that was killed: on a busy machine it dies slowly."""
        sessions = {each.engine_id: each for each in self.scene.status().sessions}
        session = sessions.get(probe.engine_id)
        if session is None or self.killed & {rank.mover_pid for rank in session.ranks}:
            return False
        said = probe.ask("wait_usable")
        return session.usable and said["usable"] and not any(said["rank_problems"])

    def _is_quiet(self) -> bool:
        is_quiet = self.below is None or self.below.is_quiet()
        return is_quiet and self.scene.busy_slots() == 0

    def _check(self, prompts: list[str]) -> None:
        for model, stored in self.stored.items():
            engine = self.dice.choice([each for each in self.engines if each.model == model])
            found = self._probe(engine).ask("verify", prefixes=prompts, most=MOST)
            for prompt, answer in found.items():
                keys = [key.hex() for key in block_hashes(prompt, MOST)]
                due = next((n for n, key in enumerate(keys) if key not in stored), MOST)
                if answer["wrong"]:  # stored wrong, or loaded wrong: others would see it, too
                    answer["again"] = [
                        (each.name, self._probe(each).ask("load", prefix=prompt, count=MOST))
                        for each in self.engines
                        if each.model == model
                    ]
                assert answer["wrong"] == [], (engine.name, prompt, answer)
                assert answer["loaded"] == answer["found"], (engine.name, prompt, answer)
                if answer["found"] < due:
                    self._ask_again(self._probe(engine), prompt, due)
                self.done["verified"] += answer["loaded"]
                self.done["expected"] += due

    def _check_below(self, below: TierStrikes, prompts: list[str]) -> None:
        if below.lost_pool:  # with it went the word that there was a clear
            self.cleared.clear()
        self._check_cleared()
        before = below.promoted()
        for engine in self.engines:
            found = self._probe(engine).ask("verify", prefixes=prompts, most=MOST)
            for prompt, answer in found.items():
                assert answer["wrong"] == [], (engine.name, prompt, answer)
                assert answer["loaded"] == answer["found"], (engine.name, prompt, answer)
                self.done["verified"] += answer["loaded"]
        self.done["from the tier"] += below.promoted() - before
        wait_until(self._is_quiet, "the tier's copies", SETTLED_SECONDS)
        for name, count in below.descriptors().items():
            most = f"descriptors of {name}, at most"
            self.done[most] = max(self.done[most], count)

    def _check_cleared(self) -> None:
        for engine in self.engines if self.cleared else ():
            found = self._probe(engine).ask("verify", prefixes=self.cleared, most=MOST)
            answers = {prompt: answer["found"] for prompt, answer in found.items()}
            assert not any(answers.values()), f"what was cleared is found: {answers}"

    def _ask_again(self, probe: Probe, prompt: str, due: int) -> None:
        """A lookup may have been given up on a busy machine; a block that is lost stays lost."""
        self.done["lookups given up"] += 1
        page, call = probe.hits(prompt, MOST)
        said = f"{probe.ask('probe', prefix=prompt, count=MOST)}, {self.scene.status().pool}"
        assert min(page, call) >= due, (probe.engine_id, prompt, due, page, call, said)


def last_words(scene: Scene) -> str:
    lines = scene.daemon.log.read_text(errors="replace").splitlines()
    return "\n".join(lines[-LINES_SHOWN:])


def crash_loop(
    seconds: float, seed: int, turns: int | None = None, *, tier: bool = False
) -> Counter[str]:
    """What was done; AssertionError or ProbeFailed where anything was wrong."""
    scene, dice = Scene(**DEADLINES), random.Random(seed)
    below = TierStrikes(scene, dice) if tier else None
    if tier and dice.random() < 0.5:
        scene.daemon.flags["payload-checksums"] = "true"
    pool_bytes = 8 << 20 if tier else 512 << 20
    scene.daemon.pool_bytes, scene.daemon.extent_bytes = pool_bytes, 1 << 20
    alike: dict[str, object] = {"model": "alike", "block_bytes": 16 << 10, "num_blocks": 256}
    ranks: dict[str, object] = {"model": "ranks", "world_size": 2}
    engines = [Engine("one", alike), Engine("two", alike), Engine("ranks", ranks)]
    if tier:
        engines.append(Engine("salted", {**alike, "model": "salted", "salt": "another"}))
    loop = CrashLoop(scene, dice, engines, below)
    until = time.monotonic() + seconds
    try:
        scene.daemon.start()
        loop.start()
        while time.monotonic() < until and (turns is None or loop.turn < turns):
            loop.one_turn()
    except (AssertionError, ProbeFailed) as error:
        error.add_note(
            f"turn {loop.turn}, {dict(loop.done)}; the daemon said last:\n{last_words(scene)}"
        )
        raise
    finally:
        scene.close()
    loop.done["turns"] = loop.turn
    if below is not None:
        loop.done.update(below.done)
        assert loop.done["from the tier"], f"nothing came from the tier: {loop.done}"
    return loop.done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--turns", type=int)
    parser.add_argument("--tier", action="store_true", help="with two disks below a small pool")
    given = parser.parse_args()
    try:
        done = crash_loop(given.seconds, given.seed, given.turns, tier=given.tier)
    except (AssertionError, ProbeFailed) as error:
        notes = getattr(error, "__notes__", ())
        sys.stdout.write(f"seed {given.seed}: {error}\n" + "\n".join(notes) + "\n")
        return 1
    sys.stdout.write(f"seed {given.seed}: {dict(done)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
