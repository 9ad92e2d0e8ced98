"""vLLM's OpenAI server with the connector, as a user runs it: answers and metrics over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.api_server import ApiServer
from tests.vllm.conftest import Plain, StartEngine, settings_of
from tests.vllm.engine import BLOCK_TOKENS, HITS, LENGTH, QUERIES, WHOLE, prompt, tokens
from tests.vllm.node_daemon import NodeDaemon, with_kvd
from tests.waiting import wait_until


@pytest.mark.slow
def test_the_server_counts_its_hits_and_shares_its_blocks(
    start_with_kvd: StartEngine, kvd: NodeDaemon, plain: Plain, model: Path, tmp_path: Path
) -> None:
    prompts = [prompt(f"over http {n}", LENGTH) for n in range(3)]
    right = plain.tokens(*prompts)
    settings = settings_of(model, **with_kvd(kvd.socket))
    del settings["disable_log_stats"]
    server = ApiServer(settings, tmp_path / "server.log")
    try:
        server.wait_for_daemon()
        asked = server.count(QUERIES)
        assert [server.complete(each) for each in prompts] == right
        wait_until(lambda: kvd.ready_blocks() == 3 * WHOLE // BLOCK_TOKENS)
        assert (server.count(QUERIES) - asked, server.count(HITS)) == (3 * LENGTH, 0)
        server.reset()
        assert [server.complete(each) for each in prompts] == right
        assert (server.count(QUERIES) - asked, server.count(HITS)) == (6 * LENGTH, 3 * WHOLE)
    finally:
        server.end()
    engine = start_with_kvd()
    assert tokens(engine.generate(*prompts)) == right
    assert engine.count(HITS) == 3 * WHOLE, "an engine of another shape loads what it stored"
    engine.end()
