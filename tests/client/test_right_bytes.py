"""Whatever an engine does with its blocks, a key is stored with its own bytes and no others.

A careless engine in memory, a daemon that copies as late as it may: every byte that is stored,
and every one that the model is about to read, is checked.
"""

from __future__ import annotations

import pytest

from kvd_client import Group, GroupKind, SchedulerOptions, StoreMode
from tests.client.copying_daemon import CopyingDaemon
from tests.client.paged_engine import PagedEngine
from tests.client.real_side import RealSide
from tests.client.small_engine import PATIENCE_S
from tests.daemon_process import DaemonProcess

STEPS = 250
PATIENT = SchedulerOptions(lookup_give_up_s=PATIENCE_S)
FULL = Group(tokens_per_block=4, shard_bytes=(64,))
WIDE = Group(tokens_per_block=8, shard_bytes=(64,), blocks_per_block=2)
WINDOW = Group(
    tokens_per_block=4,
    shard_bytes=(64,),
    kind=GroupKind.SLIDING_WINDOW,
    sliding_window_tokens=7,
)
WIDE_WINDOW = Group(
    tokens_per_block=8,
    shard_bytes=(64,),
    kind=GroupKind.SLIDING_WINDOW,
    blocks_per_block=2,
    sliding_window_tokens=10,
)
STATE = Group(tokens_per_block=8, shard_bytes=(64,), kind=GroupKind.RECURRENT_STATE)
DRAFTER = Group(tokens_per_block=4, shard_bytes=(64,), drafter=True)
WINDOW_DRAFTER = Group(
    tokens_per_block=4,
    shard_bytes=(64,),
    kind=GroupKind.SLIDING_WINDOW,
    sliding_window_tokens=7,
    drafter=True,
)
MODELS = {
    "full": (FULL,),
    "wide": (WIDE,),
    "windows": (FULL, WINDOW),
    "wide windows": (WIDE, WIDE_WINDOW, WINDOW),
    "states": (FULL, STATE),
    "all kinds": (WIDE, WINDOW, STATE),
    "drafter": (FULL, DRAFTER),
    "windows and their drafter": (FULL, WINDOW, WINDOW_DRAFTER),
}
MODES = {
    "eager": SchedulerOptions(),
    "lazy": SchedulerOptions(store_mode=StoreMode.LAZY),
    "thinned out": SchedulerOptions(retention_tokens=16, share_loads=False),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
def test_every_byte_is_right_whatever_the_engine_does(model: str, mode: str) -> None:
    stored = loaded = 0
    for seed in range(3):
        daemon = CopyingDaemon(MODELS[model], seed)
        engine = PagedEngine(daemon, MODES[mode], seed, speculates=seed % 2 == 1)
        daemon.expected = engine.expected
        engine.run(STEPS)
        stored += daemon.blocks_stored
        loaded += daemon.blocks_loaded
    assert stored > 50
    assert loaded > 50


@pytest.mark.parametrize("model", ["windows and their drafter", "all kinds"])
def test_every_byte_is_right_through_a_real_daemon(daemon: DaemonProcess, model: str) -> None:
    loaded = 0
    for seed in range(2):
        side = RealSide(daemon.socket, MODELS[model], f"e{seed}")
        try:
            engine = PagedEngine(side, PATIENT, seed, speculates=seed % 2 == 1)
            engine.run(STEPS)
            loaded += engine.tokens_loaded
        finally:
            side.close()
    assert loaded > 50
