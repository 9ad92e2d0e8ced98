"""What an engine that speaks by itself wants once faults have stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core import events as ev
from kvd.core.events import JobKind, LeaseMode
from kvd.core.keys import RequestId
from tests.simulation.whole.drawn import batch, hash_of, key_of
from tests.simulation.whole.ranks import Wish

if TYPE_CHECKING:
    from tests.simulation.whole.engine import RawEngine


class RawWish(Wish):
    """A block of its own stored and loaded in each group."""

    def __init__(self, engine: RawEngine) -> None:
        self.engine = engine
        self._left = list(range(len(engine.model.widths)))
        self._loads = 0
        self._job = 0
        self._is_loading = False

    @property
    def is_served(self) -> bool:
        return not self._left

    def ask(self) -> None:
        """Go on with the first group of which nothing was loaded."""
        engine = self.engine
        if self._job in engine.jobs:
            return
        if self._is_loading and engine.loads_done > self._loads:
            self._left.pop(0)
        self._is_loading = False
        if not self._left:
            return
        keys = [key_of(1_000_000 + hash_of(engine.name), 10 + self._left[0], "")]
        context = ev.RequestContext(RequestId("plain"))
        query = ev.Query(context, self._left[0], batch(keys), LeaseMode.ALL)
        (answer,) = engine.call(ev.LookupRequested(engine.session_id, (query,)))
        self._is_loading = answer.lease is not None
        self._loads = engine.loads_done
        kind = JobKind.LOAD if self._is_loading else JobKind.STORE
        engine.start_job(kind, self._left[0], keys, context)
        self._job = engine.last_job
        if answer.lease is not None:
            engine.call(ev.LeasesReleased(engine.session_id, (answer.lease,)))

    def told(self) -> str:
        engine = self.engine
        ranks = f"{len(engine.movers)} of {len(engine.model.ranks)} ranks"
        return f"session {engine.session}, ready {engine.is_ready}, {ranks}, groups {self._left}"
