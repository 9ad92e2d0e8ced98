"""What must agree before two engines may share bytes: validation, fingerprint, differences."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from kvd.control import errors
from kvd.control.later_fields import require_known
from kvd.core.errors import InvalidArgument
from kvd.core.keys import TenantId
from kvd.core.spec import GroupSpec, NamespaceSpec, check_group_count, check_shard_count
from kvd_proto.groups import GroupKind
from kvd_proto.limits import MAX_STRING_BYTES
from kvd_proto.v1 import engine_pb2 as pb

# Names the canonical encoding; a change of it is a new name and so a new fingerprint.
ENCODING = "kvd.namespace.v1"

_KINDS = {pb.GroupKind.Value(f"GROUP_KIND_{kind.name}"): kind for kind in GroupKind}
_STRINGS = (
    "account",
    "model",
    "model_config_digest",
    "weights_id",
    "quantization",
    "kv_dtype",
    "kv_scale_source",
    "attention_backend",
    "kv_layout",
    "parallel_shape",
    "lora_digest",
    "hash_algorithm",
)
_REQUIRED = ("model", "kv_dtype", "hash_algorithm")


def check_string(value: str, field: str, limit: int = MAX_STRING_BYTES) -> str:
    """Return the string unless it takes more than `limit` bytes."""
    if len(value) > limit or len(value.encode()) > limit:
        raise InvalidArgument(f"{field} has more than {limit} bytes", field, errors.STRING_TOO_LONG)
    return value


def describe(fields: pb.NamespaceFields, tenant: TenantId, private_to: str) -> dict[str, str]:
    """All that the fingerprint covers, as text by field name.

    `private_to` names the engine's start and takes part only where the namespace is unshared.
    """
    described = {name: str(getattr(fields, name)) for name in _STRINGS}
    described["tenant"] = tenant
    described["tokens_per_block"] = str(fields.tokens_per_block)
    described["hash_bytes"] = str(fields.hash_bytes)
    described["unshared"] = private_to if fields.unshared else ""
    for number, group in enumerate(fields.groups):
        described[f"groups[{number}]"] = _describe_group(group)
    return described


def _describe_group(group: pb.GroupSpec) -> str:
    kind = _KINDS[group.kind].value
    shards = ",".join(str(b) for b in group.shard_bytes)
    return (
        f"{kind} tokens={group.tokens_per_block} blocks={group.blocks_per_block}"
        f" window={group.sliding_window_tokens} bytes={shards} drafter={int(group.drafter)}"
    )


def fingerprint(described: Mapping[str, str]) -> str:
    """Hex SHA-256 of the canonical encoding: JSON with sorted names, so it is injective."""
    canonical = json.dumps([ENCODING, sorted(described.items())], separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def differs(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Names of the fields in which two namespaces differ, in alphabetical order."""
    return [n for n in sorted(one.keys() | other.keys()) if one.get(n, "") != other.get(n, "")]


def namespace_spec(
    fields: pb.NamespaceFields, tenant: TenantId, private_to: str
) -> tuple[NamespaceSpec, dict[str, str]]:
    """Validate the fields; return the core's spec and the description for operators."""
    _check_fields(fields)
    groups = tuple(_group_spec(g, number) for number, g in enumerate(fields.groups))
    described = describe(fields, tenant, private_to)
    named = fingerprint(described)
    spec = NamespaceSpec(named, tenant, fields.hash_bytes, groups, fields.unshared)
    spec.check()
    return spec, described


def _check_fields(fields: pb.NamespaceFields) -> None:
    for name in _STRINGS:
        check_string(getattr(fields, name), f"namespace.{name}")
    for name in _REQUIRED:
        if not getattr(fields, name):
            raise InvalidArgument(f"namespace.{name} is required", f"namespace.{name}")
    if fields.tokens_per_block == 0:
        raise InvalidArgument(
            "namespace.tokens_per_block is required", "namespace.tokens_per_block"
        )
    check_group_count(len(fields.groups))
    # The fingerprint lacks what we don't know: who differ in that only would share blocks.
    require_known(fields, "namespace")


def _group_spec(group: pb.GroupSpec, number: int) -> GroupSpec:
    where = f"namespace.groups[{number}]"
    kind = _KINDS.get(group.kind)
    if kind is None:
        raise InvalidArgument(f"{where}.kind {group.kind} is not known", f"{where}.kind")
    if group.tokens_per_block == 0:
        raise InvalidArgument(f"{where}.tokens_per_block is required", f"{where}.tokens_per_block")
    if kind is GroupKind.SLIDING_WINDOW and group.sliding_window_tokens == 0:
        raise InvalidArgument(
            f"{where}.sliding_window_tokens is required for a sliding window",
            f"{where}.sliding_window_tokens",
        )
    check_shard_count(len(group.shard_bytes), where)
    return GroupSpec(kind, group.blocks_per_block, tuple(group.shard_bytes))
