"""A benchmark that is told to end leaves nothing running, though its servers have own groups."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon_process import is_alive
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
# In the place of vLLM's Python: a server that never gets healthy, and a model that is made at once.
PYTHON = f"""#!/bin/sh
case "$*" in
  *api_server*) exec {sys.executable} -c "$SERVER" "$@";;
esac
"""
# It says that it runs once it is asked for its health: by then whoever started it knows it.
SERVER = """
import os, socket, sys, time
listener = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
asking = listener.accept()
with open(os.environ["SERVERS"], "a") as servers:
    print(os.getpid(), file=servers)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    "module", [["benchmarks.vllm.served_hits"], ["benchmarks.vllm", "served_hits"]]
)
def test_an_ended_benchmark_takes_its_servers_along(
    tmp_path_factory: pytest.TempPathFactory, number: signal.Signals, module: list[str]
) -> None:
    place = tmp_path_factory.mktemp("ends")  # a short path: a socket comes to lie below
    python, servers = place / "python", place / "servers"
    python.write_text(PYTHON)
    python.chmod(0o755)
    servers.touch()
    environment = {
        "KVD_VLLM_PYTHON": str(python),
        "SERVER": SERVER,
        "SERVERS": str(servers),
        "TMPDIR": str(place),
    }
    with subprocess.Popen(
        [sys.executable, "-m", *module], cwd=ROOT, env=os.environ | environment
    ) as benchmark:
        try:
            wait_until(lambda: servers.read_text().endswith("\n"), "the first server", 60)
            server = int(servers.read_text())
            assert is_alive(server)
            benchmark.send_signal(number)
            assert benchmark.wait(60) != 0
            wait_until(lambda: not is_alive(server), "the server's end", 10)
            assert list(place.glob("kvd-bench-*")) == []
        finally:
            benchmark.kill()
            for line in servers.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(line), signal.SIGKILL)
