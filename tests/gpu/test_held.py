"""What queued copies need is kept until they have run, and no longer."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvd.core.events import JobKind
from tests.gpu.copy_rig import Rig, open_rig
from tests.gpu.driver import Driver

GATE_S = 60.0  # a gate that nobody opens opens by itself: a test fails, nothing hangs


@pytest.fixture
def rig(driver: Driver) -> Iterator[Rig]:
    del driver
    with open_rig(4096, 4096) as made:
        yield made


def shut(stream: int) -> threading.Event:
    """Let the stream stand still until the event is set."""
    import cupy

    gate = threading.Event()
    cupy.cuda.ExternalStream(stream).launch_host_func(lambda _: gate.wait(GATE_S), None)
    return gate


def test_things_are_given_back_once_their_stream_has_passed(rig: Rig) -> None:
    from kvd.mover.cuda.held import HeldUntilPassed

    held: HeldUntilPassed[str] = HeldUntilPassed()
    gate = shut(rig.stream)
    held.hold("first", rig.stream)
    held.hold("second", rig.stream)
    assert held.release() == []
    gate.set()
    rig.sync()
    assert held.release() == ["first", "second"]
    assert held.release() == []


def test_a_stream_that_stands_still_holds_nothing_of_another(rig: Rig) -> None:
    from kvd.mover.cuda.held import HeldUntilPassed

    held: HeldUntilPassed[str] = HeldUntilPassed()
    other = int(rig.runtime.streamCreateWithFlags(rig.runtime.streamNonBlocking))
    gate = shut(other)
    held.hold("waits", other)
    held.hold("passes", rig.stream)
    rig.sync()
    assert held.release() == ["passes"]
    gate.set()
    rig.runtime.streamSynchronize(other)
    assert held.release() == ["waits"]
    rig.runtime.streamDestroy(other)


def test_what_a_broken_device_may_still_use_is_never_given_back(rig: Rig, driver: Driver) -> None:
    if not driver.is_fake:
        pytest.skip("a real device is not broken on purpose")
    from kvd.mover.cuda.held import HeldUntilPassed

    held: HeldUntilPassed[str] = HeldUntilPassed()
    driver.inject("copy_error", code=700, after=0)
    with pytest.raises(rig.runtime.CUDARuntimeError):
        rig.read_device()
    held.hold("in use", rig.stream)
    assert held.release() == []
    driver.reset()
    rig.sync()
    assert held.release() == []


def test_a_refused_batch_is_told_even_where_its_end_cant_be_noted(rig: Rig, driver: Driver) -> None:
    if not driver.is_fake:
        pytest.skip("a real device is not broken on purpose")
    import numpy as np

    from kvd.mover.cuda.copiers import Copier, batch_call
    from kvd.mover.cuda.runs import Runs
    from kvd_proto.libcuda import CudaError

    copier = Copier(JobKind.LOAD, batch_call(), None)
    values = (rig.host_address, rig.device, 8, 8, 8, 1)
    runs = Runs(*(np.array([value], dtype=np.uint64) for value in values))
    driver.inject("copy_error", code=700, after=0)
    with pytest.raises(rig.runtime.CUDARuntimeError):
        rig.read_device()
    with pytest.raises(CudaError) as caught:
        copier.submit(runs, rig.stream)
    driver.reset()
    assert caught.value.code == 700
