"""Bugs to be planted in the client."""

from __future__ import annotations

from functools import partial

from tests.simulation.planted.bug import Bug, bug

_client = partial(bug, "kvd_client")

CLIENT = (
    Bug(
        "probe that sees nothing",
        "kvd_proto.page",
        "present: Flags = found.view(np.uint64).reshape(-1) != _NONE",
        "present: Flags = found.view(np.uint64).reshape(-1) == _NONE",
    ),
    _client(
        "block that is given on before its stores have ended",
        "scheduler.fences",
        "            self._flush |= self._jobs.readers(group, new)\n",
        "",
    ),
    _client(
        "store that begins late and is not waited for",
        "scheduler.fences",
        "self._jobs.readers(group, blocks).intersection(computed_stores)",
        "set()",
    ),
    _client(
        "load that failed and is believed",
        "scheduler.outcomes",
        "        failed = load.has_failed\n",
        "        failed = False\n",
    ),
    _client(
        "load of before a reset that is believed",
        "scheduler.outcomes",
        "failed=job.has_failed or job.stale",
        "failed=job.has_failed",
    ),
    _client(
        "one token too many found",
        "scheduler.matching",
        "        found = self._queue.hit_tokens(request, num_computed_tokens)\n",
        "        found = self._queue.hit_tokens(request, num_computed_tokens)\n"
        "        found = request.num_tokens if found else found\n",
    ),
    _client(
        "load that leaves out the hit's last block",
        "scheduler.loads",
        "wanted = range(request.computed_tokens // tokens, -(-hit_tokens // tokens))",
        "wanted = range(request.computed_tokens // tokens, -(-hit_tokens // tokens) - 1)",
    ),
    _client(
        "flush that waits for nothing",
        "worker.worker",
        "        left = self.wait(plan.flush, self._flush_timeout_s)\n",
        "        return\n",
    ),
    _client(
        "store given up that its mover does not hear of",
        "worker.jobs",
        "                    job.registration.abandon(job_id)\n",
        "                    pass\n",
    ),
    _client(
        "failed store that is told as done",
        "worker.jobs",
        "report = JobReport(job_id, left or status == DONE,",
        "report = JobReport(job_id, True,",
    ),
    _client(
        "connection that never comes again",
        "connection",
        "            self._closing.wait(self._end_attempt(error_of(self._hold_session)))\n",
        "            self._end_attempt(error_of(self._hold_session))\n"
        "            self._closing.wait(1e6)\n",
    ),
    _client(
        "reset that the daemon is not told of",
        "connection",
        "                self._put(self._reset_message())\n",
        "",
    ),
    _client(
        "steps that are numbered anew by nobody",
        "connection",
        "            self._sequence = 0\n            self._steps.clear()\n",
        "            self._steps.clear()\n",
    ),
    _client(
        "store that begins before its KV is computed",
        "worker.worker",
        "self._do_aside(partial(self._wait_and_mark_ready, wait, job_ids))",
        "self._mark_ready(job_ids)",
    ),
    _client(
        "mover that is taken for dead though nobody says so",
        "worker.registrar",
        "        except grpc.RpcError as error:\n",
        "        except grpc.RpcError as error:\n            registration.is_dead = True\n",
    ),
    _client(
        "memory that is given back while its mover lives",
        "worker.registrar",
        "        return _end_all(self.lost, deadline)\n",
        "        return True\n",
    ),
    _client(
        "mover whose end its rank does not see",
        "worker.registrar",
        "        for fd in (registration.pidfd, companion_fd, self._wake_fd):\n",
        "        for fd in (companion_fd, self._wake_fd):\n",
    ),
)

_batches = partial(bug, "kvd_client")

BATCHES = (
    _batches(
        "load that has not come and is believed",
        "batches",
        "done = [bool(self._jobs.pop(job_id).done) for job_id in jobs]",
        "done = [self._jobs.pop(job_id).done is not None for job_id in jobs]",
    ),
    _batches(
        "store given up whose blocks are read on",
        "batches",
        "self._worker.flush_step(StepPlan(flush=tuple(left)))  # they may be overwritten\n",
        "pass\n",
    ),
    _batches(
        "answer whose blocks stay leased once they are loaded",
        "leased_answers",
        "            claim = leased.pop(key, None)\n",
        "            claim = leased.get(key)\n",
    ),
    _batches(
        "part of a run that is told for all of it",
        "batches",
        "loaded[number][: len(head.block_hashes)] = [ok] * len(head.block_hashes)",
        "loaded[number][:] = [ok] * len(loaded[number])",
    ),
    _batches(
        "answers whose time is over and that stay leased",
        "leased_answers",
        "            if claim.since_s > oldest_s:\n",
        "            if True:\n",
    ),
)
