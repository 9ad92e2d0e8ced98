"""Commands whose work takes the daemon seconds wait longer than others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from kvd.cli.calls import MORE_TIME, Link
from kvd.cli.quota import _set
from kvd_proto.v1 import operator_pb2 as pb

TIMEOUT_S = 5.0


class Operator:
    """Notes how long a caller would wait."""

    def __init__(self) -> None:
        self.timeout_s = 0.0

    def SetQuota(  # noqa: N802 - gRPC's name
        self, _request: pb.SetQuotaRequest, timeout: float, **_terms: Any
    ) -> SimpleNamespace:
        self.timeout_s = timeout
        return SimpleNamespace(blocks_evicted=4_000_000)


def test_a_quota_that_millions_of_blocks_go_for_is_waited_for() -> None:
    """The quota was set, and the command said that the daemon did not answer."""
    operator: Any = Operator()
    link = Link(cast(Any, None), operator, (), TIMEOUT_S)
    assert _set(link, "default", 1 << 20) == 4_000_000
    assert operator.timeout_s == TIMEOUT_S + MORE_TIME
