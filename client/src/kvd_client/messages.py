"""A step's messages: one, or as many as the protocol's limits for one message ask for.

A message that breaks a limit is refused whole. An engine may decide more in one step than a
message holds (an offline batch of a thousand short hits), so what it decides is dealt out here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvd_client.draft import BlockRun, LookupCounts, StepDraft
from kvd_proto.limits import MAX_IDS, MAX_KEYS_PER_MESSAGE, MAX_PARTS_PER_STEP
from kvd_proto.v1 import common_pb2

MAX_CONTEXT_BYTES = 1 << 20  # of a message, which may have 4 MiB together with its keys
FEW_PARTS = 32  # the contexts of so many can't take more, at 32 KiB and some for each


def messages_of(step: StepDraft) -> list[StepDraft]:
    """The step in messages that keep to the limits, to be sent in this order.

    What has ended and what needs no lease any more comes last, after the loads that turn those
    leases into pins. A single part that is too large by itself has a message to itself.
    """
    if _is_small(step):
        return [step]
    if any(each.prompt for each in step.lookups.told):
        told, step = StepDraft(lookups=step.lookups, ends_step=False), replace(step)
        step.lookups = LookupCounts()
        return [told, *messages_of(step)]
    dealer = _Dealer()
    for context, run in step.touches:
        dealer.room_for(context, [run], "touches").touches.append((context, run))
    for load in step.loads:
        dealer.room_for(load.context, load.runs, "loads").loads.append(load)
    for store in step.stores:
        dealer.room_for(store.context, store.runs, "stores").stores.append(store)
    for hand_off in step.hand_offs:
        draft = dealer.room_for(hand_off.context, hand_off.runs, "hand_offs")
        draft.hand_offs.append(hand_off)
    made = dealer.made
    for number, ends in enumerate(_ends_of(step)):
        if number:
            made.append(StepDraft())
        made[-1].take_ends(ends)
    made[-1].lookups = step.lookups
    for draft in made:
        draft.ends_step = draft is made[-1]
    return made


def _is_small(step: StepDraft) -> bool:
    contexts = step.contexts()
    if len(contexts) > MAX_PARTS_PER_STEP or _longest(step) > MAX_IDS:
        return False
    if len(contexts) > FEW_PARTS and sum(each.ByteSize() for each in contexts) > MAX_CONTEXT_BYTES:
        return False
    if any(each.prompt for each in step.lookups.told) and step.has_orders:
        return False
    return step.count_keys() <= MAX_KEYS_PER_MESSAGE


class _Dealer:
    """Fills one message after the other."""

    def __init__(self) -> None:
        self.made = [StepDraft()]
        self._keys = 0
        self._context_bytes = 0

    def room_for(
        self, context: common_pb2.ReqContext, runs: Sequence[BlockRun], kind: str
    ) -> StepDraft:
        """The message that takes a part with this context and these runs."""
        keys, size = sum(len(run.block_hashes) for run in runs), context.ByteSize()
        has_room = (
            self._keys + keys <= MAX_KEYS_PER_MESSAGE
            and self._context_bytes + size <= MAX_CONTEXT_BYTES
            and len(getattr(self.made[-1], kind)) < MAX_PARTS_PER_STEP
        )
        if self._keys and not has_room:
            self.made.append(StepDraft())
            self._keys = self._context_bytes = 0
        self._keys += keys
        self._context_bytes += size
        return self.made[-1]


def _longest(step: StepDraft) -> int:
    return max(len(step.released_leases), len(step.preempted), len(step.finished))


def _ends_of(step: StepDraft) -> Iterator[StepDraft]:
    """The step's lists of ids, as many of each as a message takes at a time; once at least."""
    for start in range(0, max(1, _longest(step)), MAX_IDS):
        part = slice(start, start + MAX_IDS)
        yield StepDraft(
            released_leases=step.released_leases[part],
            preempted=step.preempted[part],
            finished=step.finished[part],
        )
