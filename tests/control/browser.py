"""A headless Chromium, driven through its DevTools pipe: no driver program and no package."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
ANSWER_S = 60.0  # a busy machine's browser starts slowly
_FLAGS = (
    "--headless=new", "--no-sandbox", "--remote-debugging-pipe", "--disable-gpu",
    "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--mute-audio", "--hide-scrollbars",
)  # fmt: skip


class Browser:
    """One page. What it asks for, what it logs, and what its policy refuses are kept."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        for_it, ours = os.pipe(), os.pipe()
        self._to, self._from = for_it[1], ours[0]
        command = [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        place = f'exec "$@" 3</proc/self/fd/{for_it[0]} 4>/proc/self/fd/{ours[1]}'
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", place, "sh", *command],
            pass_fds=(for_it[0], ours[1]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(for_it[0])
        os.close(ours[1])
        self._numbers = itertools.count(1)
        self._read = b""
        self._session = ""
        self.asked: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Ask it, and wait for the answer."""
        number = next(self._numbers)
        asked: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        while True:
            said = self._next()
            if said.get("id") == number:
                assert "error" not in said, said["error"]
                return said["result"]

    def _next(self) -> Any:
        end = time.monotonic() + ANSWER_S
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            got = os.read(self._from, 1 << 20)
            assert got, "the browser has ended"
            self._read += got
        text, _, self._read = self._read.partition(b"\0")
        said = json.loads(text)
        self._note(said.get("method", ""), said.get("params", {}))
        return said

    def _note(self, method: str, told: Any) -> None:
        if method == "Network.requestWillBeSent":
            self.asked.append(told["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(told["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.complaints.append(told["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(told["args"]))

    def open(self, url: str) -> None:
        """Go there; returns once the page is there and its script has begun."""
        assert "errorText" not in self.call("Page.navigate", url=url)
        there = f"location.href === {json.dumps(url)} && document.readyState === 'complete'"
        self.wait(there, url)

    def look(self, *, dark: bool, width: int = 1240, height: int = 900) -> None:
        """Show it as to who prefers dark or light pages, in a window of this size."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def value(self, expression: str) -> Any:
        """What a JavaScript expression comes to in the page."""
        said = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    def wait(self, expression: str, what: str) -> None:
        """Until the expression is true in the page."""
        end = time.monotonic() + ANSWER_S
        while not self.value(expression):
            assert time.monotonic() < end, f"{what} never came; the page said {self.complaints}"
            time.sleep(0.05)

    def point(self, x: float, y: float) -> None:
        """Move the pointer there."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, file: Path) -> None:
        """The whole page, as PNG."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(taken["data"]))

    def close(self) -> None:
        """End it and all its processes."""
        os.close(self._to)
        os.close(self._from)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a profile of its own, and no trace of it afterwards."""
    with tempfile.TemporaryDirectory(prefix="browser.", ignore_cleanup_errors=True) as profile:
        made = Browser(Path(profile))
        try:
            yield made
        finally:
            made.close()
