"""An engine as a child process, for the demo and the tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from examples.engine.config import EngineConfig
from examples.engine.messages import start_process
from examples.engine.requests import RequestOrder

START_SECONDS = 120.0
STOP_SECONDS = 30.0


@dataclass
class Answer:
    """What came of a request, with its times as the caller saw them."""

    output: list[int] = field(default_factory=list)
    first_token_s: float = 0.0
    total_s: float = 0.0
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def prefilled(self) -> int:
        """Tokens computed before the first token came, if the request was never preempted."""
        return int(self.fields["computed"]) - (len(self.output) - 1)

    @property
    def loaded(self) -> int:
        return int(self.fields["loaded"])

    @property
    def digests(self) -> dict[str, str]:
        """Digest of each full block's bytes, by block hash."""
        return dict(zip(self.fields["hashes"], self.fields["digests"], strict=True))

    @property
    def loaded_digests(self) -> dict[str, str]:
        """The same, of the blocks that were loaded and not computed."""
        hashes, digests = self.fields["hashes"], self.fields["digests"]
        return {hashes[index]: digests[index] for index in self.fields["loaded_blocks"]}


class EngineProcess:
    """A running engine. Leaving the context ends it, in order if it still can."""

    def __init__(self, config: EngineConfig) -> None:
        started = time.monotonic()
        self._process, self._channel = start_process("examples.engine.engine", (config.to_json(),))
        try:
            ready = self._next_event(START_SECONDS)
        except BaseException:
            self.kill()
            raise
        self.pids: list[int] = ready["pids"]
        self.start_s = time.monotonic() - started

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()

    def generate(
        self, orders: Sequence[RequestOrder], timeout_s: float = 120.0
    ) -> dict[str, Answer]:
        """Submit the orders at once and return their answers by id when all have ended."""
        started = time.monotonic()
        answers = {order.request_id: Answer() for order in orders}
        requests = [
            {
                "id": order.request_id,
                "prompt": order.prompt,
                "max_tokens": order.max_tokens,
                "use_cache": order.use_cache,
            }
            for order in orders
        ]
        self._command({"do": "submit", "requests": requests})
        unfinished = set(answers)
        while unfinished:
            event = self._next_event(timeout_s - (time.monotonic() - started))
            answer = answers[event["id"]]
            elapsed = time.monotonic() - started
            match event["event"]:
                case "token":
                    answer.first_token_s = answer.first_token_s or elapsed
                case "finished":
                    answer.output = event["output"]
                    answer.total_s = elapsed
                    answer.fields = event
                    unfinished.remove(event["id"])
                case "refused":
                    raise ValueError(event["why"])
        return answers

    def reset_device_cache(self) -> None:
        """Forget what the engine's own blocks hold, as if others' requests had taken them."""
        self._command({"do": "reset"})

    def settle(self, timeout_s: float = 60.0) -> dict[str, int]:
        """Returns when every copy has ended: `bytes_stored` and `bytes_loaded` so far."""
        self._command({"do": "settle"})
        event = self._next_event(timeout_s)
        return {name: event[name] for name in ("bytes_stored", "bytes_loaded")}

    def stop(self) -> None:
        """End the engine in order; kill it when that takes too long."""
        if self._process.poll() is None:
            try:
                self._command({"do": "stop"})
                self._process.wait(STOP_SECONDS)
            except (OSError, subprocess.TimeoutExpired):
                pass
        self.kill()

    def kill(self) -> None:
        """Kill -9. The ranks die with the engine, by the kernel's hand."""
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._channel.close()

    def _command(self, fields: dict[str, Any]) -> None:
        self._channel.send_bytes(json.dumps(fields).encode())

    def _next_event(self, timeout_s: float) -> dict[str, Any]:
        if not self._channel.poll(max(timeout_s, 0.0)):
            raise TimeoutError(f"the engine said nothing for {timeout_s:.0f} s")
        try:
            event: dict[str, Any] = json.loads(self._channel.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise RuntimeError("the engine process died; its messages are above") from error
        return event
