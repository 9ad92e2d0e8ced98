"""What of an offer the planner asks the daemon to store, and how much of the page it reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key
from vllm.v1.request import Request

from kvd_client.integrations.vllm.scheduling.requests import OffloadGroup, by_group, track
from kvd_client.integrations.vllm.scheduling.scheduler import KvdConnectorScheduler
from kvd_client.integrations.vllm.scheduling.stores import SAMPLED, OfferedBlocks, StorePlanner
from kvd_client.integrations.vllm.spec import KvdOffloadingSpec
from kvd_client.integrations.vllm.stats import NO_ROOM, KvdStats
from tests.vllm.configurations import configure
from tests.vllm.scheduler_stand import write_model

LONG = 300


class Page:
    """A session that shows these blocks, and counts how it is asked."""

    generation = 1
    lease_ttl_s = 30.0
    store_threshold = 1
    page_hides_some = False

    def __init__(self, shown: set[bytes], room: int = 10_000) -> None:
        self._shown = shown
        self._room = room
        self.whole = self.single = 0

    def present(
        self, group: int, account: str, block_hashes: Sequence[bytes]
    ) -> npt.NDArray[np.bool_]:
        self.whole += len(block_hashes)
        return np.array([each in self._shown for each in block_hashes], dtype=np.bool_)

    def shows(self, group: int, account: str, block_hash: bytes) -> bool:
        self.single += 1
        return block_hash in self._shown

    def room(self, group: int) -> int:
        return self._room


def block(number: int) -> bytes:
    return number.to_bytes(32, "little")


class Offers:
    """A planner, and one request that offers its blocks."""

    def __init__(self) -> None:
        self.planner = StorePlanner({0: OffloadGroup(0, 0, 16, 1, 1)}, KvdStats())
        self.context = ReqContext("r")
        self._tracked = track(self.context, 1, "")

    def plan(self, page: Page, numbers: Sequence[int]) -> list[int]:
        keys = [OffloadKey(make_offload_key(block(number), 0)) for number in numbers]
        offer = OfferedBlocks(self._tracked, self.context, keys, list(by_group(keys)))
        output = self.planner.plan(offer, page, lambda *_: True)
        assert output is not None
        wanted = dict(zip(keys, numbers, strict=True))
        return [wanted[key] for key in output.keys_to_store]


@pytest.fixture
def offers() -> Offers:
    return Offers()


def test_a_long_run_that_nobody_has_is_known_by_a_few_of_its_blocks(offers: Offers) -> None:
    page = Page(set())
    assert offers.plan(page, range(LONG)) == list(range(LONG))
    assert page.whole == 0
    assert 2 <= page.single <= SAMPLED + 1


@pytest.mark.parametrize("there", [range(1), range(LONG - 1, LONG), range(150), range(LONG)])
def test_what_is_there_at_either_end_is_not_stored_again(offers: Offers, there: range) -> None:
    page = Page({block(number) for number in there})
    assert offers.plan(page, range(LONG)) == [n for n in range(LONG) if n not in there]
    assert page.whole == LONG


@pytest.mark.parametrize("first", [0, 30, 100, 200])
def test_no_stretch_as_long_as_the_distance_between_samples_is_missed(
    offers: Offers, first: int
) -> None:
    there = range(first, first + -(-LONG // (SAMPLED - 1)))
    page = Page({block(number) for number in there})
    assert offers.plan(page, range(LONG)) == [n for n in range(LONG) if n not in there]


@pytest.mark.parametrize("blocks", [2, 4 * SAMPLED, 4 * SAMPLED + 1, 4 * SAMPLED + 2, 257])
def test_runs_of_every_length_lose_no_block(offers: Offers, blocks: int) -> None:
    last = blocks - 1
    assert offers.plan(Page({block(last)}), range(blocks)) == list(range(last))
    assert offers.plan(Page(set()), range(1000, 1000 + blocks)) == list(range(1000, 1000 + blocks))


def test_a_block_between_the_samples_is_left_to_the_daemon_which_copies_none_twice(
    offers: Offers,
) -> None:
    page = Page({block(1)})
    assert offers.plan(page, range(LONG)) == list(range(LONG))


def test_what_is_on_its_way_is_not_offered_again_until_it_has_ended(offers: Offers) -> None:
    page = Page(set())
    assert offers.plan(page, range(LONG)) == list(range(LONG))
    assert offers.plan(page, range(LONG + 50)) == list(range(LONG, LONG + 50))
    offers.planner.ended([OffloadKey(make_offload_key(block(7), 0))])
    assert offers.plan(page, range(LONG)) == [7]


def test_who_found_room_for_some_only_is_named_as_it_is_named_now(offers: Offers) -> None:
    """Another request may have its first id by then."""
    offers.context.req_id = "r#1"
    assert offers.plan(Page(set(), room=2), range(3)) == [0, 1]
    ((name, cut),) = offers.planner.cut
    assert name == "r#1"
    assert cut == {make_offload_key(block(2), 0)}


def test_a_request_without_room_is_counted_once_a_step(tmp_path: Path) -> None:
    """Where vLLM itself asks for room once more, too."""
    made = configure(Path(write_model(tmp_path)), skip_tokenizer_init=True)
    scheduler: Any = KvdConnectorScheduler(
        KvdOffloadingSpec(made.offloading), made.vllm, made.cache
    )
    assert scheduler._stores_simply
    manager = scheduler.manager
    manager.steps = SimpleNamespace(pause=SimpleNamespace(is_on=False), is_full=False)
    manager._enter_open_session = lambda: Page(set(), room=0)
    request = Request("r", list(range(48)), SamplingParams(), None, block_hasher=hashes)
    scheduler.on_new_request(request)
    scheduler._req_status["r"].group_states[0].block_ids += [1, 2, 3]
    for step in (1, 2):
        scheduler._build_store_jobs(
            SimpleNamespace(
                scheduled_new_reqs=[],
                scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
                num_scheduled_tokens={"r": 48},
                finished_req_ids=set(),
            )
        )
        assert manager.stats.counts[NO_ROOM] == step


def hashes(request: Request) -> list[bytes]:
    return [block(number) for number in range(len(request.block_hashes), request.num_tokens // 16)]
