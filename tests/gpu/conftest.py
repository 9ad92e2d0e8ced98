"""The CUDA driver of these tests, and an engine's worker that owns device memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.processes import complaints
from tests.daemon_process import DaemonProcess
from tests.gpu.driver import Driver, Exporter, started
from tests.gpu.rank_engine import (
    GpuEngine,
    as_tensors,
    engine_of,
    layers_in_one_allocation,
    running_daemon,
)
from tests.gpu.rank_process import RankProcess


@pytest.fixture(scope="session")
def driver() -> Iterator[Driver]:
    """The fake driver, or with KVD_GPU=real the machine's."""
    with started() as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def _driver_in_environment(driver: Driver) -> Iterator[None]:
    """Whatever a test of this folder starts finds the driver."""
    with driver.in_environment():
        yield


@pytest.fixture(autouse=True)
def _no_fault_outlives_its_test(driver: Driver) -> Iterator[None]:
    driver.reset()
    yield
    driver.reset()


@pytest.fixture(autouse=True)
def _complaints_are_counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mover says so many and no more; here many of them share the tests' process."""
    monkeypatch.setattr(complaints, "_said", 0)


@pytest.fixture
def exporter(driver: Driver) -> Iterator[Exporter]:
    """An engine's worker on the first device: the test's own, but on a real GPU one for all tests,
    since each would take a second there to make a context."""
    if not driver.is_fake:
        yield driver.lasting_exporter()
        return
    made = Exporter(driver)
    yield made
    made.close()


@pytest.fixture(scope="module")
def daemon(driver: Driver) -> Iterator[DaemonProcess]:
    """A daemon whose movers find the driver."""
    with running_daemon(driver) as running:
        yield running


@pytest.fixture
def process(driver: Driver) -> Iterator[RankProcess]:
    """An engine's worker process that owns device memory."""
    made = RankProcess(driver)
    yield made
    made.close()


@pytest.fixture
def layers(process: RankProcess) -> list[int]:
    """Addresses of its layers, all in one allocation."""
    return layers_in_one_allocation(process)


@pytest.fixture
def engine(daemon: DaemonProcess, process: RankProcess, layers: list[int]) -> Iterator[GpuEngine]:
    """Its engine, with these layers registered."""
    with engine_of(daemon, process, layers, as_tensors(layers)) as made:
        yield made
