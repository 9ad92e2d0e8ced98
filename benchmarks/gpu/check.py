"""Everything that a GPU machine can show of kvd, in under 8 minutes: `make gpu-check`.

The probe, tests/gpu on the real driver, right bytes under load, the copies beside their bars, the
short demo, and vLLM itself where `.whl-vllm` has it (vllm_wheels.py), each under its own time
limit; a failure stops none of the others. Needs the
checkout, a python3 with numpy, CuPy, torch, grpcio, protobuf, pytest and hypothesis, and the
wheels in .whl (see benchmarks/gpu/carry.sh); no internet and no .venv. Results lie under
benchmarks/results/<device name>/, and in the folder that KVD_GPU_RESULTS names too: what there is
by then, after each step, so that who is cut off loses one step's alone.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

from benchmarks.gpu import places
from benchmarks.gpu.cuda import Cuda

ROOT = places.ROOT
WHEELS = ROOT / ".whl"
# What kvd, its tests and the benchmarks import: module → package.
NEEDED = {
    "numpy": "numpy",
    "cupy": "cupy-cuda13x",
    "torch": "torch",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_status": "grpcio-status",
    "google.protobuf": "protobuf",
    "google.rpc": "googleapis-common-protos",
    "prometheus_client": "prometheus-client",
    "pynvml": "nvidia-ml-py",
    "uvloop": "uvloop",
    "pytest": "pytest",
    "pytest_asyncio": "pytest-asyncio",
    "hypothesis": "hypothesis",
}
# What is imported once for certain: versions that don't go together show here, in seconds.
ROOTS = ("kvd.cli.serve", "kvd.mover.child", "kvd_client", "benchmarks.gpu.copies", "cupy")
PYTEST = (
    "-m",
    "pytest",
    "-c",
    "benchmarks/gpu/pytest.ini",
    "--rootdir=.",
    "-p",
    "no:cacheprovider",
)
# Their tests compare how much of the GPU is free: nothing else may come and go meanwhile.
JUDGE_MEMORY = ("deaths", "driver_contract")
# What tries the probe and the benchmark on the fake driver has nothing to add to these.
LEFT_OUT = ("benchmarks_run",)
AT_ONCE = 6  # files of the other tests, where pytest-xdist is there
ALL_S = 460.0  # for all steps together; the last ones get what is left
END_AFTER_S = 20.0  # from Ctrl-C to the kill: reports of what was done so far are written then
KILL_AFTER_S = 5.0


@dataclass(frozen=True)
class Step:
    """One part of the check: a python3 command, and the seconds that it may take."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True)
class Outcome:
    """What became of a step; `status` is its exit status, None where its time was up."""

    name: str
    status: int | None
    seconds: float

    @property
    def word(self) -> str:
        if self.status is None:
            return "FAIL (its time was up)"
        return "pass" if self.status == 0 else f"FAIL (exit status {self.status})"


def steps(results: Path, patience: float = 1.0) -> tuple[Step, ...]:
    """The parts in their order, with `patience` times their usual limits."""
    files = {name: f"tests/gpu/test_{name}.py" for name in (*JUDGE_MEMORY, *LEFT_OUT)}
    others = tuple(f"--ignore={file}" for file in files.values())
    at_once = ("-n", str(AT_ONCE), "--dist=loadfile") if importlib.util.find_spec("xdist") else ()
    memory = tuple(files[name] for name in JUDGE_MEMORY)
    demo = ("-m", "examples.gpu", "--prompts=1024,4096,16384", "--repeats=3", f"--out={results}")
    told = (
        Step("imports", ("-m", "benchmarks.gpu.check", "--imports"), 40),
        Step("probe", ("-m", "benchmarks.gpu.probe", f"--limit={95 * patience:.0f}"), 130),
        Step("tests", (*_pytest(results, "tests"), *at_once, "tests/gpu", *others), 120),
        Step("memory", (*_pytest(results, "memory"), *memory), 130),
        Step("stress", ("-m", "benchmarks.gpu.stress", "--seconds=24"), 60),
        Step("copies", ("-m", "benchmarks.gpu.copies"), 150),
        Step("demo", demo, 60),
        *(_vllm_steps() if places.has_vllm() else ()),
    )
    return tuple(replace(step, limit_s=patience * step.limit_s) for step in told)


def _vllm_steps() -> tuple[Step, ...]:
    """The real vLLM, with one kind of KV and with two."""
    module = ("-m", "benchmarks.gpu.vllm_first_token")
    return (
        Step("vllm", module, 230),
        Step("hybrid", (*module, "--model=gemma", "--quick"), 170),
    )


def _pytest(results: Path, name: str) -> tuple[str, ...]:
    """Each test is named as it runs: what is cut off is known up to there."""
    return (*PYTEST, "-v", "--durations=15", f"--junitxml={results / f'gpu-{name}.xml'}")


def check_imports() -> int:
    """Say which packages are missing, and how to bring them."""
    missing = []
    for module, package in NEEDED.items():
        try:
            if importlib.util.find_spec(module) is None:
                missing.append(package)
        except ModuleNotFoundError:
            missing.append(package)
    if missing:
        print(f"python3 has no {', '.join(missing)}: benchmarks/gpu/carry.sh downloads what is not")
        print("on GPU machines into .whl/, which must come along; name further packages to it")
        return 1
    for root in ROOTS:
        try:
            importlib.import_module(root)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            print(f"{root} can't be imported: {type(error).__name__}: {error}")
            return 1
    print("every package is here")
    return 0


@contextlib.contextmanager
def environment() -> Iterator[dict[str, str]]:
    """Ours, with the checkout, the client and the carried wheels to import from."""
    roots = [ROOT, ROOT / "client" / "src"]
    with tempfile.TemporaryDirectory(prefix="kvd-wheels-") as unpacked:
        wheels = sorted(WHEELS.glob("*.whl"))
        if wheels:
            if places.unpack(wheels, unpacked):
                roots.append(Path(unpacked))
            else:
                print(f"the wheels of {WHEELS} can't be unpacked; going on without them")
        paths = [*map(str, roots), *filter(None, [os.environ.get("PYTHONPATH")])]
        yield {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            "KVD_GPU": "real",
        }


def run(step: Step, variables: dict[str, str], log: IO[bytes]) -> Outcome:
    """Run one step, its output to the terminal and the log; end it when its time is up."""
    print(f"\n== {step.name} (at most {step.limit_s:.0f} s)", flush=True)
    log.write(f"\n== {step.name}\n".encode())
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *step.arguments],
        cwd=ROOT,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        reader = threading.Thread(target=_tee, args=(process.stdout, log))
        reader.start()
        try:
            status: int | None = process.wait(step.limit_s)
        except subprocess.TimeoutExpired:
            status = None
            _end_group(process)
        reader.join(KILL_AFTER_S)
    return Outcome(step.name, status, time.monotonic() - began)


def run_all(
    chosen: Sequence[Step],
    variables: dict[str, str],
    log: IO[bytes],
    seconds: float = ALL_S,
    after_each: Callable[[Sequence[Outcome]], object] = lambda _: None,
) -> list[Outcome]:
    """Run the steps, each within its own limit and what is left of `seconds`."""
    end = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    for step in chosen:
        limit_s = min(step.limit_s, end - time.monotonic())
        if limit_s > 0:
            outcomes.append(run(replace(step, limit_s=limit_s), variables, log))
        else:
            outcomes.append(Outcome(step.name, None, 0.0))
        log.flush()
        after_each(outcomes)
    return outcomes


def _tee(source: IO[bytes], log: IO[bytes]) -> None:
    for line in source:
        log.write(line)
        sys.stdout.buffer.write(line)
        sys.stdout.flush()


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ask the step and what it started to end, so that fixtures clean up; then make them."""
    for number, seconds in ((signal.SIGINT, END_AFTER_S), (signal.SIGKILL, KILL_AFTER_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def keep(outcomes: Sequence[Outcome], results: Path) -> None:
    """Write what became of the steps so far; all results there are to KVD_GPU_RESULTS, too.

    Reports of tests name files as they lie in the checkout, wherever that lies.
    """
    document = {
        "commit": places.commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "steps": [asdict(outcome) for outcome in outcomes],
    }
    (results / "gpu-check.json").write_text(json.dumps(document, indent=1) + "\n")
    for written in results.glob("gpu-*.xml"):
        written.write_text(written.read_text().replace(f"{ROOT}/", ""))
    if elsewhere := os.environ.get("KVD_GPU_RESULTS"):
        Path(elsewhere).mkdir(parents=True, exist_ok=True)
        for path in results.iterdir():
            if path.is_file() and path.suffix != ".xml":  # the log names each test, too
                shutil.copy(path, elsewhere)


def report(outcomes: Sequence[Outcome], results: Path) -> int:
    """Print the summary, and keep the results; 0 only when every step passed."""
    print("\n== summary")
    for outcome in outcomes:
        print(f"  {outcome.name:8} {outcome.word}, {outcome.seconds:.0f} s")
    print(f"results: {results}")
    keep(outcomes, results)
    return 0 if all(outcome.status == 0 for outcome in outcomes) else 1


def main() -> int:
    """Run the check; 1 without a GPU, or when a step failed."""
    parser = argparse.ArgumentParser(description="What a GPU machine can show of kvd.")
    parser.add_argument(
        "steps", nargs="*", metavar="STEP", help="in this order; all if none is named"
    )
    parser.add_argument(
        "--patience", type=float, default=1.0, metavar="TIMES", help="so many times all limits"
    )
    parser.add_argument(
        "--seconds", type=float, help="for all steps together; the last ones get what is left"
    )
    parser.add_argument("--imports", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.imports:
        return check_imports()
    if (reason := places.no_device()) is not None:
        print(f"There is no GPU here ({reason}), so nothing was checked on one.")
        print("`make test` runs the same tests of tests/gpu against a fake driver.")
        return 1
    name = Cuda().name()
    results = places.folder_of(name)
    results.mkdir(parents=True, exist_ok=True)
    known = {step.name: step for step in steps(results, options.patience)}
    if unknown := set(options.steps) - known.keys():
        parser.error(f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    chosen = [known[name] for name in options.steps or known]
    print(f"{name}; results go to {results}")
    if (flaw := places.flaw_of_shared_memory()) is not None:
        print(f"Expect failures: {flaw}")
    seconds = ALL_S * options.patience if options.seconds is None else options.seconds
    with environment() as variables, (results / "gpu-check.log").open("wb") as log:
        kept = partial(keep, results=results)
        outcomes = run_all(chosen, variables, log, seconds, kept)
    return report(outcomes, results)


if __name__ == "__main__":
    sys.exit(main())
