"""SGLang's own controllers and pools on the CPU, and real daemons of the other environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.daemon_process import DaemonProcess
from tests.daemons import daemons
from tests.sglang import absent

absent.install()

if TYPE_CHECKING:
    from kvd_client.integrations.sglang.backend import KvdHiCache
    from tests.sglang.rig import Rank

StartRank = Callable[..., "Rank"]
MakeBackend = Callable[..., "KvdHiCache"]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Torch's threads spin: those of several test processes beside each other take for ever."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def make_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], DaemonProcess]]:
    """Makes daemons, not yet started, each with a pool of its own on shared memory."""
    with daemons(DaemonProcess, tmp_path_factory.mktemp) as make:

        def make_one() -> DaemonProcess:
            made = make()
            made.pool_bytes = 128 << 20
            return made

        yield make_one


@pytest.fixture(scope="module")
def kvd(make_daemon: Callable[[], DaemonProcess]) -> DaemonProcess:
    """A running daemon."""
    daemon = make_daemon()
    daemon.start()
    return daemon


@pytest.fixture(scope="module")
def large_blocks_kvd(make_daemon: Callable[[], DaemonProcess]) -> DaemonProcess:
    """A running daemon for pages of up to 16 MiB."""
    daemon = make_daemon()
    daemon.pool_bytes, daemon.extent_bytes = 512 << 20, 16 << 20
    daemon.start()
    return daemon


@pytest.fixture
def start_rank(kvd: DaemonProcess) -> Iterator[StartRank]:
    """Starts ranks at the daemon, which are connected when they are here."""
    from tests.sglang.rig import Rank

    running: list[Rank] = []

    def start(*, wait: bool = True, **settings: Any) -> Rank:
        running.append(Rank(kvd.socket, **settings))
        if wait:
            running[-1].wait_usable()
        return running[-1]

    yield start
    while running:
        running.pop().close()


@pytest.fixture
def make_backend(kvd: DaemonProcess) -> Iterator[MakeBackend]:
    """Makes backends over host pools without a controller, connected; the first is the anchor."""
    from kvd_client.integrations.sglang.backend import KvdHiCache
    from tests.sglang.rig import PATIENCE_S, extra_config, storage_config

    made: list[KvdHiCache] = []

    def make(pools: dict[Any, Any], **changes: Any) -> KvdHiCache:
        backend = KvdHiCache(storage_config(extra_config(kvd.socket), **changes))
        made.append(backend)
        backend.register_mem_pool_host(next(iter(pools.values())))
        for name, pool in pools.items():
            backend.register_mem_host_pool_v2(pool, name)
        backend.on_host_pools_registered()
        for batches in backend._opened:
            assert batches.wait_usable(PATIENCE_S), batches.problem
        return backend

    yield make
    while made:
        made.pop().close()
