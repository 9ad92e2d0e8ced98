"""Blocks that may not hold what they are named by: whose are not stored, and which lose names."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput

from kvd_client.integrations.vllm.scheduling.beside import LoadsBeside
from kvd_client.integrations.vllm.scheduling.handed_states import within_bounds
from kvd_client.integrations.vllm.scheduling.never_computed import NeverComputed

BLOCK = 16  # tokens
HASHES = [bytes([number]) * 32 for number in range(4)]
GROUPS = (0, 1)


def settings(policy: str = "priority", stages: int = 1) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(policy=policy),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
    )


# -- another connector's loads ----------------------------------------------------------------


def step(*new: tuple[str, int, list[int]], loads: bool = False, resumed: Any = ()) -> Any:
    """Requests that begin, or are resumed: (name, computed tokens, engine blocks)."""
    return SimpleNamespace(
        has_sync_kv_loads=loads,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=computed, block_ids=(blocks,))
            for name, computed, blocks in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _, _ in resumed] + ["goes on"],
            num_computed_tokens=[computed for _, computed, _ in resumed] + [BLOCK],
            new_block_ids=[(blocks,) for _, _, blocks in resumed] + [([3],)],
            resumed_req_ids={name for name, _, _ in resumed},
        ),
    )


class Beside:
    """What is found doubtful, by name, where each of these had a block on the device."""

    def __init__(self, stages: int = 1) -> None:
        self._found = LoadsBeside(settings(stages=stages))
        names = ("a", "b", "goes on")
        self._requests: Any = {
            name: SimpleNamespace(name=name, num_locally_computed_tokens=BLOCK) for name in names
        }

    def __call__(self, of: Any, *asked: str) -> list[str]:
        for name in asked:
            self._found.asked(name)
        return [each.name for each in self._found.doubtful(of, self._requests)]


def test_who_loads_beside_and_who_is_given_its_blocks_is_doubtful() -> None:
    begun = step(("a", 3 * BLOCK, [1, 2, 3]), ("b", BLOCK, [1, 7]), loads=True)
    assert Beside()(begun, "a", "b") == ["a", "b"]


@pytest.mark.parametrize("asked", [["a"], []], ids=["loads nothing", "loaded by kvd before"])
def test_who_loads_nothing_within_the_step_is_not(asked: list[str]) -> None:
    computed = BLOCK if asked else 3 * BLOCK
    assert Beside()(step(("a", computed, [1, 2, 3]), loads=True), *asked) == []


def test_the_null_block_is_nobodys() -> None:
    begun = step(("a", 3 * BLOCK, [0, 2]), ("b", BLOCK, [0, 7]), loads=True)
    assert Beside()(begun, "a", "b") == ["a"]


def test_who_is_not_known_here_is_passed_over() -> None:
    assert Beside()(step(("unknown", 3 * BLOCK, [1]), loads=True), "unknown") == []


def test_a_resumed_request_is_as_a_new_one() -> None:
    resumed = step(resumed=[("a", 3 * BLOCK, [1, 2, 3])], loads=True)
    assert Beside()(resumed, "a") == ["a"]


@pytest.mark.parametrize("stages", [1, 2])
def test_until_the_loads_end_is_known_its_blocks_are_doubtful(stages: int) -> None:
    beside = Beside(stages)
    assert beside(step(("a", 3 * BLOCK, [1, 2]), loads=True), "a") == ["a"]
    for _ in range(stages):
        assert beside(step(("b", BLOCK, [2, 7]))) == ["b"]
    assert beside(step(("b", BLOCK, [2, 7]))) == ["b"]
    assert beside(step(("b", BLOCK, [2, 7]))) == []


# -- names of blocks that no step computed ----------------------------------------------------


class Named:
    """vLLM's pool, where a request's blocks have their names in two groups, each name twice."""

    def __init__(self, computed: int = 0, policy: str = "priority", tokens: int = 70) -> None:
        self.pool = BlockPool(32, True, BLOCK)
        request: Any = SimpleNamespace(
            request_id="r", block_hashes=HASHES, num_tokens=tokens, num_computed_tokens=computed
        )
        self.tables = [self.pool.get_new_blocks(len(HASHES)) for _ in (*GROUPS, *GROUPS)]
        for place, table in enumerate(self.tables):
            group = GROUPS[place % len(GROUPS)]
            self.pool.cache_full_blocks(request, table, 0, len(HASHES), BLOCK, group)
        groups = [SimpleNamespace(group_idx=group) for group in GROUPS]
        rows = [
            SimpleNamespace(block_ids=[block.block_id for block in table])
            for table in self.tables[: len(GROUPS)]
        ]
        config = SimpleNamespace(kv_group_configs=groups)
        self.requests: Any = {"r": SimpleNamespace(req=request, config=config, group_states=rows)}
        self.never = NeverComputed(settings(policy), BLOCK)
        self.never.bind(self.pool)

    def step(self, scheduled: int = 0, preempted: str = "", finished: str = "") -> None:
        made: Any = SimpleNamespace(
            preempted_req_ids={preempted} - {""},
            finished_req_ids={finished} - {""},
            num_scheduled_tokens={"r": scheduled} if scheduled else {},
        )
        self.never.step(made, self.requests)

    def found(self, group: int) -> list[int]:
        """Which blocks another request would find there."""
        known = enumerate(HASHES)
        return [place for place, each in known if self.pool.get_cached_block(each, [group])]


@pytest.mark.parametrize(
    ("computed", "scheduled", "tokens", "found"),
    [(16, 17, 70, [0, 1]), (0, 15, 70, []), (0, 32, 32, [0]), (0, 40, 33, [0, 1])],
    ids=["steps before", "less than a block", "its last token", "drafts"],
)
def test_a_preempted_request_keeps_the_names_of_what_was_computed(
    computed: int, scheduled: int, tokens: int, found: list[int]
) -> None:
    named = Named(computed, tokens=tokens)
    named.step(scheduled)
    named.step(preempted="r")
    assert [named.found(group) for group in GROUPS] == [found] * len(GROUPS)


def test_an_ended_request_leaves_nothing_to_one_of_its_name() -> None:
    named = Named()
    named.step(scheduled=64)
    named.step(finished="r")
    named.step(preempted="unknown")
    assert named.found(0) == [0, 1, 2, 3]
    named.step(preempted="r")
    assert named.found(0) == []


def test_without_priorities_vllm_leaves_no_such_names() -> None:
    named = Named(policy="fcfs")
    named.step(preempted="r")
    assert named.found(0) == [0, 1, 2, 3]


def test_what_is_behind_a_block_that_was_not_loaded_loses_its_name_too() -> None:
    named = Named()
    (_, lacking, *_), *_ = named.tables
    named.never.not_loaded({lacking.block_id}, named.requests)
    hashes = [[block.block_hash is not None for block in table] for table in named.tables]
    assert hashes == [[True, False, False, False], *[[True] * 4] * 3]


# -- states that vLLM hands over --------------------------------------------------------------


def test_states_are_bounded_by_their_own_request() -> None:
    handed = {name: [(1, 5, 32), (1, 6, 64)] for name in ("bounded", "free", "unknown", "none")}
    state = KVConnectorBlockState(
        req_ids=set(handed), resolve_block_ids=lambda _: ([],), boundary_state_offloads=handed
    )
    scheduled = replace(SchedulerOutput.make_empty(), kv_connector_block_state=state)
    bounds = {"bounded": 32, "free": None, "none": 0}
    requests: Any = {n: SimpleNamespace(max_offload_tokens=b) for n, b in bounds.items()}
    kept = within_bounds(scheduled, requests).kv_connector_block_state
    assert kept is not None
    assert kept.boundary_state_offloads == handed | {"bounded": [(1, 5, 32)], "none": []}
