"""Where one rank meets kvd: its memory is registered, its half of every copy is done.

Without a socket nothing is offloaded.
"""

from __future__ import annotations

from typing import Any, Protocol

from examples.engine.kv_memory import KvMemory
from examples.engine.messages import RankStart


class RankOffload(Protocol):
    """What a rank does around each step."""

    def start_step(self, plan: Any, /) -> None: ...

    def finish_step(self, plan: Any, /) -> None: ...

    def report(self) -> Any: ...

    def close(self) -> None:
        """Returns once no copy can touch this rank's memory."""
        ...


class NoRankOffload:
    """A rank of an engine without a daemon."""

    def start_step(self, _plan: Any, /) -> None:
        pass

    def finish_step(self, _plan: Any, /) -> None:
        pass

    def report(self) -> Any:
        return None

    def close(self) -> None:
        pass


class KvdRank:
    """A rank whose KV memory kvd's mover maps."""

    def __init__(self, start: RankStart, kv: KvMemory) -> None:
        # Imported here: an engine on its own needs no gRPC.
        from kvd_client import EngineIdentity, Fragment, GroupLayout, SharedMemory, Worker

        config = start.config
        identity = EngineIdentity(config.engine_id, start.boot_nonce)
        self._worker = Worker(
            config.socket, identity, start.rank, config.ranks, shard=start.rank, writer=True
        )
        fragments = tuple(
            Fragment(memory=0, base=each.base, stride=each.stride, bytes=each.bytes)
            for each in kv.fragments
        )
        self._worker.register(
            [SharedMemory(kv.fd, 0, kv.bytes)], [GroupLayout(kv.num_blocks, fragments)]
        )

    def start_step(self, plan: Any) -> None:
        self._worker.start_step(plan)

    def finish_step(self, plan: Any) -> None:
        # On a CPU the forward has returned, so the blocks are computed.
        self._worker.finish_step(plan, None)

    def report(self) -> Any:
        return self._worker.get_finished()

    def close(self) -> None:
        self._worker.unregister()
        self._worker.close()


def open_rank_offload(start: RankStart, kv: KvMemory) -> RankOffload:
    """Register this rank's KV memory with the daemon, if one is configured."""
    return KvdRank(start, kv) if start.config.socket else NoRankOffload()
