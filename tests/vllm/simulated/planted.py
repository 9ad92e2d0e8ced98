"""Bugs of the connector, each planted alone in a process: the worlds with vLLM must show it."""

from __future__ import annotations

import gc
import subprocess
import sys
from functools import partial
from pathlib import Path

from tests.simulation.planted.bug import Bug
from tests.simulation.planted.plant import plant
from tests.simulation.whole.world import SimFailure

LONGEST_S = 1800.0  # of one bug's worlds
CAUGHT = "caught"


def _bug(name: str, module: str, before: str, after: str, *, was_ours: bool = False) -> Bug:
    return Bug(name, f"kvd_client.integrations.vllm.{module}", before, after, was_ours)


_rank = partial(_bug, module="rank.worker")
_scheduler = partial(_bug, module="scheduling.scheduler")
_one_group = partial(_bug, module="scheduling.one_group")
_lazy = partial(_bug, module="scheduling.lazy")

BUGS = (
    _rank(
        "load that failed and is believed",
        before="            if has_failed:\n",
        after="            if False:\n",
    ),
    _rank(
        "stores that wait for no compute",
        before="self._worker.finish_step(plan, compute_end(self._device))",
        after="self._worker.finish_step(plan, None)",
    ),
    _rank(
        "loads that wait for nothing that was launched",
        before="self._worker.start_loads(plan, launched[1])",
        after="self._worker.start_loads(plan, None)",
    ),
    _rank(
        "jobs that were never sent and are not reported",
        before="for job_id in step.refused)",
        after="for job_id in ())",
    ),
    _rank(
        "flush that is left out",
        before="plan = replace(step.plan, computed_stores=computed)\n",
        after="plan = replace(step.plan, computed_stores=computed, flush=())\n",
    ),
    _one_group(
        "blocks given on before their stores have ended",
        before="                if not reused.isdisjoint(blocks)\n",
        after="                if False\n",
    ),
    _one_group(
        "table put behind the one that a session had",
        before="                state.block_ids.clear()\n        if not self._has_one_group",
        after="                pass\n        if not self._has_one_group",
        was_ours=True,
    ),
    _scheduler(
        "block stored of which the window has left a part",
        before="        return len(row) == width and VLLM_NULL_BLOCK not in row\n",
        after="        return True\n",
        was_ours=True,
    ),
    _scheduler(
        "preempted request that loads again and must be flushed",
        before="        if not reloaded:\n",
        after="        if True:\n",
        was_ours=True,
    ),
    _lazy(
        "block stored under the name that it had before",
        before="            if key is not None and blocks[block].block_hash != key:\n",
        after="            if False:\n",
        was_ours=True,
    ),
    _bug(
        "blocks that the reuse filter never hears of",
        "scheduling.manager",
        "        self.touch(fresh, req_context)\n",
        "",
        was_ours=True,
    ),
)


def live_with(number: int, seeds: int, steps: int, folder: Path) -> str:
    """Worlds with the bug in this process, until one fails."""
    plant(BUGS[number])
    from tests.vllm.simulated.node import VllmWorld, model_in

    model = model_in(folder)
    for seed in range(seeds):
        try:
            VllmWorld(seed, steps, model).run()
        except SimFailure as failure:
            return f"{CAUGHT} in world {seed + 1}, step {failure.step}: {failure.kind}"
        gc.collect()
    return f"not caught in {seeds} worlds"


def ask_for(number: int, seeds: int, steps: int) -> str:
    """What a process with this bug in it says."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.vllm.simulated"]
    command += ["--bug", str(number), "--seeds", str(seeds), "--steps", str(steps)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{CAUGHT}: it goes on for ever"
    lines = done.stdout.splitlines()
    return lines[-1] if lines else f"it could not be planted: {done.stderr.strip()[-300:]}"
