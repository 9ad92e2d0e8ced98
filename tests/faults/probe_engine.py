"""The small engine in a process of its own, so that tests can kill it.

Orders come as JSON lines on standard input, one answer goes out for each on standard output.
"""

from __future__ import annotations

import ctypes
import json
import logging
import random
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from kvd_client import ScheduledRequest, SchedulerOptions
from kvd_client.draft import BlockRun, QueryDraft, request_context
from tests.client.content import TOKENS, block_hashes
from tests.client.small_engine import IDLE_S, PATIENCE_S, WAIT_S, SmallEngine

log = logging.getLogger("probe")

PR_SET_PDEATHSIG = 1
LOAD_DEADLINE_S = 20.0  # a starved mover is no hung one, and what it was to load would be missed
OPTIONS = SchedulerOptions(lookup_deadline_s=0.02, lookup_give_up_s=PATIENCE_S)


class ProbeEngine:
    """Every public method is an order; its arguments are the order's fields."""

    def __init__(self, socket: str, **settings: Any) -> None:
        settings = {"load_deadline_s": LOAD_DEADLINE_S, "options": OPTIONS, **settings}
        self._engine = SmallEngine(socket, **settings)
        self._dice = random.Random(self._engine.settings.engine_id)

    # -- state ------------------------------------------------------------------------------

    def wait_usable(self, seconds: float = 35.0, after: int = 0) -> dict[str, Any]:
        """Step until there is a usable session of a later generation than `after`."""
        deadline = time.monotonic() + seconds
        while True:
            session = self._engine.connection.session
            if session is not None and session.generation > after:
                self._engine.wait_usable()  # its ranks, too
                return self.status()
            if time.monotonic() > deadline:
                raise TimeoutError(repr(self.status()))
            self.step()
            time.sleep(0.005)

    def status(self) -> dict[str, Any]:
        engine = self._engine
        session = engine.connection.session
        return {
            "usable": session is not None,
            "generation": session.generation if session else 0,
            "epoch": session.epoch if session else "",
            "problem": engine.connection.problem,
            "rank_problems": [rank.worker.problem for rank in engine.ranks],
            "finished": sorted(engine.finished_loads),
            "failed": sorted(engine.failed_loads),
            "stored": len(engine.stored),
            "room": session.room(0) if session else 0,
            "idle": not engine.scheduler.has_pending_work(),
            "refusals": dict(engine.connection.refusals),
        }

    def take_stored(self) -> list[str]:
        """Keys that were reported as stored since the last call, in hex."""
        stored, self._engine.stored = self._engine.stored, []
        return [key.hex() for key in stored]

    # -- steps ------------------------------------------------------------------------------

    def step(self) -> dict[str, Any]:
        self._engine.step()
        return {}

    def ready(self) -> dict[str, Any]:
        """Say ready for all that was held back."""
        self._engine.ready()
        return {}

    def pump(self, seconds: float = WAIT_S) -> dict[str, Any]:
        """Step until every job has been reported, or time is up."""
        deadline = time.monotonic() + seconds
        while self._engine.scheduler.has_pending_work() and time.monotonic() < deadline:
            self.step()
            time.sleep(IDLE_S)
        return self.status()

    def pump_for(self, seconds: float) -> dict[str, Any]:
        """Keep stepping for a while, which renews leases."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.step()
            time.sleep(0.01)
        return self.status()

    # -- stores and loads -------------------------------------------------------------------

    def store(
        self,
        prefix: str,
        count: int,
        first_block: int = 0,
        wait: bool = True,
        hold: bool = False,
        finish: bool = True,
    ) -> dict[str, Any]:
        """Compute a prompt's blocks and let them be stored. The number stored when waited for."""
        request = f"store {prefix} {self._dice.random()}"
        before = len(self._engine.stored)
        table = self._engine.prefill(request, prefix, count, first_block, hold)
        if finish:
            self._engine.scheduler.request_finished(request, [table])
        if wait:
            self.pump()
        return {"stored": len(self._engine.stored) - before, "request": request}

    def go_on(
        self, request: str, count: int, first_block: int = 0, seconds: float = 20.0
    ) -> dict[str, Any]:
        """Keep a request running that `store` has not finished, until all of it is stored or time
        is up; the number stored meanwhile."""
        table, before = self._engine.table(count, first_block), len(self._engine.stored)
        deadline = time.monotonic() + seconds
        while len(self._engine.stored) < before + count and time.monotonic() < deadline:
            self._engine.step(ScheduledRequest(request, [table], count * TOKENS))
            time.sleep(0.01)
        return {"stored": len(self._engine.stored) - before}

    def match(self, request: str, prefix: str, count: int) -> dict[str, Any]:
        """Look a prompt up and keep what it leases; the number of blocks found."""
        self._engine.arrive(request, prefix, count)
        return self.match_again(request)

    def ask_once(self, request: str, prefix: str, count: int) -> dict[str, Any]:
        """Look a prompt up for a few steps only; None where the answer is 'ask again' still."""
        self._engine.arrive(request, prefix, count)
        for _ in range(5):
            found = self._engine.scheduler.get_num_new_matched_tokens(request, 0)
            self.step()
            time.sleep(0.01)
        return {"found": found}

    def match_again(self, request: str) -> dict[str, Any]:
        """Ask once more for a request that has been looked up before."""
        return {"found": self._engine.match(request) // TOKENS}

    def start_load(
        self, request: str, found: int, first_block: int, hold: bool = False
    ) -> dict[str, Any]:
        """Submit the load of what `match` found, into wiped blocks."""
        table = self._engine.table(found, first_block)
        self._engine.start_load(request, found * TOKENS, table, hold)
        return {}

    def load(
        self, prefix: str, count: int, first_block: int = 0, awaits: bool = False
    ) -> dict[str, Any]:
        """Load what there is of a prompt and check every byte of it.

        With `awaits` another engine prefills it, which may not be done.
        """
        request = f"load {prefix} {self._dice.random()}"
        remote = {"do_remote_prefill": True} if awaits else {}
        self._engine.arrive(request, prefix, count, kv_transfer_params=remote)
        found = self.match_again(request)["found"]
        loaded = 0
        if found:
            self.start_load(request, found, first_block)
            self._engine.step_until_loaded(request)
            loaded = found if request in self._engine.finished_loads else 0
        wrong = self.check(prefix, loaded, first_block)["wrong"]
        self.finish(request)
        return {"found": found, "loaded": loaded, "wrong": wrong}

    def wait_for_end(self, request: str) -> dict[str, Any]:
        """Step without anything to run until the request's load has ended; how that went."""
        engine, began, steps = self._engine, time.monotonic(), 0
        while request not in engine.finished_loads | engine.failed_loads:
            if time.monotonic() > began + WAIT_S:
                raise TimeoutError(f"the load does not end: {self.status()}")
            for rank in engine.ranks:
                rank.worker.rest()
            self.step()
            steps += 1
        seconds = time.monotonic() - began
        return {"failed": request in engine.failed_loads, "steps": steps, "seconds": seconds}

    def ask_movers_to_leave(self) -> dict[str, Any]:
        """By their rings alone, as a worker must that may not signal them."""
        for rank in self._engine.ranks:
            registrar = rank.worker._registrar
            assert registrar is not None
            assert registrar.current is not None
            registrar.current._ring.ask_to_leave()
        return {}

    def finish(self, request: str) -> dict[str, Any]:
        """The request has ended: its leases go."""
        self._engine.scheduler.request_finished(request, [[]])
        return self.step()

    def check(self, prefix: str, count: int, first_block: int) -> dict[str, Any]:
        """Which of the prompt's blocks in engine memory are not what they should be."""
        table = self._engine.table(count, first_block)
        wrong = self._engine.wrong(table, block_hashes(prefix, count))
        return {"wrong": wrong, "right": count - len(wrong)}

    def probe(self, prefix: str, count: int) -> dict[str, Any]:
        """How many leading blocks the index page shows, and how many a call finds.

        `unanswered` says why nothing is known of them, where nothing is: none were found then,
        and none were missed.
        """
        keys, connection = block_hashes(prefix, count), self._engine.connection
        session = connection.session
        if session is None:
            return {"unanswered": f"no usable session: {connection.problem}"}
        page = session.present(0, "", keys).tolist()
        context = request_context("probe", "", 0, ())
        query = QueryDraft(context, BlockRun(0, 0, keys), False)
        call = connection.start_lookup([query])
        connection.gather([call], 5.0)
        answers = connection.take_answers(call) or ()
        leases = [answer.lease_id for answer in answers if answer.lease_id]
        self._engine.scheduler._step.released_leases += leases
        self.step()
        if not answers or connection.session is not session:
            return {"unanswered": "the lookup was not answered by the session that it was sent in"}
        statuses = answers[0].statuses
        found = [status & 3 == 1 for status in statuses]
        return {"page": leading(page), "call": leading(found), "statuses": list(statuses)}

    def reset(self) -> dict[str, Any]:
        self._engine.scheduler.reset_cache()
        self.step()
        return self.wait_usable()

    # -- longer work ------------------------------------------------------------------------

    def churn(self, prefixes: Sequence[str], rounds: int, most: int) -> dict[str, Any]:
        """Store and load prompts at random; every byte that comes back is checked."""
        loaded, wrong, slowest = 0, [], 0.0
        stored_before = len(self._engine.stored)
        for _ in range(rounds):
            began = time.monotonic()
            prefix = self._dice.choice(prefixes)
            count = self._dice.randint(1, most)
            if self._dice.random() < 0.5:
                self.store(prefix, count)
            else:
                answer = self.load(prefix, count)
                loaded += answer["loaded"]
                wrong += [[prefix, number] for number in answer["wrong"]]
            slowest = max(slowest, time.monotonic() - began)
        stored = len(self._engine.stored) - stored_before
        return {"loaded": loaded, "wrong": wrong, "stored": stored, "slowest": slowest}

    def verify(self, prefixes: Sequence[str], most: int) -> dict[str, Any]:
        """What is found and loaded of each prompt, and which bytes of it are wrong."""
        return {prefix: self.load(prefix, most) for prefix in prefixes}

    def hand_off(self, prefix: str, count: int, milliseconds: int) -> dict[str, Any]:
        """Prefill a prompt that another engine decodes, and leave it its blocks for so long; how
        many were there already."""
        engine, request = self._engine, f"hand off {prefix}"
        remote = {"do_remote_decode": True, "hand_off_ms": milliseconds}
        hashes = engine.arrive(request, prefix, count, kv_transfer_params=remote)
        found = engine.match(request)
        table = engine.table(count, 0)
        engine.start_load(request, found, table)
        if found:
            engine.step_until_loaded(request)
        loaded = found // TOKENS
        engine.step(
            ScheduledRequest(request, [table], count * TOKENS),
            overwrite=lambda: engine.compute(table[loaded:], engine.contents(hashes[loaded:])),
        )
        engine.scheduler.request_finished(request, [table])
        engine.step_until_idle()
        # The answer to a lookup comes behind the step that it followed.
        self.match(f"after {request}", prefix, count)
        self.finish(f"after {request}")
        return {"loaded": loaded}

    def close(self) -> dict[str, Any]:
        self._engine.close()
        return {}


def leading(flags: Sequence[bool]) -> int:
    """How many are true before the first that isn't."""
    return next((number for number, flag in enumerate(flags) if not flag), len(flags))


def main() -> None:
    """Serve orders until `close`, or until whoever gives them is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    engine = ProbeEngine(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        order = json.loads(line)
        name = order.pop("op")
        try:
            answer = {"answer": getattr(engine, name)(**order)}
        except Exception as error:
            log.exception("order %s failed", name)
            answer = {"error": repr(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        if name == "close":
            return


if __name__ == "__main__":
    main()
