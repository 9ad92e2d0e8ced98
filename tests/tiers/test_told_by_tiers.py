"""What control makes of a tier's word about what has left it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvd.core import events as ev
from kvd.core.keys import NamespaceId, ScopeName, TierId
from kvd.runtime import tiers as module
from kvd.runtime.tiers import Tiers
from kvd.tiers.process import TierLeft
from tests.tiers.tier_rig import OTHER_SCOPE, SCOPE, keys, on_loop

TIER = TierId(0)


def tiers(reported: list[ev.Event]) -> Tiers:
    pool = cast(Any, SimpleNamespace(directory=Path("/nowhere")))
    made = Tiers((), pool, str, reported.append, lambda: cast(Any, 1))
    made._keepers.append(cast(Any, SimpleNamespace(process=object())))
    return made


@on_loop
async def test_only_scopes_that_control_has_named_are_passed_on() -> None:
    reported: list[ev.Event] = []
    made = tiers(reported)
    name = ScopeName(NamespaceId(1), "", "", 0, 0)
    made._scope_names[SCOPE] = name
    made.left_told(TIER, TierLeft((*keys(1), *keys(2, scope=OTHER_SCOPE))))
    (forgot,) = reported
    assert isinstance(forgot, ev.TierForgot)
    assert forgot.name == name


@on_loop
async def test_a_store_that_knows_nothing_any_more_costs_the_core_one_look_in_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "DOUBTED_AGAIN_S", 0.2)
    reported: list[ev.Event] = []
    made = tiers(reported)
    for _ in range(50):
        made.left_told(TIER, TierLeft((), in_doubt=True))
    assert len(reported) == 1
    await asyncio.sleep(0.5)
    assert len(reported) == 2, "the last word counts"
    made.left_told(TIER, TierLeft((), in_doubt=True))
    assert len(reported) == 3
    made._keepers[0] = cast(Any, SimpleNamespace(process=None))
    made.left_told(TIER, TierLeft((), in_doubt=True))
    await asyncio.sleep(0.5)
    assert len(reported) == 3, "its process has ended, which says as much"
