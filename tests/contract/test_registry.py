"""The registry: written anew in pieces, whole after every death, patient on a full file system."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvd.core.actions import OpenScope
from kvd.core.events import PoolRecovered
from kvd.core.keys import NamespaceId, ScopeId
from kvd.pool import registry, sealed_json
from kvd.pool.config import START_BYTES
from kvd.pool.registry import RegisteredNamespace, Registry
from kvd.pool.reserve import Reserve
from tests.contract import pool_orders as orders
from tests.contract.pool_orders import opened

SPEC = orders.spec()


@pytest.fixture
def reserve(shared_directory: Path) -> Iterator[Reserve]:
    made = Reserve(shared_directory / "reserve", START_BYTES + (64 << 10))
    yield made
    made.close()


def namespace(number: int = 1) -> RegisteredNamespace:
    return RegisteredNamespace(NamespaceId(number), SPEC, {})


def scope(number: int, of: int = 1) -> OpenScope:
    return OpenScope(ScopeId(number), NamespaceId(of), f"epoch {number}", "account", 0)


@pytest.fixture
def made(shared_directory: Path, reserve: Reserve) -> Iterator[Registry]:
    opened = Registry.open(shared_directory / "registry.jsonl", reserve)
    opened.add_namespace(namespace())
    yield opened
    opened.close()


def read(of: Registry) -> Registry:
    """What the next owner would know if this one died now."""
    content = of.path.read_bytes()
    assert all(sealed_json.unseal(line) for line in content.splitlines()), "a line is torn"
    copy = of.path.with_name("copy.jsonl")
    copy.write_bytes(content)
    found = Registry.open(copy, of.reserve)
    found.close()
    return found


def test_a_large_registry_is_written_anew_in_small_pieces_and_no_state_of_it_is_lost(
    made: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 6001):
        made.add_scope(scope(number))
    written: list[int] = []
    write_all = sealed_json.write_all

    def counting(fd: int, content: bytes) -> None:
        written.append(len(content.splitlines()))
        write_all(fd, content)

    monkeypatch.setattr(sealed_json, "write_all", counting)
    before = made.path.stat().st_size
    made.forget_scopes([ScopeId(number) for number in range(1, 5001)])
    assert sum(written) <= 1  # nothing of it in the event itself
    pieces = 0
    while made.path.stat().st_size == before:
        made.upkeep()
        pieces += 1
        assert pieces <= 1001 // registry.PIECE_LINES + 2
        found = read(made)
        assert made.scopes.items() <= found.scopes.items()
    assert max(written) <= registry.PIECE_LINES
    assert read(made).scopes == made.scopes


def test_what_comes_and_goes_while_the_file_is_written_anew_is_in_it(
    made: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "SLACK_LINES", 10)
    for number in range(1, 401):
        made.add_scope(scope(number))
    made.forget_scopes([ScopeId(number) for number in range(1, 301)])
    inode = made.path.stat().st_ino
    number = 500
    while made.path.stat().st_ino == inode:
        made.add_namespace(namespace(number))
        made.add_scope(scope(number, of=number))
        made.forget_scopes([ScopeId(number - 3)])
        number += 1
        assert number < 1000, "it never ends"
    found = read(made)
    assert made.scopes.items() <= found.scopes.items()
    assert found.namespaces.keys() == made.namespaces.keys()


def test_a_file_with_damaged_lines_is_written_anew_with_all_others(
    made: Registry, reserve: Reserve
) -> None:
    for number in range(1, 200):
        made.add_scope(scope(number))
    lines = made.path.read_bytes().splitlines(keepends=True)
    lines[50] = lines[50].replace(b"epoch", b"Epoch")
    damaged = made.path.with_name("damaged.jsonl")
    damaged.write_bytes(b"".join(lines) + b"a torn")
    again = Registry.open(damaged, reserve)
    again.add_scope(scope(1000))
    for _ in range(200 // registry.PIECE_LINES + 1):
        again.upkeep()
    known = {number for number in range(1, 200) if number != 50} | {1000}
    assert read(again).scopes.keys() == again.scopes.keys() == known
    assert read(again).namespaces == again.namespaces == made.namespaces
    again.close()


def test_a_file_half_written_anew_is_of_no_importance(
    made: Registry, shared_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "SLACK_LINES", 10)
    for number in range(1, 401):
        made.add_scope(scope(number))
    made.forget_scopes([ScopeId(number) for number in range(1, 301)])
    made.upkeep()
    fresh = shared_directory / "registry.jsonl.new"
    assert fresh.stat().st_size > 0
    again = Registry.open(made.path, made.reserve)
    assert not fresh.exists()
    assert made.scopes.items() <= again.scopes.items()
    again.close()


def full_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let that many bytes be written yet, a last piece of them in part."""
    left = [count]
    write = os.write

    def short(fd: int, content: bytes) -> int:
        some = bytes(content)[: left[0]]
        if not some:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= len(some)
        return write(fd, some)

    monkeypatch.setattr(os, "write", short)


@pytest.mark.parametrize("room", [0, 1, 100, 500])
def test_lines_that_there_is_no_room_for_are_written_in_their_order_when_there_is(
    made: Registry, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    with monkeypatch.context() as full:
        full_after(room, full)
        made.add_namespace(namespace(2))
        for number in range(1, 201):
            made.add_scope(scope(number, of=2))
        made.forget_scopes([ScopeId(200)])
        assert made.unwritten > 190
        read(made)  # a line that was cut short was taken away
    for _ in range(registry.TRY_AGAIN_PIECES + 1 + 200 // registry.PIECE_LINES + 1):
        made.upkeep()
    assert made.unwritten == 0
    found = read(made)
    assert found.scopes == made.scopes


def test_a_new_file_that_cannot_take_the_old_ones_place_is_begun_again_later(
    made: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 3001):
        made.add_scope(scope(number))
    before = made.path.stat().st_size

    def refuse(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refuse)
        made.forget_scopes([ScopeId(number) for number in range(1, 2501)])
        for _ in range(3000 // registry.PIECE_LINES + 2):
            made.upkeep()
    assert made.path.stat().st_size == before
    assert len(read(made).scopes) == 3000
    made.forget_scopes([ScopeId(2501)])
    for _ in range(registry.TRY_AGAIN_PIECES + 3000 // registry.PIECE_LINES):
        made.upkeep()
    assert made.path.stat().st_size < before
    assert read(made).scopes.keys() == set(range(2502, 3001))


def test_the_registry_grows_into_the_reserve_which_is_had_back_later(
    made: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = made.reserve
    assert reserve.fill()
    writes = [0]
    write = os.write

    def refusing(fd: int, content: bytes) -> int:
        writes[0] += 1
        if reserve.whole:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, content)

    with monkeypatch.context() as full:
        full.setattr(os, "write", refusing)
        made.add_scope(scope(1))
    assert (made.unwritten, writes[0]) == (0, 2)
    assert not reserve.whole
    assert read(made).scopes == made.scopes
    assert reserve.fill()


def test_the_last_of_the_reserve_is_left_for_the_next_start(reserve: Reserve) -> None:
    reserve.fill()

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for _ in range(10):
        with pytest.raises(OSError, match="No space"):
            reserve.write(64 << 10, full)
    assert reserve.held == START_BYTES


def test_numbers_that_the_file_still_names_are_not_given_out_again(shared_directory: Path) -> None:
    """On a full file system the new line would be missing, and the old one be believed."""
    config = orders.config(shared_directory)
    with opened(config) as pool:
        orders.introduce(pool)
        orders.introduce(pool, namespace=2)
        for number in range(3, 50):
            pool.open_scope(replace(scope(number), account=f"{number}"))
    for _ in range(2):
        with opened(config) as pool:
            assert list(pool.recovered()) == [PoolRecovered(next_namespace=3, next_scope=50)]


def test_a_number_of_another_namespace_now_has_no_scopes_of_the_forgotten_one(
    made: Registry,
) -> None:
    made.add_scope(scope(1))
    made.forget_namespace(NamespaceId(1))
    made.add_namespace(replace(namespace(), spec=orders.spec(parts=(8192,))))
    made.add_scope(scope(2))
    found = read(made)
    assert found.scopes == {ScopeId(2): scope(2)}


def test_one_line_clears_all_scopes_of_a_namespace_that_stand_before_it(made: Registry) -> None:
    made.add_namespace(namespace(2))
    for number in range(1, 9):
        made.add_scope(scope(number, of=1 + number % 2))
    size = len(made.path.read_bytes().splitlines())
    made.clear_scopes(NamespaceId(1), ScopeId(7))
    made.add_scope(scope(9, of=1))
    assert len(made.path.read_bytes().splitlines()) == size + 2
    found = read(made)
    assert sorted(found.scopes) == [1, 3, 5, 7, 8, 9]
    assert found.highest_scope == 9


def test_clear_of_numbers_that_no_line_names_keeps_them_from_being_used_again(
    made: Registry,
) -> None:
    made.clear_scopes(NamespaceId(1), ScopeId(70))
    assert read(made).highest_scope == 69


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_clear_while_the_file_is_written_anew_holds_in_both(
    made: Registry, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    monkeypatch.setattr(registry, "SLACK_LINES", 10)
    for number in range(1, 801):
        made.add_scope(scope(number))
    made.forget_scopes([ScopeId(number) for number in range(1, 501)])
    for _ in range(pieces):
        made.upkeep()
    made.clear_scopes(NamespaceId(1), ScopeId(801))
    made.add_scope(scope(801))
    inode = made.path.stat().st_ino
    assert list(read(made).scopes) == [801]
    while made.path.stat().st_ino == inode:
        made.upkeep()
        assert list(read(made).scopes) == [801]
    assert read(made).namespaces.keys() == made.namespaces.keys()


def test_clear_holds_in_a_file_that_is_written_anew_after_it(
    made: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "SLACK_LINES", 10)
    for number in range(1, 101):
        made.add_scope(scope(number))
    made.clear_scopes(NamespaceId(1), ScopeId(151))
    inode = made.path.stat().st_ino
    made.forget_scopes([ScopeId(number) for number in range(1, 91)])
    while made.path.stat().st_ino == inode:
        made.upkeep()
    found = read(made)
    assert not found.scopes
    assert found.cleared_below(NamespaceId(1)) == 151
    assert found.highest_scope == 150


def test_clear_that_finds_no_room_holds_when_there_is_some(
    made: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.add_scope(scope(1))
    with monkeypatch.context() as patched:
        full_after(0, patched)
        made.clear_scopes(NamespaceId(1), ScopeId(2))
        made.add_scope(scope(2))
        made.clear_scopes(NamespaceId(1), ScopeId(3))
        made.add_scope(scope(3))
    for _ in range(registry.TRY_AGAIN_PIECES + 1):
        made.upkeep()
    assert list(read(made).scopes) == [3]
