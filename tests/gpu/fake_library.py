"""Builds the fake CUDA driver with the machine's C compiler, once per content."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tests" / "fakes" / "cuda"
CACHE = ROOT / ".cache" / "fake-cuda"
NAME = "libcuda.so.1"
FLAGS = (
    "-std=gnu11", "-O2", "-g", "-fPIC", "-fvisibility=hidden", "-pthread",
    "-Wall", "-Wextra", "-Werror",
)  # fmt: skip


class NoCompiler(Exception):
    """There is no C compiler here; the message says how to get by."""


def compiler() -> str:
    """The C compiler's path; NoCompiler where there is none."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    raise NoCompiler("no C compiler (cc, gcc, clang): the fake CUDA driver can't be built")


def build() -> Path:
    """Path of the fake's library, built if its sources changed; for concurrent callers too."""
    sources = sorted(SOURCES.glob("*.[ch]"))
    content = hashlib.sha256(" ".join((compiler(), *FLAGS)).encode())
    for source in sources:
        content.update(source.name.encode() + b"\0" + source.read_bytes())
    folder = CACHE / content.hexdigest()[:16]
    library = folder / NAME
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile([path for path in sources if path.suffix == ".c"], library)
    return library


def load(library: Path) -> ctypes.CDLL:
    """Load the library into this process, under the name by which programs ask for the driver."""
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    loaded.kvdFakeCounterName.restype = ctypes.c_char_p
    loaded.kvdFakeCounter.restype = ctypes.c_longlong
    loaded.kvdFakeSet.argtypes = (ctypes.c_char_p, ctypes.c_longlong)
    loaded.kvdFakeReset.restype = None
    loaded.kvdFakeClose.restype = None
    return loaded


def _compile(sources: list[Path], library: Path) -> None:
    fresh = library.with_name(f"{NAME}.{os.getpid()}")
    shared = ("-shared", f"-Wl,-soname,{NAME}", "-o", str(fresh))
    ran = subprocess.run(
        [compiler(), *FLAGS, *shared, *map(str, sources), "-ldl"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    fresh.replace(library)
