"""One vLLM engine in a process of its own: it is told what to do, and tells what happens.

Orders come and happenings go as dicts of plain values. The process is forked from a server that
has imported vLLM already, which saves six seconds a start.
"""

from __future__ import annotations

import os
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm import EngineArgs, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

Message = dict[str, Any]


def serve(
    connection: Connection[Any, Any], settings: Message, environment: dict[str, str], log: Path
) -> None:
    """Run an engine until it is told to end; whatever it prints goes to the log."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.environ.update(environment)
    try:
        process = EngineProcess(connection, settings)
        connection.send({"event": "ready"})
        process.run()
    except EOFError:  # whoever drove us is gone
        pass
    except BaseException:
        connection.send({"event": "died", "why": traceback.format_exc()})
        raise


class EngineProcess:
    """Takes orders between the engine's steps; steps as long as the engine has something to do."""

    def __init__(self, connection: Connection[Any, Any], settings: Message) -> None:
        self._connection = connection
        self._engine = LLMEngine.from_engine_args(EngineArgs(**settings))
        self._core = self._engine.engine_core.engine_core
        self._settling = False
        self._running = True

    def run(self) -> None:
        while self._running:
            busy = self._core.scheduler.has_requests()
            if self._settling and not busy:
                self._settling = False
                self._connection.send({"event": "settled"})
            if self._connection.poll(0 if busy else None):
                order = self._connection.recv()
                getattr(self, "_" + order.pop("do"))(**order)
            elif busy:
                self._step()
        self._engine.engine_core.shutdown()

    def _step(self) -> None:
        for output in self._engine.step():
            tokens = list(output.outputs[0].token_ids)
            happening: Message = {"request": output.request_id, "tokens": tokens}
            if output.finished:
                happening["reason"] = output.outputs[0].finish_reason
                happening["cached"] = output.num_cached_tokens
                happening["logprob"] = output.outputs[0].cumulative_logprob
            happening["event"] = "finished" if output.finished else "tokens"
            self._connection.send(happening)

    def _submit(
        self, request: str, prompt: list[int], max_tokens: int, transfer: Message | None
    ) -> None:
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,  # of what was sampled alone
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )
        self._engine.add_request(request, {"prompt_token_ids": prompt}, sampling)

    def _abort(self, request: str) -> None:
        self._engine.abort_request([request])

    def _settle(self) -> None:
        self._settling = True

    def _reset(self, connector: bool, running: bool) -> None:
        try:
            done = self._engine.reset_prefix_cache(
                reset_running_requests=running, reset_connector=connector
            )
        except RuntimeError:  # vLLM can't preempt a request that loads
            done = False
        self._connection.send({"event": "reset", "done": done})

    def _count(self) -> None:
        values: dict[str, float] = {}
        for metric in self._engine.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                values[metric.name] = values.get(metric.name, 0) + value
                if "source" in metric.labels:
                    values[f"{metric.name}/{metric.labels['source']}"] = value
        self._connection.send({"event": "counted", "values": values})

    def _end(self) -> None:
        self._running = False
