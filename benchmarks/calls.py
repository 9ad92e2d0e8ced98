"""Round trips, lookups, and what a `Step` costs the caller: `python -m benchmarks.calls`.

Three parts. Round trip of each RPC, one small call at a time, by a synchronous client. Lookups of
16, 256 and 2048 keys, hit and miss: as an engine sees them through the scheduler side (a miss ends
with a probe, a hit takes a lease by a call); and what they consist of: the index page from a list
of bytes, the call on the session's stream, and beside them the floor, an in-process dict probe.
Calls come every 2 ms, so that none waits for the lease that the one before gave back. The same
lookups that find all, in turn with as many calls of `Health.Check` that come as far apart: the
least that a call by gRPC takes here. And the time that `send_step` takes on the calling thread.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks import report
from benchmarks.neighbour import ask
from benchmarks.rig import MIB, TOKENS_PER_BLOCK, BenchEngine, daemon, keys
from kvd_client import Scheduler
from kvd_proto.v1 import common_pb2, engine_pb2, operator_pb2
from tests.control import daemon_rig as raw

SIZES = (16, 256, 2048)
STORED = 2048
SMALL_BLOCK = 4096
PAUSE_SECONDS = 0.002  # a step of an engine that decodes
PAIRS = 15
_REQUESTS = itertools.count()
BARS = {16: 1.6, 2048: 4.0}  # of a lookup, over `Health.Check`


def timed(call: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Milliseconds of one call: p50 and p99 over the rounds, after a tenth as warm-up."""
    millis = []
    for number in range(rounds + rounds // 10):
        began = time.perf_counter()
        call()
        if number >= rounds // 10:
            millis.append((time.perf_counter() - began) * 1e3)
    return {"p50_ms": report.percentile(millis, 50), "p99_ms": report.percentile(millis, 99)}


def told(call: Callable[[], float], rounds: int, pause_s: float) -> dict[str, float]:
    """p50 and p99 of the milliseconds that `call` says, after a tenth as warm-up."""
    millis = []
    for number in range(rounds + rounds // 10):
        taken = call()
        if number >= rounds // 10:
            millis.append(taken)
        time.sleep(pause_s)
    return {"p50_ms": report.percentile(millis, 50), "p99_ms": report.percentile(millis, 99)}


def round_trips(socket: str, rounds: int) -> list[dict[str, Any]]:
    """Every unary RPC with a small message."""
    engine = raw.RawEngine(socket)
    engine.store({1: raw.block(1)})
    scheduler, stub = engine.scheduler, engine.scheduler.engine
    health: Any = health_pb2_grpc.HealthStub(scheduler.channel)
    numbers = iter(range(1000, 1 << 30))

    def numbered(request: Any) -> Any:
        scheduler.sequence += 1
        request.session_id, request.sequence = scheduler.id, scheduler.sequence
        return request

    def lookup(lease: int) -> Any:
        return engine_pb2.LookupRequest(session_id=scheduler.id, queries=[raw.query([1], lease)])

    def refused_load() -> Any:
        return numbered(engine_pb2.PrepareLoadRequest(job=raw.load_job(next(numbers), [99], [0])))

    def known_store() -> Any:
        return numbered(engine_pb2.PrepareStoreRequest(job=raw.store_job(next(numbers), [1], [0])))

    touch = engine_pb2.Touch(context=raw.context(), runs=[common_pb2.KeyRun(hashes=raw.hashes(1))])
    calls: dict[str, tuple[Any, Callable[[], Any]]] = {
        "Lookup, 1 key": (stub.Lookup, lambda: lookup(0)),
        "PrepareLoad, refused": (stub.PrepareLoad, refused_load),
        "PrepareStore, known": (stub.PrepareStore, known_store),
        "Touch": (stub.Touch, lambda: numbered(engine_pb2.TouchRequest(touch=touch))),
        "ReleaseLease": (stub.ReleaseLease, lambda: numbered(engine_pb2.ReleaseLeaseRequest())),
        "EndStep": (stub.EndStep, lambda: numbered(engine_pb2.EndStepRequest())),
        "Flush, nothing runs": (
            stub.Flush,
            lambda: engine_pb2.FlushRequest(session_id=scheduler.id, deadline_ms=1000),
        ),
        "Status": (scheduler.operator.Status, operator_pb2.StatusRequest),
        "ListNamespaces": (
            scheduler.operator.ListNamespaces,
            operator_pb2.ListNamespacesRequest,
        ),
        "Health.Check": (health.Check, health_pb2.HealthCheckRequest),
    }
    rows = [
        {"rpc": name, **timed(partial(_call, scheduler, method, request), rounds)}
        for name, (method, request) in calls.items()
    ]
    engine.close()
    return rows


def lookups(engine: BenchEngine, rounds: int) -> list[dict[str, Any]]:
    """Through the scheduler side, by page, by a call with a lease, and by a dict."""
    there, absent = keys(1, STORED), keys(2, STORED)
    ids = [number % engine.blocks for number in range(STORED)]
    for at in range(0, STORED, engine.blocks):
        engine.run("store", there[at : at + engine.blocks], ids[at : at + engine.blocks])
    resident = dict.fromkeys(there)
    session = engine.connection.session
    assert session is not None
    assert session.present(0, "", there).all()
    assert not session.present(0, "", absent).any()
    scheduler = Scheduler(engine.connection)
    rows = []
    for size in SIZES:
        for outcome, asked in (("hit", there[:size]), ("miss", absent[:size])):
            pause = PAUSE_SECONDS if outcome == "hit" else 0.0
            by_engine = told(partial(_through, scheduler, asked, outcome), rounds, pause)
            by_page = timed(partial(session.present, 0, "", asked), rounds)
            by_call = told(partial(ask, engine, asked), rounds, PAUSE_SECONDS)
            by_dict = timed(partial(_probe, resident, asked), rounds)
            rows.append(
                {
                    "keys": size,
                    "outcome": outcome,
                    "engine_p50_ms": by_engine["p50_ms"],
                    "engine_p99_ms": by_engine["p99_ms"],
                    "page_p50_ms": by_page["p50_ms"],
                    "page_p99_ms": by_page["p99_ms"],
                    "call_p50_ms": by_call["p50_ms"],
                    "call_p99_ms": by_call["p99_ms"],
                    "dict_p50_ms": by_dict["p50_ms"],
                }
            )
    return rows


def _call(scheduler: raw.RawScheduler, method: Any, request: Callable[[], Any]) -> Any:
    return scheduler.call(method, request())


def _probe(resident: dict[bytes, None], asked: list[bytes]) -> list[bool]:
    return [key in resident for key in asked]


def _through(scheduler: Scheduler, asked: list[bytes], outcome: str) -> float:
    """Milliseconds from a request's arrival to how many tokens can be loaded, leases taken."""
    tokens = TOKENS_PER_BLOCK * len(asked)
    request = f"lookup {next(_REQUESTS)}"  # one that has just ended is asked about a step later
    began = time.perf_counter()
    scheduler.on_new_request(request, tokens + 1, [asked])
    found = scheduler.get_num_new_matched_tokens(request, 0)
    millis = (time.perf_counter() - began) * 1e3
    while found is None:  # it came too late for this step: the engine would ask in the next
        scheduler.build_step([])
        found = scheduler.get_num_new_matched_tokens(request, 0)
        millis = (time.perf_counter() - began) * 1e3
    assert found == (tokens if outcome == "hit" else 0)
    scheduler.request_finished(request, [()])
    if outcome == "hit":
        scheduler.build_step([])  # gives the leases back
    return millis


def beside_health(socket: str, engine: BenchEngine, rounds: int) -> list[dict[str, Any]]:
    """Lookups that find all and take a lease, over `Health.Check`: p50 of spells in turn."""
    there = keys(1, STORED)
    caller = raw.Caller(socket, "SCHEDULER")
    health: Any = health_pb2_grpc.HealthStub(caller.channel)

    def check() -> float:
        began = time.perf_counter()
        health.Check(health_pb2.HealthCheckRequest(), metadata=caller.metadata)
        return (time.perf_counter() - began) * 1e3

    rows = []
    for size, bar in BARS.items():
        sides: list[Callable[[], float]] = [partial(ask, engine, there[:size]), check]
        taken: list[list[float]] = [[], []]
        for pair in range(PAIRS):
            for side in ((0, 1), (1, 0))[pair % 2]:
                taken[side].append(told(sides[side], rounds // PAIRS, PAUSE_SECONDS)["p50_ms"])
        rows.append(
            {
                "keys": size,
                "lookup_ms": report.Spread.of(taken[0]),
                "health_ms": report.Spread.of(taken[1]),
                "ratio": report.ratios(*taken),
                "bar": bar,
            }
        )
    caller.close()
    return rows


def step_cost(engine: BenchEngine, rounds: int) -> list[dict[str, Any]]:
    """Time of `send_step` on the calling thread, every 2.4 ms, as in a decoding engine."""
    rows = []
    for stores in (0, 16, 256):
        fresh = keys(100 + stores, stores * 4)
        micros = []
        for number in range(rounds):
            at = number % 4 * stores
            step, _ = engine.step_of("store", fresh[at : at + stores], list(range(stores)))
            began = time.perf_counter()
            engine.connection.send_step(step)
            micros.append((time.perf_counter() - began) * 1e6)
            time.sleep(0.0024)
        rows.append(
            {
                "blocks_stored": stores,
                "p50_us": report.percentile(micros, 50),
                "p99_us": report.percentile(micros, 99),
            }
        )
    return rows


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description="Round trips, lookups and the cost of a Step.")
    parser.add_argument("--quick", action="store_true", help="few rounds: a smoke test")
    parser.add_argument("--output", type=Path, help="JSON file (default: results/calls.json)")
    options = parser.parse_args()
    rounds = 50 if options.quick else 1000
    with daemon(64 * MIB, extent_bytes=4 * MIB, **{"lease-share": 0.9}) as running:
        results = {"round_trips": round_trips(running.socket, rounds)}
        engine = BenchEngine(running.socket, "lookups", 512, SMALL_BLOCK)
        results["lookups"] = lookups(engine, rounds)
        results["beside_health"] = beside_health(running.socket, engine, rounds)
        results["step_on_the_calling_thread"] = step_cost(engine, rounds)
        engine.close()
    for title, rows in results.items():
        print(f"\n{title.replace('_', ' ')}")
        rounded = [[f"{v:.3f}" if isinstance(v, float) else v for v in r.values()] for r in rows]
        print(report.table(list(rows[0]), rounded))
    report.write("calls", results, options.output)


if __name__ == "__main__":
    main()
