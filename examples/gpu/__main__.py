"""Time to first token of an engine on a GPU: computed anew, loaded from kvd, and the ideal.

An engine over a Llama-8B-shaped model of random weights (32 layers, bfloat16, paged KV) computes
prompts, stores their KV in a daemon that this starts, and loads it back into other blocks.
The loaded bytes and the first token must be the computed ones.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from examples.gpu.measure import Plan, PromptResult

ROOT = Path(__file__).resolve().parents[2]
NO_TORCH = "this needs PyTorch, and the client's packages: grpcio, protobuf, numpy"
NO_GPU = """\
There is no GPU that PyTorch can use here, so there is nothing to measure on one.
The same code runs on any machine over host shared memory, with a model of toy size:

    {python} -m examples.gpu --device cpu --shape tiny
"""
DEFAULT_PROMPTS = {
    "llama-8b": (1024, 2048, 4096, 8192, 16384, 32768, 65536),
    "tiny": (64, 256, 1024),
}
EXTENT_BYTES = {"llama-8b": 256 << 20, "tiny": 4 << 20}
SHARED_MEMORY = "/dev/shm"
LEASE_SHARE = 4  # the daemon's default: what one request finds may be a quarter of the pool
WORK_BYTES = 8 << 30  # of the longest prompt's intermediate values, and for the mover's context


def find_packages() -> None:
    """Have kvd and its client found, here and in the daemon, where they are not installed."""
    places = [str(ROOT), str(ROOT / "client" / "src")]
    sys.path[:0] = [place for place in places if place not in sys.path]
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([*places, *filter(None, [before])])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=sorted(DEFAULT_PROMPTS), default="llama-8b")
    parser.add_argument(
        "--prompts", type=_lengths, help="tokens, with commas between; multiples of 16, from 32 on"
    )
    parser.add_argument("--repeats", type=int, choices=range(1, 100), default=3, metavar="TIMES")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--contiguous", action="store_true", help="blocks in a row, instead of in random order"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / ".cache" / "demo-gpu", help="for JSON and plot"
    )
    return parser.parse_args(argv)


def _lengths(text: str) -> tuple[int, ...]:
    lengths = tuple(int(part) for part in text.split(","))
    for length in lengths:
        if length < 32 or length % 16:
            raise argparse.ArgumentTypeError(f"{length} is no multiple of 16 from 32 on")
    return lengths


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, write; 0 when all bytes and tokens were right."""
    import torch

    from examples.gpu.bars import verdicts_of
    from examples.gpu.measure import Plan
    from examples.gpu.report import draw, table_of, write_json
    from examples.gpu.shape import SHAPES

    shape = SHAPES[arguments.shape]
    plan = Plan(
        shape=shape,
        device=torch.device("cpu") if arguments.device == "cpu" else torch.device("cuda", 0),
        prompts=tuple(sorted(arguments.prompts or DEFAULT_PROMPTS[shape.name])),
        repeats=arguments.repeats,
        seed=arguments.seed,
        is_scattered=not arguments.contiguous,
    )
    results, bandwidth = measure(plan)
    verdicts = verdicts_of(results, plan.device.type)
    print(table_of(results, bandwidth, verdicts))
    result = {
        **machine(torch, plan.device.type),
        "shape": shape.name,
        "block_bytes": shape.block_bytes,
        "blocks": "scattered" if plan.is_scattered else "contiguous",
        "repeats": plan.repeats,
        "seed": plan.seed,
        "copy_bytes_per_second": bandwidth,
        "bars": [each.to_json() for each in verdicts],
        "prompts": [each.to_json() for each in results],
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = f"ttft-{shape.name}-{plan.device.type}"
    write_json(arguments.out / f"{name}.json", result)
    is_drawn = draw(arguments.out / f"{name}.png", results, f"{shape.name} on {result['device']}")
    print(f"  written: {arguments.out / name}.json" + (" and .png" if is_drawn else ""))
    return 1 if any(each.failures for each in results) else 0


def measure(plan: Plan) -> tuple[list[PromptResult], float]:
    """Every prompt's figures, and the bytes a second of one large copy."""
    from examples.engine.daemon import Daemon
    from examples.gpu.engine import Engine
    from examples.gpu.measure import Measurement, copy_bandwidth
    from examples.gpu.model import Model
    from examples.gpu.paged_kv import PagedKv

    extent = EXTENT_BYTES[plan.shape.name]
    pool = pool_bytes(plan)
    check_memory(plan, pool)
    with Daemon(pool, extent) as daemon:
        say(f"daemon started in {daemon.start_s:.1f} s, pool {pool >> 20} MiB")
        model = Model(plan.shape, plan.device, plan.seed)
        kv = PagedKv(plan.shape, plan.num_blocks, plan.device)
        engine = Engine(model, kv, plan.device, daemon.socket)
        try:
            engine.wait_connected()
            say("the daemon has the engine's KV memory")
            measurement = Measurement(plan, engine, kv)
            measurement.warm_up()
            bandwidth = copy_bandwidth(plan.device)
            results = []
            for length in plan.prompts:
                results.append(measurement.run(length, bandwidth))
                say(f"{length} tokens: done")
        except RuntimeError:
            print(f"the daemon's log:\n{daemon.log.read_text()}", file=sys.stderr)
            raise
        finally:
            engine.close()
            kv.close()
    return results, bandwidth


def pool_bytes(plan: Plan) -> int:
    """Room for all prompts, and for the longest within what one request may find at once."""
    extent = EXTENT_BYTES[plan.shape.name]
    longest = max(plan.prompts) // plan.shape.block_tokens * plan.shape.block_bytes
    return (max(plan.stored_bytes * 5 // 4, longest * LEASE_SHARE) // extent + 4) * extent


def check_memory(plan: Plan, pool_bytes: int) -> None:
    """RuntimeError where pool, model and KV would not fit."""
    import torch

    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < pool_bytes:
        raise RuntimeError(
            f"the pool takes {pool_bytes >> 20} MiB of {SHARED_MEMORY}, where {free >> 20} are"
            " free: give fewer or shorter --prompts, or mount it larger"
        )
    if plan.device.type == "cuda":
        kv_bytes = plan.num_blocks * plan.shape.block_bytes
        needed = plan.shape.weight_bytes + kv_bytes + WORK_BYTES
        free = torch.cuda.mem_get_info(plan.device)[0]
        if free < needed:
            raise RuntimeError(
                f"model, KV and work space take {needed >> 20} MiB of GPU memory, {free >> 20} are"
                " free: give shorter --prompts"
            )


def machine(torch: Any, device_type: str) -> dict[str, Any]:
    """Where and with what this ran."""
    is_cuda = device_type == "cuda"
    return {
        "device": torch.cuda.get_device_name(0) if is_cuda else platform.machine() + " CPU",
        "torch": torch.__version__,
        "cuda": torch.version.cuda if is_cuda else None,
        "python": platform.python_version(),
        "commit": _commit(),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _commit() -> str:
    """Of this checkout, or KVD_COMMIT where files came without git; empty where neither says."""
    if told := os.environ.get("KVD_COMMIT"):
        return told
    git = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(git, cwd=ROOT, check=False, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()


STARTED = time.monotonic()


def say(line: str) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f} s] {line}", flush=True)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """0 when bytes and tokens were right; 1 else, and without a GPU; 130 after Ctrl-C."""
    arguments = parse(argv)
    find_packages()
    try:
        import torch
    except ImportError:
        print(NO_TORCH, file=sys.stderr)
        return 1
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(NO_GPU.format(python=sys.executable), file=sys.stderr)
        return 1
    previous = signal.signal(signal.SIGTERM, _interrupt)  # the daemon must go with us
    try:
        return run(arguments)
    except KeyboardInterrupt:
        print("interrupted; everything was stopped", file=sys.stderr)
        return 130
    except (RuntimeError, ValueError, OSError) as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, previous)


if __name__ == "__main__":
    sys.exit(main())
