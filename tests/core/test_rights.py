"""Whose share of the pool a namespace belongs to, and how large the shares are."""

from __future__ import annotations

from itertools import product

from kvd.core.keys import NamespaceId
from kvd.core.model.rights import Rights

A, B, C = (NamespaceId(number) for number in (1, 2, 3))


def charged(rights: Rights, namespace: NamespaceId) -> str:
    payer = rights.payer_of(namespace)
    return "" if payer is None else payer.name


def test_shares_are_a_row_each_and_an_equal_part_of_the_rest() -> None:
    rights = Rights()
    rights.session_came(A, "wide", 1, 5)
    rights.session_came(B, "narrow", 64, 1)
    shares = [rights.share(rights.payers[name], 16) for name in ("wide", "narrow")]
    assert shares == [10, 6]
    assert [rights.share(payer, 6) for payer in rights.payers.values()] == [5, 1]
    assert [rights.share(payer, 5) for payer in rights.payers.values()] == [0, 0]
    assert rights.is_crowded(rights.payers["narrow"], 16)
    assert not rights.is_crowded(rights.payers["wide"], 16)


def test_shares_never_add_up_to_more_than_the_pool() -> None:
    for widths, extents in product(product((1, 3, 8), repeat=3), (1, 7, 12, 100)):
        rights = Rights()
        for number, width in enumerate(widths):
            rights.session_came(NamespaceId(number), f"payer {number}", 2, width)
        assert sum(rights.share(payer, extents) for payer in rights.payers.values()) <= extents


def test_neighbour_who_joins_a_namespace_and_opens_many_leaves_it_its_rights() -> None:
    for joins_first in (True, False):
        rights = Rights()
        first, second = ("stranger", "owner") if joins_first else ("owner", "stranger")
        rights.session_came(B, "owner", 1, 1)
        rights.session_came(A, first, 1, 1)
        rights.session_came(A, second, 1, 1)
        for number in range(10, 20):
            rights.session_came(NamespaceId(number), "stranger", 64, 1)
        assert charged(rights, A) == "owner"
        assert rights.payers["owner"].classes == 2


def test_namespace_whose_payer_leaves_is_charged_to_one_who_stays() -> None:
    rights = Rights()
    rights.hold(A, 3)
    rights.session_came(A, "one", 2, 1)
    rights.session_came(A, "two", 2, 1)
    rights.session_came(A, "two", 2, 1)
    assert charged(rights, A) == "one"
    rights.session_went(A, "one")
    assert charged(rights, A) == "two"
    assert "one" not in rights.payers
    assert rights.payers["two"].held == 3
    rights.session_went(A, "two")
    assert charged(rights, A) == "two"
    rights.session_went(A, "two")
    assert not rights.payers
    assert (rights.shards, rights.widest) == (0, 0)
    rights.hold(A, -3)
    assert not rights.uses


def crowd(*, held: tuple[int, int], classes: tuple[int, int] = (6, 6)) -> Rights:
    """A's payer and B's, each with a share of 4 of 8 extents; C is the second namespace of A's."""
    rights = Rights()
    rights.session_came(A, "mine", classes[0] - 1, 1)
    rights.session_came(C, "mine", 1, 1)
    rights.session_came(B, "theirs", classes[1], 1)
    rights.hold(A, held[0])
    rights.hold(B, held[1])
    assert [rights.share(payer, 8) for payer in rights.payers.values()] == [4, 4]
    return rights


def pushes(rights: Rights, asking: NamespaceId, owner: NamespaceId) -> list[bool]:
    """Whether it may take a row that is safe, and one that is not any more."""
    return [rights.may_push(asking, owner, 8, safe=safe) for safe in (True, False)]


def test_a_payer_within_its_share_pushes_one_beyond_its_own_at_once() -> None:
    assert pushes(crowd(held=(3, 5)), A, B) == [True, True]
    assert pushes(crowd(held=(3, 4)), A, B) == [False, True], "in turns: it has no more than that"
    assert pushes(crowd(held=(3, 3)), A, B) == [False, False], "it has as little"


def test_a_payer_at_its_share_pushes_in_turns_and_only_where_it_is_crowded_itself() -> None:
    assert pushes(crowd(held=(4, 5)), A, B) == [False, True]
    assert pushes(crowd(held=(4, 5), classes=(4, 6)), A, B) == [False, False]


def test_nobody_pushes_one_that_is_not_crowded_or_that_nobody_uses() -> None:
    assert pushes(crowd(held=(3, 5), classes=(6, 4)), A, B) == [False, False]
    unused = crowd(held=(3, 5))
    unused.session_went(B, "theirs")
    assert pushes(unused, A, B) == [False, False]
    assert pushes(unused, B, A) == [False, False]


def test_classes_of_a_crowded_payer_push_one_another_in_turns() -> None:
    assert pushes(crowd(held=(8, 0)), C, A) == [False, True]


def test_others_want_all_where_a_row_for_each_of_theirs_leaves_no_more_than_a_share() -> None:
    for theirs, expected in ((4, False), (5, True)):
        rights = crowd(held=(0, 0), classes=(2, theirs))
        assert rights.others_want_all(rights.payers["mine"], 8) is expected
