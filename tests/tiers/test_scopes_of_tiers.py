"""By which name a tier knows what may share bytes: all that tells two such apart is in it."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvd.config.tiers import TierRule
from kvd.core.keys import NamespaceId, ScopeName, TierId
from kvd.pool.generations import NAME_BYTES, Generations
from kvd.runtime import tiers as module
from kvd.runtime.tiers import Tiers

OWN, FAR = TierId(0), TierId(1)
RULES = (TierRule("own", "nobody:Store"), TierRule("far", "nobody:Store", medium="REMOTE"))


def tiers_of(generations: Generations) -> Tiers:
    pool = cast(Any, SimpleNamespace(generations=generations))
    nobody = cast(Any, lambda *_: None)
    return Tiers(RULES, pool, str, lambda _namespace: None, nobody, nobody)


@pytest.fixture
def made(tmp_path: Path) -> Any:
    generations = Generations(tmp_path / "generations.table")
    yield tiers_of(generations)
    generations.close()


@pytest.mark.parametrize("tier", [OWN, FAR])
def test_epochs_accounts_groups_and_namespaces_have_names_of_their_own(
    made: Tiers, tier: TierId
) -> None:
    texts = ("", "1", "11", "a", "aa")  # which no end of one may make another of
    names = [
        ScopeName(NamespaceId(namespace), epoch, account, group, 0)
        for namespace, epoch, account, group in product((1, 2), texts, texts, (0, 1, 11))
    ]
    scopes = [made._scope(tier, name) for name in names]
    assert len(set(scopes)) == len(names)
    assert len({scope[:NAME_BYTES] for scope in scopes}) == 2, "as many as there are namespaces"


@pytest.mark.parametrize("tier", [OWN, FAR])
def test_blocks_of_another_order_of_bytes_are_not_found(
    made: Tiers, tier: TierId, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an upgrade over a disk that the daemon of before has filled."""
    name = ScopeName(NamespaceId(1), "", "", 0, 0)
    before = made._scope(tier, name)
    monkeypatch.setattr(module, "LAYOUT_VERSION", module.LAYOUT_VERSION + 1)
    assert made._scope(tier, name) != before


def test_a_clear_renames_what_the_nodes_own_store_has_and_not_what_nodes_share(
    made: Tiers, tmp_path: Path
) -> None:
    """Other nodes have cleared other things, and must find each other's blocks."""
    name = ScopeName(NamespaceId(1), "epoch", "account", 0, 0)
    before = [made._scope(tier, name) for tier in (OWN, FAR)]
    made._pool.generations.clear(module._namespace_name("1"), unsettled=0)
    after = [made._scope(tier, name) for tier in (OWN, FAR)]
    assert (after[0] != before[0], after[1] == before[1]) == (True, True)
    elsewhere = Generations(tmp_path / "of_another_node.table")
    assert tiers_of(elsewhere)._scope(FAR, name) == after[1]
    elsewhere.close()


def test_names_of_scopes_are_bounded_and_those_in_use_stay(
    made: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SCOPE_NAMES", 3)
    names = [ScopeName(NamespaceId(number), "", "", 0, 0) for number in range(4)]
    for name in (*names[:3], names[0], names[3]):
        made._scope(OWN, name)
    assert list(made._scope_names.values()) == [names[2], names[0], names[3]]
