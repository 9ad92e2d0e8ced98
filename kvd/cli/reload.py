"""SIGHUP: the settings are read again, and those that may change while the daemon runs do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from kvd.config.settings import SETTINGS, Config, ConfigError
from kvd.control import audit
from kvd.control.notify import notify
from kvd.control.server import ControlServer
from kvd.core import events as ev
from kvd.observability import logs
from kvd.observability.floods import COUNTED
from kvd.runtime.threads import NoThread, apart
from kvd.runtime.turns import Pace

log = logging.getLogger(__name__)

# The machine's, which one event changes.
_TERMS = (
    "lease_share",
    "private_grace_seconds",
    "submit_deadline_seconds",
    "copy_deadline_seconds",
)
# Every other one is refused by name: it needs a restart.
CHANGEABLE = (
    *("log_level", "drain_seconds", "operators", "root_operates", "tenants"),
    *("sessions_per_user", *_TERMS),
)
PATIENT_SECONDS = 5.0  # in which a reload says nothing yet of what it waits for
QUOTA_UNITS = 4  # of a pace: an event, and a line of the log
_ALL = (*(setting.name for setting in SETTINGS), "tenants", "tiers")


def machine_terms(config: Config) -> ev.TermsChanged:
    """What the machine goes by, of these settings."""
    return ev.TermsChanged(
        lease_share=config.lease_share,
        submit_deadline_ns=int(config.submit_deadline_seconds * 1e9),
        copy_deadline_ns=int(config.copy_deadline_seconds * 1e9),
        private_grace_ns=int(config.private_grace_seconds * 1e9),
    )


def rights(config: Config) -> object:
    """Who is which tenant, and who operates."""
    tenants = {rule.tenant: (rule.uids, rule.gids) for rule in config.tenants}
    return tenants, set(config.operators), config.root_operates


class Reloader:
    """Knows the settings in force, and where others are read from."""

    def __init__(self, config: Config, read: Callable[[], Config]) -> None:
        self.config = config
        self._read = read
        self._more = ""  # what came of the last reload, in systemd's status

    async def reload(self, control: ControlServer) -> None:
        """Bring the settings in force up to date. What can't be read changes nothing.

        The log says what came of it, however often it is asked for, and `systemctl status`. Nobody
        waits for thousands of tenants: they are read by a thread, quotas are set a few at a time,
        and sessions end one by one.
        """
        before = self.config
        try:
            wanted = await self._wanted(control)
        except (ConfigError, NoThread) as error:
            log.error(  # noqa: TRY400
                "the settings were not reloaded, and nothing has changed: %s", error, extra=COUNTED
            )
            self._tell_systemd(control, "; the last reload changed nothing: the log says why")
            return
        changed = [name for name in _ALL if getattr(before, name) != getattr(wanted, name)]
        taken = [name for name in changed if name in CHANGEABLE]
        refused = [name for name in changed if name not in CHANGEABLE]
        self.config = replace(before, **{name: getattr(wanted, name) for name in taken})
        await self._apply(before, control)
        if refused:
            log.warning(
                "these settings need a restart and stay as they were: %s",
                ", ".join(refused),
                extra=COUNTED,
            )
        overruled = ", ".join(wanted.overruled)
        if overruled:
            log.warning(
                "the file says otherwise of these, but what stands beside counts before it: %s",
                overruled,
                extra=COUNTED,
            )
        more = f"; need a restart: {', '.join(refused)}" if refused else ""
        more += f"; not by the file: {overruled}" if overruled else ""
        self._tell_systemd(control, more)
        told = ", ".join(taken) or "nothing"
        log.warning("the settings were reloaded; changed: %s", told, extra=COUNTED)

    async def _wanted(self, control: ControlServer) -> Config:
        """The settings as they are read now. Who asks a directory service for names may wait long.

        The daemon serves on meanwhile, and its end does not wait for that.
        """
        reading = asyncio.ensure_future(apart(self._read))
        try:
            if not (await asyncio.wait([reading], timeout=PATIENT_SECONDS))[0]:
                log.warning(
                    "a reload has not ended yet: the file, or a service that is asked for users and"
                    " groups, does not answer. Another reload waits for this one"
                )
                waits = "; a reload waits for the file, or for a service of names"
                self._tell_systemd(control, waits)
            return await reading
        finally:
            reading.cancel()

    def _tell_systemd(self, control: ControlServer, more: str) -> None:
        """Whoever reloads by systemctl may not look into the log, or its level leaves this out."""
        self._more = more
        self.tell_state(control)

    def tell_state(self, control: ControlServer) -> None:
        """Tell systemd whether work is taken, and what came of the last reload."""
        if control.stopping:
            return  # it knows that
        does = "draining, until `kvd undrain`," if control.common.draining else "serving"
        notify(f"STATUS={does} on {self.config.socket}{self._more}", room_s=0)

    async def _apply(self, before: Config, control: ControlServer) -> None:
        config = self.config
        if config.log_level != before.log_level:
            logs.set_level(config.log_level)
        if machine_terms(config) != machine_terms(before):
            control.driver.call(machine_terms(config))
        common = control.common
        common.terms = replace(common.terms, sessions_per_user=config.sessions_per_user)
        control.tenants.replace(config.tenants, config.operators, root=config.root_operates)
        if rights(config) != rights(before):
            control.driver.event_log.rights_changed()
        pace = Pace(control.driver.turns, "reload")
        await common.end_other_tenants(pace)
        old = {rule.tenant: rule.quota_bytes for rule in before.tenants}
        new = {rule.tenant: rule.quota_bytes for rule in config.tenants}
        for tenant in old | new:
            quota, named = new.get(tenant, 0), tenant in new
            if quota != old.get(tenant, 0) or named != (tenant in old):
                await pace.spend(QUOTA_UNITS)
                token = control.driver.long_work.next_token()
                control.driver.call(ev.QuotaSet(token, tenant, quota, named))
                audit.note("reload", None, tenant=tenant, quota_bytes=quota)
