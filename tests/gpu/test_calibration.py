"""Calibration: the fastest way of copying wins, is remembered, and never in the way."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.core.events import JobKind
from kvd.core.keys import MoverId
from kvd.mover.cuda import figures
from kvd.mover.cuda.figures import Key
from kvd.mover.cuda.runs import runs_of
from kvd.mover.cuda.sample import MOST_BYTES, sample_of
from kvd.mover.facts import CopyPath
from kvd.mover.layout import CudaRegion, FragmentSpec, GpuConfig, GroupMap, MoverConfig
from kvd.processes.mappings import ExtentFiles
from tests.gpu.driver import Driver

KIB, MIB = 1 << 10, 1 << 20
DRIVER_VERSION = "580.95.05"
BY_COPY_ENGINES = ("batch", "strided", "plain")
FOUND = {
    JobKind.STORE: {"batch": 40e9, "plain": 10e9},
    JobKind.LOAD: {"batch": 45e9, "plain": 48e9},
}


def per_layer(layers: int, fragment_bytes: int, num_blocks: int = 512) -> GroupMap:
    half = num_blocks * fragment_bytes
    fragments = tuple(
        FragmentSpec(layer, kv * half, fragment_bytes, fragment_bytes)
        for layer in range(layers)
        for kv in range(2)
    )
    return GroupMap(num_blocks, 1, 2 * layers * fragment_bytes, fragments)


def cross_layer(layers: int, fragment_bytes: int, num_blocks: int = 64) -> GroupMap:
    stride = layers * fragment_bytes
    fragments = tuple(
        FragmentSpec(0, layer * fragment_bytes, stride, fragment_bytes) for layer in range(layers)
    )
    return GroupMap(num_blocks, 1, stride, fragments)


def config_of(directory: Path, copier: str = "auto", uuid: str = "GPU-1") -> MoverConfig:
    group = per_layer(layers=4, fragment_bytes=8 * KIB)
    regions = tuple(CudaRegion(0, 2 * 512 * 8 * KIB, b"h" * 64) for _ in range(4))
    return MoverConfig(
        MoverId(1),
        regions,
        (group,),
        directory,
        ExtentFiles(directory / "extents", 0, 64 * MIB),
        gpu=GpuConfig(uuid, copier),
    )


# -- what is measured -----------------------------------------------------------------------


@st.composite
def groups(draw: st.DrawFn) -> GroupMap:
    fragments = []
    for _ in range(draw(st.integers(1, 12))):
        width = 8 * draw(st.sampled_from([1, 3, 64, 1024, 200_000, 600_000]))
        stride = width + 8 * draw(st.sampled_from([0, 1, 5000]))
        base = 8 * draw(st.integers(0, 1 << 21))
        fragments.append(FragmentSpec(draw(st.integers(0, 2)), base, stride, width))
    return GroupMap(1000, 1, sum(fragment.bytes for fragment in fragments), tuple(fragments))


@given(group=groups())
def test_a_sample_stays_within_its_scratch_buffers(group: GroupMap) -> None:
    sample = sample_of([group])
    assert 0 < sample.device_bytes <= MOST_BYTES
    assert 0 < sample.host_bytes <= MOST_BYTES
    host, device, width = runs_of(sample.part, sample.group, lambda _: 0, [0, 0, 0]).expand()
    assert int((host + width).max()) <= sample.host_bytes
    assert int((device + width).max()) <= sample.device_bytes
    assert int(width.sum()) == sample.host_bytes


def test_a_sample_has_the_ranks_own_widths_and_even_steps() -> None:
    group = per_layer(layers=32, fragment_bytes=4 * KIB)
    sample = sample_of([group])
    runs = runs_of(sample.part, sample.group, lambda _: 0, [0] * 32)
    assert set(runs.width.tolist()) == {4 * KIB}
    assert set(runs.height.tolist()) == {2}  # keys and values of a block, as in the rank's copies
    assert sample.host_bytes == sample.device_bytes
    assert sample.host_bytes >= MOST_BYTES // 2


def test_a_samples_blocks_are_scattered() -> None:
    sample = sample_of([cross_layer(layers=8, fragment_bytes=16 * KIB)])
    host, device, width = runs_of(sample.part, sample.group, lambda _: 0, [0]).expand()
    assert set(width.tolist()) == {128 * KIB}
    assert len(np.unique(device)) == len(host) == sample.group.num_blocks == 64


def test_the_group_with_the_largest_blocks_is_sampled() -> None:
    small, large = per_layer(1, 512), per_layer(2, 16 * KIB)
    assert sample_of([small, large]).group.fragments[0].bytes == 16 * KIB


def test_a_block_too_large_for_the_buffers_is_narrowed() -> None:
    group = GroupMap(100, 1, 20 * MIB, (FragmentSpec(0, 0, 20 * MIB, 20 * MIB),))
    sample = sample_of([group])
    assert [fragment.bytes for fragment in sample.group.fragments] == [2 * MIB]
    assert sample.group.num_blocks == 4


def test_fragments_that_overlap_are_sampled_within_the_buffers_too() -> None:
    fragments = (FragmentSpec(0, 0, MIB, MIB),) * 40
    sample = sample_of([GroupMap(100, 1, 40 * MIB, fragments)])
    assert sample.group.fragments == fragments[:1]
    assert sample.host_bytes == sample.device_bytes == MOST_BYTES


# -- which is chosen ------------------------------------------------------------------------


@pytest.fixture
def calibration(driver: Driver) -> ModuleType:
    del driver
    from cupy.cuda import runtime

    from kvd.mover.cuda import calibration as module

    runtime.setDevice(0)
    return module


@pytest.mark.parametrize(
    ("speeds", "chosen"),
    [
        ({"batch": 50e9, "strided": 20e9, "plain": 10e9}, "batch"),
        ({"batch": 50e9, "strided": 52e9, "plain": 52e9}, "batch"),
        ({"batch": 40e9, "strided": 50e9, "plain": 52e9}, "strided"),
        ({"batch": 40e9, "strided": 30e9, "plain": 52e9}, "plain"),
        ({"strided": 10e9, "plain": 20e9}, "plain"),
        ({"kernel": 5e9}, "kernel"),
    ],
)
def test_the_fastest_wins_unless_another_is_as_good_and_cheaper(
    calibration: ModuleType, speeds: dict[str, float], chosen: str
) -> None:
    assert calibration.best(speeds, "plain") == CopyPath(chosen, speeds[chosen])


def test_without_figures_the_other_one_is_taken_at_no_speed(calibration: ModuleType) -> None:
    assert calibration.best({}, "strided") == CopyPath("strided", 0.0)


# -- what is kept ---------------------------------------------------------------------------


def key_of(**changes: str) -> Key:
    return replace(Key("GPU-1", DRIVER_VERSION, "0123456789abcdef"), **changes)


def test_figures_come_back_as_they_were_kept(tmp_path: Path) -> None:
    figures.write(tmp_path / "calibration", key_of(), FOUND)
    assert figures.read(tmp_path / "calibration", key_of(), BY_COPY_ENGINES) == FOUND
    assert [path.name for path in (tmp_path / "calibration").iterdir()] == [
        "GPU-1-580.95.05-0123456789abcdef.json"
    ]


def test_a_key_is_a_plain_file_name_whatever_the_driver_calls_itself(tmp_path: Path) -> None:
    path = key_of(driver="../../etc/x y").path(tmp_path)
    assert path.parent == tmp_path
    assert path.name == "GPU-1-.._.._etc_x_y-0123456789abcdef.json"


@pytest.mark.parametrize("field", ["uuid", "driver", "layout"])
def test_figures_of_another_key_are_not_taken(tmp_path: Path, field: str) -> None:
    other = key_of(**{field: "another"})
    figures.write(tmp_path, key_of(), FOUND)
    key_of().path(tmp_path).rename(other.path(tmp_path))
    assert figures.read(tmp_path, other, BY_COPY_ENGINES) is None


def damaged(change: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps(change(json.loads(content))).encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda content: content[:-9],
        lambda _: b"\xff\xfe",
        lambda _: b"[" * 50_000,
        lambda _: b"[1, 2]",
        damaged(lambda kept: kept | {"format": 2}),
        damaged(lambda kept: kept | {"key": None}),
        damaged(lambda kept: kept | {"store": {}}),
        damaged(lambda kept: kept | {"store": []}),
        damaged(lambda kept: {name: kept[name] for name in kept if name != "load"}),
        damaged(lambda kept: kept | {"load": {"batch": "fast"}}),
        damaged(lambda kept: kept | {"load": {"batch": True}}),
        damaged(lambda kept: kept | {"load": {"batch": float("nan")}}),
        damaged(lambda kept: kept | {"load": {"batch": float("inf")}}),
        damaged(lambda kept: kept | {"load": {"batch": 1e300}}),
        damaged(lambda kept: kept | {"load": {"batch": 0.0}}),
        damaged(lambda kept: kept | {"load": {"batch": -1.0}}),
        damaged(lambda kept: kept | {"load": {"teleport": 1e12}}),
        damaged(lambda kept: kept | {"load": {"kernel": 1e12}}),
    ],
)
def test_a_damaged_or_foreign_file_is_as_good_as_none(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    figures.write(tmp_path, key_of(), FOUND)
    path = key_of().path(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert figures.read(tmp_path, key_of(), BY_COPY_ENGINES) is None
    figures.write(tmp_path, key_of(), FOUND)
    assert figures.read(tmp_path, key_of(), BY_COPY_ENGINES) == FOUND


def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path: Path) -> None:
    key_of().path(tmp_path).mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        figures.write(tmp_path, key_of(), FOUND)
    assert [path.name for path in tmp_path.iterdir()] == [key_of().path(tmp_path).name]


def test_figures_are_kept_of_so_many_layouts_and_the_oldest_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "MOST_FILES", 3)
    keys = [key_of(layout=f"{number:016x}") for number in range(5)]
    (tmp_path / ".new-killed").write_text("a mover was ended as it wrote this")
    os.utime(tmp_path / ".new-killed", ns=(0, 0))
    for number, key in enumerate(keys):
        figures.write(tmp_path, key, FOUND)
        os.utime(key.path(tmp_path), ns=(number + 1, number + 1))
    assert set(tmp_path.iterdir()) == {key.path(tmp_path) for key in keys[2:]}


def test_other_copiers_or_batches_or_layouts_are_other_keys() -> None:
    gpu, group = GpuConfig("GPU-1"), per_layer(2, 4096)
    keys = {
        Key.of(gpu, DRIVER_VERSION, group, BY_COPY_ENGINES).layout,
        Key.of(gpu, DRIVER_VERSION, group, ("kernel",)).layout,
        Key.of(gpu, DRIVER_VERSION, per_layer(2, 8192), BY_COPY_ENGINES).layout,
        Key.of(replace(gpu, batch_descriptors=1), DRIVER_VERSION, group, BY_COPY_ENGINES).layout,
    }
    assert len(keys) == 4


# -- on a device ----------------------------------------------------------------------------


def kept_in(directory: Path) -> list[Path]:
    return sorted((directory / "calibration").glob("*"))


def copies_made(driver: Driver) -> int:
    counted = driver.counters()
    return sum(counted[name] for name in ("copies_async", "copies_2d", "batches", "kernels"))


@pytest.fixture
def only_fake(driver: Driver) -> Driver:
    if not driver.is_fake:
        pytest.skip("a real driver neither counts nor breaks on purpose")
    return driver


def test_each_direction_gets_a_copier_with_its_speed(
    calibration: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    paths = calibration.choose(config_of(tmp_path), DRIVER_VERSION)
    assert paths.keys() == set(JobKind)
    for path in paths.values():
        assert path.copier in BY_COPY_ENGINES
        assert path.bytes_per_second > 0
    [line] = capfd.readouterr().err.splitlines()
    assert "GPU-1, measured now: stores go by " in line
    assert all(name in line for name in BY_COPY_ENGINES)


def test_calibration_gives_its_device_memory_back(
    calibration: ModuleType, driver: Driver, tmp_path: Path
) -> None:
    calibration.choose(config_of(tmp_path), DRIVER_VERSION)
    free = driver.free_bytes()
    calibration.choose(config_of(tmp_path, uuid="GPU-2"), DRIVER_VERSION)
    # On a real GPU others may let go meanwhile; what is missing is less than a scratch buffer.
    assert free - driver.kept_bytes // 16 <= driver.free_bytes() <= free + driver.kept_bytes


def test_the_next_mover_of_the_kind_measures_nothing(
    calibration: ModuleType, only_fake: Driver, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = calibration.choose(config_of(tmp_path), DRIVER_VERSION)
    made = copies_made(only_fake)
    assert calibration.choose(config_of(tmp_path), DRIVER_VERSION) == first
    assert copies_made(only_fake) == made
    assert "measured before" in capfd.readouterr().err.splitlines()[-1]


def test_another_driver_is_measured_anew(
    calibration: ModuleType, only_fake: Driver, tmp_path: Path
) -> None:
    calibration.choose(config_of(tmp_path), DRIVER_VERSION)
    made = copies_made(only_fake)
    calibration.choose(config_of(tmp_path), "590.1")
    assert copies_made(only_fake) > made
    assert len(kept_in(tmp_path)) == 2


def test_a_damaged_file_is_measured_anew_and_replaced(
    calibration: ModuleType, tmp_path: Path
) -> None:
    calibration.choose(config_of(tmp_path), DRIVER_VERSION)
    [path] = kept_in(tmp_path)
    path.write_text("{")
    calibration.choose(config_of(tmp_path), DRIVER_VERSION)
    assert kept_in(tmp_path) == [path]
    assert json.loads(path.read_text())["key"]["uuid"] == "GPU-1"


@pytest.mark.parametrize("name", ["batch", "strided", "plain", "kernel"])
def test_a_copier_that_is_named_is_the_only_one_measured(
    calibration: ModuleType, tmp_path: Path, name: str
) -> None:
    paths = calibration.choose(config_of(tmp_path, name), DRIVER_VERSION)
    assert [path.copier for path in paths.values()] == [name, name]
    [kept] = kept_in(tmp_path)
    assert list(json.loads(kept.read_text())["load"]) == [name]


def test_a_named_copier_that_is_not_to_be_had_is_refused(
    calibration: ModuleType, only_fake: Driver, tmp_path: Path
) -> None:
    from kvd.mover.cuda.copiers import CopierUnavailable

    only_fake.inject("driver_version", version=12040)
    with pytest.raises(CopierUnavailable, match=r"batch: the driver has no cuMemcpyBatchAsync"):
        calibration.choose(config_of(tmp_path, "batch"), DRIVER_VERSION)


def test_an_old_driver_is_calibrated_without_batches(
    calibration: ModuleType, only_fake: Driver, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    only_fake.inject("driver_version", version=12040)
    paths = calibration.choose(config_of(tmp_path), DRIVER_VERSION)
    assert {path.copier for path in paths.values()} <= {"strided", "plain"}
    assert "not copied to by batch" in capfd.readouterr().err


def test_a_device_without_room_goes_uncalibrated(
    calibration: ModuleType, only_fake: Driver, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    only_fake.inject("device_bytes", bytes=1)
    paths = calibration.choose(config_of(tmp_path), DRIVER_VERSION)
    assert set(paths.values()) == {CopyPath("batch", 0.0)}
    assert kept_in(tmp_path) == []
    assert "go by batch, unmeasured" in capfd.readouterr().err


def test_a_copier_that_fails_is_not_chosen_and_nothing_is_kept_of_it(
    calibration: ModuleType, only_fake: Driver, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    only_fake.inject("copy_error", code=2, after=0)  # the first copy of all: a store by batch
    paths = calibration.choose(config_of(tmp_path), DRIVER_VERSION)
    assert paths[JobKind.STORE].copier in ("strided", "plain")
    assert paths[JobKind.LOAD].bytes_per_second > 0
    assert kept_in(tmp_path) == []
    assert "batch is not used for stores" in capfd.readouterr().err


def test_figures_that_cant_be_kept_are_used_all_the_same(
    calibration: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "calibration").write_text("in the way")
    paths = calibration.choose(config_of(tmp_path), DRIVER_VERSION)
    assert paths[JobKind.LOAD].bytes_per_second > 0
    assert "can't be kept" in capfd.readouterr().err
