"""`cupy.RawKernel`: a kernel's source, compiled for the host and run on a stream's queue.

What is proven is the kernel's arithmetic, thread by thread in some order: not its speed, nor that
NVRTC takes it. Threads don't run together, so there is neither __syncthreads nor a warp's shuffle.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from ctypes import c_uint, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from .cuda import _calls
from .cuda.compiler import CompileException
from .cuda.stream import get_current_stream

PRELUDE = Path(__file__).with_name("prelude.h")
FLAGS = ("-std=c++17", "-O1", "-g", "-fPIC", "-fno-strict-aliasing", "-w", "-shared")
# The rest of a source for one kernel: its launcher, and the sizes of its parameters.
LAUNCHER = """
extern "C" void kvd_launch(const unsigned *grid, const unsigned *block, void **arguments) {{
    kvd::run({name}, grid, block, arguments);
}}
extern "C" unsigned long kvd_size(unsigned long which) {{ return kvd::size({name}, which); }}
"""


class RawKernel:
    """A kernel by its source and name; compiled when first called."""

    def __init__(
        self,
        code: str,
        name: str,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        translate_cucomplex: bool = False,
        *,
        enable_cooperative_groups: bool = False,
        jitify: bool | None = None,
    ) -> None:
        self.code = code
        self.name = name
        self.options = options
        self.backend = backend
        self._library: ctypes.CDLL | None = None
        self._sizes: list[int] = []

    def compile(self, log_stream: Any = None) -> None:
        """Compile, if that was not done; CompileException with what the compiler said."""
        _calls.bind()
        if self._library is not None:
            return
        loaded = ctypes.CDLL(str(_compiled(self.code, self.name, self.options)))
        loaded.kvd_size.restype = ctypes.c_ulong
        while (size := loaded.kvd_size(ctypes.c_ulong(len(self._sizes)))) != 0:
            self._sizes.append(size)
        self._library = loaded

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        *,
        shared_mem: int = 0,
    ) -> None:
        """Queue the kernel on the current stream."""
        self.compile()
        assert self._library is not None
        values = [_argument(value) for value in args]
        sizes = [ctypes.sizeof(value) for value in values]
        if sizes != self._sizes:
            # On a device this would read past the arguments, without a word.
            raise TypeError(f"{self.name} takes parameters of {self._sizes} bytes, not {sizes}")
        shape = (c_uint * 6)(*_three(grid), *_three(block))
        addresses = (c_void_p * len(values))(*map(ctypes.addressof, values))
        function = ctypes.cast(self._library.kvd_launch, c_void_p)
        _calls.call_bound(
            "kvdFakeLaunch",
            c_void_p(get_current_stream().ptr),
            function,
            shape,
            ctypes.c_size_t(len(values)),
            addresses,
            (ctypes.c_size_t * len(sizes))(*sizes),
        )


class RawModule:
    """A source with several kernels."""

    def __init__(
        self,
        code: str | None = None,
        *,
        path: str | None = None,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        name_expressions: Any = None,
        jitify: bool | None = None,
    ) -> None:
        if code is None:
            raise NotImplementedError("the fake compiles sources only")
        self.code = code
        self.options = options

    def get_function(self, name: str) -> RawKernel:
        return RawKernel(self.code, name, self.options)

    def compile(self, log_stream: Any = None) -> None:
        _calls.bind()


def _three(sizes: tuple[int, ...]) -> tuple[int, int, int]:
    first, second, third = (*sizes, 1, 1)[:3]
    return int(first), int(second), int(third)


def _argument(value: Any) -> Any:
    """As CuPy passes it: a Python int has 8 bytes, a numpy scalar its own."""
    if value is None:
        return c_void_p()
    if isinstance(value, bool | int | float):
        kinds: dict[type, Any] = {bool: ctypes.c_bool, int: ctypes.c_int64, float: ctypes.c_double}
        return kinds[type(value)](value)
    if isinstance(value, np.generic):
        content = value.tobytes()
        return (ctypes.c_char * len(content)).from_buffer_copy(content)
    raise TypeError(f"Unsupported type {type(value)}")


def _compiled(code: str, name: str, options: tuple[str, ...]) -> Path:
    """The kernel's library, compiled if no process did before."""
    source = f'#include "{PRELUDE}"\n#line 1 "{name}.cu"\n{code}\n' + LAUNCHER.format(name=name)
    content = source + PRELUDE.read_text() + " ".join(FLAGS)
    folder = Path(os.environ["KVD_FAKE_CUDA_BUILD"])
    built = folder / f"kernel-{hashlib.sha256(content.encode()).hexdigest()[:16]}.so"
    if built.exists():
        return built
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fresh = Path(scratch) / built.name
        command = [shutil.which("cc") or "cc", *FLAGS, "-x", "c++", "-", "-o", str(fresh)]
        ran = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            raise CompileException(ran.stderr, source, name, options)
        fresh.replace(built)
    return built
