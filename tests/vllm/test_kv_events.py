"""What kvd stores and evicts, as a router behind vLLM's own publisher of KV events hears it.

Below host memory is a disk: what was evicted is loaded from there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from msgspec.msgpack import Decoder
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from tests.vllm.conftest import Plain, StartEngine
from tests.vllm.engine import BLOCK_TOKENS, Engine, prompt, tokens
from tests.vllm.node_daemon import NodeDaemon, with_kvd
from tests.waiting import wait_until

PATIENCE_SECONDS = 60.0
CPU, DISK = ("CPU", None, None), ("STORAGE", "LOCAL", "disk")  # medium, locality, owner
BY_SOURCE = "vllm:prompt_tokens_cached_by_source"
PROMPT_TOKENS = 640  # twenty blocks
SMALL_POOL = 16 << 20
SMALL_EXTENT = 4 << 20
TIERS = """
[[tiers]]
name = "disk"
kind = "disk"
deadline_seconds = 60

[tiers.options]
directories = ["{directory}"]
directory_bytes = "256MiB"
region_bytes = "4MiB"
"""


class Router:
    """Knows by the events alone what lies in kvd; counts what it could not have known."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, "")
        self._decoder = Decoder(type=KVEventBatch)
        self.blocks: set[object] = set()
        self.on_disk: set[object] = set()
        self.stored = 0
        self.removed = 0
        self.unfounded = 0
        self.cleared = 0

    def listen(self) -> int:
        """Take in what has come, of whatever medium; how many events."""
        heard = 0
        while self._socket.poll(50):
            _, _, payload = self._socket.recv_multipart()
            for event in self._decoder.decode(payload).events:
                heard += 1
                self._take(event)
        return heard

    def _take(self, event: object) -> None:
        if isinstance(event, AllBlocksCleared):  # which names no medium
            self.blocks, self.on_disk = set(), set()
            self.cleared += 1
            return
        if not isinstance(event, BlockStored | BlockRemoved) or event.medium == "GPU":
            return
        hashes = set(event.block_hashes)
        if isinstance(event, BlockStored):
            assert event.block_size == BLOCK_TOKENS, "nobody can place it"
            assert len(event.token_ids) == BLOCK_TOKENS
        place = (event.medium, event.locality, event.ownership)
        if place == DISK:
            self.on_disk = (
                self.on_disk | hashes if isinstance(event, BlockStored) else self.on_disk - hashes
            )
            return
        assert place == CPU
        if isinstance(event, BlockStored):
            self.stored += len(hashes)
            self.blocks |= hashes
        else:
            self.removed += len(hashes)
            self.unfounded += len(hashes - self.blocks)
            self.blocks -= hashes

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def small_kvd(
    make_daemon: Callable[[], NodeDaemon], tmp_path_factory: pytest.TempPathFactory
) -> NodeDaemon:
    """A daemon whose pool holds a few prompts only, with a disk below it."""
    daemon = make_daemon()
    daemon.pool_bytes = SMALL_POOL
    daemon.extent_bytes = SMALL_EXTENT
    file = tmp_path_factory.mktemp("tiers") / "kvd.toml"
    file.write_text(TIERS.format(directory=file.parent / "disk"))
    daemon.flags["config"] = file
    daemon.start()
    wait_until(lambda: daemon.status().tiers[0].serving)
    return daemon


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"ipc://{tmp_path_factory.mktemp('events')}/socket"


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine, small_kvd: NodeDaemon, endpoint: str) -> Engine:
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    started = start_engine(
        kv_events_config=events,
        **with_kvd(small_kvd.socket, self_describing_kv_events=True),
    )
    started.wait_for_daemon()
    return started


@pytest.fixture
def router(engine: Engine, endpoint: str) -> Iterator[Router]:
    made = Router(endpoint)
    wait_until(lambda: hears(made, engine))
    yield made
    made.close()


def hears(router: Router, engine: Engine) -> bool:
    """A subscription has no answer: the router hears of a prompt that kvd is not to have."""
    asked = prompt(os.urandom(8).hex(), BLOCK_TOKENS + 1)
    engine.finish(engine.submit(asked, 1, {"max_offload_tokens": 0}))
    return router.listen() > 0


def serve(engine: Engine, name: str) -> None:
    engine.generate(prompt(name, PROMPT_TOKENS), max_tokens=1)
    engine.settle()


def test_a_router_knows_what_was_stored_and_what_the_daemon_evicted(
    engine: Engine, router: Router, small_kvd: NodeDaemon
) -> None:
    number = 0
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not router.removed:
        assert time.monotonic() < deadline, f"stored {router.stored}, removed none"
        serve(engine, f"prompt {number}")
        number += 1
        router.listen()
    # Removals come with the next step after they were heard of.
    while len(router.blocks) != small_kvd.ready_blocks():
        assert time.monotonic() < deadline, (len(router.blocks), small_kvd.ready_blocks())
        serve(engine, "prompt 0, again")
        router.listen()
    assert router.unfounded == 0
    assert engine.count("vllm:kvd_removals") == router.removed


def test_a_prompt_that_left_host_memory_is_loaded_from_the_disk(
    engine: Engine, router: Router, small_kvd: NodeDaemon, plain: Plain
) -> None:
    evicted = prompt("to the disk", PROMPT_TOKENS)
    whole = PROMPT_TOKENS - BLOCK_TOKENS  # the last block's last token is computed anew
    host_before = set(router.blocks)
    engine.generate(evicted, max_tokens=8)
    engine.settle()
    router.listen()
    blocks = router.blocks - host_before
    assert len(blocks) == PROMPT_TOKENS // BLOCK_TOKENS
    deadline = time.monotonic() + PATIENCE_SECONDS
    number = 0
    while blocks & router.blocks:
        assert time.monotonic() < deadline, "the prompt stays in host memory"
        serve(engine, f"to evict it {number}")
        number += 1
        router.listen()
    assert blocks <= router.on_disk, "a router still knows where they are"
    assert engine.reset(), "the device's own cache has nothing of it either"
    before = engine.counts()
    answers = engine.generate(evicted, evicted, max_tokens=8)
    assert tokens(answers) == plain.tokens(evicted, evicted, max_tokens=8)
    assert all(answer.cached >= whole for answer in answers)
    counts = engine.counts()
    grown = {
        source: counts[f"{BY_SOURCE}/{source}"] - before[f"{BY_SOURCE}/{source}"]
        for source in ("device", "host", "disk", "external_unspecified")
    }
    assert grown["disk"] >= whole, grown
    assert grown["external_unspecified"] == 0
    assert sum(grown.values()) == sum(answer.cached for answer in answers)
    (tier,) = small_kvd.status().tiers
    assert tier.blocks_promoted >= whole // BLOCK_TOKENS
    assert tier.blocks_failed == 0
    serve(engine, "and on")
    router.listen()


def test_a_removal_that_is_heard_amid_the_next_store_leaves_it_its_tokens(
    engine: Engine, router: Router, small_kvd: NodeDaemon, plain: Plain
) -> None:
    asked = prompt("stored twice", PROMPT_TOKENS)
    engine.store(asked, max_tokens=1)
    router.listen()
    known = set(router.blocks)
    with small_kvd.held_mover():
        small_kvd.clear()
        again = engine.submit(asked, 1)
        assert tokens(engine.finish(again)) == plain.tokens(asked, max_tokens=1)
        wait_until(lambda: hears(router, engine) and not router.blocks & known)
    engine.settle()
    router.listen()  # which asserts that each block stored can be placed
    assert len(router.blocks & known) >= PROMPT_TOKENS // BLOCK_TOKENS


def test_a_reset_of_the_device_alone_leaves_a_router_what_kvd_has(
    engine: Engine, router: Router
) -> None:
    serve(engine, "stays in kvd")
    wait_until(lambda: hears(router, engine) and bool(router.blocks))
    wait_until(lambda: hears(router, engine) and router.blocks <= router.on_disk)
    in_memory, on_disk = router.blocks, router.on_disk
    cleared = router.cleared
    assert engine.reset()
    wait_until(lambda: hears(router, engine) and router.cleared > cleared)
    wait_until(lambda: hears(router, engine) and on_disk <= router.on_disk)
    assert in_memory <= router.blocks


def test_a_reset_is_not_told_block_by_block(engine: Engine, router: Router) -> None:
    serve(engine, "before the reset")
    router.listen()
    before = router.removed
    assert engine.reset(connector=True)
    serve(engine, "after the reset")
    router.listen()
    assert router.stored > 0
    assert router.removed == before
