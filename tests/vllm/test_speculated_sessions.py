"""Requests with streaming input in an engine that speculates: nothing wrong leaves the engine."""

from __future__ import annotations

import vllm
from packaging.version import Version

from tests.vllm.node_daemon import NodeDaemon
from tests.vllm.stand_process import stand_process

WHOLE_TURNS = (1, 4, 5, 8)  # that end with a step's last token, or its only one
CUT_TURNS = (2, 3, 6, 7)  # that end amid accepted drafts


def test_what_vllm_computes_on_thrown_away_drafts_is_not_stored(
    fork_server: None, kvd: NodeDaemon
) -> None:
    with stand_process("speculating_stand", kvd.socket, {}) as ask:
        for answered in WHOLE_TURNS:
            told = ask(answered)
            assert told["thrown_away"] == 0
            assert told["stored"] > 6, told
        cut = [ask(answered) for answered in CUT_TURNS]
        counts_wrong = Version(vllm.__version__) < Version("0.33")
        assert any(told["thrown_away"] for told in cut) == counts_wrong
        assert all(told["stored"] > 0 for told in cut)
