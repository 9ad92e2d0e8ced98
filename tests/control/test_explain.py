"""`kvd explain`, the call behind it, and that nothing a client tells of requests breaks it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvd.cli import explain as cli
from kvd.control.services.explain import explain
from kvd.core.keys import NamespaceId, RequestId, TenantId
from kvd.core.model.gone import Cause, Fate, Recalled, WhyGone
from kvd.core.told import MissedBlock, ToldRequest
from kvd.core.upkeep.misses import Explained
from kvd_proto.limits import MAX_REQUESTS_TOLD
from kvd_proto.v1 import engine_pb2, operator_pb2
from tests.control.daemon_rig import (
    Caller,
    RawEngine,
    RawScheduler,
    RunningDaemon,
    block,
    hashes,
    identity,
    namespace,
)
from tests.forked import run


class Turns:
    """Counts how often others were let in."""

    left = 0

    async def let_others_in(self, _: object) -> None:
        self.left += 1


def told(request: str, missed: int | None = 9, **more: Any) -> engine_pb2.RequestLookup:
    """What a client says of a request that missed this block first."""
    message = engine_pb2.RequestLookup(request_id=request, prompt_tokens=160, device_tokens=16)
    if missed is not None:
        message.missed.CopyFrom(engine_pb2.MissedBlock(block=1, hash=hashes(missed)))
    message.MergeFrom(engine_pb2.RequestLookup(**more))
    return message


def explained(caller: Caller, request: str = "") -> list[operator_pb2.ExplainedRequest]:
    asked = operator_pb2.ExplainRequest(request_id=request)
    return list(caller.call(caller.operator.Explain, asked).requests)


def test_a_cleared_block_and_one_that_was_never_stored(running: RunningDaemon) -> None:
    engine = RawEngine(running.socket, identity=identity("cleared"), namespace=namespace(model="c"))
    engine.store({9: block(9)})
    tool = Caller(running.socket)
    number = engine.scheduler.opened.namespace_id
    tool.call(tool.operator.Clear, operator_pb2.ClearRequest(namespace_id=number))
    engine.scheduler.step(requests=[told("gone-1"), told("gone-2", 8)], end_step=True)
    (first,) = explained(tool, "gone-1")
    assert first.cause == operator_pb2.MISS_CAUSE_CLEARED
    assert first.engine_id == "cleared"
    assert first.missed_hash == hashes(9)
    assert first.prompt_tokens == 160
    (second,) = explained(tool, "gone-2")
    assert second.cause == operator_pb2.MISS_CAUSE_NAMESPACE_CLEARED
    assert {each.request_id for each in explained(tool, "gone")} == {"gone-1", "gone-2"}
    tool.close()
    engine.close()


def test_the_field_in_which_the_namespace_differs_is_named(running: RunningDaemon) -> None:
    one = RawEngine(running.socket, identity=identity("one"), namespace=namespace(model="d"))
    one.store({7: block(7)})
    other = RawScheduler(
        running.socket, identity=identity("two"), namespace=namespace(model="d", kv_dtype="fp8")
    )
    other.step(requests=[told("differs", 7)], end_step=True)
    (found,) = explained(other, "differs")
    assert found.cause == operator_pb2.MISS_CAUSE_NEVER_STORED
    (place,) = found.elsewhere
    assert "kv_dtype" in place.differs
    shown = "\n".join(cli.lines(found))
    assert "it was never stored" in shown
    assert f"in namespace {place.namespace_id}, which differs in kv_dtype" in shown
    other.close()
    one.close()


def test_what_a_client_says_wrong_is_passed_over_and_the_rest_is_kept(
    running: RunningDaemon,
) -> None:
    engine = RawScheduler(running.socket, identity=identity("wrong"))
    bad = [
        told(""),
        told("r" * 257),
        engine_pb2.RequestLookup(
            request_id="wrong-hash", missed=engine_pb2.MissedBlock(hash=b"short")
        ),
        engine_pb2.RequestLookup(
            request_id="wrong-group", missed=engine_pb2.MissedBlock(group=64, hash=hashes(1))
        ),
    ]
    good = [told("kept", given_up=engine_pb2.GIVEN_UP_RETRY), told("huge", prompt_tokens=2**64 - 1)]
    engine.step(requests=bad + good, end_step=True)
    (kept,) = explained(engine, "kept")
    assert kept.cause == operator_pb2.MISS_CAUSE_LEASES
    assert explained(engine, "huge")
    assert not explained(engine, "wrong")
    many = [told(f"many-{n}") for n in range(MAX_REQUESTS_TOLD + 1)]
    engine.step(requests=many, end_step=True)
    assert len(explained(engine, "many")) == MAX_REQUESTS_TOLD
    engine.close()


def test_a_step_that_is_sent_again_tells_once(running: RunningDaemon) -> None:
    engine = RawScheduler(running.socket, identity=identity("again"))
    for _ in range(2):
        engine.send(step=engine_pb2.Step(sequence=1, requests=[told("once")], end_step=True))
        engine.next("step")
    assert len(explained(engine, "once")) == 1
    engine.close()


def asked(running: RunningDaemon, *words: str) -> subprocess.CompletedProcess[str]:
    return run("explain", "--socket", running.socket, *words)


def test_the_command_says_it_in_words_and_in_json(running: RunningDaemon) -> None:
    engine = RawScheduler(
        running.socket, identity=identity("words"), namespace=namespace(model="w")
    )
    engine.step(requests=[told("said"), told("found-all", None)], end_step=True)
    shown = asked(running, "said")
    assert shown.returncode == 0, shown.stderr
    assert "why: it was never stored since the daemon started, " in shown.stdout
    (one,) = json.loads(asked(running, "said", "--json").stdout)["requests"]
    assert one["missed"]["cause"] == "never_stored"
    (whole,) = json.loads(asked(running, "found-all", "--json").stdout)["requests"]
    assert whole["missed"] is None
    unknown = asked(running, "nobody")
    assert (unknown.returncode, "is remembered" in unknown.stderr) == (1, True)
    listed = asked(running)
    assert "request said of engine words" in listed.stdout
    assert "found-all" not in listed.stdout
    engine.close()


async def test_others_get_on_between_two_explained_requests() -> None:
    """Each is sought in 17 x 64 places; a call with 64 of them took the loop for seconds."""
    turns = Turns()
    told = ToldRequest(
        RequestId("r"), "", 1, 0, 0, MissedBlock(0, 0, np.zeros((1, 4), np.uint64), 0)
    )
    one = Explained(
        Recalled(told, TenantId("t"), NamespaceId(1), "", 0, hash_bytes=32), is_all_known=True
    )
    driver: Any = SimpleNamespace(
        turns=turns,
        clock=SimpleNamespace(now_ns=lambda: 0),
        began_ns=0,
        machine=SimpleNamespace(explain=lambda *_: [one] * 3, elsewhere=lambda *_: ()),
    )
    namespaces: Any = SimpleNamespace(families=lambda _: {}, family_of=lambda _: ("t", "m"))
    peer: Any = SimpleNamespace(uid=0)
    answer = await explain(driver, namespaces, peer, "")
    assert (len(answer.requests), turns.left) == (3, 3)


@pytest.mark.parametrize("sees", [True, False])
async def test_whose_blocks_took_the_place_is_told_to_who_may_see_them(sees: bool) -> None:
    told = ToldRequest(
        RequestId("r"), "", 1, 0, 0, MissedBlock(0, 0, np.zeros((1, 4), np.uint64), 0)
    )
    cause = Cause(WhyGone(Fate.ROW_TAKEN, by=NamespaceId(2)), 1.0, 2.0)
    recalled = Recalled(told, TenantId("t"), NamespaceId(1), "", 0, hash_bytes=32, cause=cause)
    driver: Any = SimpleNamespace(
        turns=Turns(),
        clock=SimpleNamespace(now_ns=lambda: 0),
        began_ns=0,
        machine=SimpleNamespace(
            explain=lambda *_: [Explained(recalled, is_all_known=True)], elsewhere=lambda *_: ()
        ),
    )
    namespaces: Any = SimpleNamespace(
        families=lambda _: {},
        family_of=lambda _: ("t", "m"),
        may_see=lambda _peer, namespace: sees and namespace == 2,
        fields=lambda _: {"tenant": "other"},
    )
    peer: Any = SimpleNamespace(uid=0)
    (answer,) = (await explain(driver, namespaces, peer, "")).requests
    assert answer.cause == operator_pb2.MISS_CAUSE_ROW_TAKEN
    whose = (answer.by_namespace_id, answer.by_tenant)
    assert whose == ((2, "other") if sees else (0, ""))


def test_what_a_client_named_cannot_write_to_a_terminal_or_forge_a_line(
    running: RunningDaemon,
) -> None:
    name = "\x1b[2J\x1b]0;mine\x07\nrequest forged \x9b31m\u202e<b>"
    engine = RawScheduler(
        running.socket, identity=identity("engine" + name), namespace=namespace(model="m" + name)
    )
    engine.step(requests=[told("names" + name)], end_step=True)
    shown = asked(running, "names")
    assert shown.returncode == 0, shown.stderr
    everything = [shown.stdout, running.log.read_text()]
    for words in (("status",), ("namespaces",), ("explain", "nobody" + name)):
        ended = run(*words, "--socket", running.socket)
        everything.append(ended.stdout + ended.stderr)
    for text in everything:
        assert "forged" in text
        assert [c for c in text if not c.isprintable() and c != "\n"] == []
        assert not [line for line in text.split("\n") if line.startswith("request forged")]
    engine.close()


@pytest.mark.parametrize("words", [("status",), ("explain",)])
def test_a_name_that_the_terminal_has_no_letters_for_stands_as_escapes(
    running: RunningDaemon, words: tuple[str, ...]
) -> None:
    engine = RawScheduler(running.socket, identity=identity("e\u65e5"), namespace=namespace())
    engine.step(requests=[told("r\u65e5")], end_step=True)
    ended = subprocess.run(
        [sys.executable, "-m", "kvd", *words, "--socket", running.socket],
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"\\u65e5" in ended.stdout
    engine.close()


def test_a_block_that_is_there_is_not_only_said_to_be_missing(running: RunningDaemon) -> None:
    engine = RawEngine(running.socket, identity=identity("there"), namespace=namespace(model="t"))
    engine.store({5: block(5)})
    engine.scheduler.step(requests=[told("is-there", 5)], end_step=True)
    (found,) = explained(engine.scheduler, "is-there")
    shown = "\n".join(cli.lines(found))
    assert "a block of the same hash is there now: it was stored since, or" in shown
    engine.close()


@pytest.mark.parametrize("name", operator_pb2.MissCause.keys())
def test_every_cause_has_words(name: str) -> None:
    message = operator_pb2.ExplainedRequest(request_id="r", missed_hash=b"h" * 32, cause=name)
    if message.cause:
        assert "{" not in "\n".join(cli.lines(message))
