"""The pytest plugin in a run of vLLM's own tests: puts kvd's daemon in the place of vLLM's cache.

Loaded with `-p`, so that it is here before any test module is imported. What a test makes as
vLLM's `CPUOffloadingManager` becomes a manager whose every verb is a call to a running daemon; a
rank with a small shared memory and a real mover copies what the verbs say. Runs in vLLM's
environment, and stands alone: `tests` is vLLM's package here.

In the mode `few-calls` what a test makes as vLLM's `OffloadingConnector` becomes `KvdConnector`
too. A manager that a test makes by itself stays the synchronous one: kvd's own sends what it
decided with the connector's step, and such a test has no connector.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector as vllm_connector
import vllm.v1.kv_offload.cpu.manager as vllm_manager
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec, CPUOffloadingInfo
from vllm.v1.kv_offload.cpu.policies.arc import ARCCachePolicy
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

from kvd_client.identity import EngineIdentity, Group, NamespaceFields
from kvd_client.integrations.vllm.connector import KvdConnector
from kvd_client.worker.memory import Fragment, GroupLayout, SharedMemory
from kvd_client.worker.rank_memory import RegisteredMemory
from kvd_client.worker.registrar import RankPlace, Registrar
from synchronous_jobs import HASH_BYTES, Capacity
from synchronous_manager import SynchronousManager
from verb_session import VerbSession

SOCKETS = json.loads(os.environ["KVD_CONFORMANCE_SOCKETS"])  # by policy and threshold
RESULTS = Path(os.environ["KVD_CONFORMANCE_RESULTS"])
BLOCK_BYTES = 4096
BLOCKS = 1024  # of the rank's memory
TENANT = "default"
PATIENCE_S = 30.0


class HandDrivenRank:
    """A rank whose blocks hold for each key bytes that only this key has."""

    def __init__(self, socket_path: str, identity: EngineIdentity) -> None:
        self._fd = os.memfd_create("kvd-conformance")
        os.ftruncate(self._fd, BLOCKS * BLOCK_BYTES)
        memory = SharedMemory(self._fd, 0, BLOCKS * BLOCK_BYTES)
        layout = GroupLayout(BLOCKS, [Fragment(0, 0, BLOCK_BYTES, BLOCK_BYTES)])
        self._registrar = Registrar(
            socket_path, identity, RankPlace(0, 1, 0), RegisteredMemory((memory,), (layout,))
        )
        self._registrar.start()
        self._free = list(range(BLOCKS))
        self._jobs: dict[int, tuple[bool, dict[int, OffloadKey]]] = {}

    def begin(self, job_id: int, keys: Sequence[OffloadKey], *, load: bool) -> list[int]:
        blocks = [self._free.pop() for _ in keys]
        self._jobs[job_id] = (load, dict(zip(blocks, keys, strict=True)))
        for block, key in zip(blocks, keys, strict=True):
            content = bytes(BLOCK_BYTES) if load else content_of(key)
            os.pwrite(self._fd, content, block * BLOCK_BYTES)
        return blocks

    def finish(self, job_id: int) -> None:
        registration = self._registrar.current
        assert registration is not None, f"the rank was lost: {self._registrar.problem}"
        registration.take_ends(lambda _records: None)
        assert registration.mark_ready([job_id]), "the ring is full"

    def abandon(self, job_id: int) -> None:
        registration = self._registrar.current
        assert registration is not None, f"the rank was lost: {self._registrar.problem}"
        registration.abandon(job_id)
        self.finish(job_id)

    def ended(self, job_id: int, *, done: bool) -> None:
        load, keys = self._jobs.pop(job_id)
        if load and done:
            for block, key in keys.items():
                found = os.pread(self._fd, BLOCK_BYTES, block * BLOCK_BYTES)
                assert found == content_of(key), f"wrong bytes came back for {key!r}"
        self._free += keys

    def close(self) -> None:
        self._registrar.stop(PATIENCE_S)
        os.close(self._fd)


def content_of(key: OffloadKey) -> bytes:
    return hashlib.shake_128(key).digest(BLOCK_BYTES)


class Stand:
    """One engine on one daemon; it serves one manager after the other."""

    def __init__(self, socket_path: str) -> None:
        identity = EngineIdentity("vllm-conformance", os.urandom(16))
        namespace = NamespaceFields(
            model="none",
            kv_dtype="none",
            hash_algorithm="offload keys of vLLM's tests",
            hash_bytes=HASH_BYTES,
            groups=(Group(1, (BLOCK_BYTES,)),),
        )
        self.rank = HandDrivenRank(socket_path, identity)
        self.session = VerbSession(socket_path, identity, namespace)
        self.session.wait_usable()
        self.changes = self.session.watch()
        self.policy = self.session.status().policy
        self._manager: DaemonManager | None = None

    def give(self, manager: DaemonManager, num_chunks: int) -> None:
        """An empty cache of exactly so many blocks, for this manager alone."""
        self.take_back()
        self.session.reset_cache(os.urandom(16).hex())
        self.session.clear()
        self.session.set_quota(TENANT, num_chunks * BLOCK_BYTES or 1)
        self._manager = manager

    def take_back(self) -> None:
        if self._manager is not None:
            self._manager.shutdown()
        self._manager = None

    def close(self) -> None:
        self.take_back()
        self.changes.close()
        self.session.close()
        self.rank.close()


class Stands:
    """The daemons of the run, connected when a test first wants one."""

    def __init__(self) -> None:
        self._open: dict[str, Stand] = {}
        self.managers = 0

    def of(self, policy: str, threshold: int) -> Stand:
        name = f"{policy}-{max(1, threshold)}"
        if name not in self._open:
            self._open[name] = Stand(SOCKETS[name])
        return self._open[name]

    @property
    def calls(self) -> int:
        return sum(stand.session.blocking_calls for stand in self._open.values())

    def take_back(self) -> None:
        for stand in self._open.values():
            stand.take_back()

    def close(self) -> None:
        for stand in self._open.values():
            stand.close()


STANDS = Stands()


class DaemonManager(SynchronousManager):
    """In the place of vLLM's `CPUOffloadingManager`: the same arguments, the daemon's answers.

    Of the attributes that vLLM's tests read, those are offered that the daemon can tell.
    """

    def __init__(  # noqa: PLR0917 - vLLM's signature
        self,
        num_chunks: int,
        cache_policy: str = "lru",
        cache_policy_module_path: str | None = None,
        enable_events: bool = False,
        store_threshold: int = 1,
        max_tracker_size: int = 64_000,
        info: CPUOffloadingInfo | None = None,
    ) -> None:
        assert cache_policy_module_path is None, "the daemon has policies of its own"
        stand = STANDS.of(cache_policy, store_threshold)
        config_info = {} if info is None else info.as_config_info()
        capacity = Capacity(num_chunks, BLOCK_BYTES, enable_events, config_info)
        super().__init__(stand.session, stand.changes, stand.rank, capacity)
        stand.give(self, num_chunks)
        STANDS.managers += 1
        self._policy = policy_in_the_daemon(stand.policy)

    def reset_cache(self) -> None:
        """As nobody else has a part in this cache, what the old epoch holds goes as well."""
        super().reset_cache()
        self._session.clear()

    @property
    def _num_chunks(self) -> int:
        return int(self.tenant_status().quota_bytes // BLOCK_BYTES)

    def _prepare_load(
        self, keys: Collection[OffloadKey], req_context: ReqContext, *, record_access: bool
    ) -> CPULoadStoreSpec:
        """What vLLM's tiers call to read a block; the daemon counts every load as a use."""
        return self.prepare_load(keys, req_context)

    @property
    def _num_evictable_cache_chunks(self) -> int:
        return int(self.tenant_status().bytes_evictable // BLOCK_BYTES)

    @property
    def stores_skipped_in_current_batch(self) -> int:
        return self._skipped


def policy_in_the_daemon(name: str) -> Any:
    """Says which policy the daemon has, and nothing else of it."""
    kind: Any = {"lru": LRUCachePolicy, "arc": ARCCachePolicy}[name]

    class PolicyInTheDaemon(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            """Without any state: that is the daemon's."""

        def __getattr__(self, attribute: str) -> Any:
            raise AttributeError(f"{attribute} of the policy is in the daemon")

    return PolicyInTheDaemon()


vllm_manager.CPUOffloadingManager = DaemonManager
if os.environ["KVD_CONFORMANCE_MODE"] == "few-calls":
    vllm_connector.OffloadingConnector = KvdConnector


# -- what pytest calls ------------------------------------------------------------------------


class Outcomes:
    """What became of each test, for the report outside."""

    def __init__(self) -> None:
        self.by_test: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        known = self.by_test.setdefault(report.nodeid, {"outcome": "passed", "message": ""})
        if report.outcome == "passed" or known["outcome"] == "failed":
            return
        known["outcome"] = report.outcome
        crash = getattr(report.longrepr, "reprcrash", None)
        known["message"] = crash.message if crash is not None else str(report.longrepr)

    def pytest_sessionfinish(self) -> None:
        figures = {"tests": self.by_test, "managers": STANDS.managers, "calls": STANDS.calls}
        RESULTS.write_text(json.dumps(figures))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """Whatever a test left under way ends with it."""
    yield
    STANDS.take_back()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Outcomes())


def pytest_unconfigure() -> None:
    STANDS.close()
