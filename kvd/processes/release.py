"""Whether the files of this release are still those that the running daemon began with.

An installation into a live environment replaces them. A process that were started then would be
of another release than its control, and the two might misread each other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path

import kvd
import kvd_proto
from kvd.linux.proc import SHORTAGES

CODE = (".py", ".so")
_VERSION = re.compile(r'^__version__ = "([^"]+)"', re.MULTILINE)


class ReleaseChangedError(OSError):
    """The code on the disk is no longer what runs here; the message names the restart."""


class Release:
    """The code of some packages as it was when it was remembered."""

    def __init__(self, version: str, roots: Iterable[Path]) -> None:
        self._version = version
        self._roots = tuple(roots)
        self._marks: dict[str, tuple[int, int, int]] | None = None  # by path, as `stat` tells
        self._digest = b""

    def remember(self) -> None:
        """From now on `require_unchanged` compares with what is there now."""
        self._marks, self._digest = self._look(), self._read()

    def require_unchanged(self) -> None:
        """ReleaseChangedError where other code lies there now; nothing if none was remembered.

        The same code, installed again, is no other. Another OSError: it can't be read just now.
        """
        if self._marks is None:
            return
        marks = self._look()
        if marks == self._marks:
            return
        if self._read() != self._digest:
            raise ReleaseChangedError(
                f"kvd {self._version} runs, but its files in {self._roots[0]} were replaced"
                f"{self._by_what()} since it started: restart the daemon (systemctl restart kvd)"
            )
        self._marks = marks

    def _by_what(self) -> str:
        try:
            found = _VERSION.search((self._roots[0] / "__init__.py").read_text())
        except OSError:
            return " or removed"
        return f" by kvd {found[1]}" if found else ""

    def _look(self) -> dict[str, tuple[int, int, int]]:
        marks = {}
        for file in self._files():
            try:
                found = file.stat()
            except OSError as error:
                _require_no_shortage(error)
                continue
            marks[file.path] = (found.st_ino, found.st_size, found.st_mtime_ns)
        return marks

    def _files(self) -> Iterator[os.DirEntry[str]]:
        for root in self._roots:
            yield from _files_below(str(root))

    def _read(self) -> bytes:
        digest = blake2b(digest_size=16)
        for path in sorted(file.path for file in self._files()):
            try:
                content = Path(path).read_bytes()
            except OSError as error:
                _require_no_shortage(error)
                continue
            digest.update(f"{path}\0{len(content)}\0".encode())
            digest.update(content)
        return digest.digest()


def _require_no_shortage(error: OSError) -> None:
    """Raise an error that tells nothing of the file; else it is on its way out."""
    if error.errno in SHORTAGES:
        raise error


def _files_below(folder: str) -> Iterator[os.DirEntry[str]]:
    """Its files of code. Who serves others waits meanwhile, so no path is made of what is read."""
    try:
        with os.scandir(folder) as found:
            entries = list(found)
    except OSError as error:
        _require_no_shortage(error)
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files_below(entry.path)
        elif entry.name.endswith(CODE):
            yield entry


OURS = Release(kvd.__version__, (Path(kvd.__file__).parent, Path(kvd_proto.__file__).parent))
