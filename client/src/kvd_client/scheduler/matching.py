"""How many tokens a waiting request can load, or why it must ask again."""

from __future__ import annotations

from collections.abc import Callable

from kvd_client.draft import count_parts
from kvd_client.scheduler.hits import loaded_blocks
from kvd_client.scheduler.jobs import JobTable
from kvd_client.scheduler.lookup import LookupQueue
from kvd_client.scheduler.params import SchedulerOptions
from kvd_client.scheduler.request import Request
from kvd_client.scheduler.stats import StatsCollector
from kvd_client.session import Connection


class Matcher:
    """Finds a request's hit, and defers it while transfers of it or of its blocks are under way.

    Every such wait has an end: the transfer's, or `pending_deadline_s`.
    """

    def __init__(
        self,
        connection: Connection,
        options: SchedulerOptions,
        jobs: JobTable,
        queue: LookupQueue,
        clock: Callable[[], float],
    ) -> None:
        self._connection = connection
        self._groups = connection.namespace.groups
        self._options = options
        self._jobs = jobs
        self._queue = queue
        self._clock = clock
        self.tally = StatsCollector()

    def match(self, request: Request, num_computed_tokens: int) -> int | None:
        """Tokens from the prompt's start that device and daemon have together."""
        started = self._clock()
        found = self._find(request, num_computed_tokens)
        now = self._clock()
        self.tally.lookup(now - started)
        if found is None:
            if request.deferred_since_s is None:
                request.deferred_since_s = started
        elif request.deferred_since_s is not None:
            self.tally.deferral(now - request.deferred_since_s)
            request.deferred_since_s = None
        return found

    def _find(self, request: Request, num_computed_tokens: int) -> int | None:
        now = self._clock()
        deadline_s = self._options.pending_deadline_s
        if request.loading_job or request.waits_for_stores(now, deadline_s):
            return None
        if self._awaits_load(request, now):
            return None
        request.awaited_load = 0
        request.computed_tokens = num_computed_tokens
        found = self._queue.hit_tokens(request, num_computed_tokens)
        if found is None or found <= num_computed_tokens:
            return found
        if self._jobs.free < self._parts(num_computed_tokens, found):
            if request.no_job_since_s is None:
                request.no_job_since_s = now
            # Some of those in flight end first, unless the daemon hangs: then it is computed.
            return None if now - request.no_job_since_s < deadline_s else num_computed_tokens
        request.no_job_since_s = None
        if not self._options.share_loads:
            return found
        request.awaited_load = self._loader(request, num_computed_tokens, found)
        if not request.awaited_load:
            request.sharing_since_s = None
            return found
        if request.sharing_since_s is None:
            request.sharing_since_s = now
            self.tally.shared_load()
        return None if self._awaits_load(request, now) else found

    def _parts(self, computed_tokens: int, found: int) -> int:
        """Jobs that loading this hit may take."""
        blocks = (loaded_blocks(spec, computed_tokens, found) for spec in self._groups)
        return count_parts(sum(map(len, blocks)))

    def _awaits_load(self, request: Request, now: float) -> bool:
        if request.awaited_load not in self._jobs or self._connection.session is None:
            return False
        since = request.sharing_since_s
        return since is not None and now - since < self._options.pending_deadline_s

    def _loader(self, request: Request, computed_tokens: int, found: int) -> int:
        """Another request's load of any block that this hit would load."""
        for group, spec in enumerate(self._groups):
            blocks = loaded_blocks(spec, computed_tokens, found)
            hashes = request.hashes[group][blocks.start : blocks.stop]
            job_id = self._jobs.loader(group, request.account, hashes)
            if job_id:
                return job_id
        return 0
