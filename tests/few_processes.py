"""A control group in which there may be only so many processes and threads; a skip else."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOTS = (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup"))  # of the first and the second kind
PATIENCE_SECONDS = 10.0


class FewProcesses:
    """The group; it has no bound before `allow`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # What has a command run in the group.
        join = f'echo $$ > "{path}/cgroup.procs" && exec "$@"'
        self.behind = ("sh", "-c", join, "sh")

    @property
    def count(self) -> int:
        """Processes and threads in it."""
        return int((self._path / "pids.current").read_text())

    def allow(self, more: int | None) -> None:
        """So many more than there are now; None: as many as anybody wants."""
        (self._path / "pids.max").write_text("max" if more is None else str(self.count + more))


@contextlib.contextmanager
def few_processes() -> Iterator[FewProcesses]:
    """A group of this test's own; what runs in it has ended when this does."""
    roots = [root for root in _ROOTS if (root / "cgroup.procs").exists()]
    path = (roots or _ROOTS)[0] / f"kvd-test-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        if not (path / "pids.max").exists():
            pytest.skip("control groups here don't bound the number of processes")
        yield FewProcesses(path)
    finally:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (path / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        path.rmdir()
