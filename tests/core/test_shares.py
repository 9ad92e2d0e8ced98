"""Bounds that users share: who may have how many, and in which words one more is refused."""

from __future__ import annotations

import pytest

from kvd.core.errors import LimitExceeded
from kvd.core.shares import Bound, Shares

ONE, OTHER, THIRD = 1, 2, 3


def shares(most: int = 12, each: int = 5, reserved: int = 2) -> Shares:
    return Shares(Bound("watchers", most, each, reserved, "filter"))


def taken(bound: Shares, user: int, *, operates: bool = False) -> int:
    """How many the user gets until it is refused."""
    count = 0
    while True:
        before = (bound.of(user), len(bound))
        try:
            bound.take(user, operates=operates)
        except LimitExceeded:
            assert (bound.of(user), len(bound)) == before, "a refusal changed something"
            return count
        count += 1


def refusal(bound: Shares, user: int, *, operates: bool = False) -> str:
    with pytest.raises(LimitExceeded) as caught:
        bound.take(user, operates=operates)
    assert caught.value.field == "filter"
    return str(caught.value)


def test_each_who_takes_all_it_can_leaves_as_many_as_it_has() -> None:
    bound = shares()
    assert [taken(bound, user) for user in (ONE, OTHER, THIRD)] == [5, 3, 1]
    assert len(bound) == 9
    assert [bound.of(user) for user in (ONE, OTHER, THIRD)] == [5, 3, 1]
    assert refusal(bound, ONE) == "uid 1 has 5 watchers, as many as one user may: end some"
    assert refusal(bound, THIRD) == (
        "uid 3 has 1 watchers and 1 are free, and 2 for operators: a user may have as many as are"
        " left for others: end some"
    )


def test_last_ones_are_for_operators_alone() -> None:
    bound = shares()
    for user in range(10, 20):
        bound.take(user)
    assert refusal(bound, ONE) == (
        "there are 10 watchers, and 2 for operators, as many as there may be"
    )
    assert taken(bound, ONE, operates=True) == 2
    assert refusal(bound, OTHER, operates=True) == "there are 12 watchers, as many as there may be"


def test_operator_has_a_user_s_share_at_most_and_takes_what_is_free() -> None:
    bound = shares()
    assert taken(bound, ONE, operates=True) == 5
    assert taken(bound, OTHER, operates=True) == 5
    assert taken(bound, THIRD, operates=True) == 2


def test_without_a_reserve_none_is_told_of() -> None:
    bound = shares(most=2, reserved=0)
    bound.take(ONE)
    assert refusal(bound, ONE) == (
        "uid 1 has 1 watchers and 1 are free: a user may have as many as are left for others:"
        " end some"
    )
    bound.take(OTHER)
    assert refusal(bound, THIRD) == "there are 2 watchers, as many as there may be"


def test_what_is_given_back_may_be_taken_again() -> None:
    bound = shares(most=4, each=2, reserved=0)
    for user in (ONE, ONE, OTHER, THIRD):
        bound.take(user)
    bound.give_back(ONE)
    assert (bound.of(ONE), len(bound)) == (1, 3)
    bound.take(THIRD + 1)
    bound.give_back(ONE)
    assert (bound.of(ONE), len(bound)) == (0, 3)
    with pytest.raises(AssertionError, match=r"^uid 1 gives back what it never took"):
        bound.give_back(ONE)
    assert len(bound) == 3
