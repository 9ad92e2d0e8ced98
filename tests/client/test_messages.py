"""A step that is too much for one message goes in several, each within the protocol's limits."""

from __future__ import annotations

from kvd_client.draft import BlockRun, HandOffDraft, JobDraft, StepDraft, within_limit
from kvd_client.messages import MAX_CONTEXT_BYTES, messages_of
from kvd_client.scheduler.hand_offs import HandOffQueue
from kvd_client.scheduler.params import RequestParams, SchedulerOptions
from kvd_client.scheduler.request import Request
from kvd_proto.limits import MAX_IDS, MAX_KEYS_PER_MESSAGE, MAX_PARTS_PER_STEP, MAX_RUNS
from kvd_proto.v1 import common_pb2

MAX_KEYS = MAX_KEYS_PER_MESSAGE


def job(number: int, keys: int = 1, text: str = "") -> JobDraft:
    context = common_pb2.ReqContext(request_id=f"r{number}", account=text)
    return JobDraft(number, context, [BlockRun(0, 0, [b"h"] * keys, range(keys))])


def assert_within_limits(messages: list[StepDraft]) -> None:
    for message in messages:
        assert message.count_keys() <= MAX_KEYS
        for kind in (message.loads, message.stores, message.touches, message.hand_offs):
            assert len(kind) <= MAX_PARTS_PER_STEP
        contexts = [part.context for part in (*message.loads, *message.stores)]
        assert sum(context.ByteSize() for context in contexts) <= MAX_CONTEXT_BYTES
        assert len(message.released_leases) <= MAX_IDS
        assert len(message.finished) <= MAX_IDS
    assert [message.ends_step for message in messages] == [False] * (len(messages) - 1) + [True]


def test_a_step_that_fits_is_one_message_with_all_of_it() -> None:
    step = StepDraft(loads=[job(1)], released_leases=[7], finished=["r"])
    assert messages_of(step) == [step]
    full = StepDraft(loads=[job(n) for n in range(MAX_PARTS_PER_STEP)])
    [message] = messages_of(full)
    assert message.job_ids() == full.job_ids()


def test_loads_beyond_a_messages_count_go_with_the_next_and_leases_with_the_last() -> None:
    step = StepDraft(loads=[job(n) for n in range(MAX_PARTS_PER_STEP + 1)], released_leases=[1, 2])
    messages = messages_of(step)
    assert_within_limits(messages)
    assert [len(message.loads) for message in messages] == [MAX_PARTS_PER_STEP, 1]
    assert [message.released_leases for message in messages] == [[], [1, 2]]


def test_keys_contexts_and_ids_are_counted_too() -> None:
    step = StepDraft(
        loads=[job(n, keys=MAX_KEYS // 2 + 1) for n in range(3)],
        stores=[job(n, text="a" * 60_000) for n in range(3, 103)],
        released_leases=list(range(MAX_IDS + 1)),
        finished=[str(n) for n in range(2 * MAX_IDS + 1)],
    )
    messages = messages_of(step)
    assert_within_limits(messages)
    together = [number for message in messages for number in message.job_ids()]
    assert together == step.job_ids()
    leases = [lease for message in messages for lease in message.released_leases]
    assert leases == step.released_leases
    finished = [name for message in messages for name in message.finished]
    assert finished == step.finished


def test_runs_beyond_a_jobs_limit_are_joined_and_none_is_lost() -> None:
    runs = [BlockRun(n % 2, 2 * n, [bytes([n])], [n]) for n in range(MAX_RUNS + 1)]
    joined = within_limit(runs)
    assert len(joined) <= MAX_RUNS
    assert sorted(h for run in joined for h in run.block_hashes) == [bytes([n]) for n in range(65)]
    assert [b for run in joined for b in run.engine_blocks] == [*range(0, 65, 2), *range(1, 65, 2)]


def test_a_hand_off_of_many_runs_goes_in_several_parts() -> None:
    queue = HandOffQueue({}, SchedulerOptions())
    context = common_pb2.ReqContext(request_id="r")
    request = Request("r", 0, [()], RequestParams(), "", context)
    runs = [BlockRun(0, 2 * n, [bytes([n])]) for n in range(2 * MAX_RUNS + 1)]
    queue.add(request, list(runs))
    step = StepDraft()
    queue.put_into(step)
    queue.have_left()
    assert not len(queue), "all of it has left"
    assert all(isinstance(part, HandOffDraft) for part in step.hand_offs)
    assert [len(part.runs) for part in step.hand_offs] == [MAX_RUNS, MAX_RUNS, 1]
    assert [run for part in step.hand_offs for run in part.runs] == runs
