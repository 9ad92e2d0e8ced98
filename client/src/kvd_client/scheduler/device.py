"""Lazy mode: which computed blocks still lie on the device, to be stored when they must go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvd_client.identity import Group
from kvd_client.scheduler.offers import BlockOffer
from kvd_client.scheduler.request import Request

MAX_OFFERS_PER_STEP = 64


class DeviceBlocks:
    """Which kvd blocks the device holds, and in which engine blocks.

    Bounded by the device's blocks: each engine block belongs to at most one kvd block.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._widths = [group.blocks_per_block for group in groups]
        self._offers: dict[tuple[int, int], BlockOffer] = {}
        self._near: dict[int, BlockOffer] = {}  # listed by the last step, by id

    def note(self, offers: Iterable[BlockOffer]) -> None:
        """These blocks are computed. They are the device's until `overwritten` says otherwise."""
        for offer in offers:
            width = self._widths[offer.group]
            for place, block_hash in enumerate(offer.block_hashes):
                blocks = tuple(offer.engine_blocks[place * width : (place + 1) * width])
                single = _single(offer.request, offer, place, block_hash, blocks)
                for block in blocks:
                    self._offers[offer.group, block] = single

    def overwritten(self, group: int, engine_blocks: Iterable[int]) -> None:
        """Other tokens come into these engine blocks."""
        if not self._offers:
            return
        for block in engine_blocks:
            offer = self._offers.get((group, block))
            if offer is not None:
                for sibling in offer.engine_blocks:
                    self._offers.pop((group, sibling), None)

    def near_eviction(self, blocks: Iterable[tuple[int, int]]) -> list[BlockOffer]:
        """What to store now, of the (group, engine block) that the device will evict soon.

        A block that was dealt with comes again only after it has not been listed for a step:
        then it was in use once more, and the daemon may have let go of it meanwhile.
        """
        chosen: dict[int, BlockOffer] = {}
        listed: dict[int, BlockOffer] = {}
        for place in blocks:
            offer = self._offers.get(place)
            if offer is None:
                continue
            listed[id(offer)] = offer
            if id(offer) not in self._near:
                offer.is_dealt_with = False
            if not offer.is_dealt_with:
                chosen[id(offer)] = offer
                if len(chosen) >= MAX_OFFERS_PER_STEP:
                    break
        self._near = listed
        return list(chosen.values())

    def clear(self) -> None:
        self._offers.clear()
        self._near.clear()


def _single(
    request: Request, offer: BlockOffer, place: int, block_hash: bytes, blocks: tuple[int, ...]
) -> BlockOffer:
    return BlockOffer(
        request,
        offer.group,
        offer.first_block + place,
        (block_hash,),
        blocks,
        computed=True,
        advances=False,
    )
