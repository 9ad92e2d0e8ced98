"""Names that no daemon takes are refused where they are given, by the field's name."""

from __future__ import annotations

import os

import pytest

from kvd_client import EngineIdentity, Group, NamespaceFields
from kvd_client.batches import SoughtKeys
from kvd_client.draft import BlockRun
from tests.client.test_batches import Memory, keys
from tests.daemon_process import DaemonProcess

HALF_A_PAIR = "\ud800"


@pytest.mark.parametrize("field", ["account", "model", "tenant", "lora_digest"])
@pytest.mark.parametrize("text", [HALF_A_PAIR, "é" * 129])
def test_a_namespaces_texts_are_looked_at(field: str, text: str) -> None:
    fields = {"model": "m", "kv_dtype": "u8", "hash_algorithm": "sha256", field: text}
    group = Group(tokens_per_block=16, shard_bytes=(4096,))
    with pytest.raises(ValueError, match=field):
        NamespaceFields(hash_bytes=32, groups=(group,), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [HALF_A_PAIR, "é" * 129, ""])
def test_an_engines_id_is_looked_at(text: str) -> None:
    with pytest.raises(ValueError, match="engine_id"):
        EngineIdentity(text, os.urandom(16))


@pytest.mark.parametrize("epoch", [HALF_A_PAIR, "x" * 65])
def test_an_epoch_that_can_not_be_leaves_the_engine_where_it_is(
    daemon: DaemonProcess, epoch: str
) -> None:
    memory = Memory(daemon.socket)
    prompt = keys(1, 4)
    assert memory.batches.store([BlockRun(0, 0, prompt, range(4))]) == [True]
    with pytest.raises(ValueError, match="epoch"):
        memory.batches.reset(epoch)
    assert memory.batches.find([SoughtKeys(0, prompt)])[0].all()
    memory.close()
