"""Request traces: JSON lines, plain or gzip, one request a line in order of arrival.

A line has `timestamp` (milliseconds, never falling), `input_length` and `output_length`
(tokens), and `hash_ids`: one number for each block of the prompt, where a number stands for
the block and all before it, as in the traces that came with Mooncake (Qin et al., FAST 2025).
"""

from __future__ import annotations

import contextlib
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shown  # a line may have megabytes in one field
from typing import IO, Any

import numpy as np
import numpy.typing as npt

MAX_BLOCKS = 16384  # of one request
MAX_LINE_BYTES = 1 << 22
MAX_TIMESTAMP_MS = 4_102_444_800_000  # the year 2100, for those who count from 1970
_GZIP_MAGIC = b"\x1f\x8b"
_MAX_NUMBER = 2**63 - 1

BlockIds = npt.NDArray[np.int64]
Progress = Callable[[int], None]  # how much is done, of lines or requests


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request of a trace: when it came, and its blocks."""

    timestamp_ms: int
    input_tokens: int
    output_tokens: int
    blocks: BlockIds  # the prompt's blocks, head first; distinct


class TraceError(Exception):
    """The trace can't be used. Names the file, where it is known the line and the field, and
    what would help."""


def read_trace(path: Path, progress: Progress = lambda _: None) -> list[TraceRequest]:
    """All requests of a trace, checked; `progress` hears the number of each line. TraceError."""
    requests = list(_requests(path, progress))
    if not requests:
        raise TraceError(f"{path}: no requests. Fix: give a trace with at least one line")
    return requests


def _requests(path: Path, progress: Progress) -> Iterator[TraceRequest]:
    last_ms = 0
    for number, line in _lines(path):
        progress(number)
        if line.isspace():
            continue
        where = f"{path}:{number}"
        request = _parse(line, where)
        if request.timestamp_ms < last_ms:
            raise TraceError(
                f"{where}: field timestamp: {request.timestamp_ms} comes after {last_ms}. "
                "Fix: sort the lines by timestamp"
            )
        last_ms = request.timestamp_ms
        yield request


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with _opened(path) as lines:
            while line := lines.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise TraceError(
                        f"{path}:{number}: longer than {MAX_LINE_BYTES} bytes. "
                        "Fix: one JSON object a line, one request each"
                    )
                yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(
            f"{path}:{number + 1}: broken gzip ({error}). Fix: fetch the file again, or save the"
            f" whole lines: zcat {path} | sed '$d'"
        ) from error
    except OSError as error:
        raise TraceError(
            f"{path}: {error.strerror}. Fix: name a file that this user can read"
        ) from error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Opened once and never sought in: it may be a pipe."""
    with path.open("rb") as file:
        if file.peek(1)[:1] != _GZIP_MAGIC[:1]:  # which no line of JSON begins with
            yield file
            return
        with gzip.GzipFile(fileobj=file) as unpacked:
            yield unpacked  # type: ignore[misc]  # it reads lines as a file does


def _parse(line: bytes, where: str) -> TraceRequest:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        cut = "" if line.endswith(b"\n") else "; a last line that was cut: remove it, sed '$d'"
        raise TraceError(
            f"{where}: not JSON ({error}). Fix: one JSON object a line, in UTF-8{cut}"
        ) from error
    if not isinstance(fields, dict):
        raise TraceError(f'{where}: not a JSON object. Fix: write {{"timestamp": …}} a line')
    return TraceRequest(
        _timestamp(fields, where),
        _number(fields, "input_length", where),
        _number(fields, "output_length", where),
        _blocks(fields, where),
    )


def _timestamp(fields: dict[str, Any], where: str) -> int:
    value = _number(fields, "timestamp", where)
    if value > MAX_TIMESTAMP_MS:
        raise TraceError(
            f"{where}: field timestamp: {value} is beyond {MAX_TIMESTAMP_MS}. "
            "Fix: give it in milliseconds"
        )
    return value


def _number(fields: dict[str, Any], name: str, where: str) -> int:
    value = _field(fields, name, where)
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
        raise TraceError(
            f"{where}: field {name}: {shown(value)}. Fix: a whole number from 0 to 2**63 - 1"
        )
    return value


def _blocks(fields: dict[str, Any], where: str) -> BlockIds:
    value = _field(fields, "hash_ids", where)
    if not isinstance(value, list):
        raise TraceError(f"{where}: field hash_ids: {shown(value)}. Fix: a list of block numbers")
    if len(value) > MAX_BLOCKS:
        raise TraceError(
            f"{where}: field hash_ids: {len(value)} blocks. Fix: at most {MAX_BLOCKS} a request"
        )
    for block in value:
        if type(block) is not int or not 0 <= block <= _MAX_NUMBER:
            raise TraceError(
                f"{where}: field hash_ids: {shown(block)}. Fix: whole numbers from 0 to 2**63 - 1"
            )
    if len(set(value)) != len(value):
        raise TraceError(
            f"{where}: field hash_ids: a block comes twice. Fix: a number stands for the block "
            "and all before it, so it can't repeat in one request"
        )
    return np.array(value, dtype=np.int64)


def _field(fields: dict[str, Any], name: str, where: str) -> Any:
    if name not in fields:
        raise TraceError(
            f"{where}: field {name} is missing. Fix: every line needs timestamp, input_length, "
            "output_length and hash_ids"
        )
    return fields[name]
