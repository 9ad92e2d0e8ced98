"""Hits in `vllm bench serve` beside busy processes: kvd against vLLM's own in-process CPU cache.

    python -m benchmarks.vllm served_hits

Two vLLM servers (a tiny model on the CPU, one thread), one with KvdConnector over a daemon, one
with vLLM's own offloading manager, whose copies cost nothing here. In each round each of them
gets the same prompts from vLLM's own serving benchmark, forgets its prefix cache, and gets them
once more: the tokens that its connector found then are its hits. All of it while other processes
keep every core busy; kvd has the options that it has when nobody sets any.

Linux shares processors out between login sessions before it does between threads
(`sched_autogroup_enabled`), and between services where they have control groups. All processes
here are in one session, so that each thread counts as one; with `--sessions`, each server, the
daemon and all of the busy processes together are in one of their own, as services would be. With
`--crowded` the servers have one each, and the daemon shares what is left with the busy ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks import report
from benchmarks.report import Spread
from benchmarks.rig import MIB, daemon_in_session
from benchmarks.vllm.processes import ENVIRONMENT, REPOSITORY, OrderedProcess, vllm_python
from tests.daemon_process import DaemonProcess

PROMPTS = 64
INPUT_TOKENS, OUTPUT_TOKENS, BLOCK_TOKENS = 512, 8, 32
BUSY_PROCESSES = 4
BYTES = 1024 * MIB  # of either cache
BAR = 0.97
PASSES = ("cold", "again")
START_SECONDS, ASK_SECONDS = 300.0, 120.0
QUIET_SECONDS = 2.0  # without a new store: all of them have ended
HITS = "vllm:external_prefix_cache_hits"
FIGURES = (
    HITS,
    "vllm:external_prefix_cache_queries",
    "vllm:kv_offload_store_bytes",
    "vllm:kvd_failed_loads",
    "vllm:kvd_failed_stores",
    "vllm:kvd_given_up",
    "vllm:kvd_no_room",
    "vllm:kvd_refusals",
    "vllm:kvd_sessions",
    "vllm:kvd_blocking_calls",
    "vllm:kvd_lookup_wait_seconds",
)
SAMPLE = re.compile(r"^([a-z_:]+?)(?:_total)?(?:\{([^}]*)\})? ([0-9.e+-]+)$", re.MULTILINE)
REASON = re.compile(r'reason="([^"]*)"')


class Server:
    """vLLM's OpenAI server over one of the two caches; ready when entered."""

    def __init__(
        self, transfer: dict[str, Any], model: Path, log: Path, own_session: bool = False
    ) -> None:
        self._log, self._model = log, model
        self._port = _free_port()
        flags = {
            "model": str(model),
            "served-model-name": "tiny",
            "host": "127.0.0.1",
            "port": str(self._port),
            "dtype": "float32",
            "block-size": str(BLOCK_TOKENS),
            "max-model-len": "2048",
            "kv-cache-memory-bytes": str(512 * MIB),
            "kv-transfer-config": json.dumps(transfer),
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        environment = {**_environment(), "VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache
        module = "vllm.entrypoints.openai.api_server"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [vllm_python(), "-m", module, *words, "--enforce-eager"],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=own_session,
                process_group=None if own_session else 0,
            )

    def __enter__(self) -> Self:
        try:
            self._wait_healthy()
        except BaseException:
            self._end()
            raise
        return self

    def _wait_healthy(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self._ask("/health")
            except (urllib.error.URLError, ConnectionError):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"a server does not start:\n{self._log.read_text()[-4000:]}")
                time.sleep(0.2)
            else:
                return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def serve(self, client: OrderedProcess, seed: int) -> dict[str, float]:
        """What vLLM's own benchmark says of these prompts."""
        flags = {
            "model": "tiny",
            "tokenizer": str(self._model),
            "host": "127.0.0.1",
            "port": str(self._port),
            "dataset-name": "random",
            "random-input-len": str(INPUT_TOKENS),
            "random-output-len": str(OUTPUT_TOKENS),
            "num-prompts": str(PROMPTS),
            "seed": str(seed),
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        said = client.do("bench", flags=[*words, "--ignore-eos", "--disable-tqdm"])
        assert said["completed"] == PROMPTS, said
        return {"mean_ttft_ms": said["mean_ttft_ms"], "seconds": said["duration"]}

    def settle(self) -> None:
        """Returns once its stores have ended, as far as its metrics show."""
        last: dict[str, float] = {}
        since = time.monotonic()
        while time.monotonic() - since < QUIET_SECONDS:
            if (now := self._metrics()) != last:
                last, since = now, time.monotonic()
            time.sleep(0.2)

    def forget(self) -> None:
        """Empty its own prefix cache."""
        self._ask("/reset_prefix_cache", {})

    def figures(self) -> dict[str, float]:
        """The counters that matter here, with a reason behind the name where there is one."""
        metrics = self._metrics()
        return {name: value for name, value in metrics.items() if name.split(" ")[0] in FIGURES}

    def _metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, labels, value in SAMPLE.findall(self._ask("/metrics")):
            if "kv_offload" in name or "kvd" in name or "prefix_cache" in name:
                reason = REASON.search(labels)
                full = f"{name} {reason[1]}" if reason else name
                found[full] = found.get(full, 0.0) + float(value)
        return found

    def _ask(self, path: str, content: dict[str, Any] | None = None) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            None if content is None else json.dumps(content).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ASK_SECONDS) as answer:
            text: str = answer.read().decode()
        return text

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def kvd_transfer(kvd_socket: str) -> dict[str, Any]:
    """With no option but where the daemon is."""
    return {
        "kv_connector": "KvdConnector",
        "kv_connector_module_path": "kvd_client.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket_path": kvd_socket},
    }


def vllm_transfer() -> dict[str, Any]:
    """What vLLM has itself, with a worker that says of every copy that it is done."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "AcknowledgedCpuSpec",
            "spec_module_path": "benchmarks.vllm.acknowledged",
            "cpu_bytes_to_use": BYTES,
        },
    }


@contextlib.contextmanager
def busy(processes: int, own_session: bool) -> Iterator[None]:
    """Processes beside us that do nothing but compute."""
    code = "import os\nfor _ in range(%d - 1):\n    if not os.fork(): break\nwhile True: pass"
    command = [sys.executable, "-c", code % processes]
    if not processes:
        yield
        return
    group = None if own_session else 0
    running = subprocess.Popen(command, start_new_session=own_session, process_group=group)
    try:
        yield
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()


Round = dict[str, dict[str, float]]  # by pass


def measure(
    server: Server, client: OrderedProcess, seed: int, waits: Callable[[], dict[str, float]]
) -> Round:
    """The same prompts twice, and in each pass what its connector found and counted.

    `waits` says how long whose threads have run, and waited for a processor, up to now.
    """
    passes: Round = {}
    for name in PASSES:
        before = server.figures() | waits()
        told = server.serve(client, seed)
        at_end = waits()
        server.settle()
        after = server.figures() | at_end
        changed = {key: after[key] - before.get(key, 0.0) for key in sorted(after)}
        passes[name] = told | {key: value for key, value in changed.items() if value}
        server.forget()
    return passes


def processor_times(control: DaemonProcess) -> dict[str, float]:
    """Of all threads of control, and of its movers: seconds on a processor, and ready without."""
    found: dict[str, float] = {}
    for name, pids in {"control": [control.pid], "mover": control.movers()}.items():
        ran = waited = 0
        for stat in (
            path for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat")
        ):
            with contextlib.suppress(OSError):
                running, waiting, _ = stat.read_text().split()
                ran, waited = ran + int(running), waited + int(waiting)
        found |= {f"{name} ran s": ran / 1e9, f"{name} waited s": waited / 1e9}
    return found


def results_of(rounds: dict[str, list[Round]]) -> dict[str, Any]:
    hits = {
        side: [each["again"].get(HITS, 0.0) for each in taken] for side, taken in rounds.items()
    }
    return {
        "hits": {side: Spread.of(values) for side, values in hits.items()},
        "mean_ttft_ms": {
            name: {
                side: Spread.of([each[name]["mean_ttft_ms"] for each in taken])
                for side, taken in rounds.items()
            }
            for name in PASSES
        },
        "kvd_over_vllm": report.ratios(hits["kvd"], hits["vllm"]),
        "all_kvd_over_all_vllm": sum(hits["kvd"]) / sum(hits["vllm"]),
        "bar": BAR,
        "rounds": rounds,
    }


def show(results: dict[str, Any]) -> None:
    ttft = results["mean_ttft_ms"]
    rows = [
        [side, found, *(ttft[name][side] for name in PASSES)]
        for side, found in results["hits"].items()
    ]
    print(report.table(["side", "tokens found", "mean ttft ms cold", "and again"], rows))
    print(f"kvd / vLLM: {results['kvd_over_vllm']}, in all {results['all_kvd_over_all_vllm']:.3f}")
    print(f"bar at least {BAR:g}")


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round: a smoke test")
    parser.add_argument("--busy", type=int, default=BUSY_PROCESSES, help="processes beside us")
    parser.add_argument("--sessions", action="store_true", help="one each, as services have")
    parser.add_argument("--crowded", action="store_true", help="one for each but the daemon")
    parser.add_argument("--nice", type=int, default=0, help="of the daemon; below 0 needs root")
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args()
    apart = options.sessions or options.crowded
    rounds: dict[str, list[Round]] = {"kvd": [], "vllm": []}
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as scratch,
        daemon_in_session(BYTES, 64 * MIB, {}, is_own=options.sessions) as running,
    ):
        for thread in Path(f"/proc/{running.pid}/task").iterdir():  # movers inherit it
            os.setpriority(os.PRIO_PROCESS, int(thread.name), options.nice)
        model = _model(Path(scratch))
        with (
            Server(kvd_transfer(running.socket), model, Path(scratch, "kvd.log"), apart) as kvd,
            Server(vllm_transfer(), model, Path(scratch, "vllm.log"), apart) as vllm,
            OrderedProcess("benchmarks.vllm.serve_client", [], {}) as client,
            busy(options.busy, options.sessions),
        ):
            waits: dict[str, Callable[[], dict[str, float]]] = {
                "kvd": lambda: processor_times(running),
                "vllm": dict,
            }
            for number in range(1 if options.quick else options.rounds):
                pair = [("kvd", kvd), ("vllm", vllm)]
                for side, server in pair if number % 2 else reversed(pair):
                    rounds[side].append(measure(server, client, number, waits[side]))
                    print(side, json.dumps(rounds[side][-1]), flush=True)
    scene = {
        "prompts": PROMPTS,
        "busy": options.busy,
        "sessions": options.sessions,
        "crowded": options.crowded,
        "nice": options.nice,
    }
    results = {**scene, **results_of(rounds)}
    show(results)
    sharing = ".crowded" if options.crowded else ".sessions" if options.sessions else ""
    report.write(f"vllm.served_hits{sharing}", results, options.output)


def _model(folder: Path) -> Path:
    made = folder / "tiny"
    made.mkdir()
    code = "import sys; from pathlib import Path; from tests.vllm.tiny_model import make_llama; "
    code += "make_llama(Path(sys.argv[1]))"
    command = [vllm_python(), "-c", code, str(made)]
    subprocess.run(command, check=True, cwd=REPOSITORY, env=_environment())
    return made


def _environment() -> dict[str, str]:
    own = {name: value for name, value in ENVIRONMENT.items() if "MULTIPROCESSING" not in name}
    own |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": str(REPOSITORY)}
    return os.environ | own


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    main()
