"""What reads bytes that others may have written, each with valid ones to begin from.

A target takes any bytes. It returns, or refuses them in its own words; anything else is a defect.
"""

from __future__ import annotations

import json
import os
import random
import struct
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvd.cli.replay.trace import TraceError, read_trace
from kvd.config import settings
from kvd.core.events import TransferOutcome
from kvd.core.keys import TransferId
from kvd.mover import frames
from kvd.mover.frames import Finished, FrameKind
from kvd.pool import sealed_json
from kvd.pool.config import PoolConfig
from kvd.pool.header import PoolHeader, read_header
from kvd.pool.registry import Registry
from kvd.processes.framing import BadFrame, FrameReader, frame
from kvd_proto.page import PageReader
from tests.fuzz.pool_files import pool_files
from tests.fuzz.shared_words import board, ring

Target = Callable[[bytes], None]
_CONFIG = PoolConfig(Path("nowhere"), 1 << 20, extent_bytes=1 << 18)
_WANTED = PoolHeader.wanted(_CONFIG, [], bytes(16))
_SPEC: dict[str, Any] = {
    "kind": "namespace",
    "namespace": 1,
    "fingerprint": "f" * 64,
    "tenant": "default",
    "hash_bytes": 32,
    "groups": [["full_attention", 1, [4096]]],
    "unshared": False,
    "fields": {"model": "m"},
}
_SCOPE = {"kind": "scope", "scope": 1, "namespace": 1, "epoch": "", "account": "", "group": 0}
_CLEARED = {"kind": "cleared", "namespace": 1, "below": 2}
_TRACE = {"timestamp": 1, "input_length": 512, "output_length": 3, "hash_ids": [1, 2, 3]}


def registry(content: bytes) -> None:
    """As a start reads it: each line as it stands, and as if it had been sealed by us."""
    read = Registry(Path(), None)  # type: ignore[arg-type]  # it only reads
    for line in content.splitlines():
        for written in (line, sealed(line)):
            record = sealed_json.unseal(written)
            if record is not None:
                read.take(record)


def sealed(body: bytes) -> bytes:
    """The same bytes with the checksum that they would have."""
    whole = sealed_json.seal({})
    digest = sealed_json.digest(body)
    return digest + whole[len(digest) : len(digest) + 1] + body


def header(content: bytes) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        path = Path(directory) / "pool.header"
        for written in (content, sealed(content)):
            path.write_bytes(written)
            read_header(path, _WANTED)


def mover_words(content: bytes) -> None:
    """What control hears of a mover; these it takes for nonsense (kvd/processes/parent.py)."""
    try:
        for kind, body in FrameReader(FrameKind).feed(content):
            if kind is FrameKind.FINISHED:
                frames.unpack_finished(body)
    except (BadFrame, TypeError, ValueError, RecursionError, struct.error):
        pass


def trace(content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(content)
        file.flush()
        try:
            read_trace(Path(file.name))
        except TraceError:
            pass


def page(content: bytes) -> None:
    """An index page, as a client maps what it was given."""
    fd = os.memfd_create("kvd-fuzz")
    try:
        os.write(fd, content or b"\0")
        PageReader(fd).close()
    except ValueError:
        pass
    finally:
        os.close(fd)


def config(content: bytes) -> None:
    """A file of settings: it is read, or what is wrong is named."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(content)
        file.flush()
        try:
            settings.load({"config": file.name}, {})
        except settings.ConfigError:
            pass


def _lines(*records: dict[str, Any]) -> bytes:
    return b"\n".join(json.dumps(record).encode() for record in records)


_SETTINGS = b"""
policy = "arc"
pool_bytes = "4GiB"
extent_bytes = "auto"
lease_share = 0.5
operators = [1000]
[tenants.blue]
uids = [1001]
quota = "50%"
[[tiers]]
name = "disk"
kind = "disk"
[tiers.options]
directories = ["/nowhere"]
"""
_FINISHED = frames.pack_finished(Finished(TransferId(1), TransferOutcome.DONE))
TARGETS: dict[Target, bytes] = {
    registry: _lines(_SPEC, _SCOPE, _CLEARED),
    header: json.dumps(asdict(_WANTED)).encode(),
    mover_words: frame(FrameKind.FINISHED, _FINISHED),
    trace: _lines(_TRACE),
    page: b"KVDPAGE1" + bytes(4088 + 4096),
    config: _SETTINGS,
    ring: struct.pack("<16Q", 4, 1, 5, 7, 10, 1, 4, 2**64 - 1, 4, 9000, 2, 9, 0, 0, 1, 1),
    board: struct.pack("<16Q", 4, 1, 5, 7, 10, 1, 4, 2**64 - 1, 4, 9000, 2, 9, 0, 0, 1, 1),
    pool_files: bytes(16),
}
_STRANGE = [
    *("null", "[]", "{}", "-1", "1e400", "NaN", '""', "true", "18446744073709551616", '"\\ud800"'),
    "[" * 3000,
]


def mutated(content: bytes, dice: random.Random) -> bytes:
    """A few changes: of a JSON value, of bits, or of the length."""
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(content) + 1)
        match dice.randrange(6):
            case 0 if content:
                bit = dice.randrange(8 * len(content))
                byte = content[bit // 8] ^ 1 << bit % 8
                content = content[: bit // 8] + bytes([byte]) + content[bit // 8 + 1 :]
            case 1:
                content = content[:at] + content[at + dice.randint(1, 9) :]
            case 2:
                content = content[:at] + dice.randbytes(dice.randint(1, 9)) + content[at:]
            case 3:
                content = content[:at]
            case _:
                content = _with_strange_value(content, dice)
    return content


def _with_strange_value(content: bytes, dice: random.Random) -> bytes:
    """One field of one line of JSON has another value, is gone, or is there besides."""
    lines = content.splitlines()
    if not lines:
        return content
    number = dice.randrange(len(lines))
    try:
        record = json.loads(lines[number])
    except (ValueError, RecursionError):
        return content
    if not isinstance(record, dict) or not record:
        return content
    name = dice.choice([*record, "another"])
    value = dice.choice(_STRANGE)
    record[name] = "@@"
    lines[number] = json.dumps(record).replace('"@@"', value).encode()
    return b"\n".join(lines)
