"""What vLLM's self-describing KV events say of a block, kept as long as there is more to say."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Any

from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.v1.kv_offload.base import OffloadingEvent, OffloadKey

from kvd_client.event_watch import MAX_GONE


class EventPayloads(OffloadingEventsTracker):
    """vLLM's record of such blocks, where the daemon evicts and a store may fail.

    vLLM keeps a block from its store or its lookup on, and drops it when it is removed. The
    daemon's removals come late, when the next store of the block may be under way. A store that
    fails is never followed by one, nor is the lookup of a block that another engine announced. And
    a block that was removed is said to be stored again when another engine stores it: what there is
    to say of the MAX_GONE last removed is kept for that.
    """

    def __init__(
        self, theirs: OffloadingEventsTracker, is_being_stored: Callable[[OffloadKey], bool]
    ) -> None:
        """In the place of the one that vLLM made, with all that its release gives it."""
        self.__dict__.update(theirs.__dict__)
        self._is_being_stored = is_being_stored
        self._gone: OrderedDict[OffloadKey, Any] = OrderedDict()  # of removed blocks, oldest first

    def record_lookup(self, *_lookup: Any) -> None:
        """Nothing: what there is to say of a block begins with this engine's store."""

    def record_partial_lookup(self, *_lookup: Any) -> None:
        """Nothing, likewise."""

    def _build_event_metadata(self, *block: Any) -> Any:
        made = super()._build_event_metadata(*block)
        made.active_residencies.clear()  # it lies in the daemon once that is announced
        return made

    def take_events(self, events: Iterable[OffloadingEvent]) -> Iterable[KVCacheEvent]:
        """VLLM's events. What is on its way is kept for its end."""
        events = list(events)
        named = [key for event in events for key in event.keys]
        known = self._pending_event_metadata
        for key in named:
            if (gone := self._gone.pop(key, None)) is not None:
                known.setdefault(key, gone)
        before = {key: known[key] for key in named if key in known}
        removed = [key for event in events if event.removed for key in event.keys]
        yield from super().take_events(events)
        known.update((key, each) for key, each in before.items() if self._is_being_stored(key))
        self.drop_unused(named)
        self._gone.update((k, before[k]) for k in removed if k in before and k not in known)
        while len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)

    def reset(self) -> None:
        """Drop all of it."""
        super().reset()
        self._gone.clear()

    def drop_unused(self, keys: Collection[OffloadKey]) -> None:
        """Forget those of these that lie nowhere and are not on their way."""
        for key in keys:
            payload = self._pending_event_metadata.get(key)
            if payload is None or payload.active_residencies or self._is_being_stored(key):
                continue
            del self._pending_event_metadata[key]
