"""What an engine's author may give by mistake is refused at once, by name, and costs no other."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd_client import (
    EngineIdentity,
    Fragment,
    Group,
    GroupLayout,
    NamespaceFields,
    RequestParams,
    ScheduledRequest,
    SchedulerConnection,
    SchedulerOptions,
    SharedMemory,
    Worker,
)
from kvd_client.batches import SoughtKeys
from kvd_client.draft import BlockRun
from tests.client.engine_rig import FULL, TOKENS, Rig, blocks
from tests.client.test_batches import Memory, keys
from tests.daemon_process import DaemonProcess
from tests.waiting import wait_until

U32, U64 = 1 << 32, 1 << 64
BAD_BLOCKS = [-1, U32, None, 1.5]
FLOAT: Any = 32.0


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("base", lambda: Fragment(0, -8, 64, 64)),
        ("base", lambda: Fragment(0, U64, 64, 64)),
        ("stride", lambda: Fragment(0, 0, U64, 64)),
        ("memory", lambda: Fragment(-1, 0, 64, 64)),
        ("memory", lambda: Fragment(U32, 0, 64, 64)),
        ("offset", lambda: SharedMemory(0, -8, 64)),
        ("bytes", lambda: SharedMemory(0, 0, U64)),
        ("num_blocks", lambda: GroupLayout(-1, [])),
        ("blocks_per_block", lambda: GroupLayout(1, [], U32)),
    ],
)
def test_numbers_of_a_layout_that_no_message_carries(
    field: str, make: Callable[[], object]
) -> None:
    with pytest.raises(ValueError, match=rf"{field} is -?\d+, allowed are 0\.\."):
        make()


def test_the_largest_numbers_of_a_layout_are_carried() -> None:
    Fragment(U32 - 1, U64 - 8, U64 - 8, 64).to_proto()
    SharedMemory(0, U64 - 1, U64 - 1).to_proto(1)
    GroupLayout(U64 - 1, [], U32 - 1).to_proto(0)


@pytest.mark.parametrize("nonce", ["x" * 16, bytearray(16), bytes(15), bytes(17), None])
def test_a_boot_nonce_is_16_bytes(nonce: Any) -> None:
    with pytest.raises(ValueError, match=r"boot_nonce .*, needed are 16"):
        EngineIdentity("e0", nonce)


IDENTITY = EngineIdentity("e0", bytes(16))
GROUP = Group(tokens_per_block=16, shard_bytes=(4096,))
NAMESPACE = NamespaceFields(
    model="m", kv_dtype="f16", hash_algorithm="sha256", hash_bytes=32, groups=(GROUP,)
)
NO_SOCKET = "/nonexistent/kvd.sock"


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("tokens_per_block is 16.0", lambda bad: replace(GROUP, tokens_per_block=bad(16.0))),
        ("tokens_per_block is 4294967296", lambda bad: replace(GROUP, tokens_per_block=bad(U32))),
        ("kind is 'full'", lambda bad: replace(GROUP, kind=bad("full"))),
        ("sliding_window_tokens is -1", lambda bad: replace(GROUP, sliding_window_tokens=bad(-1))),
        ("shard_bytes is 4096", lambda bad: replace(GROUP, shard_bytes=bad(4096))),
        (r"shard_bytes\[1\] is 8.0", lambda bad: replace(GROUP, shard_bytes=bad((8, 8.0)))),
        (
            r"shard_bytes\[0\] is array\(\[8, 8\]\)",
            lambda bad: replace(GROUP, shard_bytes=(bad(np.array([8, 8])),)),
        ),
        ("drafter is 'no'", lambda bad: replace(GROUP, drafter=bad("no"))),
        ("hash_bytes is 32.0", lambda bad: replace(NAMESPACE, hash_bytes=bad(32.0))),
        ("groups is Group", lambda bad: replace(NAMESPACE, groups=bad(GROUP))),
        (r"groups\[0\] is {}", lambda bad: replace(NAMESPACE, groups=bad(({},)))),
        ("weights_id is None", lambda bad: replace(NAMESPACE, weights_id=bad(None))),
        ("unshared is 'no'", lambda bad: replace(NAMESPACE, unshared=bad("no"))),
        ("engine_id is 7", lambda bad: EngineIdentity(bad(7), bytes(16))),
        ("fd is 'kv'", lambda bad: SharedMemory(bad("kv"), 0, 64)),
        ("bytes is 64.0", lambda bad: SharedMemory(0, 0, bad(64.0))),
        ("stride is 64.0", lambda bad: Fragment(0, 0, bad(64.0), bad(64.0))),
        ("num_blocks is 4.0", lambda bad: GroupLayout(bad(4.0), [])),
        ("fragments is Fragment", lambda bad: GroupLayout(4, bad(Fragment(0, 0, 64, 64)))),
        (r"fragments\[0\] is 64", lambda bad: GroupLayout(4, bad([64]))),
        ("socket_path is None", lambda bad: SchedulerConnection(bad(None), IDENTITY, NAMESPACE)),
        ("identity is", lambda bad: SchedulerConnection(NO_SOCKET, bad(NAMESPACE), bad(IDENTITY))),
        ("namespace is {}", lambda bad: SchedulerConnection(NO_SOCKET, IDENTITY, bad({}))),
        (
            "world_size is 1.0",
            lambda bad: connected(bad(1.0)),
        ),
        ("socket_path is None", lambda bad: Worker(bad(None), IDENTITY)),
        ("identity is 'e0'", lambda bad: Worker(NO_SOCKET, bad("e0"))),
        (r"rank is 2, allowed are 0..1", lambda bad: Worker(NO_SOCKET, IDENTITY, bad(2), 2)),
        ("shard is '0'", lambda bad: Worker(NO_SOCKET, IDENTITY, shard=bad("0"))),
        ("writer is None", lambda bad: Worker(NO_SOCKET, IDENTITY, writer=bad(None))),
        ("flush_timeout_s is -1", lambda bad: Worker(NO_SOCKET, IDENTITY, flush_timeout_s=bad(-1))),
        ("deadline_s is nan", lambda bad: Worker(NO_SOCKET, IDENTITY, load_deadline_s=bad(np.nan))),
        ("memories is SharedMemory", lambda bad: registered(bad(SharedMemory(0, 0, 64)), [])),
        ("groups is GroupLayout", lambda bad: registered([], bad(GroupLayout(0, [])))),
        (r"groups\[0\] is 5", lambda bad: registered([], bad([5]))),
    ],
)
def test_what_no_message_carries_is_refused_where_it_is_given(
    message: str, make: Callable[[Callable[[Any], Any]], object]
) -> None:
    """`make` gets what hides a value's type from mypy."""
    with pytest.raises(ValueError, match=message):
        make(lambda value: value)


def connected(world_size: Any) -> None:
    SchedulerConnection(NO_SOCKET, IDENTITY, NAMESPACE, world_size)


def registered(memories: Any, groups: Any) -> None:
    Worker(NO_SOCKET, IDENTITY).register(memories, groups)


def test_an_option_that_a_worker_does_not_have_is_refused() -> None:
    misspelt: Any = {"load_deadline": 3.0}
    with pytest.raises(TypeError, match=r"no option load_deadline; it has .*load_deadline_s"):
        Worker(NO_SOCKET, IDENTITY, **misspelt)


def test_a_memory_whose_descriptor_is_closed_is_named() -> None:
    fd = os.memfd_create("kv")
    os.close(fd)
    with pytest.raises(OSError, match=rf"memories\[0\]: fd {fd}: Bad file descriptor"):
        registered([SharedMemory(fd, 0, 64)], [])


def test_the_sockets_path_may_be_a_path(tmp_path: Path) -> None:
    """Where no daemon is, its text is looked at."""
    nowhere: Any = tmp_path / "kvd.sock"
    connection = SchedulerConnection(nowhere, IDENTITY, NAMESPACE)
    wait_until(lambda: "not connected" not in connection.problem, "a try")
    assert connection.problem.startswith(f"{nowhere}: [Errno 2] No such file or directory")
    connection.close()


def test_numpys_whole_numbers_are_taken() -> None:
    size: Any = np.int64(4096)
    fields = replace(NAMESPACE, groups=(replace(GROUP, shard_bytes=(size,)),))
    assert list(fields.to_proto().groups[0].shard_bytes) == [4096]
    Fragment(0, 0, size, size).to_proto()


@pytest.mark.parametrize("kind", [np.int64, np.float32, np.float64])
def test_numpys_numbers_of_seconds_are_taken(kind: Callable[[int], Any]) -> None:
    Worker(NO_SOCKET, IDENTITY, flush_timeout_s=kind(3), load_deadline_s=kind(0))


@pytest.mark.parametrize("bad", BAD_BLOCKS)
def test_a_block_that_can_not_be_is_refused_when_it_is_given(bad: Any) -> None:
    rig = Rig()
    rig.arrive("r", 4 * TOKENS)
    with pytest.raises(ValueError, match=r"request r: block_ids\[0\] has "):
        rig.allocate("r", [[0, 1, bad, 3]])
    assert rig.step(("r", [blocks(0, 4)], 4 * TOKENS)).stores


@pytest.mark.parametrize("bad", BAD_BLOCKS)
def test_a_step_that_is_refused_for_a_block_loses_nothing_of_other_requests(bad: Any) -> None:
    rig = Rig()
    for name in ("ended", "other", "r"):
        rig.arrive(name, 2 * TOKENS, prefix=name)
    rig.allocate("ended", [blocks(0, 2)])
    rig.scheduler.request_finished("ended", [blocks(0, 2)], 2 * TOKENS)
    other, right = ("other", [blocks(2, 2)], 2 * TOKENS), ("r", [blocks(4, 2)], 2 * TOKENS)
    with pytest.raises(ValueError, match=r"request r: block_ids\[0\] has "):
        rig.step(other, ("r", [[4, bad]], 2 * TOKENS))
    plan = rig.step(other, right)
    assert (len(plan.computed_stores), len(plan.stores)) == (1, 2)
    assert rig.daemon.is_there


def test_a_request_that_ends_with_such_a_block_is_over_and_stores_nothing() -> None:
    rig = Rig()
    rig.arrive("r", 2 * TOKENS)
    with pytest.raises(ValueError, match=r"request r: block_ids\[0\] has -1"):
        rig.scheduler.request_finished("r", [[0, -1]], 2 * TOKENS)
    assert not rig.step().computed_stores
    assert not rig.scheduler.has_pending_work()


@pytest.mark.parametrize("bad", [np.array([0, -1]), np.array([0, U32])])
def test_an_array_is_not_taken_modulo_what_a_message_carries(bad: Any) -> None:
    rig = Rig()
    rig.arrive("r", 2 * TOKENS)
    with pytest.raises(ValueError, match=r"request r: block_ids\[0\] has "):
        rig.allocate("r", [bad])
    right: Any = np.array([0, U32 - 1])
    rig.allocate("r", [right])


def test_the_engines_own_null_may_be_any_number() -> None:
    rig = Rig(options=SchedulerOptions(null_block=-1))
    rig.arrive("r", 4 * TOKENS)
    rig.allocate("r", [[-1, 1, 2, 3]])
    with pytest.raises(ValueError, match=r"block_ids\[0\] has -2"):
        rig.allocate("r", [[-1, 1, 2, 3, -2]])


@pytest.mark.parametrize("kind", [bytearray, memoryview, lambda key: key.hex()[:32]])
def test_hashes_that_are_no_bytes_are_refused_at_arrival(kind: Callable[[bytes], Any]) -> None:
    rig = Rig()
    rig.holds("p", 2 * TOKENS)
    (hashes,) = rig.keys("p", 2 * TOKENS)
    with pytest.raises(ValueError, match=r"block_hashes\[0\] must have hashes of .*, as `bytes`"):
        rig.scheduler.on_new_request("r", 2 * TOKENS + 1, [[kind(each) for each in hashes]])
    assert not rig.scheduler.has_pending_work()
    rig.arrive("r", 2 * TOKENS + 1)
    assert rig.ask("r") == 2 * TOKENS


def test_keys_of_batches_that_are_no_bytes_are_refused_and_others_are_found(
    daemon: DaemonProcess,
) -> None:
    memory = Memory(daemon.socket)
    right = keys(1, 4)
    assert memory.batches.store([BlockRun(0, 0, right, range(4))]) == [True]
    for kind in (bytearray, memoryview):
        wrong: Any = [*right[:3], kind(right[3])]
        for call in (
            lambda wrong=wrong: memory.batches.find([SoughtKeys(0, wrong)]),
            lambda wrong=wrong: memory.batches.store([BlockRun(0, 0, wrong, range(4))]),
            lambda wrong=wrong: memory.batches.load([BlockRun(0, 0, wrong, range(4))]),
        ):
            with pytest.raises(ValueError, match="every block hash must have 32 bytes, as `bytes`"):
                call()
    assert memory.batches.find([SoughtKeys(0, right)])[0].all()
    memory.close()


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("store_mode is 'lazy'", {"store_mode": "lazy"}),
        ("lookup_deadline_s is '1'", {"lookup_deadline_s": "1"}),
        ("patience_s is nan", {"patience_s": float("nan")}),
        ("share_loads is None", {"share_loads": None}),
        ("retention_tokens is 16.0", {"retention_tokens": 16.0}),
        ("null_block is None", {"null_block": None}),
    ],
)
def test_options_that_can_not_be_are_refused_by_name(message: str, options: Any) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulerOptions(**options)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("request_id is 7", lambda s: s.on_new_request(7, 16, [[]])),
        ("num_tokens is 64.0", lambda s: s.on_new_request("new", 64.0, [[]])),
        ("context is {.priority", lambda s: s.on_new_request("new", 16, [[]], {"priority": 1})),
        ("num_computed_tokens is 0.0", lambda s: s.get_num_new_matched_tokens("r", 0.0)),
        ("num_computed_tokens is -16", lambda s: s.get_num_new_matched_tokens("r", -16)),
        ("max_new_tokens is '1'", lambda s: s.get_num_new_matched_tokens("r", 0, "1")),
        (
            "num_external_tokens is 16.0",
            lambda s: s.update_state_after_alloc("r", [[0, 1], [2, 3]], 16.0),
        ),
        (
            "num_computed_tokens_after is 32.0",
            lambda s: s.build_step([ScheduledRequest("r", [[0, 1], [2, 3]], FLOAT)]),
        ),
        (
            "num_computed_tokens_after is -1",
            lambda s: s.build_step([ScheduledRequest("r", [[0, 1], [2, 3]], -1)]),
        ),
        (
            "num_computed_tokens_after is 4294967296",
            lambda s: s.build_step([ScheduledRequest("r", [[0, 1], [2, 3]], 1 << 32)]),
        ),
        (r"block_ids\[0\] is 0", lambda s: s.update_state_after_alloc("r", [0, 1], 0)),
        ("1 tables for 2 groups", lambda s: s.update_state_after_alloc("r", [[0, 1]], 0)),
        (
            "1 tables for 2 groups",
            lambda s: s.build_step([ScheduledRequest("r", [[0, 1]], 2 * TOKENS)]),
        ),
        ("preempted is 'r'", lambda s: s.build_step([], "r")),
    ],
)
def test_a_call_that_can_not_be_is_refused_by_name_and_changes_nothing(
    message: str, call: Callable[[Any], object]
) -> None:
    rig = Rig(FULL, FULL)
    rig.arrive("r", 2 * TOKENS)
    with pytest.raises(ValueError, match=message):
        call(rig.scheduler)
    assert rig.ask("r") == 0
    rig.allocate("r", [blocks(0, 2), blocks(2, 2)])
    assert rig.step(("r", [blocks(0, 2), blocks(2, 2)], 2 * TOKENS)).stores
    assert rig.daemon.is_there


@pytest.mark.parametrize(
    ("message", "tables", "computed"),
    [
        (r"block_ids\[0\] is 0", [0], 2 * TOKENS),
        ("2 tables for 1 groups", [[0], [1]], 2 * TOKENS),
        ("num_computed_tokens is 32.0", [[0, 1]], 32.0),
    ],
)
def test_an_end_that_can_not_be_is_refused_by_name_and_ends_the_request(
    message: str, tables: Any, computed: Any
) -> None:
    rig = Rig()
    rig.arrive("r", 2 * TOKENS)
    rig.allocate("r", [blocks(0, 2)])
    with pytest.raises(ValueError, match=message):
        rig.scheduler.request_finished("r", tables, computed)
    assert not rig.step().computed_stores
    assert not rig.scheduler.has_pending_work()


@pytest.mark.parametrize("field", ["account", "kv_transfer_params", "hints"])
def test_a_requests_parameters_of_a_wrong_type_are_refused_by_name(field: str) -> None:
    wrong: Any = {field: 7}
    with pytest.raises(ValueError, match=f"{field} is 7"):
        RequestParams(**wrong)
