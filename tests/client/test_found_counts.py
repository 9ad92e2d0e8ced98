"""The scheduler side counts what its requests looked for and found, and each step tells it once."""

from __future__ import annotations

from kvd_client.draft import BlockRun, LookupCounts, RequestLookup, StepDraft
from kvd_client.messages import messages_of
from kvd_proto.limits import MAX_IDS, MAX_PROMPT_BLOCKS, MAX_PROMPT_BYTES, MAX_REQUESTS_TOLD
from kvd_proto.v1 import common_pb2, engine_pb2
from tests.client.engine_rig import RECURRENT, TOKENS, WIDE, Rig, blocks


def told(rig: Rig) -> LookupCounts:
    """What all steps so far told together."""
    whole = LookupCounts()
    for step in rig.daemon.steps:
        whole.add(step.lookups)
    return whole


def test_a_miss_that_was_no_call_is_told() -> None:
    rig = Rig()
    rig.arrive("r", 4 * TOKENS + 1)
    assert rig.ask("r") == 0
    assert not rig.daemon.lookups, "the page said it"
    rig.allocate("r", [blocks(0, 5)])
    rig.step()
    assert told(rig) == LookupCounts(1, 0, 4, 0, 4 * TOKENS + 1, 0)


def test_a_hit_is_told_with_what_it_loads_of_what_the_device_lacked() -> None:
    rig = Rig()
    rig.holds("p", 3 * TOKENS)
    rig.arrive("r", 6 * TOKENS)
    assert rig.ask("r", computed=TOKENS) == 2 * TOKENS
    rig.allocate("r", [blocks(0, 6)], 2 * TOKENS)
    rig.step()
    assert told(rig) == LookupCounts(1, 1, 5, 2, 5 * TOKENS, 2 * TOKENS)


def told_of(rig: Rig) -> RequestLookup:
    (one,) = told(rig).told
    return one


def test_the_first_block_that_was_missing_is_told() -> None:
    rig = Rig()
    rig.holds("p", 3 * TOKENS)
    rig.arrive("r", 6 * TOKENS)
    rig.ask("r", computed=TOKENS)
    rig.allocate("r", [blocks(0, 6)], 2 * TOKENS)
    rig.step()
    one = told_of(rig)
    assert one.missed is not None
    assert (one.missed.group, one.missed.block, one.missed.status) == (0, 3, 0)
    message = one.to_proto()
    assert (message.request_id, message.missed.block) == ("r", 3)
    assert (message.device_tokens, message.found_tokens) == (TOKENS, 2 * TOKENS)


def test_a_whole_prompt_is_told_while_somebody_records_and_else_not() -> None:
    rig = Rig()
    for number, records in enumerate((False, True)):
        rig.daemon.tells_prompts = records
        rig.arrive(f"r{number}", 3 * TOKENS + 1)
        rig.ask(f"r{number}", computed=TOKENS)
        rig.allocate(f"r{number}", [blocks(0, 4)])
        rig.step()
    quiet, whole = told(rig).told
    assert not quiet.to_proto().prompt_hashes
    (message,) = LookupCounts(told=[whole]).told_to_proto()
    assert len(message.prompt_hashes) == 3 * len(whole.prompt[0])


def test_prompts_that_do_not_fit_into_a_step_are_left_out() -> None:
    context = common_pb2.ReqContext(request_id="r")
    prompts = [[bytes(64)] * (MAX_PROMPT_BLOCKS + 1), [bytes(64)] * MAX_PROMPT_BLOCKS, [bytes(64)]]
    each = [RequestLookup(context, 9, 0, 0, prompt=prompt) for prompt in prompts]
    counts = LookupCounts(requests=3, told=each)
    sizes = [len(message.prompt_hashes) for message in counts.told_to_proto()]
    assert sizes == [MAX_PROMPT_BLOCKS * 64, MAX_PROMPT_BYTES - MAX_PROMPT_BLOCKS * 64, 0]
    run = BlockRun(0, 0, [bytes(32)])
    made = messages_of(StepDraft(touches=[(context, run)], lookups=counts))
    assert [len(draft.lookups.told) for draft in made] == [3, 0], "beside no keys"
    assert [draft.ends_step for draft in made] == [False, True]


def test_a_request_that_found_all_it_could_load_missed_nothing() -> None:
    rig = Rig()
    rig.holds("p", 4 * TOKENS)
    rig.arrive("r", 4 * TOKENS)
    assert rig.ask("r") == 3 * TOKENS, "a token stays to be computed"
    rig.allocate("r", [blocks(0, 4)], 3 * TOKENS)
    rig.step()
    assert told_of(rig).missed is None


def test_who_had_no_daemon_says_so() -> None:
    rig = Rig()
    rig.daemon.is_there = False
    rig.arrive("r", 4 * TOKENS + 1)
    rig.ask("r")
    rig.allocate("r", [blocks(0, 5)])
    rig.step()
    rig.daemon.is_there = True
    rig.step()
    assert told_of(rig).to_proto().given_up == engine_pb2.GIVEN_UP_NO_SESSION


def test_only_the_last_requests_are_told_one_by_one() -> None:
    rig = Rig()
    rig.daemon.is_there = False
    for number in range(MAX_REQUESTS_TOLD + 1):
        rig.arrive(f"r{number}", 2 * TOKENS)
        rig.ask(f"r{number}")
        rig.allocate(f"r{number}", [blocks(0, 2)])
        rig.step()
    rig.daemon.is_there = True
    rig.step()
    whole = told(rig)
    assert whole.requests == MAX_REQUESTS_TOLD + 1
    ids = [each.context.request_id for each in whole.told]
    assert (len(ids), ids[0]) == (MAX_REQUESTS_TOLD, "r1")


def test_a_request_that_the_device_has_whole_looks_for_nothing() -> None:
    rig = Rig()
    rig.arrive("r", 2 * TOKENS)
    rig.ask("r", computed=2 * TOKENS)
    rig.allocate("r", [blocks(0, 2)])
    rig.step()
    assert told(rig) == LookupCounts(requests=1)


def test_a_request_counts_once_however_often_it_asks_and_begins() -> None:
    rig = Rig()
    rig.arrive("r", 4 * TOKENS)
    for _ in range(3):
        rig.ask("r")
        rig.step()
    assert told(rig) == LookupCounts(), "it has no place on the device yet"
    rig.allocate("r", [blocks(0, 4)])
    rig.step(("r", [blocks(0, 4)], 4 * TOKENS))
    rig.step(preempted=["r"])
    rig.ask("r")
    rig.allocate("r", [blocks(0, 4)])
    rig.step()
    assert told(rig).requests == 1


def test_a_request_that_may_not_look_up_is_not_counted() -> None:
    rig = Rig()
    rig.arrive("r", 4 * TOKENS, skip_lookup=True)
    rig.ask("r")
    rig.allocate("r", [blocks(0, 4)])
    rig.step()
    assert told(rig) == LookupCounts()


def test_blocks_are_counted_as_far_apart_as_hits_end() -> None:
    rig = Rig(WIDE, RECURRENT)
    rig.arrive("r", 9 * TOKENS)
    rig.ask("r")
    rig.allocate("r", [blocks(0, 12), blocks(12, 3)])
    rig.step()
    assert told(rig).blocks == 2


def test_what_no_daemon_heard_is_told_to_the_next_one_once() -> None:
    rig = Rig()
    rig.daemon.is_there = False
    rig.arrive("r", 4 * TOKENS)
    rig.ask("r")
    rig.allocate("r", [blocks(0, 4)])
    rig.step()
    rig.step()
    assert not rig.daemon.steps
    rig.daemon.is_there = True
    rig.step()
    rig.step()
    assert told(rig) == LookupCounts(1, 0, 4, 0, 4 * TOKENS, 0)


def test_a_step_in_several_messages_tells_it_in_one() -> None:
    counts = LookupCounts(1, 1, 2, 1, 40, 20)
    step = StepDraft(finished=[f"r{n}" for n in range(MAX_IDS + 1)], lookups=counts)
    made = messages_of(step)
    assert len(made) == 2
    assert [draft.lookups.requests for draft in made] == [0, 1]
    assert not made[0].to_proto(1).HasField("lookups")
    assert made[1].to_proto(2).lookups.tokens_found == 20
