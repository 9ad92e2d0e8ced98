"""A name for an engine's weights, which two engines share only when their weights are the same.

Weights are named by their repository, commit and place within it where the files are untouched
downloads of the Hugging Face hub, else by a digest of the local files' names, sizes, times and
samples of what is in them. A whole file is not read: that would take as long as loading it. Local
files that were changed after the engine began may not be those that it loaded. Where no name can be
had, the answer is why not, and the engine must not share.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Loaders that read the model's own files, and of their settings those that only say how.
FILE_LOADERS = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "gguf",
        "hf",
        "instanttensor",
        "mistral",
        "npcache",
        "pt",
        "runai_streamer",
        "safetensors",
        "sharded_state",
    }
)
HARMLESS_SETTINGS = frozenset(
    {
        "concurrency",
        "distributed",
        "enable_multithread_load",
        "enable_weights_track",
        "memory_limit",
        "num_threads",
    }
)
WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz"})
MAX_FILES = 4096
# Of what else shapes a block: how the model's shards are put together, and what its processor makes
# of images, of which a block's hash has the content only.
SHAPING_SUFFIXES = (".index.json", "processor_config.json")
# What an engine reads of a model beside its weights, but for how tokens are made and drawn.
SETTINGS_SUFFIXES = ("config.json", "params.json")
OF_TOKENS = frozenset({"generation_config.json", "tokenizer_config.json"})
HUB_SWITCHES = ("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE")  # names are another hub's then
SAMPLES = 64  # of a file; a fine-tuned model differs in nearly every one
SAMPLE_BYTES = 4096
SNAPSHOT = re.compile(r"/models--(?P<repository>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})(?:/|$)")


class Changed(ValueError):
    """What lies there now may not be what the engine read."""


class WeightsName(NamedTuple):
    """`name` of the weights; where it can't be known it is empty and `problem` says why."""

    name: str
    problem: str = ""


def name_weights(model_config: Any, load_config: Any, begun_ns: int | None = None) -> WeightsName:
    """What one model's weights are called, from vLLM's configuration and the local files.

    Call it once the weights are loaded: then the files are there, and mostly in memory.
    `begun_ns`: when the engine began, before it read any of them; None where that is not known.
    """
    loader = str(load_config.load_format)
    settings = load_config.model_loader_extra_config or {}
    if loader not in FILE_LOADERS:
        return WeightsName("", f"load_format {loader} does not say which weights it loads")
    if not isinstance(settings, dict):
        return WeightsName("", "model_loader_extra_config may name other weights")
    telling = {k: v for k, v in settings.items() if k not in HARMLESS_SETTINGS}
    if telling.keys() - {"pattern"}:
        return WeightsName("", "model_loader_extra_config may name other weights")
    elsewhere = str(getattr(model_config, "model_weights", "") or "")
    if "://" in elsewhere or "://" in model_config.model:
        return WeightsName("", f"weights come from {elsewhere or model_config.model}")
    try:
        path = _local_path(elsewhere or model_config.model, model_config, load_config)
        name = _name_path(path, begun_ns, with_code=bool(model_config.trust_remote_code))
    except (OSError, ValueError) as error:
        return WeightsName("", f"the weights' files give no name: {error}")
    how = [] if loader in ("auto", "hf", "safetensors") else [loader]
    how += [json.dumps(telling, sort_keys=True, default=str)] if telling else []
    return WeightsName(" ".join([name, *how]))


def settings_digests(model_config: Any, load_config: Any) -> dict[str, str]:
    """Of each file beside the weights that says what a layer computes, a digest of what is in it.

    Of a model that lies nowhere here, nothing: then its weights have no name but a given one.
    """
    try:
        files = _settings_files(model_config, load_config)
        return {file.name: content_digest(file) for file in files}
    except (OSError, ValueError):
        return {}


def changed_settings(model_config: Any, load_config: Any, begun_ns: int) -> str:
    """Why an engine may have read other settings than lie there now; empty where it has not.

    Of a download of the hub's the files are brought, and do not change.
    """
    try:
        files = _settings_files(model_config, load_config)
        own = [file for file in files if not _blob_of(file)]
    except (OSError, ValueError):
        return ""
    return changed_files(own, begun_ns)


def changed_files(files: list[Path], begun_ns: int) -> str:
    """Why an engine may have read something else in one of them than lies there now; empty where it
    has not, or where nobody here can tell."""
    try:
        for file in files:
            _check_unchanged(file.absolute().parent, [file.absolute()], begun_ns)
    except Changed as change:
        return str(change)
    except (OSError, ValueError):
        return ""
    return ""


def _settings_files(model_config: Any, load_config: Any) -> list[Path]:
    path = _local_path(model_config.model, model_config, load_config)
    root = path if path.is_dir() else path.parent
    return [
        file
        for file in sorted(root.iterdir())
        if file.name.endswith(SETTINGS_SUFFIXES) and file.name not in OF_TOKENS
    ]


def content_digest(file: Path) -> str:
    """Of a whole file, which is small."""
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()


def short_model_name(model: str) -> str:
    """The repository's name for a hub model, wherever it lies; else the last part of the path."""
    snapshot = SNAPSHOT.search(model)
    if snapshot is not None:
        return snapshot["repository"].replace("--", "/", 1)
    return Path(model).name if model.startswith(("/", ".", "~")) else model


def _local_path(model: str, model_config: Any, load_config: Any) -> Path:
    """Where the model lies on this machine. Asks no network; ValueError when nowhere."""
    path = Path(model).expanduser()
    if path.exists():
        return path
    for switch in HUB_SWITCHES:
        if os.environ.get(switch, "").strip().lower() in ("1", "true"):
            raise ValueError(f"{model} is ModelScope's by {switch}; give the path of its download")
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - vLLM has it, not everyone

        cached = snapshot_download(
            model,
            revision=model_config.revision,
            cache_dir=load_config.download_dir,
            local_files_only=True,
        )
    except Exception as error:  # whatever it is, the place is not known
        raise ValueError(f"{model} is not in the local cache: {error}") from error
    _check_commit(model_config, Path(cached))
    return Path(cached)


def _check_commit(model_config: Any, cached: Path) -> None:
    """Raise ValueError where the engine read its configuration from another commit than this.

    Another engine may have brought a newer one into the same cache while this one was loading.
    """
    begun_with = getattr(getattr(model_config, "hf_config", None), "_commit_hash", None)
    is_elsewhere = getattr(model_config, "hf_config_path", None)
    if begun_with and not is_elsewhere and cached.name != begun_with:
        raise ValueError(
            f"the cache's commit is {cached.name}, the engine began with {begun_with}: start it"
            " again, or with --revision"
        )


def _name_path(path: Path, begun_ns: int | None, *, with_code: bool) -> str:
    """Repository, commit and place, or the files' digest. ValueError where there are no weights."""
    root = path if path.is_dir() else path.parent
    files = sorted(_weight_files(path, with_code=with_code))
    if not any(file.suffix in WEIGHT_SUFFIXES or file == path for file in files):
        raise ValueError(f"no weights in {path}")
    snapshot = SNAPSHOT.search(str(root.absolute()))
    if snapshot is not None and all(_blob_of(file) for file in files):
        repository = snapshot["repository"].replace("--", "/", 1)
        within = str(path.absolute())[snapshot.end() :]  # a repository may hold several models
        return f"{repository}@{snapshot['commit']}" + (f"/{within}" if within else "")
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(f"{file.relative_to(root)}\0{_describe_file(file)}\0".encode())
    if begun_ns is not None:
        _check_unchanged(path.absolute(), [*files, root], begun_ns)
    return f"files:{digest.hexdigest()}"


def _check_unchanged(path: Path, files: list[Path], begun_ns: int) -> None:
    """Raise Changed where any of these changed since: the engine may have read others.

    The time of a change can't be set as that of the contents can, and a file or folder that was
    moved has it, too.
    """
    if time.time_ns() < begun_ns:  # by which a later change has an earlier time
        raise Changed("the clock was put back as the engine started: start it again")
    links = [each for each in (path, *path.parents, *files) if each.is_symlink()]
    times = [(each, each.lstat().st_ctime_ns) for each in links]
    times += [(each, each.stat().st_ctime_ns) for each in files]
    for place, changed_ns in times:
        if changed_ns > begun_ns:
            raise Changed(f"{place} was changed as the engine started: start it again")


def _weight_files(path: Path, *, with_code: bool) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    count = 0
    for directory, folders, names in os.walk(path, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            file = Path(directory, name)
            is_code = with_code and file.suffix == ".py"
            if file.suffix in WEIGHT_SUFFIXES or is_code or name.endswith(SHAPING_SUFFIXES):
                count += 1
                if count > MAX_FILES:
                    raise ValueError(f"more than {MAX_FILES} files in {path}")
                yield file


def _blob_of(file: Path) -> str:
    """Name of the hub's content-addressed file that this links to; empty when it is none."""
    if not file.is_symlink():
        return ""
    target = file.resolve()
    return target.name if target.parent.name == "blobs" else ""


def _describe_file(file: Path) -> str:
    status = file.stat()
    blob = _blob_of(file)
    if blob:
        return f"{status.st_size} blob {blob}"
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb", buffering=0) as opened:
        for offset in _sample_offsets(status.st_size):
            digest.update(os.pread(opened.fileno(), SAMPLE_BYTES, offset))
    # The time catches a small change between the samples; the samples catch archives and image
    # layers, whose files all have one time.
    return f"{status.st_size} {status.st_mtime_ns} {digest.hexdigest()}"


def _sample_offsets(size: int) -> Iterator[int]:
    if size <= SAMPLES * SAMPLE_BYTES:
        yield from range(0, size, SAMPLE_BYTES)
        return
    last = size - SAMPLE_BYTES
    yield from (last * number // (SAMPLES - 1) for number in range(SAMPLES))
