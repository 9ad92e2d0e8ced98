"""The CUDA driver under test: a fake of it in C, or with KVD_GPU=real the machine's own.

A test takes the fixture `driver` (tests/gpu/conftest.py). With the fake, the library lies loaded in
the test's own process from then on, under its name libcuda.so.1, so that ctypes finds it there,
and the shim `cupy` (tests/fakes/cuda/site) stands on sys.path. A process that a test starts gets
both from its environment: os.environ has it while a test of this folder runs, and
`driver.environment()` gives the same for an environment put together by hand. Nothing of kvd knows
of the fake.

The fake's devices are shared by all processes of one KVD_FAKE_CUDA_DIR, as a GPU is. Its rules,
and the faults that can be injected, stand in tests/fakes/cuda/README.md.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.gpu import fake_library
from tests.gpu.exporter import receive, send

ROOT = Path(__file__).resolve().parents[2]
SHIM = ROOT / "tests" / "fakes" / "cuda" / "site"
SHARED_MEMORY = Path("/dev/shm")
KEPT_BYTES = 64 << 20  # a real driver may keep so much of what it took for the device itself


@contextmanager
def started() -> Iterator[Driver]:
    """The driver, until the context ends; a skip with the reason where there is none."""
    made = Driver()
    try:
        made.start()
    except fake_library.NoCompiler as error:
        import pytest  # not wanted by the processes that tests start

        pytest.skip(str(error))
    yield made
    made.close()


class Driver:
    """The machine's CUDA driver, or the fake one; `start` before use, `close` at the end."""

    def __init__(self) -> None:
        self.is_fake = os.environ.get("KVD_GPU") != "real"
        self._directory: Path | None = None
        self._library: ctypes.CDLL | None = None
        self._probe: Exporter | None = None

    def start(self) -> None:
        """Build and load the fake; fake_library.NoCompiler where it can't be built."""
        if not self.is_fake:
            self.lasting_exporter()  # now, so that no module is said to have left it behind
            return
        path = fake_library.build()
        where = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        prefix = f"kvd-fake-cuda-{os.getpid()}-"
        self._directory = Path(tempfile.mkdtemp(prefix=prefix, dir=where))
        self._environment = {
            "KVD_FAKE_CUDA_DIR": str(self._directory),
            "KVD_FAKE_CUDA_BUILD": str(path.parent),
            "LD_LIBRARY_PATH": _joined(path.parent, "LD_LIBRARY_PATH"),
            "PYTHONPATH": _joined(SHIM, "PYTHONPATH"),
        }
        with self.in_environment():
            self._library = fake_library.load(path)
            self.reset()  # here, where it finds its directory
        sys.path.insert(0, str(SHIM))

    def close(self) -> None:
        """Give everything back; the library itself stays loaded, as libraries do."""
        if self._probe is not None:
            self._probe.close()
        if self._directory is None:
            return
        sys.path.remove(str(SHIM))
        assert self._library is not None
        self._library.kvdFakeClose()
        shutil.rmtree(self._directory)

    def environment(self) -> dict[str, str]:
        """Variables with which a process finds this driver; to be laid over os.environ."""
        return dict(self._environment) if self.is_fake else {}

    @contextmanager
    def in_environment(self) -> Iterator[None]:
        """os.environ has `environment()` meanwhile."""
        before = {name: os.environ.get(name) for name in self.environment()}
        os.environ.update(self.environment())
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    @property
    def uuids(self) -> list[str]:
        """The devices' UUIDs as CUDA_VISIBLE_DEVICES takes them, by number."""
        if not self.is_fake:
            return [self.lasting_exporter().uuid]
        return [_fake_uuid(number) for number in range(self.setting("devices.count"))]

    def free_bytes(self, device: int = 0) -> int:
        """Device memory that is free now, whoever holds the rest."""
        if not self.is_fake:
            return self.lasting_exporter().free_bytes()
        value = ctypes.c_longlong()
        _check(self._fake().kvdFakeFreeBytes(device, ctypes.byref(value)), "kvdFakeFreeBytes")
        return value.value

    @property
    def kept_bytes(self) -> int:
        """What may be missing from free memory although all who took it are gone."""
        return 0 if self.is_fake else KEPT_BYTES

    def inject(self, fault: str, **values: int | bool) -> None:
        """Set a fault or a property of the fake for every process, until the test ends.

        tests/fakes/cuda/README.md lists them; a name that is none raises ValueError.
        """
        for name, value in values.items():
            setting = f"{fault}.{name}"
            if self._fake().kvdFakeSet(setting.encode(), int(value)) != 0:
                raise ValueError(f"the fake driver has no setting {setting}")

    def setting(self, name: str) -> int:
        """What a setting of the fake is now, as in `inject`: fault, full stop, value."""
        value = ctypes.c_longlong()
        if self._fake().kvdFakeGet(name.encode(), ctypes.byref(value)) != 0:
            raise ValueError(f"the fake driver has no setting {name}")
        return value.value

    def counters(self) -> dict[str, int]:
        """What all processes did since the test began, by name; fake only."""
        found = {}
        number = 0
        while name := self._fake().kvdFakeCounterName(number):
            found[name.decode()] = int(self._fake().kvdFakeCounter(number))
            number += 1
        return found

    def reset(self) -> None:
        """No fault, counters at 0, and this process well again if it had a sticky error."""
        if self.is_fake:
            self._fake().kvdFakeReset()

    def _fake(self) -> ctypes.CDLL:
        assert self._library is not None, "only the fake driver can do that, once started"
        return self._library

    def lasting_exporter(self) -> Exporter:
        """An engine's worker that lives as long as the driver is used here."""
        if self._probe is None:
            self._probe = Exporter(self)
        return self._probe


class Exporter:
    """A child process that plays an engine's worker: it owns device memory, and exports it.

    The same script plays it on a real GPU and on the fake. `pid` is the process's. A call of the
    driver that fails there raises ExporterError here.
    """

    def __init__(self, driver: Driver, device: int = 0) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.exporter", str(theirs.fileno()), str(device)],
                cwd=ROOT,
                env=os.environ | driver.environment(),
                pass_fds=[theirs.fileno()],
            )
        self._socket = ours
        self.pid = self._child.pid
        self.uuid = self._started()

    def allocate(self, nbytes: int, kind: str = "malloc") -> int:
        """Address of new memory: "malloc", "vmm_exportable", "vmm", "managed" or "pool"."""
        return int(self._ask("allocate", nbytes, kind))

    def write(self, address: int, content: bytes) -> None:
        """Put bytes into device memory; they are there once this returns."""
        self._ask("write", address, content.hex())

    def read(self, address: int, nbytes: int) -> bytes:
        """Bytes of device memory."""
        return bytes.fromhex(self._ask("read", address, nbytes))

    def free(self, address: int) -> None:
        """Give memory back, whoever has it open."""
        self._ask("free", address)

    def ipc_handle(self, address: int) -> tuple[bytes, int, int]:
        """(handle, offset, size): of the allocation around an address, the address's offset in
        it, and the whole allocation's bytes."""
        handle, offset, size = self._ask("ipc_handle", address)
        return bytes.fromhex(handle), offset, size

    def export_fd(self, address: int) -> int:
        """A descriptor for a "vmm_exportable" allocation; the caller closes it."""
        return self._send_and_receive("export_fd", address)[1][0]

    def open_handle(self, handle: bytes) -> int:
        """Open another process's handle here, in the child: the address."""
        return int(self._ask("open_handle", handle.hex()))

    def close_handle(self, address: int) -> None:
        """Close what `open_handle` opened."""
        self._ask("close_handle", address)

    def free_bytes(self) -> int:
        """Free device memory as this process sees it."""
        return int(self._ask("free_bytes"))

    def kill(self) -> None:
        """Kill -9; returns once it has ended."""
        self._child.kill()
        self._child.wait()

    def close(self) -> None:
        """End it in order; it may be dead already."""
        self._socket.close()
        try:
            self._child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.kill()

    def _started(self) -> str:
        """The device's UUID, once the process has a context; if it has none it is ended."""
        try:
            return str(self._ask("uuid"))
        except ExporterError:
            self.close()
            raise

    def _ask(self, command: str, *arguments: Any) -> Any:
        return self._send_and_receive(command, *arguments)[0]

    def _send_and_receive(self, command: str, *arguments: Any) -> tuple[Any, list[int]]:
        send(self._socket, json.dumps([command, *arguments]))
        answer, fds = receive(self._socket)
        if answer is None:
            raise ExporterError(0, f"the exporter ended with {self._child.wait()}")
        value = json.loads(answer)
        if "error" in value:
            raise ExporterError(value["code"], value["error"])
        return value["answer"], fds


class ExporterError(Exception):
    """A call failed in the exporter. `code` is its CUresult, 0 where it was not the driver's."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def _joined(first: Path, variable: str) -> str:
    return os.pathsep.join([str(first), *filter(None, [os.environ.get(variable)])])


def _fake_uuid(number: int) -> str:
    return f"GPU-{number:08x}-6b76-6400-fa6b-000000000000"


def _check(code: int, function: str) -> None:
    assert code == 0, f"{function}: {code}"
