"""Real engines, a real daemon, and what the same engine says without any connector."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.daemons import daemons
from tests.vllm import tiny_model
from tests.vllm.engine import BLOCK_TOKENS, ENVIRONMENT, FORKS, Engine, Prompt
from tests.vllm.node_daemon import NodeDaemon, with_kvd

KV_BYTES = 64 << 20

os.environ.update(ENVIRONMENT)  # before anything imports torch or vLLM, here or in a fork
FORKS.set_forkserver_preload(["tests.vllm.preloaded"])

if TYPE_CHECKING:
    from tests.vllm.late_device import LateDevice
    from tests.vllm.rank_rig import RankRig

StartEngine = Callable[..., Engine]
StartRig = Callable[..., "RankRig"]


def settings_of(model: Path, **more: Any) -> dict[str, Any]:
    """The settings of every engine here. Float32: in bfloat16 a preemption changes tokens."""
    return {
        "model": str(model),
        "dtype": "float32",
        "block_size": BLOCK_TOKENS,
        "max_model_len": 2048,
        "kv_cache_memory_bytes": KV_BYTES,
        "enforce_eager": True,
        "disable_log_stats": False,
        **more,
    }


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Runs from here on, so that no module is thought to have left it behind."""
    started = FORKS.Process()
    started.start()
    started.join()
    started.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return _made(tiny_model.make_llama, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma: sliding-window and full attention in one."""
    return _made(tiny_model.make_gemma, tmp_path_factory.mktemp("gemma"))


def _made(make: Callable[[Path], None], directory: Path) -> Path:
    maker = FORKS.Process(target=make, args=(directory,))
    maker.start()
    maker.join()
    assert maker.exitcode == 0, "the model could not be made"
    maker.close()
    return directory


class Plain:
    """What an engine without any connector answers: the truth that all others are held to."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._known: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    def tokens(self, *prompts: Prompt, max_tokens: int = 12) -> list[tuple[int, ...]]:
        """The right tokens for some prompts."""
        new = [each for each in prompts if (tuple(each), max_tokens) not in self._known]
        answers = self.engine.generate(*new, max_tokens=max_tokens)
        for each, answer in zip(new, answers, strict=True):
            self._known[tuple(each), max_tokens] = answer.tokens
        return [self._known[tuple(each), max_tokens] for each in prompts]


@pytest.fixture(scope="session")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    """An engine without a connector and without a prefix cache."""
    with _plain(model, tmp_path_factory.mktemp("plain")) as made:
        yield made


@pytest.fixture(scope="session")
def plain_hybrid(hybrid_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    """The same with the hybrid model."""
    with _plain(hybrid_model, tmp_path_factory.mktemp("plain-hybrid")) as made:
        yield made


@contextmanager
def _plain(model: Path, directory: Path) -> Iterator[Plain]:
    engine = Engine(settings_of(model, enable_prefix_caching=False), directory / "engine.log")
    yield Plain(engine)
    engine.end()


@pytest.fixture(scope="module")
def start_engine(
    plain: Plain, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartEngine]:
    """Starts engines, which end with the module at the latest."""
    running: list[Engine] = []
    directory = tmp_path_factory.mktemp("engines")

    def start(environment: dict[str, str] | None = None, **settings: Any) -> Engine:
        log = directory / f"engine-{len(running)}.log"
        running.append(Engine(settings_of(model) | settings, log, environment))
        return running[-1]

    yield start
    for engine in running:
        engine.end()


@pytest.fixture(scope="module")
def make_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], NodeDaemon]]:
    """Makes daemons, not yet started, each with a pool of its own on shared memory."""
    with daemons(NodeDaemon, tmp_path_factory.mktemp) as make:
        yield make


@pytest.fixture(scope="module")
def kvd(make_daemon: Callable[[], NodeDaemon]) -> NodeDaemon:
    """A running daemon for all of a module's tests."""
    daemon = make_daemon()
    daemon.start()
    return daemon


@pytest.fixture(scope="module")
def start_with_kvd(start_engine: StartEngine, kvd: NodeDaemon) -> StartEngine:
    """Starts engines that keep their KV in the module's daemon; each is connected when it is here.

    `options` are the connector's.
    """

    def start(options: dict[str, Any] | None = None, **settings: Any) -> Engine:
        engine = start_engine(**settings, **with_kvd(kvd.socket, **(options or {})))
        engine.wait_for_daemon()
        return engine

    return start


@pytest.fixture
def start_rig() -> Iterator[StartRig]:
    """Starts an engine's ranks without vLLM's engine, at a daemon; they end with the test."""
    from tests.vllm.rank_rig import rigs  # imports vLLM

    with rigs() as start:
        yield start


@pytest.fixture
def late_device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    """What ranks take for their device: it runs late."""
    from kvd_client.integrations.vllm.rank import worker as rank_side
    from tests.vllm.late_device import LateDevice

    made = LateDevice()
    monkeypatch.setattr(rank_side, "compute_end", made.end)
    return made


@pytest.fixture
def late_rig(kvd: NodeDaemon, late_device: LateDevice, start_rig: StartRig) -> Iterator[RankRig]:
    """A rank over such a device."""
    yield start_rig(kvd)
    late_device.let_run()  # before the rig ends
