"""For every test: nothing may be left behind."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import hangs, leaks, process_logs
from tests.daemon_process import DaemonProcess

# No example is judged by how long it took: these machines stall. CI draws the same examples each
# time, so that a change is judged by itself; elsewhere every run looks further.
settings.register_profile("kvd", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "kvd")


if os.environ.get("KVD_GPU") != "real":  # whose driver has files of its own there
    leaks.take_own_shared_memory()  # before anything is there

# Two threads of PyTorch's in each of several processes wait for each other by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's background jobs ignore these two, and so would all that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)

# These run in environments of their own: `make test-vllm`, `make test-sglang`.
collect_ignore = [each for each in ("vllm", "sglang") if importlib.util.find_spec(each) is None]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(hangs, "tests.hangs")
    config.pluginmanager.register(process_logs, "tests.process_logs")


def pytest_report_header() -> list[str]:
    return [
        f"tests/{each}: not here but in .venv-{each}, by `make test-{each}`"
        for each in collect_ignore
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules with slow tests come first: where many run side by side, none is late at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Thousands of tests and their modules stay: no collection of garbage looks at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """A module's tests end with the processes, descriptors and shared memory they began with."""
    before, mask = leaks.look(), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    failed_before = request.session.testsfailed
    yield
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, mask) - mask
    assert not blocked, (
        f"{request.node.name} blocks {blocked}: nothing that a test starts would end"
    )
    if request.session.testsfailed > failed_before:
        return  # a failed test's frames are kept for its report, and all they hold with them
    gc.collect()
    left = leaks.wait_until_clean(before, seconds=5.0)
    assert not left, f"left behind by {request.node.name}: {left}"


@pytest.fixture
def own_environment() -> Iterator[None]:
    """What a test, or what it runs in this process, changes in os.environ is changed back."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def shared_directory() -> Iterator[Path]:
    """A fresh directory on the shared-memory file system, removed at the end."""
    path = Path(tempfile.mkdtemp(prefix=f"kvd-test-{os.getpid()}-", dir=leaks.SHARED_MEMORY))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def daemon(tmp_path: Path, shared_directory: Path) -> Iterator[DaemonProcess]:
    """`kvd serve` with a pool of its own on shared memory; whatever state a test leaves it in."""
    running = DaemonProcess(tmp_path, shared_directory)
    running.start()
    yield running
    running.end()
