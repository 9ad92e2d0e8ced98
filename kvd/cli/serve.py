"""The composition root: builds the daemon from its rooms, runs it, and takes it down again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy.ma  # noqa: F401  np.unique would, at its first call: 10 ms amid an event
import uvloop

import kvd
from kvd.cli.exits import EXIT_FAILED
from kvd.cli.left_behind import MadeDirectories
from kvd.cli.pool_settings import pool_config
from kvd.cli.reload import Reloader, machine_terms
from kvd.config.settings import Config, unknown_variables
from kvd.control.access import descriptors
from kvd.control.access.tenants import TenantPolicy
from kvd.control.http import TEXT, HttpServer, Page, seldom
from kvd.control.notify import feed_watchdog, notify
from kvd.control.registration.gpu_capacity import GpuTerms
from kvd.control.server import ControlServer, Place, make_directory
from kvd.control.sessions.session import SessionTerms
from kvd.control.sockets import (
    SocketTaken,
    refuse_taken,
    require_bindable,
    require_group,
    tell_when_lost,
    warn_where_closed,
)
from kvd.core import events as ev
from kvd.core.blocks.extent_fit import size
from kvd.core.machine import Machine, MachineConfig
from kvd.core.model.state import MAX_NAMESPACES
from kvd.core.upkeep.statistics import first_tenants, largest_tenants
from kvd.linux import signals
from kvd.linux.calls import ask_for_short_slices, share_one_heap
from kvd.linux.own_directory import NotTrustedError
from kvd.observability import logs, metrics, status_page
from kvd.observability.floods import Floods
from kvd.pool.choices import NO_ROOM
from kvd.pool.config import COMFORTABLE_EXTENTS, PoolError
from kvd.pool.header import NO_POOL
from kvd.pool.pool import Pool
from kvd.processes import release
from kvd.processes.complaints import finds_no_thread, why_no_thread
from kvd.processes.launch import require_pidfds
from kvd.runtime.driver import Driver
from kvd.runtime.probes import native_probes
from kvd.runtime.threads import NoThread, require_threads
from kvd.runtime.tiers import terms_of

log = logging.getLogger(__name__)

EXIT_BROKEN_INVARIANT = 70  # EX_SOFTWARE of sysexits.h
# gRPC's own threads and the pool's must not keep the loop waiting for the interpreter.
SWITCH_SECONDS = 0.0005
# Of the loop, of gRPC's threads, and of every mover: a small call wakes a thread at each of its
# steps, here and in its engine, and each of these may have to wait for whoever computes.
SLICE_NS = 100_000
# The collector's thresholds: objects more than there were, then collections of the generation
# before. Python's own are 700, 10 and 10.
YOUNG_COLLECTION_EVERY = 100
MIDDLE_COLLECTION_EVERY = 2
WHOLE_COLLECTION_EVERY = 25_000
PROGRESS_SECONDS = 1.0
START_EXTENSION_US = 30_000_000
STOP_EXTENSION_US = 30_000_000  # beyond the drain: for calls, movers and tiers


class _ToldToStop(Exception):
    """A signal came before the pool was there."""


class Daemon:
    """One daemon's life."""

    def __init__(self, reloader: Reloader, floods: Floods) -> None:
        self._reloader = reloader
        self._floods = floods
        self.state = "starting"
        self.metrics = metrics.Metrics(kvd.__version__)
        self._status_page = status_page.StatusPage(kvd.__version__)
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._progress_at = time.monotonic()
        self._has_pool = False
        self._control: ControlServer | None = None  # once it serves
        self._reload_wanted = False
        self._reloading: asyncio.Future[None] | None = None

    @property
    def config(self) -> Config:
        """The settings in force."""
        return self._reloader.config

    async def run(self) -> int:
        """Start, serve until told to stop, stop. The exit status."""
        self._handle_signals()
        threading.excepthook = _exit_without_thread
        require_group(self.config.socket_group)
        make_directory(self.config.socket, self.config.socket_group)  # the pool takes its time
        refuse_taken(self.config.socket, self.config.companion_socket)
        for path in (self.config.socket, self.config.companion_socket):
            require_bindable(path)
        warn_where_closed(self.config.socket, self.config.socket_group)
        async with contextlib.AsyncExitStack() as stack:
            pages = self._pages()
            http = HttpServer(pages, status_page.HEADERS)
            if self.config.http_port:
                await http.listen(self.config.http_address, self.config.http_port)
                said = "HTTP on %s, port %d: %s"
                log.info(said, self.config.http_address, http.port, " ".join(sorted(pages)))
                stack.push_async_callback(http.close)
            try:
                pool = await asyncio.to_thread(Pool.open, pool_config(self.config), self._preparing)
                driver = self._driver(pool)
                stack.push_async_callback(driver.close)
                await self._recover(driver)
            except _ToldToStop:
                log.info(
                    "told to stop while the pool was made or read: the next start does it anew"
                )
                return 0
            self._has_pool = True
            control = self._control_server(driver)
            self.metrics.watch_lookups(control.common.told_lookups)
            stack.push_async_callback(control.close)
            await control.listen(self._place())
            self.metrics.watch_sockets(control.lost_socket)
            tasks: list[asyncio.Future[Any]] = [
                asyncio.ensure_future(driver.run()),
                asyncio.ensure_future(feed_watchdog()),
                asyncio.ensure_future(self._stop.wait()),
                asyncio.ensure_future(logs.tell_what_was_left_out(self._floods)),
                asyncio.ensure_future(tell_when_lost(control.lost_socket)),
            ]
            if self.config.http_port and self.config.status_page:
                sampling = asyncio.ensure_future(self._status_page.keep(self._sources(control)))
                end = partial(_tell_of_end, "the status page gets no more figures")
                sampling.add_done_callback(end)
                tasks.append(sampling)
            settle_memory()
            self._ready(control)
            try:
                await self._serve(tasks)
                await self._drain(control, driving=tasks[0])
            finally:
                if self._reloading is not None:
                    tasks.append(self._reloading)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        log.info("stopped; the pool's files stay in %s", self.config.pool_directory)
        return 0

    # -- building ---------------------------------------------------------------------------

    def _driver(self, pool: Pool) -> Driver:
        config = self.config
        machine = Machine(
            MachineConfig(
                extents=pool.extents,
                extent_bytes=pool.extent_bytes,
                policy=config.policy,
                store_threshold=config.store_threshold,
                lease_ttl_ns=config.lease_ttl_ms * 1_000_000,
                **asdict(machine_terms(config)),
                extent_nodes=pool.extent_nodes,
                tag_secret=pool.tag_secret,
                namespaces=descriptors.most_namespaces(MAX_NAMESPACES),
                tiers=terms_of(config.tiers, pool.extents * pool.extent_bytes),
            ),
            native_probes(),
        )
        return Driver(machine, pool, self.metrics, tiers=config.tiers)

    async def _recover(self, driver: Driver) -> None:
        """Have the core know what the pool holds, and tell of it. Others have turns meanwhile."""
        pool = driver.pool
        began = time.perf_counter()
        for _ in driver.recover():
            await asyncio.sleep(0)
            if self._stop.is_set():
                raise _ToldToStop
        for rule in self.config.tenants:
            driver.call(ev.QuotaSet(driver.long_work.next_token(), rule.tenant, rule.quota_bytes))
        shown = first_tenants(metrics.MAX_TENANTS_SHOWN)
        self.metrics.watch(partial(driver.statistics, by_namespace=False, which_tenants=shown))
        self.metrics.watch_ranks(driver.fleet.attached.values)
        self.metrics.watch_registry(lambda: pool.unwritten)
        recovered = driver.machine.statistics().counters.recovered
        if pool.cold_reason == NO_POOL:
            log.info("the pool is new: %s", pool.cold_reason)
        elif pool.cold_reason:
            log.warning("the pool is cold: %s", pool.cold_reason)
        self._tell_of_records(pool)
        self._warn_of_place_and_size(pool)
        for orphan in pool.orphans():
            log.warning(
                "mover %d of an earlier daemon can't be ended (its state is %s): it maps %d extents"
                " of the pool, so that %d free slots, %.1f MiB, are kept from use until a daemon"
                " starts after its end",
                orphan.pid,
                orphan.state,
                orphan.extents,
                orphan.slots,
                orphan.slot_bytes / (1 << 20),
            )
        log.info("extents lie in %s", pool.place)
        log.info("%d blocks recovered in %.3f s", recovered, time.perf_counter() - began)

    def _tell_of_records(self, pool: Pool) -> None:
        self.metrics.tell_checksums(are_kept=pool.payload_checksums)
        log.log(
            logging.WARNING if pool.checksums_reason == NO_ROOM else logging.INFO,
            "checksums of the blocks' bytes: %s%s",
            "on" if pool.payload_checksums else "off",
            f" ({pool.checksums_reason})" if pool.checksums_reason else "",
        )
        if pool.unsummed_records:
            log.info(
                "%d blocks were stored without checksums and are served without comparing",
                pool.unsummed_records,
            )
        if pool.unchecked_records:
            log.warning(
                "%d blocks were left out: they have no checksums of their bytes,"
                " or others than were written",
                pool.unchecked_records,
            )
        damaged = pool.dropped_records - pool.unchecked_records
        if damaged:
            log.warning(
                "%d blocks were left out: their records in slots.table are damaged, or what"
                " rows.table or registry.jsonl says of them is damaged or missing",
                damaged,
            )

    def _warn_of_place_and_size(self, pool: Pool) -> None:
        """What the operator could choose better."""
        if pool.on_shared_filesystem:
            log.warning(
                "%s lies on a file system that others may fill: mount a tmpfs of its own there",
                self.config.pool_directory,
            )
        descriptors.warn_where_tight(pool.extents)
        if pool.extents < COMFORTABLE_EXTENTS:
            log.warning(
                "the pool has %d extents of %s, fewer than %d: a group's rows are whole extents, so"
                " much of the pool may lie idle with one group while another lacks room; raise"
                " pool_bytes or lower extent_bytes (another size is a cold start)",
                pool.extents,
                size(pool.extent_bytes),
                COMFORTABLE_EXTENTS,
            )

    def _control_server(self, driver: Driver) -> ControlServer:
        terms = SessionTerms(
            self.config.lease_ttl_ms, self.config.store_threshold, self.config.sessions_per_user
        )
        tenants = TenantPolicy(
            self.config.tenants, self.config.operators, root=self.config.root_operates
        )
        return ControlServer(driver, tenants, terms, self.metrics, _exit_broken)

    def _place(self) -> Place:
        config = self.config
        return Place(
            config.socket,
            config.companion_socket,
            config.socket_mode,
            config.socket_group,
            config.pool_directory,
            config.pool_bytes,
            GpuTerms(config.gpu_context_bytes, config.gpu_staging_bytes),
        )

    # -- life -------------------------------------------------------------------------------

    def _handle_signals(self) -> None:
        signals.ignore_meaningless()
        for number in signals.STOPPING:
            self._loop.add_signal_handler(number, self._told_to_stop)
        self._loop.add_signal_handler(signal.SIGUSR1, self._toggle_debug)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup's wish
            at_terminal = sys.stderr.isatty()
            told = self._told_to_stop if at_terminal else self._told_to_reload
            self._loop.add_signal_handler(signal.SIGHUP, told)
        signals.take_held()
        self._loop.set_exception_handler(_on_loop_exception)

    def _told_to_stop(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def _told_to_reload(self) -> None:
        self._reload_wanted = True
        control = self._control
        if control is None or self._stop.is_set() or self._reloading is not None:
            return  # once it serves; never; after the one under way
        self._reloading = asyncio.ensure_future(self._reload(control))
        self._reloading.add_done_callback(partial(_tell_of_end, "a reload ended half-way"))

    async def _reload(self, control: ControlServer) -> None:
        try:
            while self._reload_wanted:
                self._reload_wanted = False
                await self._reloader.reload(control)
        finally:
            self._reloading = None

    def _toggle_debug(self) -> None:
        level = logs.toggle_debug(self.config.log_level)
        log.warning("log level is %s now", level)

    def _preparing(self, done: int, whole: int) -> None:
        """Called while the pool is made and read. _ToldToStop: that may take minutes."""
        if self._stop.is_set() and not self._has_pool:
            raise _ToldToStop
        now = time.monotonic()
        if now - self._progress_at >= PROGRESS_SECONDS or done == whole:
            self._progress_at = now
            status = f"preparing the pool: {done >> 20} of {whole >> 20} MiB"
            log.info("%s", status)
            notify(f"STATUS={status}", f"EXTEND_TIMEOUT_USEC={START_EXTENSION_US}")

    def _ready(self, control: ControlServer) -> None:
        self._control = control
        self.state = "ready"
        control.on_drain = partial(self._reloader.tell_state, control)
        notify("READY=1", f"STATUS=serving on {self.config.socket}")
        log.info(
            "kvd %s serves on %s, incarnation %s",
            kvd.__version__,
            self.config.socket,
            control.driver.incarnation.hex(),
        )
        if self._reload_wanted:
            self._told_to_reload()

    async def _serve(self, tasks: list[asyncio.Future[Any]]) -> None:
        driving, feeding, stopping, *_ = tasks
        await asyncio.wait([driving, stopping], return_when=asyncio.FIRST_COMPLETED)
        if feeding.done() and not feeding.cancelled():
            feeding.result()
        _require_going_on(driving)

    async def _drain(self, control: ControlServer, driving: asyncio.Future[Any]) -> None:
        """Wait for the copies under way, unless told to stop a second time.

        Their deadlines are kept and systemd hears of life meanwhile.
        """
        self.state = "draining"
        threading.excepthook = threading.__excepthook__  # it ends by itself now
        control.stopping = True
        may_take_us = int(self.config.drain_seconds * 1e6) + STOP_EXTENSION_US
        notify("STOPPING=1", "STATUS=draining", f"EXTEND_TIMEOUT_USEC={may_take_us}")
        log.info("draining for at most %.1f s", self.config.drain_seconds)
        draining = asyncio.ensure_future(control.drain(self.config.drain_seconds))
        hurrying = asyncio.ensure_future(self._hurry.wait())
        ways_out = [draining, hurrying, driving]
        await asyncio.wait(ways_out, return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        if not draining.done():
            draining.cancel()
            _require_going_on(driving)
            log.warning("told to stop again: not waiting for copies")
        elif left := draining.result():
            log.warning("%d jobs still ran when the drain's deadline passed", left)

    # -- pages ------------------------------------------------------------------------------

    def _pages(self) -> dict[str, Page]:
        pages: dict[str, Page] = {
            "/metrics": seldom(self._metrics_page),
            "/healthz": self._live_page,
            "/readyz": self._ready_page,
        }
        if self.config.status_page:
            pages |= self._status_page.pages()
        return pages

    def _sources(self, control: ControlServer) -> status_page.Sources:
        shown = largest_tenants(status_page.MAX_ROWS_SHOWN)
        return status_page.Sources(
            partial(control.driver.statistics, by_namespace=False, which_tenants=shown),
            control.common.told_lookups.by_tenant,
            control.driver.fleet.attached.values,
            lambda: self._ready_page()[2].decode().strip(),
        )

    async def _metrics_page(self) -> tuple[int, str, bytes]:
        return 200, metrics.CONTENT_TYPE, await self.metrics.exposition()

    def _live_page(self) -> tuple[int, str, bytes]:
        return 200, TEXT, b"alive\n"

    def _ready_page(self) -> tuple[int, str, bytes]:
        state = self.state
        if self._control is not None and state == "ready":
            if self._control.common.draining:
                state = "draining"
            elif lost := self._control.lost_socket():
                state = f"unreachable: somebody removed {lost}; restart kvd"
        return (200 if state == "ready" else 503), TEXT, state.encode() + b"\n"


def serve(config: Config, read: Callable[[], Config]) -> int:
    """Run a daemon in this process until it is told to stop; the exit status.

    `read` reads the settings again. A start that fails says why in the log, and leaves nothing.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    ask_for_short_slices(SLICE_NS)
    share_one_heap()
    gc.disable()  # what is read back is all kept: collections would visit it over and over
    floods = logs.start(config.log_level, config.log_format)
    logs.tell_of_faults()
    _warn_of_variables()
    places = (config.socket.parent, config.pool_directory, config.extents_directory)
    made = MadeDirectories(filter(None, places))
    release.OURS.remember()
    try:
        descriptors.raise_limit()
        descriptors.require_enough()
        require_threads()
        require_pidfds()

        async def run() -> int:
            return await Daemon(Reloader(config, read), floods).run()

        return uvloop.run(run())
    except (PoolError, NotTrustedError, SocketTaken, OSError, NoThread) as error:
        log.critical("%s", error)
        made.remove()
        return EXIT_FAILED
    except RuntimeError as error:
        if not finds_no_thread(error):
            raise
        log.critical("%s", why_no_thread())
        made.remove()
        return EXIT_FAILED


def _warn_of_variables() -> None:
    if unknown := unknown_variables(os.environ):
        log.warning("these variables mean nothing to kvd: %s", ", ".join(unknown))


def settle_memory() -> None:
    """Keep collections short: what is there by now lives as long as the daemon."""
    gc.enable()
    gc.collect()
    gc.freeze()
    # A whole collection holds the event loop for as long as clients make the daemon remember much:
    # 50 to 70 ms, and once in 3 s, beside one that uses every bound. So does one of what is young:
    # with Python's own thresholds 5 to 40 ms, many times a second, while very many calls come. Of
    # small lots each is over soon, and all together take as long.
    gc.set_threshold(YOUNG_COLLECTION_EVERY, MIDDLE_COLLECTION_EVERY, WHOLE_COLLECTION_EVERY)


def _exit_broken(_error: AssertionError) -> None:
    """A daemon that doubts its own state serves nothing. The story is in the log by now."""
    logging.shutdown()
    os._exit(EXIT_BROKEN_INVARIANT)


def _exit_without_thread(failure: threading.ExceptHookArgs) -> None:
    """Better no daemon than one that serves nobody: gRPC takes all calls on a thread of its own."""
    name = failure.thread.name if failure.thread is not None else "a thread"
    log.critical("%s ended", name, exc_info=failure.exc_value)
    _exit_broken(AssertionError("a thread ended"))


def _require_going_on(driving: asyncio.Future[Any]) -> None:
    """End the daemon where the driver ended, which it never does by itself. PoolError."""
    if not driving.done():
        return
    error = driving.exception()
    if isinstance(error, PoolError):  # nobody doubts what was served until now
        raise PoolError(f"the pool is lost: {error}") from error
    log.critical("the driver ended", exc_info=error)
    _exit_broken(AssertionError("the driver ended"))


def _tell_of_end(message: str, task: asyncio.Future[Any]) -> None:
    """What ends a task that nobody waits for is an error of the loop's, and told as such."""
    if not task.cancelled() and (error := task.exception()) is not None:
        task.get_loop().call_exception_handler({"message": message, "exception": error})


def _on_loop_exception(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:  # noqa: ARG001
    error = context.get("exception")
    log.error(
        "in a callback of the loop: %s",
        context.get("message"),
        exc_info=error if isinstance(error, BaseException) else None,
    )
    if isinstance(error, AssertionError):
        _exit_broken(error)
