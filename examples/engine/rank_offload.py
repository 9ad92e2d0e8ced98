"""Where one rank meets kvd: its memory is registered, its half of every copy is done.

Without a socket nothing is offloaded.
"""

from __future__ import annotations

from typing import Any, Protocol

from examples.engine.kv_memory import KvMemory
from examples.engine.messages import RankStart


class RankOffload(Protocol):
    """What a rank does around each step."""

    def start_step(self, plan: Any) -> None: ...

    def finish_step(self, plan: Any) -> None: ...

    def report(self) -> Any: ...

    def close(self) -> None:
        """Returns once no copy can touch this rank's memory."""
        ...


class NoRankOffload:
    """A rank of an engine without a daemon."""

    def start_step(self, plan: Any) -> None:
        pass

    def finish_step(self, plan: Any) -> None:
        pass

    def report(self) -> Any:
        return None

    def close(self) -> None:
        pass


def open_rank_offload(start: RankStart, kv: KvMemory) -> RankOffload:
    """Register this rank's KV memory with the daemon, if there is one."""
    return NoRankOffload()
