"""Chooses how each direction's copies are made, by a short measurement on the device.

A small copy in the rank's own layout, between scratch buffers, is made again and again by each
copier that may be chosen, in turns. The fastest wins; of those within a few percent of it the
one that costs the processor least. What was measured is kept in the pool's directory, for this
GPU, driver and layout. The kernel takes part only where the configuration names it: whether it
disturbs a busy engine can't be seen here.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cupy.cuda import runtime

from kvd.core.events import JobKind
from kvd.mover.cuda import figures
from kvd.mover.cuda.copiers import (
    BATCH,
    KERNEL,
    PLAIN,
    STRIDED,
    Copier,
    CopierUnavailable,
    make_copier,
)
from kvd.mover.cuda.figures import Figures, Key
from kvd.mover.cuda.runs import Runs, runs_of
from kvd.mover.cuda.sample import Sample, sample_of
from kvd.mover.facts import CopyPath
from kvd.mover.layout import GpuConfig, MoverConfig
from kvd.processes.complaints import log_limited
from kvd_proto.libcuda import CudaError

AUTO = "auto"
# Those that cost the processor less come first.
ORDER = (BATCH, STRIDED, PLAIN, KERNEL)
# So many times as fast must one be that is to be taken before an earlier one.
WORTH_IT = 1.05
_BY_COPY_ENGINES = (BATCH, STRIDED, PLAIN)
_MEASURE_S = 0.2
_ROUNDS = 15
_GPU_ERRORS = (CudaError, runtime.CUDARuntimeError)


def choose(config: MoverConfig, driver_version: str) -> dict[JobKind, CopyPath]:
    """The copier for each direction, with the speed that it had.

    To be called with the device's context current, before the first copy. Takes about 0.2 s
    and at most 8 MiB of device memory, both only where nothing is kept for this GPU, driver and
    layout. CopierUnavailable where the configuration names a copier that is not to be had; of
    the automatic ones those that are there are compared. Where nothing can be measured the
    speeds are 0. The daemon's log is told.
    """
    gpu = config.gpu
    assert gpu is not None, "host memory needs no calibration"
    sample = sample_of(config.groups)
    names = _BY_COPY_ENGINES if gpu.copier == AUTO else (gpu.copier,)
    key = Key.of(gpu, driver_version, sample.group, names)
    directory = config.pool_directory / "calibration"
    found, origin = figures.read(directory, key, names), "measured before"
    otherwise = names[0]
    if found is None:
        copiers = _copiers(names, gpu)
        otherwise = copiers[0].name
        found, origin = _measured(copiers, sample), "measured now"
        _keep(directory, key, found, copiers)
    paths = {kind: best(found[kind], otherwise) for kind in JobKind}
    told = "; ".join(_words(kind, paths[kind], found[kind]) for kind in JobKind)
    log_limited(f"{gpu.uuid}, {origin}: {told}")
    return paths


def best(speeds: Mapping[str, float], otherwise: str) -> CopyPath:
    """Which copier to take by bytes a second; the other one, at speed 0, where there are none."""
    if not speeds:
        return CopyPath(otherwise)
    enough = max(speeds.values()) / WORTH_IT
    name = next(name for name in ORDER if speeds.get(name, 0.0) >= enough)
    return CopyPath(name, speeds[name])


def _copiers(names: Sequence[str], gpu: GpuConfig) -> list[Copier]:
    """Those that are to be had; CopierUnavailable where none is."""
    made: list[Copier] = []
    reasons: list[str] = []
    for name in names:
        try:
            made.append(make_copier(name, gpu))
        except CopierUnavailable as error:
            reasons.append(f"{name}: {error}")
    if not made:
        raise CopierUnavailable("; ".join(reasons))
    for reason in reasons:
        log_limited(f"{gpu.uuid} is not copied to by {reason}")
    return made


def _keep(directory: Path, key: Key, found: Figures, copiers: Sequence[Copier]) -> None:
    """Keep complete figures only: what failed may have been something passing."""
    if any(found[kind].keys() != {copier.name for copier in copiers} for kind in JobKind):
        return
    try:
        figures.write(directory, key, found)
    except OSError as error:
        log_limited(f"the calibration can't be kept, the next mover makes it again: {error}")


def _words(kind: JobKind, path: CopyPath, speeds: Mapping[str, float]) -> str:
    others = sorted((speed, name) for name, speed in speeds.items() if name != path.copier)
    beside = ", ".join(f"{name} {speed / 1e9:.1f}" for speed, name in reversed(others))
    if not speeds:
        return f"{kind.name.lower()}s go by {path.copier}, unmeasured"
    chosen = f"{kind.name.lower()}s go by {path.copier} at {path.bytes_per_second / 1e9:.1f} GB/s"
    return f"{chosen} ({beside})" if beside else chosen


# -- measuring ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Bench:
    """The copy to be measured, and a stream of its own."""

    runs: Runs
    stream: int

    def seconds(self, kind: JobKind, copier: Copier) -> float:
        """From before the copy is submitted until it has ended."""
        start = time.perf_counter()
        copier.submit(kind, self.runs, self.stream)
        runtime.streamSynchronize(self.stream)
        return time.perf_counter() - start


def _measured(copiers: Sequence[Copier], sample: Sample) -> Figures:
    """Bytes a second of each copier in each direction; what failed is left out."""
    speeds: dict[JobKind, dict[str, float]] = {kind: {} for kind in JobKind}
    try:
        with _bench(sample) as bench:
            for (kind, name), taken in _times(copiers, bench).items():
                # The first one found everything cold.
                seconds = statistics.median(taken[1:] or taken)
                speeds[kind][name] = bench.runs.nbytes / seconds
    except _GPU_ERRORS as error:
        # Short of memory it may be, and copies go on without figures; anything worse shows there.
        log_limited(f"no calibration: {error}")
    return speeds


def _times(copiers: Sequence[Copier], bench: _Bench) -> dict[tuple[JobKind, str], list[float]]:
    """Seconds that each took each time, in turns, so that what disturbs disturbs all alike."""
    times: dict[tuple[JobKind, str], list[float]] = defaultdict(list)
    lanes = [(kind, copier) for copier in copiers for kind in JobKind]
    end = time.perf_counter() + _MEASURE_S
    for turn in range(1 + _ROUNDS):
        if turn > 0 and time.perf_counter() > end:  # whole turns only: equal conditions for all
            break
        for kind, copier in tuple(lanes):
            try:
                taken = bench.seconds(kind, copier)
            except _GPU_ERRORS as error:
                log_limited(f"{copier.name} is not used for {kind.name.lower()}s: {error}")
                lanes.remove((kind, copier))
                times.pop((kind, copier.name), None)
            else:
                times[kind, copier.name].append(taken)
    return times


@contextmanager
def _bench(sample: Sample) -> Iterator[_Bench]:
    """Scratch memory on both sides, given back at the end with nothing under way."""
    with ExitStack() as held:
        device: int = runtime.malloc(sample.device_bytes)
        held.callback(runtime.free, device)
        host: int = runtime.hostAlloc(sample.host_bytes, runtime.hostAllocPortable)
        held.callback(runtime.freeHost, host)
        stream: int = runtime.streamCreateWithFlags(runtime.streamNonBlocking)
        held.callback(runtime.streamDestroy, stream)
        held.callback(runtime.streamSynchronize, stream)
        regions = 1 + max(fragment.region for fragment in sample.group.fragments)
        yield _Bench(runs_of(sample.part, sample.group, lambda _: host, [device] * regions), stream)
