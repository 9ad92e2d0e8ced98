"""`cupy.cuda.Device`: a device by number, current within a `with`."""

from __future__ import annotations

from typing import Self

from . import runtime


class Device:
    """A device; the current one where no number is given."""

    def __init__(self, device: int | None = None) -> None:
        self.id = runtime.getDevice() if device is None else device
        self._before: list[int] = []

    def __enter__(self) -> Self:
        self._before.append(runtime.getDevice())
        self.use()
        return self

    def __exit__(self, *_: object) -> None:
        runtime.setDevice(self._before.pop())

    def __int__(self) -> int:
        return self.id

    def use(self) -> None:
        runtime.setDevice(self.id)

    def synchronize(self) -> None:
        with self:
            runtime.deviceSynchronize()

    @property
    def mem_info(self) -> tuple[int, int]:
        with self:
            return runtime.memGetInfo()

    @property
    def pci_bus_id(self) -> str:
        return runtime.deviceGetPCIBusId(self.id)

    @property
    def compute_capability(self) -> str:
        return "90"
