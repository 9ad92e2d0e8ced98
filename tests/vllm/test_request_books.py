"""What the quicker books do with what a run of plain steps does not show."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import TransferJobStatus
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from kvd_client.integrations.vllm.scheduling.scheduler import KvdConnectorScheduler
from kvd_client.integrations.vllm.spec import KvdOffloadingSpec
from tests.vllm.configurations import BLOCK_TOKENS, cache_of, configure, full_attention
from tests.vllm.scheduler_stand import write_model


def books(directory: Path, **more: Any) -> Any:
    made = configure(Path(write_model(directory)), skip_tokenizer_init=True, **more)
    return KvdConnectorScheduler(KvdOffloadingSpec(made.offloading), made.vllm, made.cache)


def request(name: str) -> Request:
    tokens = list(range(2 * BLOCK_TOKENS))
    return Request(name, tokens, SamplingParams(), None, block_hasher=hashes)


def hashes(asked: Request) -> list[bytes]:
    known = range(len(asked.block_hashes), asked.num_tokens // BLOCK_TOKENS)
    return [number.to_bytes(32, "little") for number in known]


def test_a_request_may_end_amid_its_load_with_a_block_that_it_has_just_filled(
    tmp_path: Path,
) -> None:
    made, ended = books(tmp_path), request("r")
    made.on_new_request(ended)
    status = made._req_status["r"]
    status.update_offload_keys()
    made._jobs[7] = TransferJobStatus("r", pending_count=1, keys=set(), is_store=False)
    status.transfer_jobs.add(7)
    ended.append_output_token_ids(list(range(BLOCK_TOKENS)))
    ended.status = RequestStatus.FINISHED_ABORTED
    assert made.request_finished(ended) == (False, None)
    assert len(status.group_states[0].offload_keys) == 3


def test_a_request_may_end_that_nobody_announced(tmp_path: Path) -> None:
    unknown = request("unknown")
    unknown.status = RequestStatus.FINISHED_ABORTED
    assert books(tmp_path).request_finished(unknown) == (False, None)


def test_the_null_block_is_given_to_nobody(tmp_path: Path) -> None:
    made, begun = books(tmp_path), request("r")
    made.on_new_request(begun)
    made._update_req_states(
        SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id="r", block_ids=([0, 5],))],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], new_block_ids=[], resumed_req_ids=set()
            ),
            kv_cache_block_copies=None,
        )
    )
    assert made._req_status["r"].group_states[0].block_ids == [0, 5]
    assert made._current_batch_allocated_block_ids == {5}


@pytest.mark.parametrize(
    "cache",
    [cache_of(full_attention(), drafter=True), cache_of(full_attention(), full_attention())],
    ids=["a drafter's group", "two groups"],
)
def test_what_leaves_blocks_out_is_stored_as_vllm_does_it(tmp_path: Path, cache: Any) -> None:
    assert not books(tmp_path, cache=cache)._stores_simply
