"""vLLM's source distribution of the supported version, laid out so that its tests run here.

Fetched with pip into .cache and never committed. Its Python goes over the compiled files of
the vLLM that is installed, which is a build for CPUs of the version before.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

VERSION = "0.33.0"
# What vLLM's setup.py imports before pip can tell what it would need.
BUILD_TOOLS = ("setuptools<81", "setuptools-rust", "setuptools-scm", "packaging", "wheel", "jinja2")
# The one model whose configuration the tests read; nothing of it is ever run.
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "activation_function": "relu",
    "bos_token_id": 2,
    "do_layer_norm_before": True,
    "eos_token_id": 2,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "max_position_embeddings": 2048,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "torch_dtype": "float16",
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}


class CannotBeHad(Exception):
    """The source distribution can't be fetched here."""


def laid_out(python: Path, cache: Path) -> Path:
    """A directory to run vLLM's tests in: `vllm` is importable from it, `tests` lies in it."""
    whole = cache / f"vllm-{VERSION}"
    if not (whole / "config-written").exists():
        shutil.rmtree(whole, ignore_errors=True)
        with tarfile.open(_fetched(python, cache)) as archive:
            top = f"vllm-{VERSION}/"
            wanted = [m for m in archive if m.name.startswith((f"{top}vllm/", f"{top}tests/"))]
            archive.extractall(cache, members=wanted, filter="data")
        model = whole / "facebook" / "opt-125m"
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(OPT))
        (whole / "config-written").touch()
    for built in _installed(python).glob("*.so"):
        link = whole / "vllm" / built.name
        link.unlink(missing_ok=True)
        link.symlink_to(built)
    return whole


def _fetched(python: Path, cache: Path) -> Path:
    archive = cache / f"vllm-{VERSION}.tar.gz"
    if archive.exists():
        return archive
    tools = cache / "build-tools"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "install", "-q", "--target", str(tools), "--upgrade", *BUILD_TOOLS], {})
    source = ["--no-binary", ":all:", "--no-deps", "--no-build-isolation"]
    _run(
        [*pip, "download", "-q", f"vllm=={VERSION}", *source, "-d", str(cache)],
        {
            "PYTHONPATH": str(tools),
            "VLLM_TARGET_DEVICE": "empty",
            "VLLM_VERSION_OVERRIDE": VERSION,
        },
    )
    return archive


def _run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CannotBeHad(done.stderr.strip().splitlines()[-1] if done.stderr else command[3])


def _installed(python: Path) -> Path:
    """The folder of the installed vLLM, found without importing it."""
    code = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return Path(found.stdout.strip())
