"""For vLLM's KV events: what the daemon did with the blocks that this engine announced.

vLLM's manager says itself what it evicts. Here the daemon evicts, whenever any engine needs the
room, and writes to its tiers; its event stream tells.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import cast

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey

from kvd_client.event_watch import GROUP_BYTES, EventWatch
from kvd_client.session import DaemonSession
from kvd_client.tier_record import Key, News

MEDIA = {medium.value: medium for medium in Medium}
LOCALITIES = {locality.value: locality for locality in Locality}


class DeviceResets:
    """Whether vLLM has cleared the device's cache: no connector is told, and every router is.

    `AllBlocksCleared` names no medium, so routers forget what kvd holds as well.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._cached = pool.cached_block_hash_to_block  # a clear puts another one there

    def take(self) -> bool:
        """Whether it was cleared since the last call."""
        before, self._cached = self._cached, self._pool.cached_block_hash_to_block
        return self._cached is not before


class KvEvents:
    """Adds what the daemon did to vLLM's KV events; called once a step, never waits."""

    def __init__(
        self,
        socket_path: str,
        session: Callable[[], DaemonSession | None],
        vllm_groups: Sequence[int],
        *,
        with_tiers: bool = True,
    ) -> None:
        """`session` is the open one, if any; `vllm_groups[i]` is vLLM's number of group i."""
        self._session = session
        self._watch = EventWatch(socket_path, "kvd-client vllm events", with_tiers=with_tiers)
        ours, theirs = (
            [number.to_bytes(GROUP_BYTES, "big") for number in numbers]
            for numbers in (range(len(vllm_groups)), vllm_groups)
        )
        # Mostly the numbers are the same, and keys of both sides then are, too.
        self._ours = None if ours == theirs else dict(zip(theirs, ours, strict=True))
        self._theirs = None if ours == theirs else dict(zip(ours, theirs, strict=True))

    def pass_on(self, announced: Sequence[OffloadingEvent]) -> list[OffloadingEvent]:
        """What vLLM gets now: its own events, without what was said before, and what follows them.

        Whoever counts how often a block was stored would never see it removed else.
        """
        session = self._session()
        if session is not None:
            self._watch.follow(session.namespace_id, session.epoch)
        events = []
        for event in announced:
            if not event.removed:
                keys = _renumbered(event.keys, self._ours)
                earlier, fresh = self._watch.take_and_announce(keys)
                events += [self._event_of(news) for news in earlier]  # of copies before these
                if len(fresh) != len(event.keys):
                    event = replace(event, keys=self._in_vllms_numbers(fresh))  # noqa: PLW2901
            if event.keys:
                events.append(event)
        return events + [self._event_of(news) for news in self._watch.take()]

    def _event_of(self, news: News) -> OffloadingEvent:
        place = news.place
        return OffloadingEvent(
            self._in_vllms_numbers(news.keys),
            MEDIA.get(place.medium, Medium.STORAGE),
            news.removed,
            LOCALITIES.get(place.locality),
            place.tier or None,
            removal_expected=not news.removed,
        )

    def _in_vllms_numbers(self, keys: Collection[Key]) -> list[OffloadKey]:
        return [cast(OffloadKey, key) for key in _renumbered(keys, self._theirs)]

    def say_again(self) -> None:
        """VLLM has said that all is gone, and what was announced is still there."""
        self._watch.say_again()

    def forget(self) -> None:
        """The cache was reset: what was announced before is not there any more for anybody."""
        self._watch.forget()

    def close(self) -> None:
        """End the watching."""
        self._watch.close()


def _renumbered(keys: Collection[Key], numbers: dict[bytes, bytes] | None) -> Collection[Key]:
    """The keys with the other side's group numbers."""
    if numbers is None:
        return keys
    return [key[:-GROUP_BYTES] + numbers[key[-GROUP_BYTES:]] for key in keys]
