"""What an engine's author may give by mistake is refused at once, by name, and costs no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvd_client import EngineIdentity, Fragment, GroupLayout, SharedMemory

U32, U64 = 1 << 32, 1 << 64


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("base", lambda: Fragment(0, -8, 64, 64)),
        ("base", lambda: Fragment(0, U64, 64, 64)),
        ("stride", lambda: Fragment(0, 0, U64, 64)),
        ("memory", lambda: Fragment(-1, 0, 64, 64)),
        ("memory", lambda: Fragment(U32, 0, 64, 64)),
        ("offset", lambda: SharedMemory(0, -8, 64)),
        ("bytes", lambda: SharedMemory(0, 0, U64)),
        ("num_blocks", lambda: GroupLayout(-1, [])),
        ("blocks_per_block", lambda: GroupLayout(1, [], U32)),
    ],
)
def test_numbers_of_a_layout_that_no_message_carries(
    field: str, make: Callable[[], object]
) -> None:
    with pytest.raises(ValueError, match=rf"{field} is -?\d+, allowed are 0\.\."):
        make()


def test_the_largest_numbers_of_a_layout_are_carried() -> None:
    Fragment(U32 - 1, U64 - 8, U64 - 8, 64).to_proto()
    SharedMemory(0, U64 - 1, U64 - 1).to_proto(1)
    GroupLayout(U64 - 1, [], U32 - 1).to_proto(0)


@pytest.mark.parametrize("nonce", ["x" * 16, bytearray(16), bytes(15), bytes(17), None])
def test_a_boot_nonce_is_16_bytes(nonce: Any) -> None:
    with pytest.raises(ValueError, match="boot_nonce must be `bytes`, 16 of them"):
        EngineIdentity("e0", nonce)
