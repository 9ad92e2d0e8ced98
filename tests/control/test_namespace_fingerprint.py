"""What is part of a namespace's fingerprint, and what makes a namespace impossible."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.control.namespace import differs, namespace_spec
from kvd.core.errors import KvdError
from kvd.core.keys import TenantId
from kvd_proto.v1 import engine_pb2
from tests.control.daemon_rig import group, namespace

TENANT = TenantId("default")


def fingerprint(private_to: str = "engine", tenant: str = "default", **changes: Any) -> str:
    spec, _ = namespace_spec(namespace(**changes), TenantId(tenant), private_to)
    return spec.fingerprint


CHANGES: list[dict[str, Any]] = [
    {"account": "salt"},
    {"model": "other"},
    {"model_config_digest": "d"},
    {"weights_id": "w"},
    {"quantization": "awq"},
    {"kv_dtype": "fp8"},
    {"kv_scale_source": "s"},
    {"attention_backend": "b"},
    {"kv_layout": "NHD"},
    {"tokens_per_block": 32},
    {"parallel_shape": "tp2"},
    {"lora_digest": "l"},
    {"hash_algorithm": "xxh"},
    {"hash_bytes": 16},
    {"unshared": True},
    {"groups": [group(), group()]},
    {"groups": [group(tokens_per_block=32)]},
    {"groups": [group(blocks_per_block=2)]},
    {"groups": [group(shard_bytes=[8])]},
    {"groups": [group(drafter=True)]},
    {"groups": [group(sliding_window_tokens=64)]},
    {"groups": [group(kind=engine_pb2.GROUP_KIND_RECURRENT_STATE)]},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_every_field_changes_the_fingerprint(change: dict[str, Any]) -> None:
    assert fingerprint(**change) != fingerprint()


LATER_FIELD = b"\xfa\x07\x01x"  # number 127, a string


@pytest.mark.parametrize("part", ["namespace", "group"])
def test_a_field_of_a_later_release_is_refused(part: str) -> None:
    """The fingerprint lacks it: engines that differ in it only would share blocks."""
    fields = namespace()
    later = fields if part == "namespace" else fields.groups[0]
    later.MergeFromString(LATER_FIELD)
    with pytest.raises(KvdError, match="of a later release"):
        namespace_spec(fields, TENANT, "engine")


def test_every_field_of_the_message_is_covered_by_that_test() -> None:
    covered = {name for change in CHANGES for name in change}
    fields = {field.name for field in engine_pb2.NamespaceFields.DESCRIPTOR.fields}
    assert fields - covered == {"tenant"}  # the policy's, not the message's
    assert fingerprint(tenant="other") != fingerprint()


def test_the_fingerprint_is_the_same_for_the_same_fields() -> None:
    assert fingerprint(private_to="one") == fingerprint(private_to="two")
    assert len(fingerprint()) == 64


def test_text_can_not_move_from_one_field_to_the_next() -> None:
    assert fingerprint(weights_id="ab", quantization="") != fingerprint(
        weights_id="a", quantization="b"
    )


def test_an_unshared_namespace_is_its_engines_own() -> None:
    assert fingerprint("one", unshared=True) != fingerprint("two", unshared=True)


def test_differences_are_named() -> None:
    _, one = namespace_spec(namespace(), TENANT, "")
    _, other = namespace_spec(namespace(kv_dtype="fp8", weights_id="w"), TENANT, "")
    assert differs(one, other) == ["kv_dtype", "weights_id"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": ""}, "INVALID_ARGUMENT"),
        ({"kv_dtype": ""}, "INVALID_ARGUMENT"),
        ({"hash_algorithm": ""}, "INVALID_ARGUMENT"),
        ({"tokens_per_block": 0}, "INVALID_ARGUMENT"),
        ({"hash_bytes": 0}, "HASH_BYTES"),
        ({"hash_bytes": 65}, "HASH_BYTES"),
        ({"groups": []}, "GROUP_COUNT"),
        ({"groups": [group()] * 65}, "GROUP_COUNT"),
        ({"model": "m" * 257}, "STRING_TOO_LONG"),
        ({"model": "é" * 129}, "STRING_TOO_LONG"),
        ({"groups": [group(kind=0)]}, "INVALID_ARGUMENT"),
        ({"groups": [group(kind=99)]}, "INVALID_ARGUMENT"),
        ({"groups": [group(blocks_per_block=0)]}, "BLOCKS_PER_BLOCK"),
        ({"groups": [group(blocks_per_block=65)]}, "BLOCKS_PER_BLOCK"),
        ({"groups": [group(shard_bytes=[])]}, "RANK_COUNT"),
        ({"groups": [group(shard_bytes=[8] * 257)]}, "RANK_COUNT"),
        ({"groups": [group(shard_bytes=[0])]}, "INVALID_ARGUMENT"),
        ({"groups": [group(shard_bytes=[7])]}, "INVALID_ARGUMENT"),
        ({"groups": [group(shard_bytes=[1 << 62])]}, "INVALID_ARGUMENT"),
        ({"groups": [group(), group(shard_bytes=[8, 8])]}, "RANK_COUNT"),
        ({"groups": [group(kind=engine_pb2.GROUP_KIND_SLIDING_WINDOW)]}, "INVALID_ARGUMENT"),
    ],
)
def test_an_impossible_namespace_is_refused_and_its_field_named(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(KvdError) as caught:
        namespace_spec(namespace(**changes), TENANT, "")
    assert caught.value.reason == reason
    assert caught.value.field.startswith("namespace.")


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ([group(kind=99)] * 65, "GROUP_COUNT"),  # a group that was read would be refused by itself
        ([group(shard_bytes=[7] * 257), group(kind=99)], "RANK_COUNT"),
    ],
)
def test_what_is_too_much_is_refused_before_it_is_read(
    groups: list[Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message may have 48,000 groups, or as many shards as take a second to describe."""

    def read(*_: object) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr("kvd.control.namespace.GroupSpec", read)
    monkeypatch.setattr("kvd.control.namespace.describe", read)
    with pytest.raises(KvdError) as caught:
        namespace_spec(namespace(groups=groups), TENANT, "")
    assert caught.value.reason == reason
