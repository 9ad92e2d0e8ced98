"""A message that is read in pieces is the one that protobuf reads, or refused as it refuses it."""

from __future__ import annotations

import asyncio
import random

import pytest
from google.protobuf import struct_pb2

from kvd.control.namespace import namespace_spec
from kvd.control.sessions import wire
from kvd.control.sessions.verbs import step_parts
from kvd.core.errors import KvdError
from kvd.core.keys import TenantId
from kvd.runtime.turns import FairQueue, Pace
from kvd_proto.limits import MAX_IDS
from kvd_proto.v1 import common_pb2
from kvd_proto.v1 import engine_pb2 as pb
from tests.control.daemon_rig import namespace
from tests.control.live_session import live_session
from tests.control.test_malformed_requests import scrambled

HASH = bytes(range(32))


class CountedPace(Pace):
    """Counts what is done in one go."""

    def __init__(self) -> None:
        super().__init__(FairQueue(), "user")
        self.spent: list[int] = []

    async def spend(self, units: int) -> None:
        self.spent.append(units)


def read(content: bytes, pace: Pace | None = None) -> pb.SessionRequest:
    request = pb.SessionRequest()
    asyncio.run(wire.read_in_pieces(request, content, pace or CountedPace()))
    return request


def context(struct: struct_pb2.Struct | None = None) -> common_pb2.ReqContext:
    return common_pb2.ReqContext(request_id="r", kv_transfer_params=struct, hints=struct)


def many_small_values(most_bytes: int) -> struct_pb2.Struct:
    struct = struct_pb2.Struct()
    while struct.ByteSize() < most_bytes - 16:
        struct.fields[format(len(struct.fields), "x")].SetInParent()
    return struct


def large_step() -> pb.Step:
    """Some MiB of everything that a step may hold."""
    values = many_small_values(8000)
    touch = pb.Touch(context=context(values), runs=[common_pb2.KeyRun(hashes=HASH)] * 4)
    run = common_pb2.TransferRun(hashes=HASH * 2000, engine_blocks=bytes(8000))
    return pb.Step(
        sequence=7,
        touches=[touch] * 60,
        stores=[pb.StoreJob(job_id=n, context=context(), runs=[run]) for n in range(1, 5)],
        released_leases=range(1, MAX_IDS + 1),
        finished_request_ids=["r" * 100] * 5000,
        end_step=True,
    )


def test_a_large_message_is_read_as_protobuf_reads_it_and_in_small_pieces() -> None:
    content = pb.SessionRequest(step=large_step()).SerializeToString()
    assert len(content) > 100 * wire.PIECE_BYTES
    pace = CountedPace()
    assert read(content, pace) == pb.SessionRequest.FromString(content)
    assert max(pace.spent) <= wire.PIECE_BYTES // wire.BYTES_A_UNIT
    assert len(pace.spent) > 100


def test_messages_of_nonsense_mean_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PIECE_BYTES", 8)
    agreed = 0
    for seed in range(120):
        step = scrambled(pb.Step(), random.Random(seed))
        assert isinstance(step, pb.Step)
        content = pb.SessionRequest(step=step).SerializeToString()
        assert means(read(content), content), seed
        damaged = damage(content, random.Random(seed))
        try:
            in_pieces = read(damaged)
        except wire.Unreadable:
            continue  # protobuf refuses it too, or it has groups of an old protocol
        assert means(in_pieces, damaged), seed
        agreed += 1
    assert agreed > 10


LATER_SIZES = [1, wire.PIECE_BYTES - 2, wire.PIECE_BYTES, 1 << 20]


def later_field(size: int) -> bytes:
    """A string of a number that no message has."""
    return b"\xfa\x07" + _part(0, bytes(size))[1:]


@pytest.mark.parametrize("size", LATER_SIZES)
def test_a_message_of_a_later_release_is_none_that_is_empty_however_large_it_is(size: int) -> None:
    request = read(later_field(size))
    assert request.WhichOneof("kind") is None
    assert 0 < request.ByteSize() <= wire.PIECE_BYTES + 8


@pytest.mark.parametrize("size", LATER_SIZES)
@pytest.mark.parametrize("part", ["namespace", "group"])
def test_a_namespace_with_a_later_field_is_refused_however_large_that_is(
    part: str, size: int
) -> None:
    fields = namespace()
    later = fields if part == "namespace" else fields.groups[0]
    later.MergeFromString(later_field(size))
    request = read(pb.SessionRequest(open=pb.OpenSession(namespace=fields)).SerializeToString())
    with pytest.raises(KvdError, match="of a later release"):
        namespace_spec(request.open.namespace, TenantId("default"), "engine")


def test_a_later_field_of_any_kind_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PIECE_BYTES", 1)
    fixed64, fixed32 = b"\xf9\x07" + bytes(range(8)), b"\xfd\x07" + bytes(range(4))
    varint = b"\xf8\x07" + b"\xff" * 9 + b"\x01"
    for each in fixed64, fixed32, varint, later_field(300):
        assert read(each).ByteSize() > 0


def damage(content: bytes, dice: random.Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(3):
        damaged[dice.randrange(len(damaged))] = dice.randrange(256)
    return bytes(damaged)


def means(read_one: pb.SessionRequest, content: bytes) -> bool:
    """Whether protobuf's own reader reads the same out of the content."""
    whole = pb.SessionRequest.FromString(content)
    for each in (read_one, whole):
        each.DiscardUnknownFields()  # type: ignore[attr-defined]
    same: bool = read_one == whole
    return same


def nested(depth: int) -> bytes:
    """Bytes of a Struct of so many dictionaries in one another."""
    content = b""
    for _ in range(depth):
        content = _part(1, _part(1, b"a") + _part(2, _part(5, content)))
    return content


def _part(number: int, content: bytes) -> bytes:
    length, left = b"", len(content)
    while left > 127:
        length += bytes([left & 127 | 128])
        left >>= 7
    return bytes([number << 3 | 2]) + length + bytes([left]) + content


def test_what_takes_long_to_read_whatever_it_is_made_of_is_not_read() -> None:
    later = b"\xf8\x07\x01"
    assert read(later * wire.MAX_FIELDS).ByteSize() == 3 * wire.MAX_FIELDS
    with pytest.raises(wire.Unreadable, match="fields beside each other"):
        read(later * (wire.MAX_FIELDS + 1))
    ids = pb.Step(released_leases=range(1, wire.MAX_PACKED_BYTES))
    with pytest.raises(wire.Unreadable, match="released_leases takes more than"):
        read(pb.SessionRequest(step=ids).SerializeToString())
    touch = pb.Touch(context=context(many_small_values(2 * wire.PIECE_BYTES)))
    with pytest.raises(KvdError, match="kv_transfer_params takes more than"):
        read(pb.SessionRequest(step=pb.Step(touches=[touch])).SerializeToString())
    with pytest.raises(wire.Unreadable, match="a number that does not end"):
        read(b"\xf8" + b"\xff" * wire.PIECE_BYTES + b"\x01\x01")


def nested_step(sequence: int, depth: int) -> bytes:
    job = b"\x08\x01" + _part(2, _part(1, b"r") + _part(3, nested(depth)))
    return _part(2, bytes([8, sequence]) + _part(4, job))


def test_a_structure_that_is_nested_too_deeply_is_unreadable_and_its_number_is_found() -> None:
    assert read(nested_step(5, 32)).step.sequence == 5
    content = nested_step(5, 33)
    with pytest.raises(wire.Unreadable):
        read(content)
    found = wire.unreadable_request(content, KvdError("why"))
    assert (found.kind, found.number) == ("step", 5)


NO_NUMBERS = [
    *(b"", b"\xff" * 9, b"\x12", b"\x12\x05\x08", _part(4, b"\x08")),
    b"\x11\x08\x07" + bytes(6),  # a step that is a fixed64, and one whose number is a string
    _part(2, _part(1, b"\x07")),
]


@pytest.mark.parametrize("content", NO_NUMBERS)
def test_a_number_that_can_not_be_found_is_none(content: bytes) -> None:
    assert wire.unreadable_request(content, KvdError("why")).number == 0


@pytest.mark.parametrize("last", [1, 2, 0x7F])
def test_a_number_of_more_bits_than_it_has_is_read_as_protobuf_reads_it(last: int) -> None:
    number = b"\x08" + b"\x85" + b"\x80" * 8 + bytes([last])
    content = _part(2, number + _part(4, b"\xff"))
    found = wire.unreadable_request(content, KvdError("why"))
    assert (found.kind, found.number) == ("step", pb.Step.FromString(number).sequence)


def test_the_largest_legal_steps_are_checked_in_small_pieces() -> None:
    run = common_pb2.KeyRun(hashes=HASH)
    transfer = common_pb2.TransferRun(hashes=HASH, engine_blocks=bytes(4))
    values = many_small_values(16 * 1024)
    steps = (
        pb.Step(touches=[pb.Touch(context=context(), runs=[run] * 8)] * 1024),
        pb.Step(stores=[pb.StoreJob(job_id=1, context=context(), runs=[transfer] * 8)] * 1024),
        pb.Step(touches=[pb.Touch(context=context(values), runs=[run])] * 100),
        pb.Step(finished_request_ids=["r"] * MAX_IDS, preempted_request_ids=["r"] * MAX_IDS),
    )
    for step in steps:
        pace = CountedPace()
        asyncio.run(step_parts(live_session(), step, pace))
        assert sum(pace.spent) >= 2000
        assert max(pace.spent) <= 192
