"""Mooncake's library as a dictionary, with whatever codes a test wants."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Sequence

from kvd.tiers.mooncake import codes
from kvd.tiers.mooncake.client import MooncakeClient
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

    def batch_put_from_multi_buffers(
        self, names: list[str], addresses: list[list[int]], sizes: list[list[int]], _: object
    ) -> list[int]:
        self._begin("put", names)
        found = []
        for name, at, of in zip(names, addresses, sizes, strict=True):
            code = self._code("put", name, codes.OK)
            if code == codes.OK:
                laid = b"".join(map(ctypes.string_at, at, of))
                self.values.setdefault(name, laid)
            found.append(code)
        return found

    def batch_get_into_multi_buffers(
        self, names: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        self._begin("get", names)
        return [self._get(*each) for each in zip(names, addresses, sizes, strict=True)]

    def _get(self, name: str, addresses: list[int], sizes: list[int]) -> int:
        code = self._code("get", name, codes.OK)
        value = self.values.get(name)
        if code != codes.OK or value is None:
            return code or codes.NOT_FOUND
        if len(value) != sum(sizes):
            return codes.SIZE_DIFFERS if sum(sizes) < len(value) else codes.TRANSFER_FAILED
        for address, size in zip(addresses, sizes, strict=True):
            ctypes.memmove(address, value[:size], size)
            value = value[size:]
        return sum(sizes)

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
    def connect(_: MooncakeOptions) -> MooncakeClient:
        return MooncakeClient(library, None)

    return MooncakeStore({"master": "127.0.0.1:1", **options}, connect)
