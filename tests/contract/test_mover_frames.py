"""What a mover says of a copy arrives as it was said, and nothing else is taken for it."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.core.events import TransferOutcome
from kvd.core.keys import TransferId
from kvd.mover.frames import Finished, pack_finished, unpack_finished
from kvd.processes.framing import BadFrame

SAID = Finished(
    TransferId(7),
    TransferOutcome.FAILED,
    bytes_copied=3 << 33,
    duration_ns=5 << 34,
    checksums=np.array([1 << 63, 2, 3], dtype=np.uint64),
    damaged=np.array([4, 5], dtype=np.uint64),
)


def test_every_figure_of_a_copys_end_arrives() -> None:
    heard = unpack_finished(pack_finished(SAID))
    for field in ("transfer", "outcome", "bytes_copied", "duration_ns"):
        assert getattr(heard, field) == getattr(SAID, field), field
    assert heard.checksums.tolist() == SAID.checksums.tolist()
    assert heard.damaged.tolist() == SAID.damaged.tolist()


@pytest.mark.parametrize("change", [-8, -1, 1, 8])
def test_a_copys_end_of_another_length_is_refused(change: int) -> None:
    body = pack_finished(SAID)
    with pytest.raises(BadFrame):
        unpack_finished(body[:change] if change < 0 else body + bytes(change))


def test_each_outcome_is_told_and_no_other() -> None:
    said = {each: pack_finished(Finished(TransferId(1), each)) for each in TransferOutcome}
    assert {unpack_finished(body).outcome for body in said.values()} == set(TransferOutcome)
    body = bytearray(said[TransferOutcome.DONE])
    places = [n for n, byte in enumerate(body) if byte != said[TransferOutcome.FAILED][n]]
    body[places[0]] = len(TransferOutcome)
    with pytest.raises(BadFrame, match="outcome"):
        unpack_finished(bytes(body))
