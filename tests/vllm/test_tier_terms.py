"""What vLLM says of tiers, in the daemon's terms, and the other way round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import _parse_tier_filter
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvd_client.integrations.vllm.scheduling.lookups import RequestLookups
from kvd_client.integrations.vllm.scheduling.requests import OffloadGroup, track
from kvd_proto.v1 import common_pb2

HOST, DISK, CLUSTER = common_pb2.TIER_HOST, common_pb2.TIER_DISK, common_pb2.TIER_CLUSTER
# By vLLM's number; vLLM keeps its group 0 to itself.
GROUPS = {1: OffloadGroup(0, 1, 16, 1, 1), 2: OffloadGroup(1, 2, 16, 1, 1)}


@pytest.mark.parametrize(
    ("load_tiers", "allowed"),
    [
        (None, []),
        ([{}], []),
        ([{"medium": "storage"}], []),
        ([], [HOST]),
        ([{"medium": "CPU"}], [HOST]),
        ([{"medium": "STORAGE", "locality": "LOCAL"}], [HOST, DISK]),
        ([{"locality": "remote"}], [HOST, CLUSTER]),
        ([{"locality": "LOCAL"}, {"locality": "REMOTE"}], []),
        ("nonsense", []),
    ],
)
def test_a_requests_load_tiers_bound_what_the_daemon_may_read(
    load_tiers: Any, allowed: list[int]
) -> None:
    context = ReqContext(req_id="r")
    if load_tiers is not None:
        context.load_tier_filter = _parse_tier_filter(load_tiers)
    assert list(track(context, 1, "").request.context.tiers_allowed) == allowed


def test_each_key_has_the_source_that_the_daemon_names() -> None:
    tracked = track(ReqContext(req_id="r"), len(GROUPS), "")
    hashes = [[b"a" * 32, b"b" * 32], [b"c" * 32, b"d" * 32]]
    tracked.request.hashes = hashes
    lookups = RequestLookups(GROUPS, lambda: 0.0)

    def source(hash_of: int, place: int, group: int) -> CacheHitSource:
        return lookups.source(tracked, make_offload_key(hashes[hash_of][place], group))

    assert source(0, 0, 1) is CacheHitSource.HOST
    tracked.request.lookup.sources = {1: np.array([DISK, CLUSTER], dtype=np.uint8)}
    assert source(0, 0, 1) is CacheHitSource.HOST
    assert source(1, 0, 2) is CacheHitSource.DISK
    assert source(1, 1, 2) is CacheHitSource.EXTERNAL_UNSPECIFIED
    assert source(1, 0, 1) is CacheHitSource.HOST, "a key of another group"


def test_a_tier_that_a_later_daemon_may_have_is_no_error() -> None:
    tracked = track(ReqContext(req_id="r"), len(GROUPS), "")
    tracked.request.hashes = [[b"a" * 32], []]
    tracked.request.lookup.sources = {0: np.array([9], dtype=np.uint8)}
    key = make_offload_key(b"a" * 32, 1)
    lookups = RequestLookups(GROUPS, lambda: 0.0)
    assert lookups.source(tracked, key) is CacheHitSource.EXTERNAL_UNSPECIFIED
