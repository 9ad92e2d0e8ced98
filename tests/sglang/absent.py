"""Stand-ins for what SGLang imports and its hierarchical cache does not use.

`import sglang` wants Triton, and importing its pools wants every model's configuration, kernels
and quantisation: 2 GB of packages, most for GPUs alone. None of them is called here.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

AT_ONCE = ("triton",)
AFTERWARDS = (  # `import sglang` itself goes without these, and says so
    "aiohttp",
    "compressed_tensors",
    "datasets",
    "dill",
    "fastapi",
    "openai",
    "outlines",
    "requests",
    "safetensors",
    "sentencepiece",
    "sglang.jit_kernel",
    "sglang.kernels",
    "sglang.srt.configs",
    "sglang.srt.connector",
    "sglang.srt.constrained",
    "sglang.srt.entrypoints",
    "sglang.srt.layers.moe",
    "sglang.srt.layers.quantization",
    "sglang.srt.models",
    "sglang.srt.multimodal",
    "sglang.srt.parser",
    "sglang.srt.sampling",
    "sglang.srt.utils.hf_transformers",
    "tokenizers",
    "torchvision",
    "transformers",
    "tvm_ffi",
    "xgrammar",
)
STATE_EVERY_TOKENS = 64  # a figure of an absent kernel's that SGLang's caches compute with
REAL = ("sglang.srt.configs.mamba_utils", "sglang.srt.sampling.sampling_params")


class Nothing(type):
    """A class whose every attribute is such a class, too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make(name)


def make(name: str) -> Nothing:
    """A class that takes any arguments, subclasses and subscripts."""
    return Nothing(
        name,
        (),
        {
            "__init__": lambda *_, **__: None,
            "__class_getitem__": classmethod(lambda cls, _: cls),
            "__init_subclass__": classmethod(lambda *_, **__: None),
        },
    )


def jit(function: Any = None, **_: Any) -> Any:
    """Triton's decorator, which leaves the kernel as it is."""
    return function if callable(function) else (lambda decorated: decorated)


class Absent(types.ModuleType):
    """A module that has whatever it is asked for."""

    __version__ = "3.5.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "jit":
            return jit
        if name in ("autotune", "heuristics"):
            return lambda *_, **__: lambda decorated: decorated
        made = make(name)
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the absent modules before anybody else does."""

    def __init__(self) -> None:
        self.absent: tuple[str, ...] = AT_ONCE

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if name in REAL or not any(f"{name}.".startswith(f"{each}.") for each in self.absent):
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        if any(each.startswith(f"{name}.") for each in REAL):
            above = sys.modules["sglang.srt"].__path__[0]
            spec.submodule_search_locations = [f"{above}/{name.rpartition('.')[2]}"]
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def install() -> None:
    """From here on SGLang's host pools and cache controllers can be imported."""
    finder = Finder()
    sys.meta_path.insert(0, finder)
    import sglang  # noqa: F401 - its patches of transformers are for the real one

    finder.absent = (*AT_ONCE, *AFTERWARDS)
    linear_attention: Any = importlib.import_module(
        "sglang.kernels.ops.attention.fla.chunk_delta_h"
    )
    linear_attention.CHUNK_SIZE = STATE_EVERY_TOKENS
    # SGLang makes no pool, however small, where the machine has less than 10 GiB to spare.
    host_pools: Any = importlib.import_module("sglang.srt.mem_cache.pool_host.base")
    assert host_pools.HICACHE_HOST_MEMORY_RESERVE_BYTES
    host_pools.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
