"""What a store or a load asks for: checked, merged by group, and compared with the index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvd.core.blocks.reading import check_keys, locate
from kvd.core.errors import InvalidArgument
from kvd.core.events import Run
from kvd.core.keys import U32, U64, Bools, Slots
from kvd.core.model.job import Offer
from kvd.core.model.state import Session, State
from kvd_proto.groups import GroupKind
from kvd_proto.layout import NULL_ENGINE_BLOCK


def read_offers(state: State, session: Session, account: str, runs: Sequence[Run]) -> list[Offer]:
    """One offer a group, in the order of the groups' first runs.

    Raises InvalidArgument where a run can't be meant, whatever the state.
    """
    check_runs(state, session, runs)
    by_group: dict[int, list[Run]] = {}
    for run in runs:
        if len(run.keys):
            by_group.setdefault(run.group, []).append(run)
    return [_read_group(state, session, account, same) for same in by_group.values()]


def read_storable(
    state: State, session: Session, account: str, runs: Sequence[Run]
) -> tuple[list[Offer], int]:
    """Offers without repeated keys and without blocks that are not whole; how many are not.

    A null engine block would put zeros under a real key, and whoever loads that block may want
    just this part of it. Of a recurrent group's block only the last state is ever loaded.
    """
    offers = read_offers(state, session, account, runs)
    whole = [_only(offer, whole_rows(offer)) for offer in offers]
    broken = sum(len(offer.tags) for offer in offers) - sum(len(offer.tags) for offer in whole)
    return [_once_each(offer) for offer in whole], broken


def check_loaded_places(state: State, session: Session, runs: Sequence[Run]) -> None:
    """Raise InvalidArgument where a load wants more of a recurrent block than its last state."""
    classes = state.namespace_of(session).classes
    for run in runs:
        if classes[run.group].spec.kind is not GroupKind.RECURRENT_STATE:
            continue
        if (run.engine_blocks[:, :-1] != NULL_ENGINE_BLOCK).any():
            raise InvalidArgument(
                "a recurrent group's blocks keep their last state: all but the last engine block"
                " of a row must be null (0xFFFFFFFF) in a load",
                "engine_blocks",
            )


def check_runs(state: State, session: Session, runs: Sequence[Run]) -> None:
    """Raise InvalidArgument where a run can't be meant."""
    owners = check_keys(state, session, [(run.group, run.keys) for run in runs])
    for run, owner in zip(runs, owners, strict=True):
        shape = (len(run.keys), owner.spec.blocks_per_block)
        if run.engine_blocks.shape != shape:
            raise InvalidArgument(
                f"engine blocks of shape {run.engine_blocks.shape}, must be {shape}",
                "engine_blocks",
            )
        known = session.engine_blocks(run.group)
        if run.engine_blocks.max(initial=0) < known:
            continue
        real = run.engine_blocks[run.engine_blocks != NULL_ENGINE_BLOCK]
        if len(real) and int(real.max()) >= known:
            raise InvalidArgument(
                f"engine block {int(real.max())} of group {run.group}, which has {known} as its"
                " ranks registered it: ids are below that",
                "engine_blocks",
            )


def _read_group(state: State, session: Session, account: str, runs: list[Run]) -> Offer:
    group = runs[0].group
    words, engine_blocks, blocks = joined(runs)
    scope, tags, slots = locate(state, session, account, group, words)
    owner = state.namespace_of(session).classes[group]
    return Offer(owner, scope, words, tags, engine_blocks, blocks, slots)


def joined(runs: Sequence[Run]) -> tuple[U64, U32, Slots]:
    """Words of the keys, engine blocks, and places in the prompt, of runs of one group."""
    if len(runs) == 1:
        words, engine_blocks = runs[0].keys.words, runs[0].engine_blocks
        blocks = np.arange(runs[0].first_block, runs[0].first_block + len(words))
    else:
        blocks = np.concatenate([run.first_block + np.arange(len(run.keys)) for run in runs])
        words = np.concatenate([run.keys.words for run in runs])
        engine_blocks = np.concatenate([run.engine_blocks for run in runs])
    return words, engine_blocks, blocks


def _only(offer: Offer, whole: Bools) -> Offer:
    return offer if np.count_nonzero(whole) == len(whole) else offer.rows(whole.nonzero()[0])


def _once_each(offer: Offer) -> Offer:
    ordered = np.sort(offer.tags)
    if not np.count_nonzero(ordered[1:] == ordered[:-1]):
        return offer
    unique, first = np.unique(offer.tags, return_index=True)
    if len(unique) < len(np.unique(offer.words, axis=0)):  # two keys share a tag
        _, first = np.unique(offer.words, axis=0, return_index=True)
    return offer.rows(np.sort(first))


def whole_rows(offer: Offer) -> Bools:
    """Which of the blocks the engine has all of; of a recurrent group's, the last state."""
    given = offer.engine_blocks != NULL_ENGINE_BLOCK
    keeps_last = offer.size_class.spec.kind is GroupKind.RECURRENT_STATE
    return np.asarray(given[:, -1] if keeps_last or given.shape[1] == 1 else given.all(axis=1))
