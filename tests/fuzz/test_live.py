"""A few seconds of what `make fuzz` throws at a real daemon, and that it sees what is wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from kvd.control.errors import DETAILS_KEY
from kvd_proto.v1 import engine_pb2
from tests.fuzz.corpus import kept
from tests.fuzz.live import METHODS, UNARY, Live, Untyped, input_of, lives
from tests.fuzz.messages import drawn

INPUTS = 120


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with lives(random.Random(7)) as made:
        yield made


def test_every_input_is_answered_and_the_neighbour_works_on(live: Live) -> None:
    contents = list(kept())
    assert {method for method, _ in contents} == set(UNARY)
    for method, content in contents:
        live.replay(method, content)
    live.round(INPUTS)
    assert live.ends["blocks of the neighbour"] > 0


@pytest.mark.parametrize("method", METHODS)
def test_drawn_messages_are_messages(method: str) -> None:
    of, dice = input_of(method), random.Random(1)
    messages = [drawn(of, dice, {}) for _ in range(10)]
    assert all(
        type(m).FromString(m.SerializeToString()) == m for m in messages if "nan" not in str(m)
    )


def test_drawn_messages_have_what_is_known_and_what_is_not() -> None:
    dice = random.Random(1)
    of: Any = engine_pb2.LookupRequest.DESCRIPTOR
    ids = {drawn(of, dice, {"session_id": [77]}).session_id for _ in range(200)}
    assert 77 in ids
    assert 2**64 - 1 in ids


class Failure(grpc.RpcError):
    """A refusal of some server's."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        self._code, self._reason = code, reason

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return ""

    def trailing_metadata(self) -> Any:
        if not self._reason:
            return []
        detail = any_pb2.Any()
        detail.Pack(error_details_pb2.ErrorInfo(reason=self._reason, domain="kvd"))
        status: Any = status_pb2.Status(details=[detail])
        return [(DETAILS_KEY, status.SerializeToString())]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.UNKNOWN, ""),
        (grpc.StatusCode.DEADLINE_EXCEEDED, ""),
        (grpc.StatusCode.INTERNAL, "INTERNAL"),
        (grpc.StatusCode.INVALID_ARGUMENT, "UNHEARD_OF"),
        (grpc.StatusCode.NOT_FOUND, "MALFORMED_MESSAGE"),
    ],
    ids=["unknown", "unanswered", "internal", "new reason", "another code"],
)
def test_answer_without_a_proper_reason_is_a_defect(
    live: Live, code: grpc.StatusCode, reason: str
) -> None:
    with pytest.raises(Untyped):
        live._typed("EngineService.Lookup", b"", Failure(code, reason))
