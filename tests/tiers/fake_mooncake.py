"""Mooncake's library as a dictionary, with whatever codes a test wants."""

from __future__ import annotations

import ctypes
import itertools
import re
import threading
from collections.abc import Callable, Sequence

from kvd.tiers.mooncake import codes
from kvd.tiers.mooncake.client import LOOK_NS_PER_BYTE, MooncakeClient
from kvd.tiers.mooncake.options import MooncakeOptions
from kvd.tiers.mooncake.store import MooncakeStore
from kvd.tiers.store import OptionValue

# By kind of call and name: the code that it gives instead of doing anything.
Fault = Callable[[str, str], int | None]


class _Replica:
    def __init__(self, size: int) -> None:
        self.buffer_descriptor, self.size = self, size

    def is_memory_replica(self) -> bool:
        return True

    def get_memory_descriptor(self) -> _Replica:
        return self


class FakeLibrary:
    """Answers as a MooncakeDistributedStore does."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.begun: dict[str, bytearray] = {}  # writes that have not ended
        self.stretches: dict[str, int] = {}  # of memory, of which a write took a value
        self.found: set[str] = set()  # for reads that have not ended
        self.fault: Fault = lambda call, name: None
        self.calls: list[tuple[str, list[str]]] = []
        self.registered: dict[int, int] = {}
        self.refuses_memory = False
        self.closed = False
        self._lock = threading.Lock()

    def _begin(self, call: str, names: Sequence[str]) -> None:
        assert not self.closed, "the library crashes when it is called after its end"
        with self._lock:
            self.calls.append((call, list(names)))

    def batch_is_exist(self, names: list[str]) -> list[int]:
        self._begin("exists", names)
        return [self._code("exists", name, int(name in self.values)) for name in names]

    def batch_put_session_start(self, names: list[str], sizes: list[int], _: object) -> list[int]:
        self._begin("begin", names)
        return [self._start(*each) for each in zip(names, sizes, strict=True)]

    def _start(self, name: str, size: int) -> int:
        code = self._code("begin", name, codes.OK)
        with self._lock:
            if code == codes.OK and name in self.begun:
                return codes.SIZE_DIFFERS
            if code == codes.OK and name in self.values:
                return codes.EXISTS
            if code == codes.OK:
                self.begun[name] = bytearray(size)
        return code

    def batch_put_from_multi_buffer_ranges(
        self,
        names: list[str],
        addresses: list[list[int]],
        sizes: list[list[int]],
        offsets: list[list[int]],
    ) -> list[int]:
        self._begin("put", names)
        found = []
        for name, *each in zip(names, addresses, sizes, offsets, strict=True):
            code = self._code("put", name, codes.OK)
            self.stretches[name] = len(each[0])
            for address, size, at in zip(*each, strict=True) if code == codes.OK else ():
                assert at + size <= len(self.begun[name])
                self.begun[name][at : at + size] = ctypes.string_at(address, size)
            found.append(code or sum(each[1]))
        return found

    def batch_put_session_end(self, names: list[str]) -> list[int]:
        self._begin("end", names)
        return [self._end(name) for name in names]

    def _end(self, name: str) -> int:
        code = self._code("end", name, codes.OK)
        if code == codes.OK:
            self.values.setdefault(name, bytes(self.begun.pop(name)))
        return code

    def batch_put_session_revoke(self, names: list[str]) -> list[int]:
        self._begin("give up", names)
        found = [self._code("give up", name, codes.OK) for name in names]
        for name, code in zip(names, found, strict=True):
            if code == codes.OK:
                self.begun.pop(name, None)
        return found

    def batch_get_session_start(self, names: list[str]) -> list[int]:
        self._begin("find", names)
        found = []
        for name in names:
            code = codes.OK if name in self.values else codes.NOT_FOUND
            found.append(self._code("find", name, code))
            if not found[-1]:
                self.found.add(name)
        return found

    def batch_get_into_multi_buffer_ranges(
        self,
        names: list[str],
        addresses: list[list[int]],
        sizes: list[list[int]],
        offsets: list[list[int]],
    ) -> list[int]:
        self._begin("get", names)
        assert self.found.issuperset(names), "somebody else ended what this call began"
        return [self._get(*each) for each in zip(names, addresses, sizes, offsets, strict=True)]

    def _get(self, name: str, addresses: list[int], sizes: list[int], offsets: list[int]) -> int:
        code = self._code("get", name, codes.OK)
        value = self.values.get(name)
        if code != codes.OK or value is None:
            return code or codes.TRANSFER_FAILED
        if len(value) < sum(sizes):
            return codes.SIZE_DIFFERS
        for address, size, at in zip(addresses, sizes, offsets, strict=True):
            ctypes.memmove(address, value[at : at + size], size)
        return sum(sizes)

    def batch_get_session_end(self, names: list[str]) -> int:
        self._begin("let go", names)
        self.found.difference_update(names)
        return codes.OK

    def batch_put_from_multi_buffers(
        self, names: list[str], addresses: list[list[int]], sizes: list[list[int]], _: object
    ) -> list[int]:
        self._begin("put at once", names)
        assert self.begun.keys().isdisjoint(names), "what was begun is to be given up first"
        found = []
        for name, at, of in zip(names, addresses, sizes, strict=True):
            self.stretches[name] = len(at)
            found.append(self._code("put at once", name, codes.OK))
            if found[-1] == codes.OK:
                self.values.setdefault(name, b"".join(map(ctypes.string_at, at, of)))
        return found

    def batch_get_into_multi_buffers(
        self, names: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        self._begin("get at once", names)
        found = []
        for name, at, of in zip(names, addresses, sizes, strict=True):
            code = self._code("get at once", name, codes.OK)
            value = self.values.get(name)
            if code == codes.OK and value is None:
                code = codes.NOT_FOUND
            elif code == codes.OK and value is not None and len(value) != sum(of):
                code = codes.SIZE_DIFFERS if sum(of) < len(value) else codes.TRANSFER_FAILED
            elif code == codes.OK:
                starts = [0, *itertools.accumulate(of[:-1])]
                code = self._get(name, at, of, starts)
            found.append(code)
        return found

    def get_into_ranges(
        self,
        buffers: list[int],
        names: list[list[str]],
        offsets: list[list[list[int]]],
        _: object,
        sizes: list[list[list[int]]],
    ) -> list[list[list[int]]]:
        self._begin("heads", names[0])
        found = []
        for name, [offset], [size] in zip(names[0], offsets[0], sizes[0], strict=True):
            value = self.values.get(name)
            code = self._code("heads", name, codes.OK if value is not None else codes.NOT_FOUND)
            if code == codes.OK and value is not None:
                ctypes.memmove(buffers[0] + offset, value[:size], len(value[:size]))
                code = size if len(value) >= size else codes.SIZE_DIFFERS
            found.append([code])
        return [found]

    def batch_get_replica_desc(self, names: list[str]) -> dict[str, list[_Replica]]:
        self._begin("lengths", names)
        return {n: [_Replica(len(self.values[n]))] for n in names if n in self.values}

    def batch_remove(self, names: list[str], force: bool) -> list[int]:
        assert force, "what was just looked for has a lease"
        self._begin("remove", names)
        return [self._remove(name) for name in names]

    def _remove(self, name: str) -> int:
        code = self._code("remove", name, codes.OK)
        if code == codes.OK and self.values.pop(name, None) is None:
            return codes.NOT_FOUND
        return code

    def remove_by_regex(self, pattern: str, force: bool) -> int:
        assert force
        self._begin("regex", [pattern])
        gone = [name for name in self.values if re.search(pattern, name)]
        code = self._code("regex", pattern, codes.OK)
        if code != codes.OK:
            return code
        for name in gone:
            del self.values[name]
        return len(gone)

    def register_buffer(self, address: int, nbytes: int) -> int:
        if self.refuses_memory:
            return codes.SIZE_DIFFERS
        self.registered[address] = nbytes
        return codes.OK

    def unregister_buffer(self, address: int) -> int:
        return codes.OK if self.registered.pop(address, None) else codes.SIZE_DIFFERS

    def close(self) -> int:
        self.closed = True
        return codes.OK

    def _code(self, call: str, name: str, otherwise: int) -> int:
        wanted = self.fault(call, name)
        return otherwise if wanted is None else wanted

    def names_of(self, call: str) -> list[list[str]]:
        """The names of each call of a kind, in order."""
        return [names for made, names in self.calls if made == call]


def store_over(library: FakeLibrary, **options: OptionValue) -> MooncakeStore:
    def connect(given: MooncakeOptions) -> MooncakeClient:
        return MooncakeClient(library, None, LOOK_NS_PER_BYTE[given.protocol])

    return MooncakeStore({"master": "127.0.0.1:1", **options}, connect)
