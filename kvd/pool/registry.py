"""registry.jsonl: namespaces and scopes, so that the numbers in records mean something.

Append-only, one sealed line for each; the line is in the file before any record names it. A torn
last line, of a daemon that died while writing, belongs to something that no record names yet.
What is forgotten stays in the file until that is written anew: recovery forgets it likewise, since
no record names it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvd.core.actions import OpenScope
from kvd.core.keys import NamespaceId, ScopeId, TenantId
from kvd.core.spec import GroupKind, GroupSpec, NamespaceSpec
from kvd.pool import lines

SLACK_LINES = 1024  # of what is forgotten, before it is worth writing the file anew


@dataclass(frozen=True, slots=True)
class RegisteredNamespace:
    """A namespace as the file knows it."""

    namespace: NamespaceId
    spec: NamespaceSpec
    fields: Mapping[str, str]  # for display only


@dataclass(slots=True)
class Registry:
    """What the file says, and the way to say more."""

    path: Path
    namespaces: dict[NamespaceId, RegisteredNamespace] = field(default_factory=dict)
    scopes: dict[ScopeId, OpenScope] = field(default_factory=dict)
    damaged_lines: int = 0
    _fd: int = -1
    _lines: int = 0  # in the file

    @classmethod
    def open(cls, path: Path) -> Registry:
        """Read what is there; damaged lines are counted and left out."""
        registry = cls(path)
        if path.exists():
            for line in path.read_bytes().splitlines():
                record = lines.unseal(line)
                if record is None:
                    registry.damaged_lines += 1
                else:
                    registry._take(record)
        registry._rewrite()
        return registry

    def keep_only(self, namespaces: Collection[NamespaceId], scopes: Collection[ScopeId]) -> None:
        """Forget the others, in the file too, so that it doesn't grow with every restart."""
        if len(namespaces) == len(self.namespaces) and len(scopes) == len(self.scopes):
            return
        self.namespaces = {n: self.namespaces[n] for n in namespaces}
        self.scopes = {s: self.scopes[s] for s in scopes}
        self._rewrite()

    def add_namespace(self, namespace: RegisteredNamespace) -> None:
        """Write the namespace down unless it stands there the same."""
        known = self.namespaces.get(namespace.namespace)
        if known is not None and known.spec == namespace.spec:
            fields = namespace.fields or known.fields
            if fields == known.fields:
                return
            namespace = RegisteredNamespace(namespace.namespace, namespace.spec, fields)
        self.namespaces[namespace.namespace] = namespace
        self._append(_namespace_record(namespace))

    def add_scope(self, scope: OpenScope) -> None:
        """Write the scope down unless it stands there the same."""
        if self.scopes.get(scope.scope) == scope:
            return
        self.scopes[scope.scope] = scope
        self._append(_scope_record(scope))

    def forget_scopes(self, scopes: Collection[ScopeId]) -> None:
        """Forget these."""
        for scope in scopes:
            self.scopes.pop(scope, None)
        self._shrink()

    def forget_namespace(self, namespace: NamespaceId) -> None:
        """Forget this and its scopes."""
        del self.namespaces[namespace]
        self.scopes = {n: s for n, s in self.scopes.items() if s.namespace != namespace}
        self._shrink()

    def close(self) -> None:
        os.close(self._fd)
        self._fd = -1

    def _take(self, record: dict[str, Any]) -> None:
        if record["kind"] == "namespace":
            namespace = _namespace_of(record)
            self.namespaces[namespace.namespace] = namespace
            return
        scope = OpenScope(
            ScopeId(record["scope"]),
            NamespaceId(record["namespace"]),
            record["epoch"],
            record["account"],
            record["group"],
            record.get("own", False),
        )
        known = self.namespaces.get(scope.namespace)
        if known is None or not 0 <= scope.group < len(known.spec.groups):
            self.damaged_lines += 1  # its namespace's line was damaged
            return
        self.scopes[scope.scope] = scope

    def _shrink(self) -> None:
        """Write the file anew once most of its lines say what is forgotten."""
        if self._lines > SLACK_LINES + 2 * (len(self.namespaces) + len(self.scopes)):
            self._rewrite()

    def _append(self, record: dict[str, Any]) -> None:
        lines.write_all(self._fd, lines.seal(record))
        self._lines += 1

    def _rewrite(self) -> None:
        """Write the file anew: drops torn lines, which a further append would glue itself to."""
        content = [lines.seal(_namespace_record(n)) for n in self.namespaces.values()]
        content += [lines.seal(_scope_record(s)) for s in self.scopes.values()]
        lines.replace_file(self.path, b"".join(content))
        self._lines = len(content)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)


def _namespace_record(namespace: RegisteredNamespace) -> dict[str, Any]:
    spec = namespace.spec
    return {
        "kind": "namespace",
        "namespace": namespace.namespace,
        "fingerprint": spec.fingerprint,
        "tenant": spec.tenant,
        "hash_bytes": spec.hash_bytes,
        "groups": [[g.kind.value, g.blocks_per_block, list(g.shard_bytes)] for g in spec.groups],
        "unshared": spec.unshared,
        "fields": dict(namespace.fields),
    }


def _namespace_of(record: dict[str, Any]) -> RegisteredNamespace:
    groups = tuple(
        GroupSpec(GroupKind(kind), blocks, tuple(shard_bytes))
        for kind, blocks, shard_bytes in record["groups"]
    )
    # Older registries tell it by the fields alone.
    unshared = record.get("unshared", bool(record["fields"].get("unshared")))
    tenant = TenantId(record["tenant"])
    spec = NamespaceSpec(record["fingerprint"], tenant, record["hash_bytes"], groups, unshared)
    return RegisteredNamespace(NamespaceId(record["namespace"]), spec, record["fields"])


def _scope_record(scope: OpenScope) -> dict[str, Any]:
    return {
        "kind": "scope",
        "scope": scope.scope,
        "namespace": scope.namespace,
        "epoch": scope.epoch,
        "account": scope.account,
        "group": scope.group,
        "own": scope.own,
    }
