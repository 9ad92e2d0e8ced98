"""Memory opened in another process: what opens, what is refused, and with which words; and which
kinds of allocation can be shared at all."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.gpu.probing.remote import (
    BEHIND_A_SHELL,
    NAMESPACE,
    Remote,
    remotes,
    tried,
)
from benchmarks.gpu.probing.scale import Scale

KINDS = ("malloc", "physical, exportable", "physical", "managed", "pool")
FILL, OTHER_FILL = 0xA5, 0x5A
OFFSET = 1 << 20


def handles(scale: Scale) -> dict[str, Any]:
    """Between two plain processes: what an import looks like, and the ways it may be misused."""
    with remotes(2) as (engine, mover):
        base = engine.call("allocate", size=scale.handle)
        engine.call("fill", address=base, value=FILL, size=scale.handle)
        handle = engine.call("export", address=base)
        found: dict[str, Any] = {
            "handle_of_an_inner_address_is_the_same": engine.call("export", address=base + OFFSET)
            == handle,
            "range_in_the_exporter": engine.call("range_of", address=base + OFFSET),
            "opened_by_its_exporter": tried(lambda: engine.call("open", handle=handle)),
        }
        opened = mover.call("open", handle=handle)
        address = opened["address"]
        found |= {
            "seconds_to_open": opened["seconds"],
            "address_differs": address != base,
            "bytes_arrive": mover.call("sample", address=address + OFFSET) == f"{FILL:02x}" * 16,
            "range_of_the_import": tried(lambda: mover.call("range_of", address=address + OFFSET)),
            "pointer_of_the_import": mover.call("pointer", address=address + OFFSET),
            "pointer_in_the_exporter": engine.call("pointer", address=base + OFFSET),
        }
        mover.call("fill", address=address, value=OTHER_FILL, size=scale.handle)
        written = engine.call("sample", address=base) == f"{OTHER_FILL:02x}" * 16
        found["what_the_importer_writes_is_seen"] = written
        found["opened_twice"] = _twice(mover, handle, address)
        found["export_of_an_import"] = tried(lambda: mover.call("export", address=address))
        found["close"] = tried(lambda: mover.call("close", address=address))
        found["read_after_close"] = tried(lambda: mover.call("sample", address=address))
    with remotes(2) as (engine, mover):
        base = engine.call("allocate", size=scale.handle)
        handle = engine.call("export", address=base)
        engine.call("free", address=base)
        found["opened_after_free"] = tried(lambda: mover.call("open", handle=handle))
    return found


def _twice(mover: Remote, handle: str, address: int) -> dict[str, Any]:
    """Open what is open, and see whether one close leaves it."""
    again = tried(lambda: mover.call("open", handle=handle))
    if "ok" not in again:
        return {"second_open": again}
    same = again["ok"]["address"] == address
    closed = tried(lambda: mover.call("close", address=again["ok"]["address"]))
    return {
        "second_open": again,
        "same_address": same,
        "one_close": closed,
        "readable_after_one_close": tried(lambda: mover.call("sample", address=address)),
    }


def namespaces(scale: Scale) -> dict[str, Any]:
    """The same where engine and mover live in PID namespaces of their own, as in containers:
    with the same PID value in both, with different ones, and with one of them outside."""
    if shutil.which("unshare") is None:
        return {"skipped": "no unshare here"}
    one, other = NAMESPACE, (*NAMESPACE, *BEHIND_A_SHELL)
    return {
        "both have PID 1": _between(scale, one, one),
        "PID 1 and another": _between(scale, one, other),
        "exporter in a namespace, importer outside": _between(scale, one, ()),
        "exporter outside, importer in a namespace": _between(scale, (), one),
    }


def _between(scale: Scale, exporter: Sequence[str], importer: Sequence[str]) -> dict[str, Any]:
    def attempt() -> dict[str, Any]:
        with ExitStack() as stack:
            ends = []
            for prefix in (exporter, importer):
                remote = Remote(prefix)
                stack.callback(remote.end)
                ends.append(remote)
            pids = [remote.call("start")["pid"] for remote in ends]
            base = ends[0].call("allocate", size=scale.handle)
            ends[0].call("fill", address=base, value=FILL, size=scale.handle)
            handle = ends[0].call("export", address=base)
            opened = tried(lambda: ends[1].call("open", handle=handle))
            found: dict[str, Any] = {"pids": pids, "open": opened}
            if "ok" in opened:
                address = opened["ok"]["address"]
                found["bytes_arrive"] = (
                    ends[1].call("sample", address=address) == f"{FILL:02x}" * 16
                )
            return found

    return tried(attempt)


def kinds(scale: Scale) -> dict[str, Any]:
    """What each kind's pointer says, whether a legacy handle of it can be made, and whether
    exportable physical memory can be opened elsewhere and outlives its exporter."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        with remotes(1) as (engine,):
            order = {"kind": kind, "size": scale.handle}
            made = tried(lambda o=order: engine.call("allocate_kind", **o))  # type: ignore[misc]
            if "failed" in made:
                found[kind] = made
                continue
            at = {"address": made["ok"]}
            found[kind] = {
                "pointer": engine.call("pointer", **at),
                "is physical": tried(lambda: engine.call("is_physical", **at)),  # noqa: B023
                "legacy handle": _worked(tried(lambda: engine.call("export", **at))),  # noqa: B023
            }
    found["opened by descriptor"] = tried(lambda: _by_descriptor(scale))
    return found


def _worked(told: dict[str, Any]) -> dict[str, Any]:
    return told if "failed" in told else {"ok": None}


def _by_descriptor(scale: Scale) -> dict[str, Any]:
    with remotes(3) as (engine, mover, observer):
        pid = engine.call("pid")
        before = observer.call("memory")
        address = engine.call("allocate_kind", kind="physical, exportable", size=scale.handle)
        engine.call("fill", address=address, value=FILL, size=scale.handle)
        fd = engine.call("export_descriptor", address=address)
        there = mover.call("open_descriptor", pid=pid, number=fd, size=scale.handle)
        expected = f"{FILL:02x}" * 16
        found: dict[str, Any] = {
            "bytes arrive": mover.call("sample", address=there) == expected,
            "range of the import": tried(lambda: mover.call("range_of", address=there)),
            "pointer of the import": mover.call("pointer", address=there),
            "bytes taken": before - observer.call("memory"),
        }
        engine.end()
        found["read after the exporter's end"] = tried(lambda: mover.call("sample", address=there))
        mover.kill()
        return found
