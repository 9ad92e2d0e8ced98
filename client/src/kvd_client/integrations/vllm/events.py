"""Removals for vLLM's KV events: what the daemon evicted of the blocks this engine announced.

vLLM's manager says itself what it evicts. Here the daemon evicts, whenever any engine needs the
room, and its event stream tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

from vllm.v1.kv_offload.base import Medium, OffloadingEvent, OffloadKey

from kvd_client.event_watch import GROUP_BYTES, Key, RemovalWatch
from kvd_client.session import DaemonSession


class KvEventRemovals:
    """Adds removals to vLLM's KV events; called once a step, never waits."""

    def __init__(
        self,
        socket_path: str,
        session: Callable[[], DaemonSession | None],
        vllm_groups: Sequence[int],
    ) -> None:
        """`session` is the open one, if any; `vllm_groups[i]` is vLLM's number of group i."""
        self._session = session
        self._watch = RemovalWatch(socket_path, "kvd-client vllm events")
        ours, theirs = (
            [number.to_bytes(GROUP_BYTES, "big") for number in numbers]
            for numbers in (range(len(vllm_groups)), vllm_groups)
        )
        # Mostly the numbers are the same, and keys of both sides then are, too.
        self._ours = None if ours == theirs else dict(zip(theirs, ours, strict=True))
        self._theirs = None if ours == theirs else dict(zip(ours, theirs, strict=True))

    def pass_on(self, announced: Sequence[OffloadingEvent]) -> list[OffloadingEvent]:
        """Take note of the events that vLLM gets now; the removals that follow them."""
        session = self._session()
        if session is not None:
            self._watch.follow(session.namespace_id, session.epoch)
        for event in announced:
            if not event.removed:
                self._watch.announce(_renumbered(event.keys, self._ours))
        removed = self._watch.take()
        if not removed:
            return []
        keys = [cast(OffloadKey, key) for key in _renumbered(removed, self._theirs)]
        return [OffloadingEvent(keys, Medium.CPU, removed=True)]

    def forget(self) -> None:
        """The cache was reset: what was announced before is not there any more for anybody."""
        self._watch.forget()

    def close(self) -> None:
        """End the watching."""
        self._watch.close()


def _renumbered(keys: Iterable[Key], numbers: dict[bytes, bytes] | None) -> Iterable[Key]:
    """The keys with the other side's group numbers."""
    if numbers is None:
        return keys
    return [key[:-GROUP_BYTES] + numbers[key[-GROUP_BYTES:]] for key in keys]
