"""An engine in a process of its own, so that tests can kill it: one scheduler and its ranks.

Orders come as JSON lines on standard input, one answer goes out for each on standard output.
The KV of a block follows from its key (content.py). It takes a step only when told to.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvd_client import (
    EngineIdentity,
    Group,
    NamespaceFields,
    RequestParams,
    ScheduledRequest,
    Scheduler,
    SchedulerConnection,
    SchedulerOptions,
    StepPlan,
    Worker,
)
from kvd_client.draft import BlockRun, QueryDraft, request_context
from tests.client.content import HASH_BYTES, TOKENS, block_hashes, block_words
from tests.client.kv_memory import memory_of

log = logging.getLogger("probe")

PR_SET_PDEATHSIG = 1
IDLE_S = 0.001
LOAD_DEADLINE_S = 3.0  # more than any daemon here takes until it ends a mover
LOOKUP_GIVE_UP_S = 20.0  # more than a busy machine takes to answer


class Rank:
    """One rank's KV memory and its worker side."""

    def __init__(self, order: dict[str, Any], identity: EngineIdentity, rank: int) -> None:
        self.rank = rank
        self.block_bytes: int = order["block_bytes"]
        self.kv = memory_of(order)
        self.worker = Worker(
            order["socket"],
            identity,
            rank,
            order["world_size"],
            load_deadline_s=LOAD_DEADLINE_S,
        )
        self.kv.register(self.worker)

    def compute(self, block: int, key: bytes) -> None:
        self.kv.write(block, block_words(key, self.rank, self.block_bytes))

    def holds(self, block: int, key: bytes) -> bool:
        words = block_words(key, self.rank, self.block_bytes)
        return np.array_equal(self.kv.read(block), words)


class ProbeEngine:
    """Every public method is an order; its arguments are the order's fields."""

    def __init__(self, order: dict[str, Any]) -> None:
        world_size = order["world_size"]
        identity = EngineIdentity(order["engine_id"], os.urandom(16))
        group = Group(tokens_per_block=TOKENS, shard_bytes=(order["block_bytes"],) * world_size)
        namespace = NamespaceFields(
            model=order["model"],
            kv_dtype="uint64",
            hash_algorithm="sha256-chain",
            hash_bytes=HASH_BYTES,
            tenant=order["tenant"],
            groups=(group,),
            unshared=order["unshared"],
        )
        self.connection = SchedulerConnection(
            order["socket"],
            identity,
            namespace,
            world_size,
            silent_after_s=order["silent_after_s"],
        )
        options = SchedulerOptions(lookup_deadline_s=0.02, lookup_give_up_s=LOOKUP_GIVE_UP_S)
        self.scheduler = Scheduler(self.connection, options)
        played = range(world_size) if order["ranks"] is None else order["ranks"]
        self.ranks = [Rank(order, identity, rank) for rank in played]
        self.dice = random.Random(order["engine_id"])
        self._held: list[StepPlan] = []  # their halves are not said to be ready yet
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._stored: list[str] = []  # keys, in hex

    # -- state ------------------------------------------------------------------------------

    def wait_usable(self, seconds: float = 20.0, after: int = 0) -> dict[str, Any]:
        """Step until there is a usable session of a later generation than `after`."""
        deadline = time.monotonic() + seconds
        while True:
            session = self.connection.session
            if session is not None and session.generation > after:
                return self.status()
            if time.monotonic() > deadline:
                raise TimeoutError(repr(self.status()))
            self.step()
            time.sleep(0.005)

    def status(self) -> dict[str, Any]:
        session = self.connection.session
        return {
            "usable": session is not None,
            "generation": session.generation if session else 0,
            "problem": self.connection.problem,
            "rank_problems": [rank.worker.problem for rank in self.ranks],
            "finished": sorted(self._finished),
            "failed": sorted(self._failed),
            "stored": len(self._stored),
            "room": session.room(0) if session else 0,
            "idle": not self.scheduler.has_pending_work(),
            "refusals": dict(self.connection.refusals),
        }

    def take_stored(self) -> list[str]:
        """Keys that were reported as stored since the last call, in hex."""
        stored, self._stored = self._stored, []
        return stored

    # -- steps ------------------------------------------------------------------------------

    def step(self, *scheduled: ScheduledRequest, hold: bool = False) -> dict[str, Any]:
        """One step. `hold`: the workers don't hear of its jobs before `ready`."""
        plan = self.scheduler.build_step(scheduled)
        if hold:
            self._held.append(plan)
        else:
            self._work(plan)
        self._collect()
        return {}

    def ready(self) -> dict[str, Any]:
        """Say ready for all that was held back."""
        held, self._held = self._held, []
        for plan in held:
            self._work(plan)
        return {}

    def _work(self, plan: StepPlan) -> None:
        for rank in self.ranks:
            rank.worker.start_step(plan)
            rank.worker.finish_step(plan)

    def _collect(self) -> None:
        reports = [rank.worker.get_finished() for rank in self.ranks]
        outcome = self.scheduler.update_from_workers(reports)
        self._finished.update(outcome.finished_loads)
        self._failed.update(outcome.failed_loads)
        for stored in outcome.stored:
            self._stored += [key.hex() for key in stored.block_hashes]

    def pump(self, seconds: float = 10.0) -> dict[str, Any]:
        """Step until every job has been reported, or time is up."""
        deadline = time.monotonic() + seconds
        while self.scheduler.has_pending_work() and time.monotonic() < deadline:
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
        keys = block_hashes(prefix, count)
        request = f"store {prefix} {self.dice.random()}"
        table = list(range(first_block, first_block + count))
        before = len(self._stored)
        self.scheduler.on_new_request(request, count * TOKENS + 1, [keys])
        self.scheduler.update_state_after_alloc(request, [table], 0)
        for rank in self.ranks:
            for block, key in zip(table, keys, strict=True):
                rank.compute(block, key)
        self.step(ScheduledRequest(request, [table], count * TOKENS), hold=hold)
        if finish:
            self.scheduler.request_finished(request, [table])
        if wait:
            self.pump()
        return {"stored": len(self._stored) - before, "request": request}

    def go_on(
        self, request: str, count: int, first_block: int = 0, seconds: float = 20.0
    ) -> dict[str, Any]:
        """Keep a request running that `store` has not finished, until all of it is stored or time
        is up; the number stored meanwhile."""
        table, before = list(range(first_block, first_block + count)), len(self._stored)
        deadline = time.monotonic() + seconds
        while len(self._stored) < before + count and time.monotonic() < deadline:
            self.step(ScheduledRequest(request, [table], count * TOKENS))
            time.sleep(0.01)
        return {"stored": len(self._stored) - before}

    def match(self, request: str, prefix: str, count: int, seconds: float = 30.0) -> dict[str, Any]:
        """Look a prompt up and keep what it leases; the number of blocks found."""
        keys = block_hashes(prefix, count)
        self.scheduler.on_new_request(request, count * TOKENS + 1, [keys])
        return {"found": self._found(request, seconds)}

    def match_again(self, request: str) -> dict[str, Any]:
        """Ask once more for a request that has been looked up before."""
        return {"found": self._found(request, 30.0)}

    def _found(self, request: str, seconds: float) -> int:
        deadline = time.monotonic() + seconds
        while (found := self.scheduler.get_num_new_matched_tokens(request, 0)) is None:
            assert time.monotonic() < deadline, "asked for ever"
            self.step()
            time.sleep(IDLE_S)
        return found // TOKENS

    def start_load(
        self, request: str, found: int, first_block: int, hold: bool = False
    ) -> dict[str, Any]:
        """Submit the load of what `match` found, into wiped blocks."""
        table = list(range(first_block, first_block + found))
        for rank in self.ranks:
            rank.kv.wipe(first_block, found)
        self.scheduler.update_state_after_alloc(request, [table], found * TOKENS)
        self.step(hold=hold)
        return {}

    def load(self, prefix: str, count: int, first_block: int = 0) -> dict[str, Any]:
        """Load what there is of a prompt and check every byte of it."""
        request = f"load {prefix} {self.dice.random()}"
        found = self.match(request, prefix, count)["found"]
        loaded = 0
        if found:
            self.start_load(request, found, first_block)
            self._wait_for_load(request)
            loaded = found if request in self._finished else 0
        wrong = self.check(prefix, loaded, first_block)["wrong"]
        self.finish(request)
        return {"found": found, "loaded": loaded, "wrong": wrong}

    def _wait_for_load(self, request: str, seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while request not in self._finished | self._failed:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the load does not end: {self.status()}")
            self.step()
            time.sleep(IDLE_S)

    def wait_for_end(self, request: str) -> dict[str, Any]:
        """Step without anything to run until the request's load has ended; how that went."""
        began, steps = time.monotonic(), 0
        while request not in self._finished | self._failed:
            if time.monotonic() > began + 30.0:
                raise TimeoutError(f"the load does not end: {self.status()}")
            for rank in self.ranks:
                rank.worker.rest()
            self.step()
            steps += 1
        seconds = time.monotonic() - began
        return {"failed": request in self._failed, "steps": steps, "seconds": seconds}

    def ask_movers_to_leave(self) -> dict[str, Any]:
        """By their rings alone, as a worker must that may not signal them."""
        for rank in self.ranks:
            registrar = rank.worker._registrar
            assert registrar is not None
            assert registrar.current is not None
            registrar.current._ring.ask_to_leave()
        return {}

    def finish(self, request: str) -> dict[str, Any]:
        """The request has ended: its leases go."""
        self.scheduler.request_finished(request, [[]])
        self.step()
        return {}

    def check(self, prefix: str, count: int, first_block: int) -> dict[str, Any]:
        """Which of the prompt's blocks in engine memory are not what they should be."""
        wrong = [
            number
            for number, key in enumerate(block_hashes(prefix, count))
            if not all(rank.holds(first_block + number, key) for rank in self.ranks)
        ]
        return {"wrong": wrong, "right": count - len(wrong)}

    def probe(self, prefix: str, count: int) -> dict[str, Any]:
        """How many leading blocks the index page shows, and how many a call finds.

        `unanswered` says why nothing is known of them, where nothing is: none were found then,
        and none were missed.
        """
        keys = block_hashes(prefix, count)
        session = self.connection.session
        if session is None:
            return {"unanswered": f"no usable session: {self.connection.problem}"}
        page = session.present(0, "", keys).tolist()
        context = request_context("probe", "", 0, ())
        query = QueryDraft(context, BlockRun(0, 0, keys), False)
        call = self.connection.start_lookup([query])
        self.connection.gather([call], 5.0)
        answers = self.connection.take_answers(call) or ()
        for answer in answers:
            self.scheduler._step.released_leases += [answer.lease_id] if answer.lease_id else []
        self.step()
        if not answers or self.connection.session is not session:
            return {"unanswered": "the lookup was not answered by the session that it was sent in"}
        statuses = answers[0].statuses
        found = [status & 3 == 1 for status in statuses]
        return {"page": leading(page), "call": leading(found), "statuses": list(statuses)}

    def reset(self) -> dict[str, Any]:
        self.scheduler.reset_cache()
        self.step()
        return self.wait_usable()

    # -- longer work ------------------------------------------------------------------------

    def churn(self, prefixes: Sequence[str], rounds: int, most: int) -> dict[str, Any]:
        """Store and load prompts at random; every byte that comes back is checked."""
        loaded, wrong = 0, []
        stored_before = len(self._stored)
        for _ in range(rounds):
            prefix = self.dice.choice(prefixes)
            count = self.dice.randint(1, most)
            if self.dice.random() < 0.5:
                self.store(prefix, count)
            else:
                answer = self.load(prefix, count)
                loaded += answer["loaded"]
                wrong += [[prefix, number] for number in answer["wrong"]]
        stored = len(self._stored) - stored_before
        return {"loaded": loaded, "wrong": wrong, "stored": stored}

    def verify(self, prefixes: Sequence[str], most: int) -> dict[str, Any]:
        """What is found and loaded of each prompt, and which bytes of it are wrong."""
        return {prefix: self.load(prefix, most) for prefix in prefixes}

    def timed_steps(self, prefix: str, count: int, steps: int) -> dict[str, Any]:
        """A new request in each of these steps; seconds that the slowest step took."""
        slowest, found = 0.0, 0
        keys = block_hashes(prefix, count)
        for number in range(steps):
            request = f"timed {prefix} {number}"
            started = time.monotonic()
            self.scheduler.on_new_request(request, count * TOKENS + 1, [keys], RequestParams())
            found += bool(self.scheduler.get_num_new_matched_tokens(request, 0))
            self.step()
            slowest = max(slowest, time.monotonic() - started)
            self.scheduler.request_finished(request, [[]])
            time.sleep(0.002)
        return {"slowest": slowest, "found": found}

    def close(self) -> dict[str, Any]:
        for rank in self.ranks:
            rank.worker.close()
        self.connection.close()
        return {}


def leading(flags: Sequence[bool]) -> int:
    """How many are true before the first that isn't."""
    return next((number for number, flag in enumerate(flags) if not flag), len(flags))


def main() -> None:
    """Serve orders until `close`, or until whoever gives them is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    engine = ProbeEngine(json.loads(sys.argv[1]))
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
