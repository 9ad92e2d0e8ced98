"""SIGHUP: the settings are read again, and those that may change while the daemon runs do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from kvd.config.settings import SETTINGS, Config, ConfigError
from kvd.control import audit
from kvd.control.server import ControlServer
from kvd.core import events as ev
from kvd.observability import logs
from kvd.runtime.turns import Pace

log = logging.getLogger(__name__)

# Every other one is refused by name: it needs a restart.
CHANGEABLE = ("log_level", "drain_seconds", "operators", "root_operates", "tenants")
QUOTA_UNITS = 4  # of a pace: an event, and a line of the log
_ALL = (*(setting.name for setting in SETTINGS), "tenants", "tiers")


class Reloader:
    """Knows the settings in force, and where others are read from."""

    def __init__(self, config: Config, read: Callable[[], Config]) -> None:
        self.config = config
        self._read = read

    async def reload(self, control: ControlServer) -> None:
        """Bring the settings in force up to date. What can't be read changes nothing.

        Nobody waits for thousands of tenants: they are read by a thread, and their quotas are set
        a few at a time.
        """
        before = self.config
        try:
            wanted = await asyncio.to_thread(self._read)
        except ConfigError as error:
            log.error("the settings were not reloaded, and nothing has changed: %s", error)  # noqa: TRY400
            return
        changed = [name for name in _ALL if getattr(before, name) != getattr(wanted, name)]
        taken = [name for name in changed if name in CHANGEABLE]
        refused = [name for name in changed if name not in CHANGEABLE]
        self.config = replace(before, **{name: getattr(wanted, name) for name in taken})
        await self._apply(before, control)
        if refused:
            log.warning(
                "these settings need a restart and stay as they were: %s", ", ".join(refused)
            )
        log.warning("the settings were reloaded; changed: %s", ", ".join(taken) or "nothing")

    async def _apply(self, before: Config, control: ControlServer) -> None:
        config = self.config
        if config.log_level != before.log_level:
            logs.set_level(config.log_level)
        control.tenants.replace(config.tenants, config.operators, root=config.root_operates)
        for session in control.common.end_other_tenants():
            audit.note("reload", None, session_ended=session)
        old = {rule.tenant: rule.quota_bytes for rule in before.tenants}
        new = {rule.tenant: rule.quota_bytes for rule in config.tenants}
        pace = Pace(control.driver.turns, "reload")
        for tenant in old | new:
            quota = new.get(tenant, 0)
            if quota != old.get(tenant, 0):
                await pace.spend(QUOTA_UNITS)
                control.driver.call(
                    ev.QuotaSet(control.driver.long_work.next_token(), tenant, quota)
                )
                audit.note("reload", None, tenant=tenant, quota_bytes=quota)
