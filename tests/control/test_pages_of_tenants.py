"""Who gets a namespace's index page: a real daemon, and users of two tenants."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvd_client.companion import CompanionRefused
from tests.control.daemon_rig import Caller, RawScheduler, identity
from tests.control.running_daemon import RunningDaemon

STRANGER = 12347
TRY_BOTH = f"""
import os, sys
from kvd_client.companion import CompanionRefused
from tests.control.daemon_rig import RawScheduler, identity
os.setgid({STRANGER}); os.setuid({STRANGER})
mine = RawScheduler(sys.argv[1], identity=identity("other"))
os.close(mine.companion.get_page(mine.opened.namespace_id))
try:
    mine.companion.get_page(int(sys.argv[2]))
except CompanionRefused as refused:
    print(mine.opened.namespace_id, refused)
mine.close()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_nobody_gets_the_page_of_another_tenants_namespace_and_no_operator_either() -> None:
    running = RunningDaemon("--socket-mode", "0666")
    rules = f"[tenants.one]\nuids = [0]\n[tenants.two]\nuids = [{STRANGER}]\n"
    (running.directory / "kvd.toml").write_text(rules)
    running.flags["config"] = running.directory / "kvd.toml"
    running.directory.chmod(0o755)
    try:
        running.start()
        mine = RawScheduler(running.socket, identity=identity("mine"))
        told = subprocess.run(
            [sys.executable, "-c", TRY_BOTH, running.socket, str(mine.opened.namespace_id)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        theirs, _, refused = told.stdout.strip().partition(" ")
        assert "there is no namespace" in refused, told.stderr
        root = Caller(running.socket)
        with pytest.raises(CompanionRefused, match="UNKNOWN_NAMESPACE"):
            root.companion.get_page(int(theirs))
        root.close()
        mine.close()
    finally:
        running.remove()
