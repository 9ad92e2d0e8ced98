"""The disk tier against a dictionary, in any order of calls, with restarts in between."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvd.core.policy import POLICY_NAMES
from kvd.tiers.disk.store import DiskStore
from kvd.tiers.store import Outcome, TierKey
from tests.tiers.contract import ONE, OTHER, content, key, soon, source, target
from tests.tiers.test_disk_contract import options_of

KEYS = [key(n, scope) for scope in (ONE, OTHER) for n in range(6)]
SIZES = [(4096,), (8192,), (4096, 4096), (24,), (20480,)]
keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=8)
sizes = st.sampled_from(SIZES)


class DiskMachine(RuleBasedStateMachine):
    """`kept` says what the last write of each key gave it; a block may be missing, never wrong."""

    @initialize(policy=st.sampled_from(POLICY_NAMES), disks=st.integers(1, 2))
    def begin(self, policy: str, disks: int) -> None:
        self.root = Path(tempfile.mkdtemp())
        places = [self.root / str(n) for n in range(disks)]
        self.options = options_of(*places, regions=3, region_bytes=64 << 10, policy=policy)
        self.store = DiskStore(self.options)
        self.kept: dict[TierKey, tuple[tuple[int, ...], bytes]] = {}
        self.writes = 0

    @rule(names=keys, shape=sizes)
    def write(self, names: list[TierKey], shape: tuple[int, ...]) -> None:
        self.writes += 1
        parts = [content((self.writes, n), size) for n, size in enumerate(shape)]
        had = dict(zip(names, self.store.exists(names, soon()), strict=True))
        outcomes = self.store.write([source(name, *parts) for name in names], soon())
        for name, outcome in zip(names, outcomes, strict=True):
            assert outcome in (Outcome.DONE, Outcome.FULL)
            if outcome is Outcome.DONE and (not had[name] or self.kept[name][0] != shape):
                self.kept[name] = (shape, b"".join(parts))

    @rule(names=keys, shape=sizes)
    def read(self, names: list[TierKey], shape: tuple[int, ...]) -> None:
        blocks = [target(name, *shape) for name in names]
        outcomes = self.store.read(blocks, soon())
        for name, block, outcome in zip(names, blocks, outcomes, strict=True):
            assert outcome in (Outcome.DONE, Outcome.MISSING)
            if outcome is Outcome.DONE:
                assert self.kept[name] == (shape, b"".join(map(bytes, block.parts)))

    @rule(scope=st.sampled_from([ONE, OTHER]))
    def delete_scope(self, scope: bytes) -> None:
        self.store.delete_scopes([scope], soon())
        self.kept = {name: what for name, what in self.kept.items() if name.scope != scope}

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = DiskStore(self.options)

    @invariant()
    def nothing_is_there_that_was_not_written(self) -> None:
        if hasattr(self, "store"):
            there = self.store.exists(KEYS, soon())
            assert {k for k, is_there in zip(KEYS, there, strict=True) if is_there} <= set(
                self.kept
            )
            usage = self.store.usage()
            assert usage.blocks == sum(there)
            assert usage.bytes <= usage.capacity_bytes
            assert usage.errors == {}

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.root)


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
