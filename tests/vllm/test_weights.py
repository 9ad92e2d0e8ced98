"""Names of weights: the same only for the same weights, none where that can't be known."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvd_client.integrations.weights import (
    SAMPLES,
    WeightsName,
    name_weights,
    short_model_name,
)

MEBIBYTE = 1 << 20
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def named(
    model: Path | str,
    trust_remote_code: bool = False,
    begun_with: SimpleNamespace | None = None,
    begun_ns: int | None = None,
    **load: Any,
) -> WeightsName:
    """`begun_with`: more of the model's configuration. `begun_ns`: when the engine began."""
    config = SimpleNamespace(
        model=str(model),
        model_weights="",
        revision=None,
        trust_remote_code=trust_remote_code,
        **vars(begun_with or SimpleNamespace()),
    )
    settings: dict[str, Any] = {
        "load_format": "auto",
        "model_loader_extra_config": {},
        "download_dir": None,
    }
    return name_weights(config, SimpleNamespace(**settings | load), begun_ns)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(bytes(range(256)) * (4 * MEBIBYTE // 256))
    (directory / "config.json").write_text("{}")
    return directory


def rewrite(file: Path, at: int) -> None:
    """Change one byte and nothing else: not the size, not the time."""
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(b"\xff\xfe")
    os.utime(file, ns=times)


def test_local_files_have_the_same_name_when_asked_twice(model: Path) -> None:
    first = named(model)
    assert first == named(model)
    assert first.name.startswith("files:")
    assert not first.problem


def test_touched_renamed_longer_or_other_files_have_another_name(model: Path) -> None:
    file = model / "model.safetensors"
    names = {named(model)}
    os.utime(file, ns=(1, 1))
    names.add(named(model))
    rewrite(file, at=0)
    names.add(named(model))
    rewrite(file, at=file.stat().st_size // (SAMPLES - 1) * 3 + 5)
    names.add(named(model))
    file.rename(model / "other.safetensors")
    names.add(named(model))
    (model / "more.bin").write_bytes(b"")
    names.add(named(model))
    assert len(names) == 6
    assert not any(name.problem for name in names)


def put_in_place(folder: Path, other: Path) -> None:
    """The other's file for its own, with the times that it has."""
    (other / "model.safetensors").replace(folder / "model.safetensors")


def move_in_place(folder: Path, other: Path) -> None:
    shutil.rmtree(folder)
    other.rename(folder)


def link_in_place(folder: Path, other: Path) -> None:
    """`latest`, by which the model is named, is another folder from now on."""
    link = folder.parent / "latest"
    link.unlink()
    link.symlink_to(other)


@pytest.mark.parametrize("change", [put_in_place, move_in_place, link_in_place])
def test_files_that_changed_as_the_engine_started_give_no_name(
    model: Path, tmp_path: Path, change: Callable[[Path, Path], None]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(model, other)
    latest = tmp_path / "latest"
    latest.symlink_to(model)
    time.sleep(0.05)  # the times of files are behind the clock's by a tick
    begun_ns = time.time_ns()
    time.sleep(0.05)
    assert named(latest, begun_ns=begun_ns) == named(latest)
    change(model, other)
    changed = named(latest, begun_ns=begun_ns)
    assert not changed.name
    assert "changed as the engine started" in changed.problem
    time.sleep(0.05)
    assert named(latest, begun_ns=time.time_ns()).name, "the next start has a name"


def test_files_of_an_engine_whose_clock_was_put_back_since_its_start_give_no_name(
    model: Path,
) -> None:
    begun_ns = time.time_ns() + 3600 * 10**9  # by the clock as it was
    rewrite(model / "model.safetensors", at=0)
    changed = named(model, begun_ns=begun_ns)
    assert not changed.name
    assert "the clock was put back as the engine started" in changed.problem


def test_what_is_no_weights_does_not_count(model: Path) -> None:
    before = named(model)
    (model / "README.md").write_text("changed")
    (model / ".git").mkdir()
    (model / ".git" / "pack.bin").write_bytes(b"x")
    assert named(model) == before


def test_the_models_own_code_counts_where_it_is_run(model: Path) -> None:
    (model / "modeling.py").write_text("a = 1")
    plain, trusted = named(model), named(model, trust_remote_code=True)
    (model / "modeling.py").write_text("a = 2")
    assert named(model) == plain
    assert named(model, trust_remote_code=True) != trusted


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_what_the_models_processor_makes_of_images_counts(
    model: Path, tmp_path: Path, name: str
) -> None:
    names = {named(model)}
    (model / name).write_text('{"image_mean": 0.5}')
    names.add(named(model))
    (model / name).write_text('{"image_mean": 0.25}')
    names.add(named(model))
    assert len(names) == 3
    place = snapshot(tmp_path)
    (place / name).write_text("changed")
    assert named(place).name.startswith("files:")
    (place / "model.safetensors").unlink()
    assert "no weights" in named(place).problem


def snapshot(hub: Path) -> Path:
    """A download as the hub's cache keeps it: links into files named by what is in them."""
    blobs = hub / "models--org--name" / "blobs"
    place = hub / "models--org--name" / "snapshots" / COMMIT
    blobs.mkdir(parents=True)
    place.mkdir(parents=True)
    (blobs / "feed").write_bytes(b"weights")
    (place / "model.safetensors").symlink_to("../../blobs/feed")
    return place


def test_a_download_is_named_by_repository_and_commit_wherever_it_lies(tmp_path: Path) -> None:
    one, two = snapshot(tmp_path / "one"), snapshot(tmp_path / "two")
    assert named(one) == named(two) == WeightsName(f"org/name@{COMMIT}")
    assert short_model_name(str(one)) == "org/name"


def test_several_models_of_one_download_have_names_of_their_own(tmp_path: Path) -> None:
    place = snapshot(tmp_path)
    models = [place / "step-1", place / "step-2", place / "step-1" / "best"]
    for number, folder in enumerate(models):
        folder.mkdir()
        blob = tmp_path / "models--org--name" / "blobs" / f"weights-{number}"
        blob.write_bytes(b"weights")
        (folder / "model.safetensors").symlink_to(blob)
    for quantised in ("q4.gguf", "q8.gguf"):
        (place / quantised).symlink_to("../../blobs/feed")
    names = [named(each) for each in (place, *models, place / "q4.gguf", place / "q8.gguf")]
    assert len(set(names)) == len(names)
    assert all(f"org/name@{COMMIT}" in name.name for name in names)
    assert named(f"{models[0]}/") == named(models[0])


def test_a_download_that_was_changed_is_not_named_by_its_commit(tmp_path: Path) -> None:
    place = snapshot(tmp_path)
    file = place / "model.safetensors"
    file.unlink()
    file.write_bytes(b"others!")
    assert named(place).name.startswith("files:")


def test_a_repository_is_found_in_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = snapshot(tmp_path)
    (place.parents[1] / "refs").mkdir()
    (place.parents[1] / "refs" / "main").write_text(COMMIT)
    assert named("org/name", download_dir=str(tmp_path)).name == f"org/name@{COMMIT}"
    assert "not in the local cache" in named("org/other", download_dir=str(tmp_path)).problem


def test_a_cache_that_was_updated_as_the_engine_started_gives_no_name(tmp_path: Path) -> None:
    place = snapshot(tmp_path)
    (place.parents[1] / "refs").mkdir()
    (place.parents[1] / "refs" / "main").write_text(COMMIT)

    def begun_with(commit: str, **more: Any) -> WeightsName:
        return named(
            "org/name",
            download_dir=str(tmp_path),
            begun_with=SimpleNamespace(hf_config=SimpleNamespace(_commit_hash=commit), **more),
        )

    assert begun_with(COMMIT).name == f"org/name@{COMMIT}"
    other = COMMIT[::-1]
    assert other in begun_with(other).problem
    assert begun_with(other, hf_config_path="/elsewhere").name == f"org/name@{COMMIT}"


@pytest.mark.parametrize("switch", ["VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE"])
def test_another_hubs_model_has_no_name_of_this_ones_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    place = snapshot(tmp_path)
    (place.parents[1] / "refs").mkdir()
    (place.parents[1] / "refs" / "main").write_text(COMMIT)
    monkeypatch.setenv(switch, "true")
    assert switch in named("org/name", download_dir=str(tmp_path)).problem
    assert named(place).name == f"org/name@{COMMIT}"


@pytest.mark.parametrize(
    "load",
    [
        {"load_format": "dummy"},
        {"load_format": "tensorizer"},
        {"load_format": "a loader of somebody's own"},
        {"model_loader_extra_config": {"qlora_adapter_name_or_path": "/x"}},
    ],
)
def test_a_loader_that_may_read_other_weights_leaves_them_without_a_name(
    model: Path, load: dict[str, Any]
) -> None:
    name, problem = named(model, **load)
    assert not name
    assert problem


def test_settings_that_only_say_how_to_load_don_t_count(model: Path) -> None:
    assert named(model, model_loader_extra_config={"num_threads": 4}) == named(model)
    sharded = named(model, load_format="sharded_state")
    assert sharded.name
    assert sharded != named(model)


def test_a_place_without_weights_and_an_object_store_have_no_name(tmp_path: Path) -> None:
    assert "no weights" in named(tmp_path).problem
    assert "s3://" in named("s3://bucket/model").problem
