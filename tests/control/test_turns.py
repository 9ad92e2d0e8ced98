"""Large calls take turns: one piece of all of them at a time, users before their calls."""

from __future__ import annotations

import asyncio
import itertools

from kvd.runtime.turns import TURNS_BETWEEN_PIECES, EndsInTurn, FairQueue, Pace

PIECES = 12


async def call(turns: FairQueue, user: str, done: list[str]) -> None:
    for _ in range(PIECES):
        done.append(user)
        await turns.let_others_in(user)


def test_one_piece_is_done_in_some_turns_of_the_loop_however_many_calls_there_are() -> None:
    async def count() -> list[int]:
        turns = FairQueue()
        done: list[str] = []
        calls = [asyncio.ensure_future(call(turns, "one", done)) for _ in range(50)]
        await asyncio.sleep(0)
        seen = []
        for _ in range(10 * TURNS_BETWEEN_PIECES):
            await asyncio.sleep(0)
            seen.append(len(done))
        for each in calls:
            each.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        return seen

    seen = asyncio.run(count())
    assert seen[-1] - seen[0] <= 11
    assert max(b - a for a, b in itertools.pairwise(seen)) == 1


def test_a_user_with_many_calls_waits_for_himself() -> None:
    async def run() -> list[str]:
        turns = FairQueue()
        done: list[str] = []
        calls = [call(turns, "greedy", done) for _ in range(20)]
        await asyncio.gather(*calls, call(turns, "honest", done))
        return done

    done = asyncio.run(run())
    honest = [at for at, user in enumerate(done) if user == "honest"]
    assert honest[-1] - honest[0] <= 2 * PIECES + 20  # every other piece, behind the first round


def test_calls_that_give_up_hold_nobody_up() -> None:
    failed: list[object] = []

    async def run() -> int:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, what: failed.append(what))
        turns = FairQueue()
        done: list[str] = []
        given_up = [asyncio.ensure_future(call(turns, "a", done)) for _ in range(5)]
        await asyncio.sleep(0)
        for each in given_up:
            each.cancel()
        await asyncio.wait_for(call(turns, "a", done), 10)
        return len(done)

    assert asyncio.run(run()) == 5 + PIECES
    assert not failed, "the log would be full of it"


def test_a_pace_lets_others_in_when_much_is_done() -> None:
    async def run() -> int:
        turns, others = FairQueue(), 0
        ended = False

        async def other() -> None:
            nonlocal others
            while not ended:
                others += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(other())
        pace = Pace(turns, "user")
        for _ in range(640):
            await pace.spend(1)
        ended = True
        await task
        return others

    assert asyncio.run(run()) >= 10 * TURNS_BETWEEN_PIECES


def test_what_no_call_waits_for_has_every_other_turn_and_never_the_one_of_a_piece() -> None:
    async def run() -> list[tuple[int, str]]:
        turns, now = FairQueue(), 0
        done: list[tuple[int, str]] = []

        async def clock() -> None:
            nonlocal now
            while True:
                now += 1
                await asyncio.sleep(0)

        async def large(name: str) -> None:
            while True:
                await turns.let_others_in(name)
                done.append((now, name))

        tasks = [asyncio.ensure_future(each) for each in (clock(), large("one"), large("two"))]
        for number in range(20):
            turns.do_in_turn(lambda number=number: done.append((now, str(number))))  # type: ignore[misc]
        while len(done) < 40:  # noqa: ASYNC110 - it counts turns of the loop
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return done

    done = asyncio.run(run())
    reports = [name for _, name in done if name.isdigit()]
    assert reports == [str(number) for number in range(20)]
    assert {name for _, name in done[:39:2]} == set(reports), "not every other turn"
    times = [at for at, _ in done]
    assert min(b - a for a, b in itertools.pairwise(times)) >= TURNS_BETWEEN_PIECES - 1


def test_what_breaks_in_its_turn_stops_nobody_else() -> None:
    async def run() -> list[str]:
        turns = FairQueue()
        done: list[str] = []
        failed: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, said: failed.append(said))

        def break_down() -> None:
            raise RuntimeError

        turns.do_in_turn(break_down)
        turns.do_in_turn(lambda: done.append("next"))
        await asyncio.wait_for(call(turns, "a", done), 10)
        assert len(failed) == 1
        return done

    assert sorted(asyncio.run(run())) == ["a"] * PIECES + ["next"]


def test_ends_of_clients_come_one_by_one_and_users_take_turns() -> None:
    async def run() -> tuple[list[str], int, list[str]]:
        turns = FairQueue()
        ends = EndsInTurn(turns)
        done: list[str] = []
        said: list[str] = []
        for _ in range(20):
            ends.put("greedy", lambda: done.append("greedy"))
        ends.put("other", lambda: done.append("other"))
        turns.do_in_turn(lambda: said.append(f"after {len(done)}"))
        most = 0
        while len(done) < 21:
            before = len(done)
            await asyncio.sleep(0)
            most = max(most, len(done) - before)
        ends.put("greedy", lambda: done.append("late"))
        while done[-1] != "late":  # noqa: ASYNC110 - it goes on after it was idle
            await asyncio.sleep(0)
        return done, most, said

    done, most, said = asyncio.run(run())
    assert done == ["greedy", "other", *["greedy"] * 19, "late"]
    assert most == 1
    assert said == ["after 1"], "what movers say waits for one end only"
