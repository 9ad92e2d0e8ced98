"""The quicker books of requests and stores beside those of vLLM, over the same random steps."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.kv_offload.base import PrepareStoreOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvd_client.integrations.vllm.scheduling import one_group
from kvd_client.integrations.vllm.scheduling import scheduler as ours
from kvd_client.integrations.vllm.scheduling.jobs import AdjacentBlocks
from kvd_client.integrations.vllm.scheduling.requests import by_group
from kvd_client.integrations.vllm.scheduling.scheduler import KvdConnectorScheduler
from kvd_client.integrations.vllm.scheduling.stores import BlocksSpec
from kvd_client.integrations.vllm.spec import KvdOffloadingSpec
from tests.vllm.configurations import BLOCK_TOKENS, Configuration, configure
from tests.vllm.scheduler_stand import write_model

STEPS = 60
MOST_BLOCKS = 12  # of a request
ROOM_FOR = 30  # requests at once: more than MANY_REQUESTS


@pytest.fixture(scope="module")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Configuration:
    model = write_model(tmp_path_factory.mktemp("model"))
    return configure(Path(model), skip_tokenizer_init=True)


class ScriptedStores:
    """Stores what a draw from the key and the step says, however often it is asked."""

    stores_lazily = False
    lock = nullcontext()  # as of vLLM 0.33's managers that one thread enters

    def __init__(self, groups: Any) -> None:
        self.groups = groups
        self.step = 0

    def tracked(self, _context: Any) -> Any:
        return SimpleNamespace(request=SimpleNamespace(context=None, request_level=False))

    def prepare_store(self, keys: Any, _context: Any) -> PrepareStoreOutput | None:
        draws = [random.Random(f"{key!r} {self.step}").random() for key in keys]
        if draws[0] < 0.15:
            return None
        stored = [key for key, draw in zip(keys, draws, strict=True) if draw > 0.4]
        return PrepareStoreOutput(stored, BlocksSpec(stored, list(by_group(stored))), [])

    def prepare_blocks(self, keys: Any, parts: Any, context: Any) -> PrepareStoreOutput | None:
        assert parts == list(by_group(keys))
        return self.prepare_store(keys, context)

    def forget_failures(self) -> set[Any]:
        return set()

    def __getattr__(self, _verb: str) -> Any:
        return lambda *_arguments, **_more: None


class ScriptedRequest:
    """What both sides read of a request. Its hashes are known up to its last token."""

    kv_transfer_params = None
    kv_hints = None
    skip_reading_prefix_cache = True
    mm_features = ()
    num_output_tokens = 0
    shared_prefix_boundary = None

    def __init__(self, name: str, blocks: int) -> None:
        self.request_id = name
        self.block_hashes: list[bytes] = []
        self.num_prompt_tokens = blocks * BLOCK_TOKENS + 5
        self.num_tokens = 0
        self.num_computed_tokens = 0
        self.status = RequestStatus.RUNNING
        self.grow_to(self.num_prompt_tokens)

    def grow_to(self, tokens: int) -> None:
        self.num_tokens = tokens
        for block in range(len(self.block_hashes), tokens // BLOCK_TOKENS):
            self.block_hashes.append(f"{self.request_id} {block}".encode().ljust(32, b"."))

    def is_finished(self) -> bool:
        return bool(RequestStatus.is_finished(self.status))


class Drawn:
    """A run of steps drawn from a seed: the same for every side."""

    def __init__(self, seed: int, blocks: int = 0) -> None:
        """`blocks`: what the device has, each used again and again; 0: enough for ever."""
        self.draw = random.Random(seed)
        self._device = blocks
        self.requests: dict[str, ScriptedRequest] = {}
        self.ended: list[ScriptedRequest] = []
        self._tables: dict[str, int] = {}  # engine blocks that each has
        self._made = 0
        self._next_block = 1

    def arrivals(self) -> list[ScriptedRequest]:
        count = self.draw.choice((0, 1, 1, 12))
        made = []
        for _ in range(min(count, ROOM_FOR - len(self.requests))):
            self._made += 1
            made.append(ScriptedRequest(f"r{self._made}", self.draw.randrange(MOST_BLOCKS)))
        return made

    def step(self, arrived: list[ScriptedRequest]) -> Any:
        """What vLLM says of a step. Some are computed ahead of their tokens, as overlapped;
        some were preempted and are given all their blocks anew."""
        told, self.ended = self.ended, []
        new, cached = [], SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
        scheduled: dict[str, int] = {}
        for request in (*self.requests.values(), *arrived):
            name = request.request_id
            if name in self.requests and self.draw.random() < 0.3:
                continue
            ahead = request.num_tokens + self.draw.choice((0, 0, 1)) - request.num_computed_tokens
            if ahead <= 0:
                continue
            scheduled[name] = self.draw.randint(1, ahead)
            if name not in self.requests:
                new.append(
                    SimpleNamespace(req_id=name, block_ids=(self._give(request, scheduled),))
                )
                continue
            if self.draw.random() < 0.1:
                self._tables[name] = 0
                cached.resumed_req_ids.add(name)
            blocks = self._give(request, scheduled)
            cached.req_ids.append(name)
            cached.new_block_ids.append((blocks,) if blocks else None)
        self.requests.update({request.request_id: request for request in arrived})
        return SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=scheduled,
            finished_req_ids={request.request_id for request in told},
            preempted_req_ids=set(),
            kv_cache_block_copies=self._copies(told),
            kv_connector_block_state=None,
        )

    def _copies(self, told: list[ScriptedRequest]) -> list[Any] | None:
        """Blocks that the step writes to beside those that it gives to requests."""
        first = self._next_block
        return [SimpleNamespace(dst_block_id=1 + first % (self._device or first))] if told else None

    def _give(self, request: ScriptedRequest, scheduled: dict[str, int]) -> list[int]:
        name = request.request_id
        wanted = -(-(request.num_computed_tokens + scheduled[name]) // BLOCK_TOKENS)
        count = max(0, wanted - self._tables.get(name, 0))
        self._tables[name] = self._tables.get(name, 0) + count
        first, self._next_block = self._next_block, self._next_block + count
        given = range(first, first + count)
        return [1 + block % self._device for block in given] if self._device else list(given)

    def compute(self, scheduled: dict[str, int]) -> list[ScriptedRequest]:
        """The step has run; who ended with it."""
        for name, count in scheduled.items():
            request = self.requests[name]
            request.num_computed_tokens += count
            request.grow_to(max(request.num_tokens, request.num_computed_tokens))
            if request.num_computed_tokens >= request.num_prompt_tokens and (
                self.draw.random() < 0.2
            ):
                aborted = self.draw.random() < 0.3
                end = RequestStatus.FINISHED_ABORTED if aborted else RequestStatus.FINISHED_STOPPED
                request.status = end
                self.ended.append(self.requests.pop(name))
        return self.ended


def side(kind: type[Any], configuration: Configuration) -> Any:
    made = kind(
        KvdOffloadingSpec(configuration.offloading), configuration.vllm, configuration.cache
    )
    made.manager = ScriptedStores(made.manager.groups)
    return made


def books(made: Any) -> dict[str, Any]:
    """The books of either, by value. Of keys those that are stored: ours makes them for that."""
    return {
        "requests": {
            name: [
                (keys_of(status, each), each.block_ids, each.next_stored_chunk_idx)
                for each in status.group_states
            ]
            + [status.transfer_jobs]
            for name, status in made._req_status.items()
        },
        "jobs": {
            job: (each.req_id, each.keys, each.deferred_fence_block_ids, each.pending_count)
            for job, each in made._jobs.items()
        },
        "fenced": fences(made),
        "allocated": made._current_batch_allocated_block_ids,
    }


def keys_of(status: Any, state: Any) -> list[tuple[Any, int]]:
    """What is stored of the request, with the end of each block."""
    positions = status.req_context._offload_key_positions
    return [(key, positions[key]) for key in state.offload_keys[: state.next_stored_chunk_idx]]


def fences(made: Any) -> dict[int, set[int]]:
    """Jobs by the engine block that they fence, wherever that is kept."""
    fenced = {block: set(jobs) for block, jobs in made._block_id_to_pending_jobs.items()}
    for job, blocks in getattr(made, "_fenced_lists", {}).items():
        for block in blocks:
            fenced.setdefault(block, set()).add(job)
    return fenced


def stores(jobs: dict[int, Any]) -> dict[int, Any]:
    told = {}
    for number, job in jobs.items():
        source = job.src_spec
        if isinstance(source, AdjacentBlocks):
            row, first = source.engine_blocks, source.first_block
        else:
            row, first = list(np.asarray(source.block_ids)), source.block_indices[0]
        told[number] = (job.req_id, row, first, job.dst_spec.keys, job.dst_spec.parts)
    return told


@pytest.mark.parametrize("many", [1, 8, 1000])
@pytest.mark.parametrize("seed", range(6))
def test_both_keep_the_same_books(
    seed: int, many: int, configuration: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "MANY_REQUESTS", many)
    drawn = Drawn(seed)
    sides = [
        side(kind, configuration) for kind in (OffloadingConnectorScheduler, KvdConnectorScheduler)
    ]
    assert sides[1]._stores_simply
    stored = 0
    for _ in range(STEPS):
        arrived = drawn.arrivals()
        for made in sides:
            for request in arrived:
                made.on_new_request(request)
        output = drawn.step(arrived)
        made_jobs: list[dict[Any, Any]] = []
        for made in sides:
            made.manager.step += 1
            made._update_req_states(output)
            before = books(made)
            made_jobs.append(stores(made._build_store_jobs(output)))
            made._current_batch_allocated_block_ids = set()
            made_jobs.append(before)
        assert made_jobs[0] == made_jobs[2]
        assert made_jobs[1] == made_jobs[3]
        stored += len(made_jobs[0])
        for request in drawn.compute(output.num_scheduled_tokens):
            for made in sides:
                made.request_finished(request)
        assert books(sides[0]) == books(sides[1])
        ended = [job for job in sides[0]._jobs if drawn.draw.random() < 0.4]
        report = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(ended, 1))
        for made in sides:
            made.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
        assert books(sides[0]) == books(sides[1])
    assert stored > STEPS / 2, "the run stores something"


@pytest.mark.parametrize("most", [0, 20, 4096])
@pytest.mark.parametrize("seed", range(3))
def test_both_flush_the_same_stores_where_blocks_are_used_again(
    seed: int, most: int, configuration: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_group, "MAX_FENCED_AS_LISTS", most)
    drawn = Drawn(seed, blocks=60)
    sides = [
        side(kind, configuration) for kind in (OffloadingConnectorScheduler, KvdConnectorScheduler)
    ]
    flushed = at_once = as_lists = moved = 0
    for _ in range(2 * STEPS):
        arrived = drawn.arrivals()
        for made in sides:
            made.manager.step += 1
            for request in arrived:
                made.on_new_request(request)
        output = drawn.step(arrived)
        told = [OffloadingConnectorScheduler.build_connector_meta(made, output) for made in sides]
        assert told[0].jobs_to_flush == told[1].jobs_to_flush
        assert stores(told[0].store_jobs) == stores(told[1].store_jobs)
        flushed += len(told[0].jobs_to_flush)
        jobs = sides[1]._join(told[1])
        said = {jobs.owners[draft.job_id] for draft in jobs.stores if draft.ready_together == 1}
        assert said == told[1].jobs_to_flush & told[1].store_jobs.keys()
        in_order = [draft.ready_together for draft in jobs.stores]
        assert in_order == sorted(in_order), "one that waits for none before it may end with it"
        moved += bool(said) and next(iter(told[1].store_jobs)) not in said
        at_once += len(said)
        for request in drawn.compute(output.num_scheduled_tokens):
            for made in sides:
                made.request_finished(request)
        as_lists += len(sides[1]._fenced_lists)
        assert sides[1]._fenced_blocks <= most
        assert sides[1]._fenced_blocks == sum(map(len, sides[1]._fenced_lists.values()))
        assert books(sides[0]) == books(sides[1])
        ended = [job for job in sides[0]._jobs if drawn.draw.random() < 0.2]
        report = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(ended, 1))
        for made in sides:
            made.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
        assert books(sides[0]) == books(sides[1])
        if drawn.draw.random() < 0.02:
            for made in sides:
                made.reset_cache()
                made._current_batch_jobs_to_flush.clear()
    assert flushed, "the run flushes something"
    assert at_once or seed == 2, "also of its own step"
    assert moved or seed, "also after others of its step"
    assert bool(as_lists) == bool(most)


def test_a_request_whose_id_is_like_the_new_name_of_an_ended_one_keeps_its_record(
    configuration: Configuration,
) -> None:
    made = side(KvdConnectorScheduler, configuration)
    ended, other, again = (ScriptedRequest(name, 1) for name in ("r", "r#1", "r"))
    for request in (ended, other):
        made.on_new_request(request)
    ended.status = RequestStatus.FINISHED_STOPPED
    made.request_finished(ended)
    made.on_new_request(again)
    named = {name: status.req for name, status in made._req_status.items()}
    assert named == {"r": again, "r#1": other, "r#2": ended}


@pytest.mark.parametrize("what", ["plain", "has ended", "has a null block"])
def test_what_is_not_plain_is_left_to_vllm(configuration: Configuration, what: str) -> None:
    made = side(KvdConnectorScheduler, configuration)
    request = ScriptedRequest("r", 3)
    made.on_new_request(request)
    status = made._req_status["r"]
    status.update_offload_keys()
    status.group_states[0].block_ids += [1, 0 if what == "has a null block" else 2, 3]
    if what == "has ended":
        request.status = RequestStatus.FINISHED_ABORTED
    offered: list[Any] = []
    made.manager.prepare_blocks = lambda keys, *_: offered.append(keys)  # there is no room
    due = {"r": 3 * BLOCK_TOKENS}
    assert made._store_new_blocks(due) == {}
    assert due
    assert offered == ([status.group_states[0].offload_keys] if what == "plain" else [])


def test_of_two_resets_between_two_steps_the_first_ones_flush_is_kept(
    configuration: Configuration,
) -> None:
    made, drawn = side(KvdConnectorScheduler, configuration), Drawn(0)
    while not made._jobs:
        arrived = drawn.arrivals()
        for request in arrived:
            made.on_new_request(request)
        output = drawn.step(arrived)
        OffloadingConnectorScheduler.build_connector_meta(made, output)
        drawn.compute(output.num_scheduled_tokens)
    under_way = set(made._jobs)
    for _ in range(2):
        made.reset_cache()
    assert made._current_batch_jobs_to_flush == under_way


def test_books_of_an_engine_with_blocks_of_several_are_vllms(
    configuration: Configuration, tmp_path: Path
) -> None:
    wide = configure(Path(write_model(tmp_path)), {"blocks_per_chunk": 2}, skip_tokenizer_init=True)
    made = side(KvdConnectorScheduler, wide)
    assert not made._stores_simply
    plain = side(OffloadingConnectorScheduler, wide)
    request = ScriptedRequest("r", 7)
    for each in (plain, made):
        each.on_new_request(request)
        each._req_status["r"].update_offload_keys()
        request.grow_to(9 * BLOCK_TOKENS)
        each._req_status["r"].update_offload_keys()
    ours, theirs = (each._req_status["r"] for each in (made, plain))
    assert ours.group_states[0].offload_keys == theirs.group_states[0].offload_keys
    assert ours.req_context._offload_key_positions == theirs.req_context._offload_key_positions
    assert len(ours.group_states[0].offload_keys) == 4


def test_a_block_whose_last_token_is_not_known_is_not_due(tmp_path: Path) -> None:
    extra = {"offload_prompt_only": False}
    decoding = configure(Path(write_model(tmp_path)), extra, skip_tokenizer_init=True)
    made = side(KvdConnectorScheduler, decoding)
    request = ScriptedRequest("r", 2)
    made.on_new_request(request)
    made._req_status["r"].group_states[0].next_stored_chunk_idx = 2
    request.num_computed_tokens = 3 * BLOCK_TOKENS - 1
    request.grow_to(3 * BLOCK_TOKENS - 1)
    assert made._due({"r": 1}) == {}, "the step before has not told its token yet"
    request.grow_to(3 * BLOCK_TOKENS)
    assert made._due({"r": 1}) == {"r": 1}
    assert len(made._req_status["r"].group_states[0].offload_keys) == 3


class CountedLooks(dict[str, Any]):
    """vLLM's records of requests, which count how often each was asked for."""

    def __init__(self, records: dict[str, Any]) -> None:
        super().__init__(records)
        self.looks: dict[str, int] = {}

    def get(self, name: str, default: Any = None) -> Any:
        self.looks[name] = self.looks.get(name, 0) + 1
        return super().get(name, default)


@pytest.fixture
def decoding(tmp_path: Path) -> tuple[Any, ScriptedRequest]:
    """A scheduler that stores what is generated, and a request at the start of its third block."""
    extra = {"offload_prompt_only": False}
    configuration = configure(Path(write_model(tmp_path)), extra, skip_tokenizer_init=True)
    made = side(KvdConnectorScheduler, configuration)
    request = ScriptedRequest("r", 1)
    made.on_new_request(request)
    made._req_status["r"].group_states[0].next_stored_chunk_idx = 2
    request.num_computed_tokens = 2 * BLOCK_TOKENS
    request.grow_to(4 * BLOCK_TOKENS)
    return made, request


def steps_until_due(made: Any, request: ScriptedRequest, tokens: int) -> int:
    """Steps of so many tokens each until the request has a new block."""
    for step in range(1, BLOCK_TOKENS + 1):
        if made._due({"r": tokens}):
            return step
        request.num_computed_tokens += tokens
    raise AssertionError("the block is never stored")


@pytest.mark.parametrize("tokens", [1, 3])
def test_who_decodes_is_looked_at_only_when_its_block_may_be_full(
    decoding: tuple[Any, ScriptedRequest], tokens: int
) -> None:
    made, request = decoding
    made._decode_tokens = tokens
    made._req_status = CountedLooks(made._req_status)
    assert steps_until_due(made, request, tokens) == -(-BLOCK_TOKENS // tokens)
    assert made._req_status.looks["r"] == 2, "in its first step, and in its last"
    assert made._due({"r": tokens}) == {"r": tokens}, "it has not been dealt with"


def test_who_decodes_fewer_tokens_than_it_may_is_due_in_time(
    decoding: tuple[Any, ScriptedRequest],
) -> None:
    made, request = decoding
    made._decode_tokens = 5
    assert steps_until_due(made, request, 1) == BLOCK_TOKENS


def test_a_step_of_more_tokens_than_a_drafter_gives_is_looked_at(
    decoding: tuple[Any, ScriptedRequest],
) -> None:
    made, request = decoding
    assert made._due({"r": 1}) == {}
    request.num_computed_tokens += 1
    assert made._due({"r": BLOCK_TOKENS}) == {"r": BLOCK_TOKENS}
    assert made._due({"r": BLOCK_TOKENS - 2}) == {}
    assert made._due({"r": BLOCK_TOKENS - 1}) == {"r": BLOCK_TOKENS - 1}


def test_whose_blocks_are_offered_again_is_looked_at(
    decoding: tuple[Any, ScriptedRequest],
) -> None:
    made, _request = decoding
    assert made._due({"r": 1}) == {}
    status = made._req_status["r"]
    made.manager.block_of = lambda _key, _context: 1
    status.update_offload_keys()
    made._rewind(status, {status.group_states[0].offload_keys[1]})
    assert made._due({"r": 1}) == {"r": 1}
    made._req_status["r"].group_states[0].next_stored_chunk_idx = 2
    assert made._due({"r": 1}) == {}
    made.reset_cache()
    assert made._due({"r": 1}) == {"r": 1}


@pytest.mark.parametrize("comes_back", ["new", "resumed"])
def test_who_comes_back_with_more_tokens_is_looked_at(
    decoding: tuple[Any, ScriptedRequest], comes_back: str
) -> None:
    made, request = decoding
    assert made._due({"r": 1}) == {}
    request.num_computed_tokens = 3 * BLOCK_TOKENS + 4
    made._req_status["r"].group_states[0].block_ids += [1, 2, 3, 4]
    new = [SimpleNamespace(req_id="r")] if comes_back == "new" else []
    resumed = {"r"} if comes_back == "resumed" else set()
    output = SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=resumed),
        num_scheduled_tokens={"r": 1},
        finished_req_ids=set(),
    )
    made._build_store_jobs(output)
    status = made._req_status["r"]
    offered = status.group_states[0].offload_keys
    assert len(offered) == 4, "its keys were made: it was due"


def test_nothing_is_kept_of_who_has_ended(decoding: tuple[Any, ScriptedRequest]) -> None:
    made, request = decoding
    assert made._due({"r": 1}) == {}
    assert made._next_look
    request.status = RequestStatus.FINISHED_STOPPED
    made.request_finished(request)
    assert not made._next_look


def test_what_a_step_left_out_is_offered_at_the_requests_end_at_last(
    decoding: tuple[Any, ScriptedRequest],
) -> None:
    made, request = decoding
    status = made._req_status["r"]
    status.update_offload_keys()
    made.manager.block_of = lambda _key, _context: 1
    made._offer_later(status, {status.group_states[0].offload_keys[1]})
    assert status.group_states[0].next_stored_chunk_idx == 2
    made.request_finished(request)
    assert status.group_states[0].next_stored_chunk_idx == 1


@pytest.mark.parametrize("at_once", [True, False])
def test_a_failed_store_of_who_must_be_whole_at_its_end_is_offered_again_at_once(
    decoding: tuple[Any, ScriptedRequest], *, at_once: bool
) -> None:
    made, _request = decoding
    status = made._req_status["r"]
    status.update_offload_keys()
    made.manager.block_of = lambda _key, _context: 1
    made.manager.fail_stores = lambda _tracked, _keys: True
    tracked = SimpleNamespace(request=SimpleNamespace(request_level=at_once))
    made.manager.tracked = lambda _context: tracked
    keys = {status.group_states[0].offload_keys[1]}
    made._jobs[7] = SimpleNamespace(req_id="r", is_store=True, keys=keys)
    made._fail(7)
    assert status.group_states[0].next_stored_chunk_idx == (1 if at_once else 2)
    assert len(made._left) == (0 if at_once else 1)
