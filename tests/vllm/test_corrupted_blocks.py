"""Bytes that changed in the pool are caught where checksums are on, and would be seen if not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import FAILED_LOADS, HITS, LENGTH, WHOLE, Engine, prompt, tokens
from tests.vllm.node_daemon import NodeDaemon, with_kvd


@pytest.fixture(scope="module")
def start_with_pool(
    make_daemon: Callable[[], NodeDaemon], start_engine: StartEngine
) -> Callable[..., tuple[NodeDaemon, Engine]]:
    def start(*more_flags: str) -> tuple[NodeDaemon, Engine]:
        daemon = make_daemon()
        daemon.more_flags = more_flags
        daemon.start()
        engine = start_engine(**with_kvd(daemon.socket))
        engine.wait_for_daemon()
        return daemon, engine

    return start


def spoil(daemon: NodeDaemon) -> None:
    """Turn over every bit of every block's bytes, in the files of the pool itself."""
    extents = sorted((daemon.pool / "extents").glob("*.kv"))
    assert extents
    for path in extents:
        with path.open("r+b") as extent:
            content = bytearray(extent.read())
            extent.seek(0)
            extent.write(bytes(content).translate(bytes(255 - byte for byte in range(256))))


def test_without_checksums_spoilt_bytes_change_the_tokens(
    start_with_pool: Callable[..., tuple[NodeDaemon, Engine]], plain: Plain
) -> None:
    daemon, engine = start_with_pool("--payload-checksums", "off")
    prompts = [prompt(f"spoilt {n}", LENGTH) for n in range(4)]
    engine.store(*prompts)
    spoil(daemon)
    answers = engine.generate(*prompts)
    assert engine.count(HITS) == 4 * WHOLE
    for answer, right in zip(tokens(answers), plain.tokens(*prompts), strict=True):
        assert answer != right, "these tests can tell wrong bytes from right ones"


def test_with_checksums_spoilt_blocks_are_computed_anew(
    start_with_pool: Callable[..., tuple[NodeDaemon, Engine]], plain: Plain
) -> None:
    daemon, engine = start_with_pool("--payload-checksums")
    prompts = [prompt(f"caught {n}", LENGTH) for n in range(4)]
    engine.store(*prompts)
    whole = engine.generate(*prompts)
    assert tokens(whole) == plain.tokens(*prompts)
    assert engine.count(HITS) == 4 * WHOLE, "whole blocks are loaded"
    engine.settle()
    assert engine.reset()
    assert engine.count(FAILED_LOADS) == 0
    spoil(daemon)
    assert tokens(engine.generate(*prompts)) == plain.tokens(*prompts)
    engine.settle()
    # A load that a busy daemon refused, and that was looked up once more, counts as well.
    assert engine.count(FAILED_LOADS) >= 4, "each load found it"
    assert engine.reset()
    assert tokens(engine.generate(*prompts)) == plain.tokens(*prompts)
