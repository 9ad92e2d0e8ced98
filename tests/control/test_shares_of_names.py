"""One user's namespaces never keep another user out: a real daemon, and two users."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import pytest

from tests.control.daemon_of_few_names import MOST
from tests.control.daemon_rig import RawScheduler, identity, namespace, refusal
from tests.control.running_daemon import RunningDaemon

STRANGER = 12346
OPEN_ONE = f"""
import os, sys
from tests.control.daemon_rig import RawScheduler, identity, namespace
os.setgid({STRANGER}); os.setuid({STRANGER})
mine = RawScheduler(sys.argv[1], identity=identity("other"), namespace=namespace(model="other"))
print(mine.opened.session_id > 0)
mine.close()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_user_with_all_the_namespaces_it_gets_leaves_some_for_another() -> None:
    running = RunningDaemon("--socket-mode", "0666")
    running.module = "tests.control.daemon_of_few_names"
    running.directory.chmod(0o755)
    held: list[RawScheduler] = []
    try:
        running.start()
        for number in range(MOST):
            names = namespace(model=f"model {number}")
            each = RawScheduler(running.socket, identity=identity(f"e{number}"), namespace=names)
            held.append(each)
            if number < MOST - 2:
                assert each.opened.session_id
                continue
            refused = refusal(partial(getattr, each, "opened"))
            assert refused == ("RESOURCE_EXHAUSTED", "LIMIT_EXCEEDED", "namespace")
        told = subprocess.run(
            [sys.executable, "-c", OPEN_ONE, running.socket],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert told.stdout.strip() == "True", told.stderr
    finally:
        for each in held:
            each.close()
        running.remove()
