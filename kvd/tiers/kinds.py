"""Opens kvd's own stores; where the library of one is not here, what to install is said."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable

from kvd.linux.limits import have_at_most
from kvd.processes import extras
from kvd.tiers.disk.options import DiskOptions
from kvd.tiers.mooncake.options import MooncakeOptions
from kvd.tiers.s3.options import S3Options
from kvd.tiers.store import LibraryMissing, OpenStore, TierOptions, TierStore
from kvd.tiers.valkey.options import ValkeyOptions

S3_MEMORY_BYTES = 3 << 30  # two of them the most threads' stacks may take
STACK_BYTES = 8 << 20  # of a thread there: LimitSTACK (ulimit -s) may be any number
OPEN_DISK = "kvd.tiers.kinds:open_disk"


def open_disk(options: TierOptions) -> TierStore:
    """A store on disks of this node."""
    return _opened("disk", "kvd.tiers.disk.store", "DiskStore", options)


def open_mooncake(options: TierOptions) -> TierStore:
    """A store in a Mooncake Store."""
    return _opened("mooncake", "kvd.tiers.mooncake.store", "MooncakeStore", options)


def open_valkey(options: TierOptions) -> TierStore:
    """A store in a Valkey cluster or server."""
    return _opened("valkey", "kvd.tiers.valkey.store", "ValkeyStore", options)


def open_s3(options: TierOptions) -> TierStore:
    """A store in a bucket of an object store.

    Its client takes in the whole body of an answer, however long: so this process is bounded.
    """
    have_at_most(S3_MEMORY_BYTES)
    threading.stack_size(STACK_BYTES)
    return _opened("s3", "kvd.tiers.s3.store", "S3Store", options)


def check_options(store: str, options: TierOptions) -> None:
    """TierUnusable, with the option and what it must be, where one of ours can't have these.

    Opens nothing. A site's own stores are not asked: only a process of theirs imports them.
    """
    readers: dict[str, Callable[[TierOptions], object]] = {
        OPEN_DISK: DiskOptions.of,
        "kvd.tiers.kinds:open_mooncake": MooncakeOptions.of,
        "kvd.tiers.kinds:open_valkey": ValkeyOptions.of,
        "kvd.tiers.kinds:open_s3": S3Options.of,
    }
    if store in readers:
        readers[store](options)


def require_library(store: str) -> None:
    """LibraryMissing, with what to install, where the library of one of ours can't be loaded."""
    if store == "kvd.tiers.kinds:open_mooncake":
        importlib.import_module("kvd.tiers.mooncake.client").load_library()
    elif store == "kvd.tiers.kinds:open_s3":
        _opener("s3", "kvd.tiers.s3.store", "S3Store")


def _opened(extra: str, module: str, name: str, options: TierOptions) -> TierStore:
    return _opener(extra, module, name)(options)


def _opener(extra: str, module: str, name: str) -> OpenStore:
    try:
        opener: OpenStore = getattr(importlib.import_module(module), name)
    except ImportError as error:
        problem = f"kind: {extra!r} needs a library that is not here ({error})"
        raise LibraryMissing(problem, extras.install(extra)) from None
    return opener
