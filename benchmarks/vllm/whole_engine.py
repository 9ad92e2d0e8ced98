"""A whole vLLM engine with KvdConnector in one process, for benchmarks.

    python -m benchmarks.vllm.whole_engine SOCKET MODEL

Orders and answers are lines of JSON, as in `benchmarks.vllm.side`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import vllm
from vllm import EngineArgs, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.engine.llm_engine import LLMEngine

from examples.engine.conversation import HANDBOOK

IDLE_SECONDS = 0.001  # what vLLM's own loop sleeps after a step that computed nothing
SCRIBBLE = 0x5A
SETTINGS = {
    "block_size": 32,
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 256 << 20,
    "enforce_eager": True,
}

Answer = dict[str, Any]


class WholeEngine:
    """Answers prompts, and says how soon its first token came and what the KV cache holds.

    `changes` are of SETTINGS and of vLLM's other arguments; `options` are the connector's.
    """

    def __init__(
        self, model: str, socket: str, options: dict[str, Any] | None = None, **changes: Any
    ) -> None:
        arguments = EngineArgs(
            model=model,
            kv_transfer_config={  # type: ignore[arg-type, unused-ignore]
                "kv_connector": "KvdConnector",
                "kv_connector_module_path": "kvd_client.integrations.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"socket_path": socket, **(options or {})},
            },
            **(SETTINGS | changes),
        )
        self.engine = LLMEngine.from_engine_args(arguments)
        self.core = self.engine.engine_core.engine_core
        connection = self.core.scheduler.connector.connector_scheduler.manager.connection
        assert connection.wait_usable(60), connection.problem
        self._block_tokens = self.engine.vllm_config.cache_config.block_size
        self._asked = 0

    def ask(self, number: int, length: int, max_tokens: int) -> Answer:
        """Of prompt `number` of a text, `_run`'s answer."""
        tokenizer = self.engine.get_tokenizer()
        handbook = tokenizer.encode(HANDBOOK, add_special_tokens=False)
        opening = tokenizer.encode(
            f"Visitor number {number} of this season asks:\n", add_special_tokens=False
        )
        (answer,) = self._run([[*opening, *handbook, *handbook][:length]], max_tokens)
        return answer

    def ask_drawn(self, numbers: list[int], length: int, max_tokens: int) -> Answer:
        """The same of prompts of drawn tokens, which are all asked at once."""
        vocabulary = self.engine.vllm_config.model_config.get_vocab_size()
        prompts = [
            np.random.default_rng([number, 11]).integers(3, vocabulary, length).tolist()
            for number in numbers
        ]
        return {"answers": self._run(prompts, max_tokens)}

    def _run(self, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
        """Of each: seconds to the first token, when each step until then began and how long it
        took, all its tokens, how many were cached, and a digest of what its whole blocks hold on
        the device.

        Returns once nothing is being stored any more.
        """
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        began, answers = time.perf_counter(), dict[str, Answer]()
        for prompt in prompts:
            self._asked += 1
            name = str(self._asked)
            self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
            answers[name] = {"seconds": 0.0, "tokens": [], "cached": 0, "length": len(prompt)}
        blocks: dict[str, tuple[list[int], ...]] = {}  # of each group
        scheduler = self.core.scheduler
        steps: list[tuple[float, float]] = []
        while scheduler.has_requests():
            at = time.perf_counter() - began
            outputs = self.engine.step()
            steps.append((at, time.perf_counter() - began - at))  # seconds
            for output in outputs:
                answer = answers[output.request_id]
                if not answer["seconds"]:
                    answer["seconds"] = time.perf_counter() - began
                    answer["steps"] = list(steps)
                answer["tokens"] = list(output.outputs[0].token_ids)
                answer["cached"] = output.num_cached_tokens
            for known in scheduler.requests:  # a name of ours, and vLLM's suffix
                name = known.partition("-")[0]
                held = scheduler.kv_cache_manager.get_block_ids(known)
                if any(held):
                    blocks[name] = held
            if not outputs:
                time.sleep(IDLE_SECONDS)
        for name, answer in answers.items():
            answer["digest"] = digest_of(blocks[name], answer["length"]) if name in blocks else ""
        return list(answers.values())

    def forget_device(self) -> Answer:
        """Empty vLLM's own prefix cache, and write over all of its KV memory."""
        done = self.engine.reset_prefix_cache()
        for tensor in kv_tensors():
            tensor.fill_(SCRIBBLE)
        settle()
        return {"done": done}


def kv_tensors() -> list[torch.Tensor]:
    """The rank's KV memory as vLLM's offloading has it: bytes, shape [blocks, page]."""
    caches = get_kv_transfer_group().connector_worker._caches  # noqa: SLF001 - there is no other
    return [each.tensor for each in caches.tensors]


def digest_of(blocks: tuple[list[int], ...], length: int) -> str:
    """Of what the whole blocks of so many tokens hold, in order: each word times a key of its
    place, summed up on the device, since gigabytes are asked for. `blocks`: of each group; of one
    with a window the last ones, which the next token needs."""
    settle()
    digest = hashlib.blake2b(digest_size=16)
    drawn = torch.Generator().manual_seed(1)
    for tensor, places in _places(blocks, length):
        words = tensor[places.to(tensor.device)].view(torch.int64)
        keys = torch.randint(-(2**62), 2**62, words.shape[1:], generator=drawn) * 2 + 1
        sums = (words * keys.to(words.device)).sum(dim=1)  # modulo 2**64
        digest.update(sums.cpu().numpy().data)
    return digest.hexdigest()


def _places(
    blocks: tuple[list[int], ...], length: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each group's tensors, and the numbers of its whole blocks."""
    worker = get_kv_transfer_group().connector_worker
    caches, tensors = worker._caches, kv_tensors()  # noqa: SLF001 - there is no other
    groups = worker.kv_cache_config.kv_cache_groups
    for group, held, refs in zip(groups, blocks, caches.group_data_refs, strict=True):
        spec = group.kv_cache_spec
        whole = held[: length // spec.block_size]
        window = getattr(spec, "sliding_window", None)
        if window is not None:
            whole = whole[-((window - 1) // spec.block_size) :]
        for number in sorted({ref.tensor_idx for ref in refs}):
            yield tensors[number], torch.tensor(whole)


def settle() -> None:
    """Return once the device has done what was launched."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def serve() -> None:
    """Serve orders until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    engine = WholeEngine(model=sys.argv[2], socket=sys.argv[1], **settings)
    print(json.dumps({"vllm": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(engine, order.pop("do"))(**order)
        print(json.dumps(answer), file=answers, flush=True)
    engine.engine.engine_core.shutdown()


if __name__ == "__main__":
    serve()
