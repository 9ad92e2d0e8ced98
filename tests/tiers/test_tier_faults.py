"""A tier's process with a store that breaks its promises, or that itself is killed, stopped or fed
nonsense. Control is never late, and no slot is written to after its copy was said to have ended."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from kvd.core.keys import RowId
from kvd.processes import parent
from kvd.processes.complaints import MAX_COMPLAINTS
from kvd.tiers import process as module
from kvd.tiers.kinds import OPEN_DISK
from kvd.tiers.process import (
    OrderEnd,
    OrderId,
    ProcessReason,
    QueueBounds,
    TierId,
    TierProcess,
    TierRefused,
    TierStartError,
)
from kvd.tiers.store import Outcome, TierOptions, TierReason
from tests.tiers.tier_rig import (
    BAD,
    PATIENCE_S,
    TierRig,
    keys,
    on_loop,
    owed,
    placed,
    proc_text,
    soon,
    tier_rig,
    until,
)

DONE, MISSING = Outcome.DONE, Outcome.MISSING
DEADLINE_S = 0.3
BEGUN_S = 2.0  # a deadline before which even a starved process has begun
NOT_LATER_S = 2.0  # and what it may be late for want of a processor


async def still_serves(r: TierRig, tier: TierProcess) -> None:
    """The process answers what a MemoryStore can answer."""
    order = r.next_order()
    assert tier.exists(order, keys(1), soon())
    assert (await r.sink.answer(order)).end is OrderEnd.ANSWERED


async def unchanged_for(seconds: float, r: TierRig, slot: int) -> None:
    """Nobody writes to a slot any more."""
    before = r.content(slot)
    await asyncio.sleep(seconds)
    unchanged = r.content(slot) == before  # said apart: a difference of bytes is long
    assert unchanged


# -- starts that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("store", "field", "said"),
    [
        ("tests.tiers.nowhere:Store", "store", "No module named"),
        ("tests.tiers.memory_store:Nothing", "store", "Nothing"),
        (BAD + "can_not_be_opened", "options", "place is '/nowhere': there is no such directory"),
        (BAD + "raises_in_opening", "options", "ZeroDivisionError"),
    ],
)
@on_loop
async def test_a_store_that_can_not_be_opened_is_refused_by_its_field(
    store: str, field: str, said: str
) -> None:
    async with tier_rig() as r:
        with pytest.raises(TierRefused, match=said) as refused:
            await r.start(store, place="/nowhere")
        assert (refused.value.field, refused.value.reason) == (field, TierReason.UNUSABLE)
        assert not r.sink.living
        assert not r.sink.gone


@pytest.mark.parametrize("when", ["opening", "opened"])
@on_loop
async def test_a_process_that_finds_no_threads_says_which_limit(
    when: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with tier_rig() as r:
        with pytest.raises(TierStartError, match=r"it has no threads: there are as many .* raise"):
            await r.start(BAD + "finds_no_threads", when=when)
        assert "Traceback" not in capfd.readouterr().err
        assert not r.sink.living


@on_loop
async def test_a_store_that_hangs_or_ends_while_it_opens_is_a_start_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with tier_rig() as r:
        with pytest.raises(TierStartError, match="exited with status 7"):
            await r.start(BAD + "ends_in_opening")
        monkeypatch.setattr(module, "START_S", 0.5)
        with pytest.raises(TierStartError, match=r"no word .* in 0\.5 s"):
            await r.start(BAD + "hangs_in_opening")
        assert not r.sink.living
        assert not r.sink.gone


@on_loop
async def test_a_disk_has_longer_than_others_to_read_its_index(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "START_S", 0.0)
    async with tier_rig() as r:
        with pytest.raises(TierStartError, match="no word"):
            await r.start()
        options: TierOptions = {"directories": str(tmp_path), "directory_bytes": "64MiB"}
        config = replace(r.config(OPEN_DISK), options=options)
        r.processes.append(await TierProcess.start(config, r.sink))


@on_loop
async def test_a_process_that_can_not_be_noted_ends_before_it_opens_anything() -> None:
    async with tier_rig() as r:
        started: list[int] = []

        def full(tier: TierId, pid: int, start_time: int) -> None:
            started.append(pid)
            r.sink.living.add(pid)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        r.sink.process_started = full  # type: ignore[method-assign]
        with pytest.raises(TierStartError, match="No space left"):
            await r.start()
        [pid] = started
        assert not proc_text(pid, "stat")
        r.sink.living.clear()


# -- stores that break their promises -------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("tier", TierReason.UNREACHABLE),
        ("odd", ProcessReason.STORE_RAISED),
        ("value", ProcessReason.STORE_RAISED),
        ("assertion", ProcessReason.STORE_RAISED),
        ("memory", ProcessReason.STORE_RAISED),
        ("exit", ProcessReason.STORE_RAISED),
    ],
)
@on_loop
async def test_what_a_store_raises_fails_its_orders_and_nothing_else(
    what: str, reason: str
) -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + "Raises", what=what, concurrency=2)
        for _ in range(3):  # more than there are threads
            first = r.next_order()
            tier.read(first, placed([1, 2], [1, 2]), soon())
            tier.write(r.next_order(), placed([1, 2], [1, 2]), soon())
            tier.exists(r.next_order(), keys(1), soon())
            tier.delete_scopes(r.next_order(), [bytes(32)], soon())
            for order in range(first, first + 4):
                answer = await r.sink.answer(order)
                assert (answer.end, answer.reason) == (OrderEnd.FAILED, reason)
                assert answer.bytes_copied == 0
        assert not r.sink.gone
        assert not r.sink.usages


@on_loop
async def test_what_a_store_can_not_delete_yet_is_said_once_however_often_it_is_asked(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + "Raises", what="tier")
        for _ in range(3):
            order = r.next_order()
            assert tier.delete_scopes(order, (b"s" * 32,), soon())
            assert (await r.sink.answer(order)).end is OrderEnd.FAILED
        order = r.next_order()
        assert tier.exists(order, keys(1), soon())
        assert (await r.sink.answer(order)).end is OrderEnd.FAILED
    said = capfd.readouterr().err
    assert said.count("DELETE_SCOPES of 1: nobody answers") == 1
    assert "EXISTS of 1: nobody answers" in said


@on_loop
async def test_many_questions_that_fail_alike_leave_room_in_the_log_for_other_lines(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + "Raises", what="tier", concurrency=1)
        for _ in range(MAX_COMPLAINTS + 10):
            assert tier.exists(r.next_order(), keys(1), soon())
        await r.sink.answer(MAX_COMPLAINTS + 10)
        order = r.next_order()
        assert tier.read(order, placed([1], [1]), soon())
        await r.sink.answer(order)
    said = capfd.readouterr().err
    assert "READ of 1: nobody answers" in said
    assert said.count("EXISTS of 1: nobody answers") == 1


@pytest.mark.parametrize(
    "lie", ["fewer", "more", "none", "impossible", "negative", "words", "a number"]
)
@on_loop
async def test_lies_of_a_store_are_taken_for_nothing(lie: str) -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + "Lies", lie=lie)
        tier.read(r.next_order(), placed([1, 2], [1, 2]), soon())
        tier.write(r.next_order(), placed([1, 2], [1, 2]), soon())
        tier.exists(r.next_order(), keys(1, 2), soon())
        for order in (1, 2, 3):
            answer = await r.sink.answer(order)
            assert (answer.end, answer.reason) == (OrderEnd.FAILED, ProcessReason.STORE_LIED)
            assert answer.bytes_copied == 0
        tier.delete_scopes(r.next_order(), [bytes(32)], soon())
        assert (await r.sink.answer(4)).end is OrderEnd.ANSWERED


@on_loop
async def test_an_outcome_of_the_other_direction_is_a_lie() -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + "WrongWay")
        tier.read(r.next_order(), placed([1], [1]), soon())
        tier.write(r.next_order(), placed([1], [1]), soon())
        for order in (1, 2):
            assert (await r.sink.answer(order)).reason == ProcessReason.STORE_LIED


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exit", "exited with status 0"),
        ("segfault", "killed by SIGSEGV"),
        ("kill", "killed by SIGKILL, perhaps for want of memory"),
    ],
)
@on_loop
async def test_a_store_that_takes_its_process_along_ends_its_copies(how: str, said: str) -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + "Dies", how=how)
        tier.write(r.next_order(), placed([1], [1]), soon())
        assert await r.sink.outcomes(1) == [DONE]
        tier.read(r.next_order(), placed([1], [2]), soon())
        tier.read(r.next_order(), placed([1], [3]), soon())
        await r.sink.until(lambda: r.sink.gone)
        assert r.sink.gone == [said]
        for order in (2, 3):
            answer = r.sink.answers[order]
            assert (answer.end, answer.reason) == (OrderEnd.FAILED, ProcessReason.TIER_GONE)


@pytest.mark.parametrize("how", ["block", "slice", "array", "ctypes", "thread"])
@on_loop
async def test_a_store_that_keeps_memory_after_its_call_costs_its_process(how: str) -> None:
    """The answer would free the slot, and the store could still write to it."""
    async with tier_rig() as r:
        tier = await r.start(BAD + "KeepsMemory", how=how)
        tier.write(r.next_order(), placed([1], [1]), soon())
        await r.sink.answer(1)
        tier.read(r.next_order(), placed([1], [2]), soon())
        await r.sink.until(lambda: r.sink.gone)
        assert r.sink.gone == ["its store kept hold of memory after a call had returned"]
        assert r.sink.answers[2].reason == ProcessReason.TIER_GONE
        await unchanged_for(0.2, r, 2)


@on_loop
async def test_what_a_store_forks_maps_no_extent_and_hides_no_end() -> None:
    """It holds the socket too, so that control can't go by end-of-file alone."""
    async with tier_rig() as r:
        tier = await r.start(BAD + "Forks")
        tier.write(r.next_order(), placed([1], [1]), soon())
        assert await r.sink.outcomes(1) == [DONE]
        [sign] = r.signs.iterdir()
        forked = int(sign.name.removeprefix("forked-"))
        try:
            extent = str(r.files.path(0))
            assert extent in proc_text(tier.pid, "maps")
            assert extent not in proc_text(forked, "maps")
            began = time.monotonic()
            os.kill(tier.pid, signal.SIGKILL)
            await r.sink.until(lambda: r.sink.gone)
            assert time.monotonic() - began < 3.0
            assert proc_text(forked, "stat"), "the test proves nothing"
        finally:
            os.kill(forked, signal.SIGKILL)


@pytest.mark.parametrize("written", [False, True])
@on_loop
async def test_a_last_word_counts_though_the_process_had_ended_before_it_was_read(
    monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    """Also where control writes to it before that, which fails and closes the transport."""
    monkeypatch.setattr(parent, "_LAST_WORDS_S", PATIENCE_S)
    for pause in ("USAGE_S", "LEFT_S"):  # what control asks is a write, too
        monkeypatch.setattr(module, pause, 60.0)
    async with tier_rig() as r:
        tier = await r.start(BAD + "KeepsMemory", how="block")
        tier.write(r.next_order(), placed([1], [1]), soon())
        await r.sink.answer(1)
        await until(lambda: tier._next_look and (tier._next_left or not tier._names_left))
        unread = cast("asyncio.Transport", tier._transport)
        unread.pause_reading()
        tier.read(r.next_order(), placed([1], [2]), soon(60.0))  # else it is called off
        await until(lambda: tier._end_signs is parent.EndSigns.REAPED)
        assert tier.ending
        assert not r.sink.gone
        if written:
            unread.write(bytes(8))
        else:
            unread.resume_reading()
        await r.sink.until(lambda: r.sink.gone)
        assert r.sink.gone == ["its store kept hold of memory after a call had returned"]


@on_loop
async def test_a_copy_that_is_called_off_a_little_before_its_deadline_was_late() -> None:
    """Timers may fire a millisecond early, and the process looks at its own clock."""
    async with tier_rig() as r:
        tier = await r.start(BAD + "Slow", concurrency=1)
        tier.write(r.next_order(), placed([1], [1]), soon())
        await r.signed("writing")
        tier.read(r.next_order(), placed([1], [2]), soon())
        tier._pass_deadline(tier._given[OrderId(2)])
        answer = await r.sink.answer(2)
        assert (answer.end, answer.reason) == (OrderEnd.NEVER_STARTED, ProcessReason.LATE)
        r.sign("go")


@on_loop
async def test_garbage_that_a_store_leaves_behind_is_collected() -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + "KeepsMemory", how="circle")
        tier.write(r.next_order(), placed([1], [1]), soon())
        tier.read(r.next_order(), placed([1], [2]), soon())
        await r.sink.answer(2)
        assert tier.unmap_row(RowId(0), [0, 1])
        await r.sink.until(lambda: r.sink.unmapped)
        assert not r.sink.gone


@pytest.mark.parametrize("store", ["UsageHangs", "UsageLies"])
@on_loop
async def test_a_store_that_does_not_say_how_it_fares_serves_all_the_same(store: str) -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + store, concurrency=1)
        for _ in range(3):
            await still_serves(r, tier)
            await asyncio.sleep(0.05)
        assert not r.sink.usages


@on_loop
async def test_a_store_that_says_late_how_it_fares_serves_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "USAGE_S", 0.01)
    async with tier_rig() as r:
        tier = await r.start(BAD + "UsageLate", concurrency=1)
        for _ in range(100):
            await still_serves(r, tier)
            await asyncio.sleep(0.01)
        await r.sink.until(lambda: len(r.sink.usages) > 5)
        assert not r.sink.gone


# -- deadlines ------------------------------------------------------------------------------------


@on_loop
async def test_questions_are_answered_at_their_deadline_whatever_the_store_does() -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + "Hangs", exists=True, concurrency=1)
        began = time.monotonic()
        tier.exists(r.next_order(), keys(1), began + DEADLINE_S)
        tier.exists(r.next_order(), keys(2), began + DEADLINE_S)  # waits for the first
        tier.delete_scopes(r.next_order(), [bytes(32)], began + DEADLINE_S)
        for order in (1, 2, 3):
            answer = await r.sink.answer(order)
            assert (answer.end, answer.reason) == (OrderEnd.FAILED, ProcessReason.LATE)
            assert r.sink.when[order] - began < DEADLINE_S + NOT_LATER_S
        assert not r.sink.gone
        tier.late_s = 0.1


@on_loop
async def test_a_copy_that_did_not_start_in_time_is_told_apart_and_touches_nothing() -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + "Slow", concurrency=1)
        tier.write(r.next_order(), placed([1], [1]), soon())
        await r.signed("writing")
        untouched = r.content(2)
        began = time.monotonic()
        tier.read(r.next_order(), placed([1], [2]), began + DEADLINE_S)
        tier.write(r.next_order(), placed([3], [3]), began + DEADLINE_S)
        for order in (2, 3):
            answer = await r.sink.answer(order)
            assert (answer.end, answer.reason) == (OrderEnd.NEVER_STARTED, ProcessReason.LATE)
            assert r.sink.when[order] - began < DEADLINE_S + NOT_LATER_S
        r.sign("go")
        assert await r.sink.outcomes(1) == [DONE]
        await still_serves(r, tier)
        assert r.content(2) == untouched
        tier.exists(OrderId(50), keys(3), soon())
        assert (await r.sink.answer(50)).values.tolist() == [0]


@on_loop
async def test_a_late_answer_of_a_started_copy_counts_and_that_of_a_question_does_not() -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + "Slow", exists=True, reads=True)
        tier.exists(r.next_order(), keys(1), soon(BEGUN_S))
        tier.read(r.next_order(), placed([1], [2]), soon(BEGUN_S))
        tier.write(r.next_order(), placed([1], [1]), soon(BEGUN_S))
        assert (await r.sink.answer(1)).end is OrderEnd.FAILED
        await asyncio.sleep(0.2)
        assert list(r.sink.answers) == [1]
        r.sign("go")
        assert await r.sink.outcomes(3) == [DONE]
        assert await r.sink.outcomes(2) in ([DONE], [MISSING])
        await still_serves(r, tier)  # the question's own answer came and was passed over
        assert not r.sink.gone


@pytest.mark.parametrize("store", ["Hangs", "HoldsTheInterpreter"])
@on_loop
async def test_a_call_that_never_returns_costs_its_process_and_its_end_is_the_proof(
    store: str,
) -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + store)
        tier.late_s = 0.3
        began = time.monotonic()
        tier.read(r.next_order(), placed([1], [2]), began + BEGUN_S)
        await r.signed("reading")
        tier.write(r.next_order(), placed([5], [5]), began + 20)
        await r.sink.until(lambda: r.sink.gone)
        took = time.monotonic() - began
        assert BEGUN_S + 0.3 <= took < BEGUN_S + 0.3 + module.LOOK_AGAIN_S + NOT_LATER_S
        assert r.sink.gone == ["read of 1 did not end within 0.3 s of its deadline"]
        assert r.sink.answers[1].reason == ProcessReason.TIER_GONE
        await unchanged_for(0.2, r, 2)


@on_loop
async def test_control_that_slept_hears_what_was_said_before_it_finds_anything_late() -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + "Slow")
        tier.late_s = 0.1
        tier.write(r.next_order(), placed([1], [1]), soon(BEGUN_S))
        await r.signed("writing")
        r.sign("go")
        time.sleep(BEGUN_S + 0.8)  # noqa: ASYNC251 - that is what it is about
        assert await r.sink.outcomes(1) == [DONE]
        await asyncio.sleep(0.5)
        assert not r.sink.gone


# -- a process that is killed or stopped ----------------------------------------------------------


@on_loop
async def test_a_process_killed_in_mid_copy_is_told_once_and_last() -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + "Hangs", concurrency=2)
        tier.read(r.next_order(), placed([1], [2]), soon())
        await r.signed("reading")
        for number in range(20):
            tier.write(r.next_order(), placed([number], [number + 10]), soon())
        assert tier.unmap_row(RowId(0), [0, 1])
        os.kill(tier.pid, signal.SIGKILL)
        tier.kill()
        await r.sink.until(lambda: r.sink.gone)
        await unchanged_for(1.2, r, 2)  # past every timer that could say it again
        assert len(r.sink.gone) == 1
        assert len(r.sink.answers) == 21
        assert r.sink.answers[1].reason == ProcessReason.TIER_GONE
        assert r.sink.unmapped == [0]
        assert not tier.read(r.next_order(), placed([1], [2]), soon())
        assert not any(owed(tier).values())


@on_loop
async def test_a_process_that_was_told_to_go_takes_no_more_though_it_does_not_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where it waits for a disk: whatever it took would keep slots until it is gone."""
    async with tier_rig() as r:
        tier = await r.start(BAD + "Hangs")
        tier.read(r.next_order(), placed([1], [2]), soon())
        await r.signed("reading")
        with monkeypatch.context() as patch:
            patch.setattr(tier._child, "kill", lambda: None)
            tier.end_because("a test")
            assert tier.ending
            assert not tier.read(r.next_order(), placed([1], [3]), soon())
            assert not tier.exists(r.next_order(), keys(1), soon())
            assert tier.unmap_row(RowId(0), [0, 1])
            await asyncio.sleep(0.2)
            assert not r.sink.unmapped
            assert not r.sink.gone
        tier._child.kill()
        await r.sink.until(lambda: r.sink.gone)
        assert r.sink.gone == ["a test"]
        assert (list(r.sink.answers), r.sink.unmapped) == ([1], [0])


@on_loop
async def test_a_stopped_process_is_killed_when_its_copies_are_late() -> None:
    async with tier_rig() as r:
        tier = await r.start()
        tier.late_s = 0.3
        await still_serves(r, tier)
        os.kill(tier.pid, signal.SIGSTOP)
        began = time.monotonic()
        tier.exists(OrderId(10), keys(1), began + DEADLINE_S)
        tier.read(OrderId(11), placed([1], [1]), began + DEADLINE_S)
        assert (await r.sink.answer(10)).reason == ProcessReason.LATE
        assert r.sink.when[10] - began < DEADLINE_S + NOT_LATER_S
        await r.sink.until(lambda: r.sink.gone)
        assert r.sink.answers[11].end is OrderEnd.FAILED, "who knows whether it had begun"


@on_loop
async def test_a_process_stopped_for_less_than_the_margin_goes_on() -> None:
    async with tier_rig() as r:
        tier = await r.start()
        await still_serves(r, tier)
        os.kill(tier.pid, signal.SIGSTOP)
        untouched = r.content(1)
        tier.read(OrderId(11), placed([1], [1]), soon(0.1))
        await asyncio.sleep(0.4)
        os.kill(tier.pid, signal.SIGCONT)
        answer = await r.sink.answer(11)
        assert (answer.end, answer.reason) == (OrderEnd.NEVER_STARTED, ProcessReason.LATE)
        assert r.content(1) == untouched
        await still_serves(r, tier)


@on_loop
async def test_a_process_that_does_not_read_is_ended_before_control_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parent, "MAX_BYTES_UNREAD", 1 << 20)
    async with tier_rig() as r:
        tier = await r.start(bounds=QueueBounds(keys=1 << 20))
        os.kill(tier.pid, signal.SIGSTOP)
        taken = sum(tier.exists(r.next_order(), keys(*range(20)), soon(60.0)) for _ in range(5_000))
        assert 1_000 < taken < 5_000
        await r.sink.until(lambda: r.sink.gone)
        assert "does not read" in r.sink.gone[0]
        answered = len(r.sink.answers)
        assert answered == taken


@pytest.mark.parametrize("store", ["DoesNotStop", "HangsAtTheEnd"])
@on_loop
async def test_a_store_that_goes_on_after_its_end_is_killed_with_its_process(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parent, "STOP_S", 1.5)
    async with tier_rig() as r:
        tier = await r.start(BAD + store)
        tier.read(r.next_order(), placed([1], [2]), soon())
        if store == "DoesNotStop":
            await r.signed("reading")
        began = time.monotonic()
        await tier.stop()
        assert time.monotonic() - began < 1.5 + NOT_LATER_S
        assert len(r.sink.gone) == 1
        await unchanged_for(0.2, r, 2)


@on_loop
async def test_a_process_that_closes_its_channel_and_stays_is_ended_for_that() -> None:
    async with tier_rig() as r:
        tier = await r.start(BAD + "ClosesItsChannel")
        assert tier.read(r.next_order(), placed([1], [1]), soon())
        await r.sink.until(lambda: r.sink.gone)
        assert r.sink.gone == ["closed its channel and stayed"]
        assert r.sink.answers[1].reason == ProcessReason.TIER_GONE
        assert not r.sink.living
