"""Transfers: started rank by rank, finished in any order, and what their end does to a job."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvd.core.actions import (
    EndJob,
    PostBoard,
    RevokeTransfer,
    StartTransfer,
    TransferPart,
)
from kvd.core.blocks import namespaces, slot_lifecycle
from kvd.core.claims import damage, hand_off
from kvd.core.errors import (
    ABANDONED,
    CHECKSUM_MISMATCH,
    COPY_FAILED,
    MOVER_GONE,
    QUEUE_FULL,
    RESET,
)
from kvd.core.events import JobKind, JobStatus, TransferFinished, TransferOutcome
from kvd.core.keys import U32, TransferId
from kvd.core.model.backlog import CallOff
from kvd.core.model.gone import Fate, WhyGone
from kvd.core.model.job import Job, JobShare, JobState, Part, Piece, Transfer, TransferStage
from kvd.core.model.state import Mover, MoverState, Session, State
from kvd.core.model.turn import Turn
from kvd.core.tiers import writing
from kvd_proto.layout import NULL_ENGINE_BLOCK

# With these a copy broke; else it was called off, as at an engine's end or a reset. Whoever has a
# mover end has failed its pieces before.
_BROKE = frozenset({COPY_FAILED, CHECKSUM_MISMATCH, MOVER_GONE})


def start_piece(turn: Turn, job: Job, parts: tuple[Part, ...]) -> None:
    """Start a piece that is this job's alone."""
    start_shared(turn, (JobShare(job, sum(len(part.slots) for part in parts)),), parts)


def start_shared(turn: Turn, shares: tuple[JobShare, ...], parts: tuple[Part, ...]) -> None:
    """Pin the parts' blocks and start one transfer for each rank that copies."""
    state = turn.state
    piece = Piece(shares=shares, parts=parts)
    session, kind = state.sessions[piece.session], piece.kind
    store = kind is JobKind.STORE
    if store:
        state.add_filling(piece)
    for share in shares:
        share.job.pieces += 1
        share.job.pieces_begun += 1
    jobs = tuple(share.job.job for share in shares)
    orders = tuple(
        TransferPart(part.size_class.group, part.slots, part.engine_blocks) for part in parts
    )
    if store:
        for part in parts:
            mark_busy(session, part.size_class.group, part.engine_blocks, +1)
    for mover in ranks(session):
        if store and not mover.writer:
            continue
        transfer = Transfer(TransferId(state.next_transfer), mover.mover, piece, turn.now_ns)
        state.next_transfer += 1
        state.transfers[transfer.transfer] = state.in_time[transfer.transfer] = transfer
        mover.transfers[transfer.transfer] = transfer
        piece.transfers[transfer.transfer] = transfer
        for part in parts:
            slot_lifecycle.pin(state, part.size_class, part.pinned)
        turn.orders.append(StartTransfer(mover.mover, transfer.transfer, jobs, kind, orders))
    for part in parts:
        state.count_in_flight(part.scopes, +1)


def ranks(session: Session) -> list[Mover]:
    return [session.movers[rank] for rank in sorted(session.movers)]


def mark_busy(session: Session, group: int, engine_blocks: U32, step: int) -> None:
    """Count these engine blocks in or out of the session's blocks whose copy is in flight."""
    blocks = engine_blocks.ravel()
    highest = int(blocks.max(initial=0))
    if highest == NULL_ENGINE_BLOCK:
        blocks = blocks[blocks != NULL_ENGINE_BLOCK]
        highest = int(blocks.max(initial=0))
    if not len(blocks):
        return
    counts = session.busy.get(group)
    if counts is None or highest >= len(counts):
        larger = np.zeros(max(highest + 1, session.map_size(group)), dtype=np.int16)
        if counts is not None:
            larger[: len(counts)] = counts
        counts = session.busy[group] = larger
    np.add.at(counts, blocks, np.int16(step))  # of another type it takes twenty times as long


def transfer_finished(turn: Turn, event: TransferFinished) -> None:
    """A copy has ended, or never will start. Unknown ones were given up with their mover."""
    state = turn.state
    transfer = state.transfers.get(event.transfer)
    mover = state.movers.get(event.mover)
    if transfer is None or transfer.mover != event.mover or mover is None:
        return
    piece = transfer.piece
    done = event.outcome is TransferOutcome.DONE
    given_up = event.outcome is TransferOutcome.ABANDONED
    reason = transfer.reason or (ABANDONED if given_up else COPY_FAILED)
    if event.damaged:
        reason = CHECKSUM_MISMATCH
        damaged = np.array(event.damaged, dtype=np.int64)
        for part in piece.parts:
            damage.remove(turn, part, damaged)
    if event.outcome is TransferOutcome.REVOKED and transfer.state is TransferStage.WANTED:
        reason = event.reason or QUEUE_FULL  # the mover never took it
        if piece.kind is JobKind.LOAD:
            for share in piece.shares:
                failed = (share.job.job, JobKind.LOAD, JobStatus.FAILED)
                turn.orders.append(PostBoard(transfer.mover, *failed, 0, 0))
    if done:
        _count_copied(transfer, event)
    if not mover.is_serving:
        done, reason = False, MOVER_GONE  # perhaps its failing still waits in the backlog
    end_transfer(turn, transfer, "" if done else reason)


def _count_copied(transfer: Transfer, event: TransferFinished) -> None:
    """To each of its jobs what it has of the bytes, and of the time that they took."""
    piece, mover = transfer.piece, transfer.mover
    copied, spent = piece.divide(event.bytes_copied), piece.divide(event.duration_ns)
    for share, some, time_ns in zip(piece.shares, copied, spent, strict=True):
        job = share.job
        job.bytes_by_mover[mover] = job.bytes_by_mover.get(mover, 0) + some
        job.duration_ns[mover] = job.duration_ns.get(mover, 0) + time_ns


def mover_gone(turn: Turn, mover: Mover) -> None:
    """No copy of this mover runs any more: all that it still had has failed, or soon will have."""
    state = turn.state
    session = state.sessions[mover.session]
    mover.move(MoverState.GONE)
    del state.movers[mover.mover]
    del session.movers[mover.rank]
    running = list(mover.transfers.values())
    for transfer in state.backlog.call_off(running, CallOff.END, MOVER_GONE):
        end_transfer(turn, transfer, MOVER_GONE)


def call_off(turn: Turn, transfer: Transfer, how: CallOff, reason: str) -> None:
    """What was put off with a transfer that still stands."""
    match how:
        case CallOff.REVOKE:
            revoke(turn, [transfer], reason)
        case CallOff.FAIL:
            fail_running(turn, transfer, reason)
        case CallOff.END:
            end_transfer(turn, transfer, reason)


def fail_running(turn: Turn, transfer: Transfer, reason: str) -> None:
    """What it copies is of no use, though the copy may run on."""
    if transfer.piece.kind is JobKind.STORE:
        fail_piece(turn, transfer.piece, reason)
    else:
        fail_jobs(transfer.piece, reason)
        transfer.piece.failed = True


def end_those_of_gone_movers(turn: Turn, session: Session) -> None:
    """Nothing of the session's former movers waits any more: another may come in their place."""
    state = turn.state
    for item in [each for each in state.backlog.transfers if each.how is CallOff.END]:
        for waiting in item.transfers:
            running = state.transfers.get(waiting.transfer)
            if running is waiting and running.piece.session == session.session:
                end_transfer(turn, running, item.reason)


def end_transfer(turn: Turn, transfer: Transfer, failure: str) -> None:
    """Take the transfer's pins away; with its last one a piece is readable, or given up."""
    state, piece = turn.state, transfer.piece
    transfer.end()
    del state.transfers[transfer.transfer]
    state.in_time.pop(transfer.transfer, None)
    state.late.pop(transfer.transfer, None)
    del piece.transfers[transfer.transfer]
    mover = state.movers.get(transfer.mover)
    if mover is not None:
        del mover.transfers[transfer.transfer]
    if not failure and piece.kind is JobKind.STORE and _is_cleared(state, piece):
        failure = RESET
    if failure in _BROKE and not piece.failed:
        state.counters.failed += sum(len(part.slots) for part in piece.parts)
    if failure:
        fail_piece(turn, piece, failure)
    for part in piece.parts:
        slot_lifecycle.unpin(state, part.size_class, part.pinned)
    if not piece.transfers:
        _end_piece(turn, piece)


def _end_piece(turn: Turn, piece: Piece) -> None:
    """No rank copies for it any more: its jobs have come so much further."""
    state, is_store = turn.state, piece.kind is JobKind.STORE
    for part in piece.parts:
        state.count_in_flight(part.scopes, -1)
    if is_store:
        del state.fillings[piece.number]
        session = state.sessions[piece.session]
        for part in piece.parts:
            mark_busy(session, part.size_class.group, part.engine_blocks, -1)
    if not piece.failed:
        if is_store:
            _stored(turn, piece)
        else:
            _loaded(state, piece)
    for share in piece.shares:
        share.job.blocks += 0 if piece.failed else share.blocks
        share.job.pieces -= 1
        end_job_when_done(turn, share.job)


def _stored(turn: Turn, piece: Piece) -> None:
    state = turn.state
    for part in piece.parts:
        state.counters.stored += len(part.slots)
        slot_lifecycle.make_ready(turn, part.size_class, part.slots)
        if state.below.tiers:
            writing.stored(turn, part.size_class, part.slots)
    state.released.extend(piece.end_waits(done=True))


def _loaded(state: State, piece: Piece) -> None:
    for part in piece.parts:
        state.counters.loaded += len(part.slots)
        hand_off.loaded(state, piece.session, part.size_class, part.pinned)


def _is_cleared(state: State, piece: Piece) -> bool:
    """Whether the piece's namespace was cleared since it was admitted."""
    part = piece.parts[0]
    return namespaces.is_cleared(state, part.size_class.namespace, part.scope)


def fail_piece(turn: Turn, piece: Piece, reason: str) -> None:
    """The piece's blocks will not be readable by it; a store's other ranks are called off."""
    state = turn.state
    if piece.failed:
        return
    piece.failed = True
    fail_jobs(piece, reason)
    if piece.kind is not JobKind.STORE:
        return
    for part in piece.parts:
        hand_off.blocks_lost(state, part.size_class, part.slots)
        tags, why = state.slots.tags[part.slots], WhyGone(Fate.FAILED, reason)
        slot_lifecycle.note_gone(turn, part.size_class, part.slots, tags, why)
        slot_lifecycle.quarantine_reserved(state, part.size_class, part.slots)
    state.released.extend(piece.end_waits(done=False))
    revoke(turn, piece.transfers.values(), reason)


def fail_jobs(piece: Piece, reason: str) -> None:
    """Every job of the piece will end as failed."""
    for share in piece.shares:
        fail_job(share.job, reason)


def fail_job(job: Job, reason: str) -> None:
    """The job will end as failed; the first reason stands."""
    job.will_end_as(JobStatus.FAILED, reason)


def revoke(turn: Turn, transfers: Iterable[Transfer], reason: str) -> None:
    """Ask the movers to give up what they have not started; asked once."""
    for transfer in transfers:
        mover = turn.state.movers.get(transfer.mover)
        if transfer.state is not TransferStage.WANTED or mover is None:
            continue
        transfer.call_off(reason)
        if mover.is_serving:
            turn.orders.append(RevokeTransfer(transfer.mover, transfer.transfer))


def end_job_when_done(turn: Turn, job: Job) -> None:
    """Tell everybody once nothing of the job is open, running or followed."""
    state = turn.state
    if job.is_open or job.pieces or job.followed:
        return
    job.move(JobState.ENDED)
    session = state.sessions[job.session]
    del session.jobs[job.job]
    if job.left and job.status is JobStatus.DONE:
        job.will_end_as(JobStatus.PARTIAL)
    copied = sum(job.bytes_by_mover.values())
    if job.kind is JobKind.LOAD:
        state.counters.load_bytes += copied
    else:
        state.counters.store_bytes += copied
    if job.kind is JobKind.STORE or not job.pieces_begun:
        _post_boards(turn, session, job)
    if job.reason:
        refused = state.counters.refused
        refused[job.reason] = refused.get(job.reason, 0) + 1
    left = job.left if job.status is JobStatus.PARTIAL else 0
    turn.orders.append(
        EndJob(job.session, job.job, job.kind, job.status, job.reason, job.blocks, copied, left)
    )


def _post_boards(turn: Turn, session: Session, job: Job) -> None:
    for mover in ranks(session):
        if mover.is_serving:
            copied = job.bytes_by_mover.get(mover.mover, 0)
            spent = job.duration_ns.get(mover.mover, 0)
            turn.orders.append(PostBoard(mover.mover, job.job, job.kind, job.status, copied, spent))
