"""What the management library says of the device, by nvidia-smi: read only, never set."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

CLOCKS = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"
FACTS = (
    "name,uuid,driver_version,vbios_version,pcie.link.gen.current,pcie.link.gen.max,"
    "pcie.link.width.current,persistence_mode,compute_mode,mig.mode.current,memory.total,"
    "clocks.max.sm,clocks.applications.graphics,power.limit"
)


def query(fields: str) -> dict[str, str] | None:
    """Those fields of the first device as nvidia-smi writes them; None where it can't be asked."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    values = [value.strip() for value in asked.stdout.strip().split(",")]
    return dict(zip(fields.split(","), values, strict=False))


def used_bytes() -> int | None:
    """Device memory in use, all processes together."""
    told = query("memory.used")
    try:
        return None if told is None else int(told["memory.used"]) << 20
    except ValueError:
        return None


class ClockLog:
    """nvidia-smi's clocks, power and temperature about every 100 ms while it is open."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        if shutil.which("nvidia-smi") is not None:
            fields = f"timestamp,{CLOCKS}"
            command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
            self._process = subprocess.Popen(
                [*command, "--loop-ms=100", "--id=0"], stdout=subprocess.PIPE, text=True
            )

    def end(self) -> list[dict[str, Any]]:
        """Stop; one record a reading, empty where there is no nvidia-smi."""
        if self._process is None:
            return []
        self._process.terminate()
        told, _ = self._process.communicate(timeout=10)
        names = ["timestamp", *CLOCKS.split(",")]
        lines = [line.split(",") for line in told.splitlines()]
        return [
            {name: value.strip() for name, value in zip(names, line, strict=True)}
            for line in lines
            if len(line) == len(names)
        ]
