"""Probes of the index page: how few of them tell a miss from a hit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from tests.client.engine_rig import TOKENS, Rig


def test_a_miss_probes_no_more_than_its_next_block(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.daemon.holds(rig.keys("p", 10 * TOKENS)[0][3:8])
    probed: list[int] = []
    present = rig.daemon.present

    def count(group: int, account: str, hashes: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        probed.append(len(hashes))
        return present(group, account, hashes)

    monkeypatch.setattr(rig.daemon, "present", count)
    rig.arrive("r", 10 * TOKENS)
    assert rig.ask("r", computed=TOKENS) == 0
    assert probed == [1, 1]
    assert rig.daemon.lookups == []


def test_what_lies_behind_the_devices_prefix_is_found() -> None:
    rig = Rig()
    rig.daemon.holds(rig.keys("p", 10 * TOKENS)[0][3:8])
    rig.arrive("r", 10 * TOKENS)
    assert rig.ask("r", computed=3 * TOKENS) == 5 * TOKENS
