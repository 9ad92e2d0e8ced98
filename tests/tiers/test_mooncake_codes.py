"""Every code of Mooncake's is looked at, key by key; its habits don't come out of the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from kvd.tiers.mooncake import client, codes, moves, store
from kvd.tiers.mooncake.moves import name_of as name_of_key
from kvd.tiers.mooncake.options import MooncakeOptions
from kvd.tiers.mooncake.store import MooncakeStore
from kvd.tiers.store import (
    Found,
    MapsMemory,
    OptionValue,
    Outcome,
    TierBlock,
    TierError,
    TierReason,
    TierTimeout,
    TierUnusable,
)
from tests.tiers.contract import (
    BLOCK_BYTES,
    ONE,
    Opened,
    TierStoreContract,
    content,
    keep,
    key,
    memory,
    read,
    soon,
    source,
    target,
    write,
)
from tests.tiers.fake_mooncake import FakeLibrary, store_over


class TestOverADictionary(TierStoreContract):
    counts_blocks = False

    @pytest.fixture(params=["in one stretch", "in several"])
    def opened(self, request: pytest.FixtureRequest) -> Opened:
        values: dict[str, bytes] = {}

        def open_() -> MooncakeStore:
            library = FakeLibrary()
            library.values = values
            opened = store_over(library)
            if request.param == "in several":
                opened._staged_part_bytes = 0
            return opened

        return open_

    @pytest.fixture
    def small(self) -> Opened:
        pytest.skip("Mooncake makes room by itself")


@pytest.fixture
def library() -> FakeLibrary:
    return FakeLibrary()


@pytest.fixture(params=["in one stretch", "in several"])
def kept(library: FakeLibrary, request: pytest.FixtureRequest) -> Iterator[MooncakeStore]:
    opened = store_over(library)
    if request.param == "in several":
        opened._staged_part_bytes = 0
    yield opened
    opened.close()


def name_of(number: int) -> str:
    return name_of_key(key(number))


def fault_of(library: FakeLibrary, call: str, codes_of: dict[int, int]) -> None:
    wanted = {name_of(number): code for number, code in codes_of.items()}
    library.fault = lambda made, name: wanted.get(name) if made == call else None


@pytest.mark.parametrize(
    ("call", "code", "outcome", "reason"),
    [
        ("find", codes.NOT_FOUND, Outcome.MISSING, None),
        ("find", codes.NOT_READY, Outcome.MISSING, None),
        ("find", -702, Outcome.FAILED, TierReason.UNREACHABLE),
        ("find", codes.RPC_FAILED, Outcome.FAILED, TierReason.UNREACHABLE),
        ("find", codes.RPC_TIMED_OUT, Outcome.FAILED, TierReason.TIMEOUT),
        ("get", codes.LEASE_EXPIRED, Outcome.FAILED, TierReason.TIMEOUT),
        ("get", codes.TRANSFER_FAILED, Outcome.FAILED, TierReason.UNREACHABLE),
        ("get", codes.SIZE_DIFFERS, Outcome.FAILED, TierReason.REFUSED),
        ("get", -4711, Outcome.FAILED, TierReason.REFUSED),
        ("get", BLOCK_BYTES, Outcome.FAILED, TierReason.REFUSED),  # less than was asked for
    ],
)
def test_a_read_is_judged_key_by_key(
    library: FakeLibrary,
    kept: MooncakeStore,
    call: str,
    code: int,
    outcome: Outcome,
    reason: TierReason | None,
) -> None:
    keep(kept, [1, 2, 3])
    fault_of(library, call, {2: code})
    blocks = [target(key(n), BLOCK_BYTES) for n in (1, 2, 3)]
    assert kept.read(blocks, soon()) == [Outcome.DONE, outcome, Outcome.DONE]
    assert kept.usage().errors == ({reason: 1} if reason else {})
    assert bytes(blocks[2].parts[0]) == content((3, ONE))
    assert not library.found


@pytest.mark.parametrize(
    ("call", "code", "outcome"),
    [
        ("begin", codes.NO_SPACE, Outcome.FULL),
        ("begin", codes.NO_QUOTA, Outcome.FULL),
        ("begin", codes.RPC_FAILED, Outcome.FAILED),
        ("begin", -4711, Outcome.FAILED),
        ("put", codes.TRANSFER_FAILED, Outcome.FAILED),
        ("put", BLOCK_BYTES, Outcome.FAILED),  # less than was to be written
        ("end", codes.TRANSFER_FAILED, Outcome.FAILED),
    ],
)
def test_a_write_is_judged_key_by_key(
    library: FakeLibrary, kept: MooncakeStore, call: str, code: int, outcome: Outcome
) -> None:
    fault_of(library, call, {2: code})
    blocks = [source(key(n), content((n, ONE))) for n in (1, 2, 3)]
    assert kept.write(blocks, soon()) == [Outcome.DONE, outcome, Outcome.DONE]
    assert len(library.values) == 2


def test_a_lease_that_was_too_short_is_told_for_a_while_with_what_to_change(
    library: FakeLibrary, kept: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(kept, [1])
    fault_of(library, "get", {1: codes.LEASE_EXPIRED})
    assert read(kept, key(1))[0] is Outcome.FAILED
    assert any("--default_kv_lease_ttl" in note for note in kept.usage().notes)
    monkeypatch.setattr(store, "NOTED_S", 0.0)
    assert kept.usage().notes == ()


def test_a_block_that_finds_no_room_is_tried_again_while_mooncake_evicts(
    library: FakeLibrary, kept: MooncakeStore
) -> None:
    left = [3]

    def fault(call: str, name: str) -> int | None:
        if call != "begin" or not left[0]:
            return None
        left[0] -= 1
        return codes.NO_SPACE

    library.fault = fault
    assert write(kept, source(key(1), content(1))) == [Outcome.DONE]
    assert len(library.names_of("begin")) == 4
    assert len(library.names_of("put")) == 1


def test_no_value_is_asked_for_twice_in_one_call(library: FakeLibrary, kept: MooncakeStore) -> None:
    keep(kept, [1, 2])
    blocks = [target(key(n), BLOCK_BYTES) for n in (1, 2, 1, 1)]
    assert kept.read(blocks, soon()) == [Outcome.DONE] * 4
    assert [len(names) for names in library.names_of("get")] == [2, 1, 1]
    assert not library.found


def test_calls_are_cut_into_pieces_that_a_lease_outlasts(
    library: FakeLibrary, kept: MooncakeStore
) -> None:
    part = memory(bytes(7 << 20))
    blocks = [TierBlock(key(n), (part,)) for n in range(5)]
    assert kept.write(blocks, soon()) == [Outcome.DONE] * 5
    assert sorted(len(names) for names in library.names_of("begin")) == [1, 2, 2]


def test_blocks_of_most_parts_go_in_pieces_too(library: FakeLibrary, kept: MooncakeStore) -> None:
    kept._staged_part_bytes = 0
    parts = tuple(memory(content(n, 8)) for n in range(256))
    blocks = [TierBlock(key(n), parts) for n in range(60)]
    assert set(kept.write(blocks, soon())) == {Outcome.DONE}
    assert max(map(len, library.names_of("begin"))) == 4096 // 257
    assert set(kept.read(blocks, soon())) == {Outcome.DONE}


def test_many_small_blocks_are_no_more_transfers_than_mooncake_takes(
    library: FakeLibrary, kept: MooncakeStore
) -> None:
    part = memory(bytes(8))
    blocks = [TierBlock(key(n), (part,)) for n in range(5000)]
    assert set(kept.write(blocks, soon())) == {Outcome.DONE}
    most = 4096 // (1 if kept._staged_part_bytes else 2)
    assert max(map(len, library.names_of("begin"))) == most


def test_what_no_time_is_left_for_has_failed_and_is_not_begun(
    library: FakeLibrary, kept: MooncakeStore
) -> None:
    part = memory(bytes(40 << 20))
    deadline = time.monotonic() + 30

    def fault(call: str, name: str) -> int | None:
        if call == "put":
            kept_clock.append(deadline)
        return None

    kept_clock: list[float] = []
    library.fault = fault
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "kvd.tiers.mooncake.store.time.monotonic",
            lambda: deadline + 1 if kept_clock else deadline - 30,
        )
        outcomes = kept.write([TierBlock(key(n), (part,)) for n in range(5)], deadline)
    written = outcomes.count(Outcome.DONE)
    assert 1 <= written <= store.PIECES_AT_ONCE
    assert outcomes.count(Outcome.FAILED) == 5 - written == kept.usage().errors[TierReason.TIMEOUT]


# -- bytes that are not those written ---------------------------------------------------------


def damage(library: FakeLibrary, number: int, at: int) -> None:
    value = bytearray(library.values[name_of(number)])
    value[at] ^= 1
    library.values[name_of(number)] = bytes(value)


def test_a_value_that_proves_wrong_fails_once_and_is_missing_then(
    library: FakeLibrary, kept: MooncakeStore
) -> None:
    keep(kept, [1, 2])
    damage(library, 1, -1)
    block = target(key(1), BLOCK_BYTES)
    untouched = set(bytes(block.parts[0]))
    assert kept.read([block], soon()) == [Outcome.FAILED]
    came = set(bytes(block.parts[0]))
    assert came in ({0}, untouched)  # nothing of it is left
    assert kept.usage().errors == {TierReason.CHECKSUM_MISMATCH: 1}
    assert read(kept, key(1))[0] is Outcome.MISSING
    keep(kept, [1])
    assert read(kept, key(1)) == (Outcome.DONE, content((1, ONE)))


@pytest.mark.parametrize("at", [0, 4, 8, 15, 16, 23, 24, 24 + BLOCK_BYTES - 1])
def test_no_damaged_byte_comes_through(library: FakeLibrary, kept: MooncakeStore, at: int) -> None:
    keep(kept, [1])
    damage(library, 1, at)
    assert read(kept, key(1))[0] in (Outcome.FAILED, Outcome.MISSING)
    keep(kept, [1])  # and it can be had again, whatever was damaged
    assert read(kept, key(1)) == (Outcome.DONE, content((1, ONE)))


def test_another_blocks_value_is_none_of_this_one(
    library: FakeLibrary, kept: MooncakeStore
) -> None:
    keep(kept, [1, 2])
    library.values[name_of(1)] = library.values[name_of(2)]
    assert read(kept, key(1))[0] is Outcome.FAILED


def test_a_value_that_changed_while_it_came_is_read_again(
    library: FakeLibrary, kept: MooncakeStore
) -> None:
    keep(kept, [1])
    good, left = library.values[name_of(1)], [2]
    damage(library, 1, -1)

    def fault(call: str, name: str) -> int | None:
        if call == "get":
            left[0] -= 1
            if not left[0]:
                library.values[name] = good
        return None

    library.fault = fault
    assert read(kept, key(1)) == (Outcome.DONE, content((1, ONE)))
    assert kept.usage().errors == {}


# -- the master is away ---------------------------------------------------------------------


def test_without_a_master_calls_are_refused_at_once_until_it_is_back(
    library: FakeLibrary, kept: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ASK_AGAIN_S", 0.01)
    keep(kept, [1])
    library.fault = lambda call, name: codes.RPC_FAILED
    with pytest.raises(TierError) as raised:
        kept.exists([key(1)], soon())
    assert raised.value.reason is TierReason.UNREACHABLE
    calls = len(library.names_of("get"))
    for _ in range(3):
        with pytest.raises(TierError, match="does not answer"):
            read(kept, key(1))
    assert len(library.names_of("get")) == calls
    assert any("does not answer" in note for note in kept.usage().notes)
    library.fault = lambda call, name: None
    end = time.monotonic() + 10
    while not kept._client.has_master:
        assert time.monotonic() < end
        time.sleep(0.005)
    assert read(kept, key(1)) == (Outcome.DONE, content((1, ONE)))
    assert kept.usage().notes == ()


@pytest.mark.parametrize("call", ["begin", "find"])
def test_a_batch_of_which_nothing_is_known_raises(
    library: FakeLibrary, kept: MooncakeStore, call: str
) -> None:
    library.fault = lambda made, name: codes.RPC_TIMED_OUT if made == call else None
    blocks = [source(key(n), content(n)) for n in (1, 2)]
    batch = kept.write if call == "begin" else kept.read
    with pytest.raises(TierError) as raised:
        batch(blocks, soon())
    assert raised.value.reason is TierReason.TIMEOUT
    assert kept.usage().errors == {TierReason.TIMEOUT: 2}


def test_a_key_that_was_not_looked_for_is_not_called_absent(
    library: FakeLibrary, kept: MooncakeStore
) -> None:
    keep(kept, [1, 3])
    failing = {name_of(3): codes.RPC_TIMED_OUT, name_of(4): codes.NOT_READY}
    library.fault = lambda call, name: failing.get(name) if call == "exists" else None
    found = kept.exists([key(n) for n in (1, 2, 3, 4)], soon())
    assert found == [Found.THERE, Found.ABSENT, Found.UNKNOWN, Found.ABSENT]
    assert kept.usage().errors == {TierReason.TIMEOUT: 1}


def test_fewer_codes_than_keys_are_none(library: FakeLibrary, kept: MooncakeStore) -> None:
    library.batch_is_exist = lambda names: [1] * (len(names) - 1)  # type: ignore[method-assign]
    with pytest.raises(TierError, match="1 codes for 2 keys"):
        kept.exists([key(1), key(2)], soon())


def test_a_call_after_which_bytes_may_still_come_never_returns(
    library: FakeLibrary, kept: MooncakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(kept, [1])
    monkeypatch.setattr(client, "GIVES_UP_S", 0.05)
    library.fault = lambda call, name: time.sleep(0.1) if call == "get" else None
    reading = threading.Thread(target=lambda: read(kept, key(1)), daemon=True)
    reading.start()
    reading.join(0.5)
    assert reading.is_alive()


# -- deleting ---------------------------------------------------------------------------------


def test_a_delete_that_can_not_be_promised_raises(
    library: FakeLibrary, kept: MooncakeStore
) -> None:
    library.fault = lambda call, name: codes.RPC_TIMED_OUT if call == "regex" else None
    with pytest.raises(TierError) as raised:
        kept.delete_scopes([ONE], soon())
    assert raised.value.reason is TierReason.TIMEOUT


def test_deleting_a_scope_waits_for_writes_that_began_before(
    library: FakeLibrary, kept: MooncakeStore
) -> None:
    may_end, begun = threading.Event(), threading.Event()

    def fault(call: str, name: str) -> int | None:
        if call == "put":
            begun.set()
            may_end.wait(20)
        return None

    library.fault = fault
    writing = threading.Thread(target=lambda: keep(kept, [1]))
    writing.start()
    begun.wait(20)
    with pytest.raises(TierTimeout):
        kept.delete_scopes([ONE], time.monotonic() + 0.1)
    assert not library.names_of("regex")
    threading.Timer(0.1, may_end.set).start()
    kept.delete_scopes([ONE], soon())
    writing.join()
    assert library.values == {}


# -- memory and options -----------------------------------------------------------------------


def test_the_network_is_told_of_the_pools_memory(library: FakeLibrary, kept: MooncakeStore) -> None:
    assert isinstance(kept, MapsMemory)
    own = dict(library.registered)
    kept.map_memory(4096, 1 << 20)
    assert library.registered == {**own, 4096: 1 << 20}
    kept.unmap_memory(4096)
    assert library.registered == own
    library.refuses_memory = True
    with pytest.raises(TierError):
        kept.map_memory(4096, 1 << 20)


def test_a_store_that_gets_no_memory_of_its_own_does_not_open(library: FakeLibrary) -> None:
    library.refuses_memory = True
    with pytest.raises(TierError):
        store_over(library)
    assert library.closed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "master: is needed"),
        ({"master": "somewhere"}, "master: 'somewhere' is neither"),
        ({"master": "a:0"}, "master"),
        ({"master": "a:65536"}, "master"),
        ({"master": "a:1;b:2"}, "etcd://"),
        ({"master": 3}, "master: 3 is not a text"),
        ({"master": "a:1", "speed": 3}, "speed: no such option; known: calls, devices"),
        ({"master": "a:1", "protocol": "ucx"}, "protocol: 'ucx' is not one of tcp, rdma"),
        ({"master": "a:1", "calls": 0}, "calls: 0 is not a whole number from 1 to 64"),
        ({"master": "a:1", "calls": 65}, "calls: 65"),
        ({"master": "a:1", "calls": True}, "calls: True is not a whole number"),
        ({"master": "a:1", "replicas": 17}, "replicas: 17 is not a whole number from 1 to 16"),
        ({"master": "a:1", "rpc_timeout_seconds": 0.05}, "rpc_timeout_seconds"),
        ({"master": "a:1", "rpc_timeout_seconds": 601}, "rpc_timeout_seconds"),
        ({"master": "a:1", "rpc_timeout_seconds": "4"}, "is not a number of seconds"),
        ({"master": "a:1", "tenant": ""}, "tenant"),
    ],
)
def test_options_that_can_not_be_are_refused_by_name(
    options: dict[str, OptionValue], said: str
) -> None:
    with pytest.raises(TierUnusable, match=said):
        MooncakeOptions.of(options)


@pytest.mark.parametrize(
    "master", ["a:1", "10.0.0.1:65535", "[::1]:50051", "etcd://a:1;b:2", "a-b.c_d:50051"]
)
def test_options_that_may_just_be_are_taken(master: str) -> None:
    options: dict[str, OptionValue] = {
        "master": master,
        "calls": 64,
        "replicas": 16,
        "rpc_timeout_seconds": 600,
    }
    assert MooncakeOptions.of(options).master == master


def test_the_nodes_own_address_is_that_by_which_it_reaches_the_master() -> None:
    assert MooncakeOptions("127.0.0.1:50051").own_host() == "127.0.0.1"
    assert MooncakeOptions("etcd://localhost:1;b:2").own_host() in ("127.0.0.1", "::1")
    assert MooncakeOptions("b.invalid:1", host="10.1.2.3").own_host() == "10.1.2.3"
    with pytest.raises(TierUnusable, match="leads nowhere"):
        MooncakeOptions("b.invalid:1").own_host()


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mooncake.store", None)
    with pytest.raises(TierUnusable, match=r"'\.\[mooncake\]'"):
        MooncakeStore({"master": "127.0.0.1:1"})


def test_the_librarys_bounds_are_set_and_what_the_site_has_set_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By default it fails what waits for a node behind 1024 others for a second."""
    environment = {"MC_RPC_TIMEOUT_MS": "9000"}
    monkeypatch.setattr("kvd.tiers.mooncake.client.os.environ", environment)
    client._set_environment(MooncakeOptions("a:1", rpc_timeout_seconds=2.5))
    assert environment["MC_RPC_TIMEOUT_MS"] == "9000"
    assert environment["MC_RPC_CONNECT_TIMEOUT_MS"] == "2500"
    assert environment["MC_STORE_CLIENT_SETUP_RETRIES"] == "1"
    waiting = int(environment["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"])
    assert waiting >= MooncakeOptions("a:1").calls * moves.MAX_PIECE_TRANSFERS


def test_a_lost_master_is_found_again_though_there_was_no_thread_to_ask_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    library = FakeLibrary()
    asker = client.MooncakeClient(library, None, 0.0)
    library.fault = lambda call, name: min(codes.WITHOUT_MASTER)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", start)
        assert asker.exists(["one"])[0] < 0
    library.fault = lambda call, name: None
    assert asker.has_master
    assert asker.exists(["one"]) == [0]
    asker.close()
