"""Who may open the sockets: their mode and group say so, and the kernel holds to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.control.daemon_rig import daemon

OUTSIDER = 65534  # nobody
CONNECT = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[2]))
for path in sys.argv[3:]:
    try:
        socket.socket(socket.AF_UNIX).connect(path)
        print("in")
    except PermissionError:
        print("refused")
"""


def as_outsider(*paths: str, group: int) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-I", "-c", CONNECT, str(group), str(OUTSIDER), *paths],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("mode", "group", "outcome"),
    [("0660", OUTSIDER, "refused"), ("0660", 0, "in"), ("0600", 0, "refused")],
)
def test_only_who_the_mode_and_the_group_name_may_open_the_sockets(
    mode: str, group: int, outcome: str
) -> None:
    with daemon("--socket-mode", mode) as running:
        running.directory.chmod(0o755)
        paths = [running.socket, running.socket + ".companion"]
        assert {Path(path).stat().st_mode & 0o777 for path in paths} == {int(mode, 8)}
        assert as_outsider(*paths, group=group) == [outcome, outcome]
