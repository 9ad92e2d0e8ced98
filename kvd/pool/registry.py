"""registry.jsonl: namespaces and scopes, so that the numbers in records mean something.

Append-only, one sealed line for each; the last one for a number counts. The line is in the file
before any record names it, as long as the file can grow. A torn last line, of a daemon that died
while writing, belongs to something that no record names yet.

On a full file system a line waits, in memory, until there is room. Should the daemon die before
that, recovery takes what the line is missing for as free: blocks are lost, none is mistaken.

A line that a namespace was cleared takes all that stands before it of its scopes: one line, however
many there are, and records that name them mean nothing from then on.

What is forgotten stays in the file until that is written anew: recovery forgets it likewise, since
no record names it. The new file is written in pieces beside the old one and then takes its place.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from kvd.core.actions import OpenScope
from kvd.core.errors import KvdError
from kvd.core.keys import NamespaceId, ScopeId, TenantId
from kvd.core.spec import GroupSpec, NamespaceSpec, check_group_count
from kvd.linux.standing import Kept, Lost, lost
from kvd.pool import sealed_json
from kvd.pool.reserve import Reserve
from kvd_proto.groups import GroupKind

log = logging.getLogger(__name__)

SLACK_LINES = 1024  # of what is forgotten, before it is worth writing the file anew
PIECE_LINES = 64  # written in one piece of upkeep
PIECE_BYTES = 64 << 10
TRY_AGAIN_PIECES = 20  # of upkeep, after the file system was full


@dataclass(frozen=True, slots=True)
class RegisteredNamespace:
    """A namespace as the file knows it."""

    namespace: NamespaceId
    spec: NamespaceSpec
    fields: Mapping[str, str]  # for display only


class LineFile:
    """Whole lines at the end of a file, or nothing: a line cut short is taken away again."""

    def __init__(self, path: Path, reserve: Reserve, *, fresh: bool) -> None:
        """`fresh`: in place of what was there. OSError where that can't be."""
        if fresh:
            path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(path, flags | (os.O_EXCL if fresh else 0), 0o600)
        self._reserve = reserve
        self._size = os.fstat(self._fd).st_size
        self.lines = 0

    def append(self, content: bytes, count: int) -> None:
        """So many lines; OSError, and none of them, where there is no room."""
        self._reserve.write(len(content), partial(self._append, content))
        self._size += len(content)
        self.lines += count

    def _append(self, content: bytes) -> None:
        try:
            os.lseek(self._fd, self._size, os.SEEK_SET)
            sealed_json.write_all(self._fd, content)
        except OSError:
            self.cut(self._size)
            raise

    def cut(self, size: int) -> None:
        """Shorten it to so many bytes."""
        os.ftruncate(self._fd, size)
        self._size = size

    def kept(self) -> Kept:
        """What the file is, and how long we made it."""
        found = os.fstat(self._fd)
        return Kept(found.st_dev, found.st_ino, self._size)

    def close(self) -> None:
        os.close(self._fd)


class LineKind(enum.Enum):
    """What a line says."""

    NAMESPACE = "namespace"
    SCOPE = "scope"
    CLEARED = "cleared"


Name = tuple[LineKind, int]  # and the number: of a namespace, but for a scope


@dataclass(slots=True)
class Registry:
    """The file of namespaces, epochs and scopes: what it says, and the way to say more."""

    path: Path
    reserve: Reserve
    namespaces: dict[NamespaceId, RegisteredNamespace] = field(default_factory=dict)
    scopes: dict[ScopeId, OpenScope] = field(default_factory=dict)
    _file: LineFile = field(init=False)
    # To be written when there is room, in order: a namespace's line comes before its scopes'.
    _waiting: dict[Name, None] = field(default_factory=dict)
    _fresh: LineFile | None = None  # to take the file's place
    _left: deque[Name] = field(default_factory=deque)  # to be written there
    _pause: int = 0  # pieces of upkeep to let pass, since the file system is full
    _said: bool = False
    _by_namespace: dict[NamespaceId, set[ScopeId]] = field(default_factory=dict)
    _cleared: dict[NamespaceId, ScopeId] = field(default_factory=dict)  # scopes below this number
    # Numbers in the file, of what is forgotten too: used anew they could be mistaken for it.
    highest_namespace: int = 0
    highest_scope: int = 0

    @classmethod
    def open(cls, path: Path, reserve: Reserve) -> Registry:
        """Read what is there; damaged lines are left out, and the file is written anew then."""
        registry = cls(path, reserve)
        registry._fresh_path.unlink(missing_ok=True)
        content = path.read_bytes() if path.exists() else b""
        # A torn line would be glued to whatever is appended to it.
        whole = content.rfind(b"\n") + 1
        damaged = 0
        for line in content[:whole].splitlines():
            record = sealed_json.unseal(line)
            if record is not None:
                registry.take(record)
            else:
                damaged += 1
        registry._file = LineFile(path, reserve, fresh=False)
        registry._file.lines = content.count(b"\n")
        registry._file.cut(whole)
        if damaged:
            log.warning("%s has %d damaged lines and is written anew", path, damaged)
            registry._begin_anew()
        return registry

    def missing(self) -> Lost | None:
        """The file, where it has gone or was cut short: the next start would know of no block."""
        return lost(self.path, self._file.kept())

    @property
    def unwritten(self) -> int:
        """Namespaces and scopes that a restart would not know."""
        return len(self._waiting)

    def written(self) -> tuple[dict[NamespaceId, RegisteredNamespace], dict[ScopeId, OpenScope]]:
        """What a restart would know: without what waits, and what was cleared."""
        waiting, cleared = self._waiting, self._cleared
        namespaces = {
            n: known
            for n, known in self.namespaces.items()
            if (LineKind.NAMESPACE, n) not in waiting
        }
        scopes = {
            s: scope
            for s, scope in self.scopes.items()
            if s >= cleared.get(scope.namespace, 0) and (LineKind.SCOPE, s) not in waiting
        }
        return namespaces, scopes

    def keep_only(self, namespaces: Collection[NamespaceId], scopes: Collection[ScopeId]) -> None:
        """Forget the others, in the file too, so that it doesn't grow with every restart."""
        self._cleared = {n: below for n, below in self._cleared.items() if n in namespaces}
        if len(namespaces) == len(self.namespaces) and len(scopes) == len(self.scopes):
            return
        self.namespaces = {n: self.namespaces[n] for n in namespaces}
        for scope in self.scopes.keys() - set(scopes):
            self._forget_scope(scope)
        self._shrink()
        while self._fresh is not None and not self._pause:
            self.upkeep()

    def add_namespace(self, namespace: RegisteredNamespace) -> None:
        """Write the namespace down unless it stands there the same."""
        known = self.namespaces.get(namespace.namespace)
        if known is not None and known.spec == namespace.spec:
            fields = namespace.fields or known.fields
            if fields == known.fields:
                return
            namespace = RegisteredNamespace(namespace.namespace, namespace.spec, fields)
        self.namespaces[namespace.namespace] = namespace
        self._write((LineKind.NAMESPACE, namespace.namespace))

    def add_scope(self, scope: OpenScope) -> None:
        """Write the scope down unless it stands there the same."""
        if self.scopes.get(scope.scope) == scope:
            return
        self._know(scope)
        self._write((LineKind.SCOPE, scope.scope))

    def clear_scopes(self, namespace: NamespaceId, below: ScopeId) -> None:
        """Records that name these scopes mean nothing; they are forgotten later."""
        self._cleared[namespace] = below
        self._waiting.pop((LineKind.CLEARED, namespace), None)  # it comes behind what waits now
        self._write((LineKind.CLEARED, namespace))

    def cleared_below(self, namespace: NamespaceId) -> ScopeId:
        """Records of the namespace with a scope below this number are of what was cleared."""
        return self._cleared.get(namespace, ScopeId(0))

    def forget_scopes(self, scopes: Collection[ScopeId]) -> None:
        """Forget these."""
        for scope in scopes:
            self._forget_scope(scope)
        self._shrink()

    def forget_namespace(self, namespace: NamespaceId) -> None:
        """Forget this and its scopes."""
        del self.namespaces[namespace]
        self._waiting.pop((LineKind.NAMESPACE, namespace), None)
        self._waiting.pop((LineKind.CLEARED, namespace), None)
        self._forget_scopes_of(namespace)
        self._cleared.pop(namespace, None)
        self._shrink()

    def upkeep(self) -> None:
        """A piece of what is left to do: lines that wait, then the file that is written anew."""
        if self._pause:
            self._pause -= 1
        elif self._waiting:
            self._write_waiting()
        elif self._fresh is not None:
            self._go_on_anew(self._fresh, PIECE_LINES)

    def close(self) -> None:
        """What waits is tried a last time; what was begun is begun again by the next owner."""
        while self._waiting and not self._pause:
            self._write_waiting()
        if self._fresh is not None:
            self._give_up_anew(self._fresh)
        self._file.close()

    # -- what is known ------------------------------------------------------------------------

    def _know(self, scope: OpenScope) -> None:
        self.scopes[scope.scope] = scope
        self._by_namespace.setdefault(scope.namespace, set()).add(scope.scope)

    def _forget_scope(self, scope: ScopeId) -> None:
        known = self.scopes.pop(scope, None)
        self._waiting.pop((LineKind.SCOPE, scope), None)
        if known is not None:
            self._by_namespace[known.namespace].discard(scope)

    def _forget_scopes_of(self, namespace: NamespaceId) -> None:
        for scope in list(self._by_namespace.get(namespace, ())):
            self._forget_scope(scope)
        self._by_namespace.pop(namespace, None)

    def take(self, record: Mapping[str, Any]) -> bool:
        """Know what a whole line says; False, and nothing has changed, where it says nothing to us.

        As another release's may: that, too, is lost, and mistaken for nothing else.
        """
        try:
            match LineKind(record["kind"]):
                case LineKind.NAMESPACE:
                    self._take_namespace(_namespace_of(record))
                case LineKind.SCOPE:
                    self._take_scope(_scope_of(record))
                case LineKind.CLEARED:
                    numbers = _number(record["namespace"]), _number(record["below"])
                    self._take_cleared(NamespaceId(numbers[0]), ScopeId(numbers[1]))
        except (KeyError, TypeError, ValueError, KvdError):
            return False
        return True

    def _take_cleared(self, namespace: NamespaceId, below: ScopeId) -> None:
        self._cleared[namespace] = below
        self.highest_scope = max(self.highest_scope, below - 1)
        for number in list(self._by_namespace.get(namespace, ())):
            if number < below:
                self._forget_scope(number)

    def _take_namespace(self, namespace: RegisteredNamespace) -> None:
        known = self.namespaces.get(namespace.namespace)
        if known is not None and known.spec != namespace.spec:
            self._forget_scopes_of(namespace.namespace)  # of one that was forgotten since
        self.namespaces[namespace.namespace] = namespace
        self.highest_namespace = max(self.highest_namespace, namespace.namespace)

    def _take_scope(self, scope: OpenScope) -> None:
        self.highest_scope = max(self.highest_scope, scope.scope)
        known = self.namespaces.get(scope.namespace)
        if known is None or not 0 <= scope.group < len(known.spec.groups):
            return  # its namespace's line was damaged
        if scope.scope in self.scopes:
            self._forget_scope(scope.scope)  # the number of one that was forgotten since
        self._know(scope)

    # -- writing ----------------------------------------------------------------------------------

    @property
    def _fresh_path(self) -> Path:
        return self.path.with_name(self.path.name + ".new")

    def _write(self, name: Name) -> None:
        """Append its line, or have it wait behind those that wait already."""
        if self._fresh is not None:
            self._left.append(name)
            self._go_on_anew(self._fresh, 2)  # so that it ends, however many more there are
        if self._waiting:
            self._waiting[name] = None
            return
        try:
            self._file.append(b"".join(self._lines_of(name)), 1)
        except OSError as error:
            self._waiting[name] = None
            self._wait(error)

    def _write_waiting(self) -> None:
        some = list(islice(self._waiting, PIECE_LINES))
        if self._append(self._file, some):
            for name in some:
                del self._waiting[name]
            if not self._waiting:
                self._said = False
                log.info("the registry is whole again")

    def _append(self, file: LineFile, names: Collection[Name]) -> bool:
        """The lines of those that are still known; False where there is no room for them."""
        content = [line for name in names for line in self._lines_of(name)]
        try:
            file.append(b"".join(content), len(content))
        except OSError as error:
            self._wait(error)
            return False
        return True

    def _wait(self, error: OSError) -> None:
        if not self._said:
            log.warning(
                "the registry can't grow (%s): enlarge the file system of %s, or keep others' files"
                " out of it; namespaces and accounts that are new would not outlive the daemon",
                error.strerror,
                self.path.parent,
            )
        self._said = True
        self._pause = TRY_AGAIN_PIECES

    def _lines_of(self, name: Name) -> Iterator[bytes]:
        """Its line; none where it was forgotten, or cleared."""
        kind, number = name
        if kind is LineKind.SCOPE:
            scope = self.scopes.get(ScopeId(number))
            if scope is not None and number >= self._cleared.get(scope.namespace, 0):
                yield sealed_json.seal(_scope_record(scope))
        elif kind is LineKind.CLEARED:
            if (below := self._cleared.get(NamespaceId(number))) is not None:
                yield sealed_json.seal({"kind": kind.value, "namespace": number, "below": below})
        elif (known := self.namespaces.get(NamespaceId(number))) is not None:
            yield sealed_json.seal(_namespace_record(known))

    # -- writing anew -----------------------------------------------------------------------------

    def _shrink(self) -> None:
        """Begin to write the file anew once most of its lines say what is forgotten."""
        if self._fresh is not None:
            return
        if self._file.lines > SLACK_LINES + 2 * (len(self.namespaces) + len(self.scopes)):
            self._begin_anew()

    def _begin_anew(self) -> None:
        try:
            self._fresh = LineFile(self._fresh_path, self.reserve, fresh=True)
        except OSError as error:
            self._wait(error)
            return
        self._left = deque((LineKind.NAMESPACE, number) for number in self.namespaces)
        self._left.extend((LineKind.CLEARED, number) for number in self._cleared)
        self._left.extend((LineKind.SCOPE, number) for number in self.scopes)

    def _go_on_anew(self, fresh: LineFile, most: int) -> None:
        names: list[Name] = []
        size = 0
        while self._left and len(names) < most and size < PIECE_BYTES:
            names.append(self._left.popleft())
            size += sum(map(len, self._lines_of(names[-1])))
        if not self._append(fresh, names):
            self._give_up_anew(fresh)  # it would only shrink what can stay as it is
            return
        if not self._left:
            try:
                self._fresh_path.rename(self.path)
            except OSError as error:
                self._wait(error)
                self._give_up_anew(fresh)  # and begin again with the next that is forgotten
                return
            self._file.close()
            self._file, self._fresh = fresh, None

    def _give_up_anew(self, fresh: LineFile) -> None:
        fresh.close()
        self._fresh = None
        self._left.clear()
        with contextlib.suppress(OSError):
            self._fresh_path.unlink()


def _namespace_record(namespace: RegisteredNamespace) -> dict[str, Any]:
    spec = namespace.spec
    return {
        "kind": LineKind.NAMESPACE.value,
        "namespace": namespace.namespace,
        "fingerprint": spec.fingerprint,
        "tenant": spec.tenant,
        "hash_bytes": spec.hash_bytes,
        "groups": [[g.kind.value, g.blocks_per_block, list(g.shard_bytes)] for g in spec.groups],
        "unshared": spec.unshared,
        "fields": dict(namespace.fields),
    }


def _namespace_of(record: Mapping[str, Any]) -> RegisteredNamespace:
    groups = tuple(
        GroupSpec(GroupKind(kind), _number(blocks), tuple(map(_number, shard_bytes)))
        for kind, blocks, shard_bytes in record["groups"]
    )
    fields = {_text(name): _text(value) for name, value in dict(record["fields"]).items()}
    # Older registries tell it by the fields alone.
    unshared = bool(record.get("unshared", fields.get("unshared")))
    tenant = TenantId(_text(record["tenant"]))
    fingerprint, hash_bytes = _text(record["fingerprint"]), _number(record["hash_bytes"])
    spec = NamespaceSpec(fingerprint, tenant, hash_bytes, groups, unshared)
    check_group_count(len(groups))
    spec.check()
    return RegisteredNamespace(NamespaceId(_number(record["namespace"])), spec, fields)


def _scope_of(record: Mapping[str, Any]) -> OpenScope:
    return OpenScope(
        ScopeId(_number(record["scope"])),
        NamespaceId(_number(record["namespace"])),
        _text(record["epoch"]),
        _text(record["account"]),
        _number(record["group"]),
        bool(record.get("own", False)),
    )


def _number(value: object) -> int:
    """A number as a record in the slot table may have it; ValueError for anything else."""
    if type(value) is not int or not 0 <= value < 1 << 32:
        raise ValueError("not a number of ours")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _scope_record(scope: OpenScope) -> dict[str, Any]:
    return {
        "kind": LineKind.SCOPE.value,
        "scope": scope.scope,
        "namespace": scope.namespace,
        "epoch": scope.epoch,
        "account": scope.account,
        "group": scope.group,
        "own": scope.own,
    }
