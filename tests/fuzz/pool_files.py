"""A pool's files as a hostile or broken disk would leave them, read by a start.

What is mutated is sealed again where it has a checksum, so that what lies behind is reached.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import tempfile
from pathlib import Path

import numpy as np

from kvd.core.events import TimerTicked
from kvd.core.machine import Machine, MachineConfig
from kvd.pool import Pool, PoolConfig, row_table, sealed_json, slot_table
from kvd.pool.config import PoolError
from kvd.pool.ownership import note_place
from tests.contract import pool_orders as orders
from tests.core.invariants import check

SEALED = ("slots.table", "rows.table")
FILES = (*SEALED, "checksums.table", "generations.table", "movers", "registry.jsonl")
STRANGE = (0, 1, 2, 0xFF, 2**16, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1)
MOST_CHANGES = 6
NEARBY = 400  # words: where the few records of so small a pool are


@functools.cache
def template() -> dict[Path, bytes]:
    """The files of a pool with blocks of one namespace and rows of two."""
    with tempfile.TemporaryDirectory(prefix="kvd-fuzz-", dir="/dev/shm") as made:
        directory = Path(made)
        with orders.opened(config(directory)) as pool:
            orders.introduce(pool)
            second = dataclasses.replace(orders.spec((4096, 4096)), fingerprint="decaf")
            orders.introduce(pool, second, namespace=2)
            pool.grant_row(orders.row([0]))
            pool.grant_row(orders.row([1, 2], (4096, 4096), namespace=2))
            slots = list(range(orders.SLOTS_PER_EXTENT))
            pool.write_ready(orders.ready(slots[:40], orders.keys(40)))
        files = (path for path in directory.rglob("*") if path.is_file())
        return {path.relative_to(directory): path.read_bytes() for path in files}


def lay_out(directory: Path) -> None:
    """The files, as those of a pool that was made there."""
    extents = directory / "pool" / "extents"
    extents.mkdir(parents=True, mode=0o700)
    for path, content in template().items():
        whole = content
        if path.name == "pool.header":
            header = sealed_json.unseal(content)
            assert header is not None
            whole = sealed_json.seal(header | {"extents_directory": str(extents)})
        (directory / path).write_bytes(whole)
        (directory / path).chmod(0o600)
    with (directory / "pool" / "lock").open("r+b") as lock:
        note_place(lock.fileno(), config(directory))


def config(directory: Path) -> PoolConfig:
    return orders.config(directory, extents=4)


def pool_files(content: bytes) -> None:
    """A start over the files, changed as these bytes say."""
    dice = random.Random(content)
    with tempfile.TemporaryDirectory(prefix="kvd-fuzz-", dir="/dev/shm") as made:
        directory = Path(made)
        lay_out(directory)
        for _ in range(dice.randint(1, MOST_CHANGES)):
            name = dice.choice([*SEALED * 3, *FILES])
            path = directory / "pool" / name
            if path.exists():
                change(path, dice)
        for name in SEALED if dice.random() < 0.7 else ():
            seal(directory / "pool" / name)
        start(config(directory))


def change(path: Path, dice: random.Random) -> None:
    """A word of it is another, lies elsewhere, or the end is gone."""
    content = bytearray(path.read_bytes())
    at = 8 * dice.randrange(max(1, min(NEARBY, len(content) // 8)))
    match dice.randrange(5):
        case 0:
            content[at : at + 8] = dice.choice(STRANGE).to_bytes(8, "little")
        case 1:
            other = 8 * dice.randrange(max(1, min(NEARBY, len(content) // 8)))
            content[at : at + 8] = content[other : other + 8]
        case 2 if content:
            content[at % len(content)] ^= 1 << dice.randrange(8)
        case 3:
            record = 128 if path.name == "slots.table" else 64
            one, other = (record * dice.randrange(NEARBY // 16) for _ in "ab")
            content[one : one + record] = content[other : other + record]
        case _ if dice.random() < 0.2:
            del content[dice.randrange(len(content) + 1) :]
    path.write_bytes(bytes(content))


def seal(path: Path) -> None:
    """Give every record the checksum that it would have had."""
    words = np.fromfile(path, dtype=np.uint64)
    if path.name == "rows.table":
        if words.size % 8:
            return
        table = words.reshape(-1, 8)
        table[:, 5] = row_table._checksums(np.arange(len(table)), table)
    else:
        if words.size % 16:
            return
        table = words.reshape(-1, 16)
        generations = table[:, 0] >> np.uint64(8)
        table[:, 3] = slot_table._checksums(np.arange(len(table)), generations, table, 4)
    table.tofile(path)


def start(of: PoolConfig) -> None:
    """As a daemon starts: it is refused in words, or its core is whole and can go on."""
    try:
        pool = Pool.open(of, lambda _done, _total: None)
    except PoolError:
        return
    try:
        machine = Machine(MachineConfig(pool.extents, of.extent_bytes, spare_bytes=0))
        for number, event in enumerate(pool.recovered()):
            machine.handle(event, number + 1)
        machine.handle(TimerTicked(), 10**12)
        check(machine)
    finally:
        pool.close()
