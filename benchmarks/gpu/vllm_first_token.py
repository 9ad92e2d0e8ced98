"""vLLM itself on a GPU with kvd: right bytes, and the time to the first token.

    python3 -m benchmarks.gpu.vllm_first_token [--device cpu]

A real engine (vLLM's own scheduler, GPU worker and model code; Triton for attention, torch for
the rest, see vllm_wheels.py) with random weights in a Llama's shape, over a real daemon. Prompts
of drawn tokens are asked for cold, then loaded from kvd once vLLM's prefix cache is empty and all
of its KV memory is written over, and again from vLLM's own prefix cache. What was loaded must have
the bytes that were computed. Then several prompts come at once; then movers and the daemon are
killed while one is loaded; then another engine, with CUDA graphs, finds them in the daemon.
`--device cpu` does the same with a toy model, by .venv-vllm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.gpu import places
from benchmarks.gpu.cuda import Cuda
from benchmarks.gpu.vllm_deaths import Asked, survived
from benchmarks.report import Spread
from benchmarks.rig import MIB, daemon
from benchmarks.vllm import processes
from benchmarks.vllm.processes import OrderedProcess
from tests.daemon_process import DaemonProcess

MODULE = "benchmarks.vllm.whole_engine"
GIB = 1 << 30
TAIL = 5  # tokens behind the last whole block, which are always computed
AT_ONCE = 6
TOKENS = 4  # of an answer
DEATHS_AT = (0.0, 0.5, 1.5)  # × a load's usual time
CASES = ("cold", "kvd", "prefix cache")
Answer = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """Of one device: the model's shape, vLLM's settings, and what is asked."""

    shape: dict[str, Any]
    lengths: tuple[int, ...]  # tokens
    rounds: int
    pool_bytes: int
    load_s: float  # about how long a prompt of the middle length is looked up and loaded
    settings: dict[str, Any] = field(default_factory=dict)
    restarts: bool = True  # whether another engine comes

    @property
    def block_tokens(self) -> int:
        size: int = self.settings["block_size"]
        return size


LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
}
# Of a Gemma 3 of 4B: five layers in six see a window alone, and have blocks of their own.
GEMMA_4B = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 32000,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 32768,
    "sliding_window": 1024,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5,
}
TOY_GEMMA = GEMMA_4B | {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "max_position_embeddings": 4096,
    "sliding_window": 128,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
}
TOY = LLAMA_8B | {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
COMMON = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "seed": 0,
    "options": {"weights_id": "drawn"},
}
NATIVE = {
    "ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]},
    "enable_jit_warmup": False,
    "enable_cutedsl_warmup": False,
    "enable_flashinfer_autotune": False,
}
SCALES = {
    "cuda": Scale(
        LLAMA_8B,
        (1024, 4096, 16384),
        3,
        24 * GIB,
        0.04,
        {
            "dtype": "bfloat16",
            "block_size": 16,
            "max_model_len": 16384 + 64,
            "max_num_batched_tokens": 16384 + 64,
            "kv_cache_memory_bytes": 8 * GIB,
            "attention_backend": "TRITON_ATTN",
            "kernel_config": NATIVE,
        },
    ),
    "cpu": Scale(
        TOY,
        (256, 1024),
        2,
        512 * MIB,
        0.006,
        {
            "dtype": "float32",
            "block_size": 32,
            "max_model_len": 2048,
            "max_num_batched_tokens": 2048,
            "kv_cache_memory_bytes": 64 * MIB,
        },
    ),
}
MODELS = {
    "llama": {"cuda": LLAMA_8B, "cpu": TOY},
    "gemma": {"cuda": GEMMA_4B, "cpu": TOY_GEMMA},
}
# No compiler and no kernels of vLLM's own; of the second engine's decoding steps there are graphs.
TORCH_ONLY = {"mode": 0, "custom_ops": ["none"]}
EAGER = {"enforce_eager": True, "compilation_config": TORCH_ONLY}
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {
        **TORCH_ONLY,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8],
    },
}


@contextlib.contextmanager
def vllm_from(wheels: Path) -> Iterator[None]:
    """Have engines run by this python with vLLM from wheels, where there are any."""
    found = sorted(wheels.glob("*.whl"))
    if not found:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="kvd-vllm-") as unpacked:
        if not places.unpack(found, unpacked):
            sys.exit(f"the wheels of {wheels} can't be unpacked")
        os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # it was not carried
        os.environ[processes.VARIABLE] = sys.executable
        os.environ[processes.PATHS] = os.pathsep.join(
            [str(places.ROOT / "client" / "src"), unpacked]
        )
        yield


def write_model(scale: Scale, folder: Path) -> Path:
    """A model's configuration; vLLM draws its weights."""
    config = {
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "torch_dtype": scale.settings["dtype"],
        **scale.shape,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def ask_thrice(engine: OrderedProcess, scale: Scale, number: int, length: int) -> dict[str, Answer]:
    """The answers to one prompt by case, once they were compared."""
    tokens = length // scale.block_tokens * scale.block_tokens - scale.block_tokens + TAIL
    answers: dict[str, Answer] = {}
    for case in CASES:
        if case == "kvd":
            assert engine.do("forget_device")["done"], "requests still hold blocks"
        told = engine.do("ask_drawn", numbers=[number], length=tokens, max_tokens=TOKENS)
        (answers[case],) = told["answers"]
        expect(answers[case], answers["cold"], 0 if case == "cold" else tokens - TAIL, case)
    assert engine.do("forget_device")["done"], "requests still hold blocks"
    return answers


def expect(answer: Answer, cold: Answer, cached: int, what: str) -> None:
    """So many tokens were not computed, and the blocks hold what the cold ones did."""
    assert answer["cached"] == cached, f"{what}: {answer['cached']} tokens cached, not {cached}"
    assert answer["digest"] == cold["digest"], f"{what}: other bytes than were computed"


def ask_many(engine: OrderedProcess, scale: Scale) -> list[Answer]:
    """The answers to prompts that come at once."""
    assert engine.do("forget_device")["done"], "requests still hold blocks"
    length = min(scale.lengths) + TAIL
    order = {"numbers": list(range(900, 900 + AT_ONCE)), "length": length, "max_tokens": TOKENS}
    answers: list[Answer] = engine.do("ask_drawn", **order)["answers"]
    return answers


def expect_many(engine: OrderedProcess, scale: Scale, cold: list[Answer]) -> None:
    """The same prompts are loaded, all at once, and right."""
    for number, answer in enumerate(ask_many(engine, scale)):
        what = f"prompt {number} of {AT_ONCE}"
        expect(answer, cold[number], min(scale.lengths), what)


def deaths(engine: OrderedProcess, scale: Scale, running: DaemonProcess) -> list[Answer]:
    """Kill at the request's arrival, while it is looked up or loaded, and at its end."""
    length = sorted(scale.lengths)[len(scale.lengths) // 2]
    asked = Asked(engine, 800, length + TAIL, length, TOKENS)
    found = survived(asked, running, [share * scale.load_s for share in DEATHS_AT])
    print(f"the engine went on after {len(found)} kills of movers and daemon", flush=True)
    return found


def measure(scale: Scale, running: DaemonProcess, model: Path) -> Answer:
    """Everything, as a document."""
    pairs: dict[int, list[dict[str, Answer]]] = {}
    socket = running.socket
    began = time.monotonic()
    settings = COMMON | scale.settings
    with OrderedProcess(MODULE, [socket, str(model)], settings | EAGER) as engine:
        found: Answer = {"vllm": engine.ready["vllm"], "start_s": time.monotonic() - began}
        print(f"vLLM {found['vllm']} is up after {found['start_s']:.0f} s", flush=True)
        for length in scale.lengths:
            taken = [
                ask_thrice(engine, scale, 100 * length + number, length)
                for number in range(1 + scale.rounds)
            ]
            pairs[length] = taken[1:]  # the first compiles kernels
            print(line_of(length, pairs[length]), flush=True)
        cold = ask_many(engine, scale)
        expect_many(engine, scale, cold)
        killed = deaths(engine, scale, running)
    again: list[Answer] = []
    if scale.restarts:
        with OrderedProcess(MODULE, [socket, str(model)], settings | GRAPHS) as engine:
            print("another engine, with graphs of its decoding steps, is up", flush=True)
            expect_many(engine, scale, cold)
            longest = max(scale.lengths)
            again = [ask_thrice(engine, scale, n, longest)["kvd"] for n in range(scale.rounds)]
    return found | {
        "rows": [row_of(length, taken) for length, taken in pairs.items()],
        "with_graphs_s": [answer["seconds"] for answer in again],
        "with_graphs_steps": [answer["steps"] for answer in again],
        "same_tokens": same_tokens(pairs),
        "deaths": killed,
        "blocks_compared": blocks_compared(scale, pairs),
    }


def row_of(length: int, taken: list[dict[str, Answer]]) -> Answer:
    """Of prompts of one length: seconds to the first token by case, and the steps until then."""
    told = {
        name: {case: [answers[case][name] for answers in taken] for case in CASES}
        for name in ("seconds", "steps")
    }
    return {"tokens": length, **told}


def line_of(length: int, taken: list[dict[str, Answer]]) -> str:
    seconds = row_of(length, taken)["seconds"]
    spreads = {case: Spread.of([1e3 * s for s in seconds[case]]) for case in CASES}
    ratio = report.ratios(seconds["cold"], seconds["kvd"])
    told = ", ".join(f"{case} {spread}" for case, spread in spreads.items())
    return f"{length} tokens, ms to the first: {told}; cold / kvd {ratio}"


def same_tokens(pairs: dict[int, list[dict[str, Answer]]]) -> float:
    """Share of answers from kvd with the cold one's tokens; rounding may differ, bytes may not."""
    told = [answers for taken in pairs.values() for answers in taken]
    same = [answers["kvd"]["tokens"] == answers["cold"]["tokens"] for answers in told]
    return same.count(True) / len(told)


def blocks_compared(scale: Scale, pairs: dict[int, list[dict[str, Answer]]]) -> int:
    """How many loaded blocks were found to have the bytes that were computed, in `pairs`."""
    return sum(
        answers["kvd"]["cached"] // scale.block_tokens
        for taken in pairs.values()
        for answers in taken
    )


def main() -> int:
    """Measure, print, write the JSON; 1 where there is no GPU and none is left out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=sorted(SCALES), default="cuda")
    parser.add_argument("--quick", action="store_true", help="one engine, one length: a smoke test")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--model", choices=sorted(MODELS), default="llama", help="its shape")
    options = parser.parse_args()
    scale, name = SCALES[options.device], "cpu"
    scale = replace(scale, shape=MODELS[options.model][options.device])
    if options.quick:
        scale = replace(scale, lengths=scale.lengths[-2:-1], rounds=1, restarts=False)
    if options.device == "cuda":
        if (reason := places.no_device()) is not None:
            print(f"There is no GPU here ({reason}); `--device cpu` runs the same on any machine.")
            return 1
        name = Cuda().name()
    wheels = places.VLLM_WHEELS if options.device == "cuda" else Path(os.devnull)
    with (
        tempfile.TemporaryDirectory(prefix="kvd-model-") as folder,
        vllm_from(wheels),
        daemon(scale.pool_bytes, extent_bytes=min(scale.pool_bytes // 8, 256 * MIB)) as running,
    ):
        found = measure(scale, running, write_model(scale, Path(folder)))
    document = {"device": name, "commit": places.commit(), "shape": scale.shape, **found}
    print(f"{found['blocks_compared']} loaded blocks have the bytes that were computed")
    file = "gpu-vllm" if options.model == "llama" else f"gpu-vllm-{options.model}"
    print(f"written to {places.write(document, name, file, options.output)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
