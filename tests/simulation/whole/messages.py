"""What engines say over their streams: steps, the same again, steps too early, and nonsense."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvd.core.events import JobKind
from kvd_proto.v1 import common_pb2
from kvd_proto.v1 import engine_pb2 as pb
from tests.simulation.whole.drawn import Job

if TYPE_CHECKING:
    from tests.simulation.whole.engine import RawEngine


def send_step(engine: RawEngine) -> None:
    """A step over the stream: whole, again, with a gap before it, or nonsense."""
    assert engine.stream is not None
    random = engine.random
    dice = random.random()
    if dice < 0.25 and engine.sent:
        sequence = random.choice(list(engine.sent))
        engine.stream.send(engine.sent[sequence])
        return
    if dice < 0.35:
        engine.stream.send(_nonsense(engine))
        return
    engine.sequence += 1
    step = pb.Step(sequence=engine.sequence, end_step=True)
    context, group = engine.context(), random.randrange(len(engine.model.widths))
    said = common_pb2.ReqContext(request_id=context.request, account=context.account)
    if random.random() < 0.5:
        run = common_pb2.KeyRun(group=group, hashes=b"".join(engine.keys(context.account)))
        step.touches.append(pb.Touch(context=said, runs=[run]))
    if random.random() < 0.4:
        _add_store(engine, step, said, group, engine.keys(context.account))
    elif random.random() < 0.5:
        _add_small_stores(engine, step, context.account)
    message = pb.SessionRequest(step=step)
    engine.sent[engine.sequence] = message
    if len(engine.sent) > 8:
        del engine.sent[next(iter(engine.sent))]
    engine.stream.send(message)


def _add_small_stores(engine: RawEngine, step: pb.Step, account: str) -> None:
    """As while many requests decode: some blocks for each, mostly of one account."""
    random = engine.random
    group = random.randrange(len(engine.model.widths))
    for _ in range(random.choice([2, 4, 8])):
        context = engine.context()
        if random.random() < 0.9:
            context = replace(context, account=account)
        if random.random() < 0.1:
            group = random.randrange(len(engine.model.widths))
        said = common_pb2.ReqContext(request_id=context.request, account=context.account)
        keys = engine.keys(context.account)[-random.randrange(1, 3) :]
        _add_store(engine, step, said, group, keys)


def _add_store(
    engine: RawEngine, step: pb.Step, said: common_pb2.ReqContext, group: int, keys: list[bytes]
) -> None:
    width = engine.model.widths[group]
    blocks = engine.take(group, len(keys), width)
    if blocks is None:
        return
    engine.last_job += 1
    job = Job(JobKind.STORE, group, keys, blocks, engine.epoch, said.account, {})
    engine.compute(engine.note_job(engine.last_job, job))
    run = common_pb2.TransferRun(
        group=group,
        hashes=b"".join(keys),
        engine_blocks=np.array(blocks, dtype="<u4").tobytes(),
    )
    store = pb.StoreJob(job_id=engine.last_job, context=said, runs=[run], ready_together=1)
    step.stores.append(store)
    engine.loop.outside(engine.random.random() * 0.02, engine.say_ready, engine.last_job)


def _nonsense(engine: RawEngine) -> pb.SessionRequest:
    random = engine.random
    said = common_pb2.ReqContext(request_id="nonsense")
    run = common_pb2.KeyRun(group=random.choice([0, 99]), hashes=random.randbytes(17))
    query = pb.Query(context=said, run=run, lease=cast(Any, random.choice([0, 1, 77])))
    bad = [
        pb.SessionRequest(),
        pb.SessionRequest(step=pb.Step(sequence=engine.sequence + 7)),
        pb.SessionRequest(step=pb.Step(sequence=0)),
        pb.SessionRequest(lookup=pb.LookupCall(call_id=1, queries=[query])),
        pb.SessionRequest(lookup=pb.LookupCall(call_id=2)),
        pb.SessionRequest(reset_cache=pb.ResetCache(sequence=0, epoch="x")),
    ]
    return random.choice(bad)
