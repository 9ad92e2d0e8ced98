"""`KvdConnector`: vLLM's offloading connector over the kvd daemon.

A thin subclass: vLLM's scheduler logic stays vLLM's; kvd brings its own manager, its own worker
side, failure reports, sleep hooks and the handshake. See docs/adr/0011.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    SchedulerOffloadConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvd_client.connection import SchedulerConnection
from kvd_client.integrations.option_fields import wrong
from kvd_client.integrations.vllm.events import DeviceResets, KvEvents
from kvd_client.integrations.vllm.identity.namespace import (
    build_namespace,
    check_config,
    check_transfer,
    engine_identity,
)
from kvd_client.integrations.vllm.metadata import RankHandshake
from kvd_client.integrations.vllm.options import WHERE, KvdOptions
from kvd_client.integrations.vllm.plugin import knows_spec, register_spec
from kvd_client.integrations.vllm.rank.gpu_rules import check_sleep, check_step_order
from kvd_client.integrations.vllm.rank.worker import KvdConnectorWorker
from kvd_client.integrations.vllm.scheduling.lazy import check_lazy
from kvd_client.integrations.vllm.scheduling.scheduler import KvdConnectorScheduler
from kvd_client.integrations.vllm.shared_metrics import shareable
from kvd_client.integrations.vllm.spec import SPEC_NAME, KvdOffloadingSpec
from kvd_client.integrations.vllm.stats import keep_deprecated_totals

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

log = logging.getLogger(__name__)


class KvdConnector(OffloadingConnector):
    """vLLM's connector: it offloads the KV cache into the node's kvd daemon.

    With `spec_name` set to another spec it is exactly vLLM's OffloadingConnector.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        is_ours = choose_spec(vllm_config)
        if is_ours:
            check_config(vllm_config)
            _check_engines_own()
            check_step_order(vllm_config, kv_cache_config)
            check_sleep(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._kvd_scheduler: KvdConnectorScheduler | None = None
        self._kvd_worker: KvdConnectorWorker | None = None
        if not is_ours:
            return
        spec = KvdOffloadingSpec(build_offloading_config(vllm_config, kv_cache_config))
        if spec.options.stores_lazily:
            config = SchedulerOffloadConfig.from_spec(spec, vllm_config, kv_cache_config)
            # In a rank, too, which vLLM makes first and keeps where it refuses the scheduler side.
            check_lazy(vllm_config, config)
        if role == KVConnectorRole.SCHEDULER:
            self._kvd_scheduler = KvdConnectorScheduler(spec, vllm_config, kv_cache_config)
            self.connector_scheduler = self._kvd_scheduler
        else:
            self._kvd_worker = KvdConnectorWorker(spec, vllm_config, kv_cache_config)
            self.connector_worker = self._kvd_worker

    # -- scheduler side ---------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Every rank has told what its memory is: now the session can be opened."""
        if self._kvd_scheduler is None:
            return
        ranks = [rank for rank in metadata.values() if isinstance(rank, RankHandshake)]
        ranks.sort(key=lambda rank: rank.rank)
        for rank in ranks:
            if not rank.registered:
                log.warning("kvd: rank %d is not registered yet: %s", rank.rank, rank.problem)
        self._open(ranks)

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, tp): rank for tp, rank in metadata.items()})

    def _open(self, ranks: list[RankHandshake]) -> None:
        """Begin to connect; the daemon may come at any time."""
        assert self._kvd_scheduler is not None
        manager = self._kvd_scheduler.manager
        if manager.is_open:
            return
        config, options = manager.offloading_config, manager.connect_options
        namespace = build_namespace(
            self._vllm_config, self._kv_cache_config, config, options, ranks
        )
        connection = SchedulerConnection(
            options.socket_path,
            engine_identity(self._vllm_config),
            namespace,
            world_size=config.parallel.world_size,
            silent_after_s=options.silent_after_s,
        )
        manager.stats.watch(connection)
        if config.enable_kv_cache_events and options.watch_removals:
            groups = [group.group_id for group in config.groups]
            manager.watched = KvEvents(
                options.socket_path,
                lambda: connection.session,
                groups,
                with_tiers=options.watch_tiers,
            )
        manager.open(connection)

    def on_new_request(self, request: Request) -> None:
        if self._kvd_scheduler is not None and not self._kvd_scheduler.manager.is_open:
            self._open([])  # an executor without a handshake
        super().on_new_request(request)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """VLLM's account of the device's blocks: lazy mode stores what it gives away next, and what
        routers hear depends on when it is cleared."""
        super().bind_gpu_block_pool(gpu_block_pool)
        if self._kvd_scheduler is not None:
            self._kvd_scheduler.bind_gpu_block_pool(gpu_block_pool)
            self._kvd_scheduler.manager.device_resets = DeviceResets(gpu_block_pool)

    # -- worker side ------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        if self._kvd_worker is None:
            return None
        context: AbstractContextManager[Any] | None = self._kvd_worker.get_mem_pool_context()
        return context

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The last call of vLLM's before the step's forward."""
        super().bind_connector_metadata(connector_metadata)
        if self._kvd_worker is not None:
            self._kvd_worker.note_launched(connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that ended, those among them that failed: their requests are computed."""
        if self._kvd_worker is None:
            results: KVConnectorTransferResults = super().get_transfer_results(finished_req_ids)
            return results
        return self._kvd_worker.get_transfer_results(finished_req_ids)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None if self._kvd_worker is None else self._kvd_worker.get_handshake_metadata()

    def unregister_kv_caches(self) -> None:
        """Before the KV memory goes (sleep): no copy can touch it once this returns."""
        if self._kvd_worker is not None:
            self._kvd_worker.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        if self._kvd_worker is not None:
            self._kvd_worker.restore_kv_caches()

    # -- metrics (in the API server's process) ----------------------------------------------

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, metric_types: Any, *labels: Any) -> Any:
        """Under names that vLLM's own offloading beside this one may declare as well."""
        if not choose_spec(vllm_config):
            return super().build_prom_metrics(vllm_config, metric_types, *labels)
        metrics = super().build_prom_metrics(vllm_config, shareable(metric_types), *labels)
        return keep_deprecated_totals(metrics)


def choose_spec(vllm_config: VllmConfig) -> bool:
    """Name kvd's spec in the connector's options where the user named none. Whether it is kvd's.

    A load within the step can't fail safely with several cache groups, so there is none. ValueError
    for what is no name of a spec.
    """
    register_spec()
    assert vllm_config.kv_transfer_config is not None
    extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
    name = extra_config.setdefault("spec_name", SPEC_NAME)
    if name != SPEC_NAME:
        is_made_elsewhere = bool(extra_config.get("spec_module_path"))
        if not isinstance(name, str) or not (is_made_elsewhere or knows_spec(name)):
            raise ValueError(wrong(WHERE, "spec_name", name, f"{SPEC_NAME}; leave it out"))
        return False
    if extra_config.get("sync_load_budget_bytes"):
        log.warning("kvd: sync_load_budget_bytes is set to 0: a load in the step can't fail safely")
    extra_config["sync_load_budget_bytes"] = 0
    return True


def _check_engines_own() -> None:
    """Raise ValueError where vLLM itself is configured otherwise than this connector's part says.

    So it may be under MultiConnector. VLLM sets its configuration as the ranks begin; where it
    does not, nothing is known.
    """
    outer = get_current_vllm_config_or_none()
    if outer is not None and outer.kv_transfer_config is not None:
        check_transfer(outer.kv_transfer_config)
        _check_named_once(outer.kv_transfer_config.kv_connector_extra_config)


def _check_named_once(outer: Mapping[str, Any]) -> None:
    """Raise ValueError where MultiConnector's part names this connector twice for one daemon.

    To the daemon both would be one engine: each would end the other's session, over and over.
    """
    found: set[tuple[str, str]] = set()
    for options in _options_beside(outer):
        engine = (options.socket_path, options.engine_name)
        if engine in found:
            raise ValueError(
                f"KvdConnector is named twice for the daemon at {options.socket_path}, and each"
                " would end the other's session. Leave one of the two out of --kv-transfer-config"
            )
        found.add(engine)


def _options_beside(outer: Mapping[str, Any]) -> Iterator[KvdOptions]:
    """Those of each of this connector's parts under MultiConnector, also where these are nested."""
    for part in outer.get("connectors") or ():
        extra_config = part.get("kv_connector_extra_config") or {}
        yield from _options_beside(extra_config)
        is_ours = part.get("kv_connector") == KvdConnector.__name__
        if is_ours and extra_config.get("spec_name", SPEC_NAME) == SPEC_NAME:
            yield KvdOptions.from_extra_config(extra_config)
