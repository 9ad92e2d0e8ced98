"""The daemon as the engines' tests see it: what it holds, who is connected, which movers run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvd.cli.status import ask
from kvd_client.daemon import greeted
from kvd_proto.v1 import companion_pb2, operator_pb2, operator_pb2_grpc
from tests.daemon_process import DaemonProcess

PATIENCE_SECONDS = 60.0
# A busy machine answers late; where that is not what a test is about, it must not turn a hit
# into a miss.
PATIENT = {
    "lookup_give_up_s": 30.0,
    "silent_after_s": 30.0,
    "retry_deadline_s": 30.0,
    "pending_deadline_s": 30.0,
    "flush_timeout_s": 30.0,
    "load_deadline_s": 60.0,
}


def with_kvd(socket: str, **options: Any) -> dict[str, Any]:
    """The settings of an engine that keeps its KV in the daemon behind a socket."""
    return {
        "kv_transfer_config": {
            "kv_connector": "KvdConnector",
            "kv_connector_module_path": "kvd_client.integrations.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket_path": socket, **PATIENT, **options},
        }
    }


class NodeDaemon(DaemonProcess):
    """A daemon process that can be asked.

    A mover that a test holds, or that a busy machine does, is not ended within `PATIENT`'s times.
    """

    def __init__(self, directory: Path, pool: Path) -> None:
        super().__init__(directory, pool)
        self.flags = {"submit-deadline-seconds": 120, "copy-deadline-seconds": 120}

    def status(self) -> operator_pb2.StatusResponse:
        return ask(self.socket, PATIENCE_SECONDS)

    def clear(self) -> None:
        """Forget all blocks, as an operator does."""
        with greeted(self.socket, companion_pb2.PEER_ROLE_TOOL, "tests") as daemon:
            stub = operator_pb2_grpc.OperatorServiceStub(daemon.channel)
            request = operator_pb2.ClearRequest()
            stub.Clear(request, timeout=PATIENCE_SECONDS, metadata=daemon.metadata)

    def bytes_loaded(self) -> list[int]:
        """Bytes copied into each rank of the one engine; a load's count follows its end."""
        (session,) = self.status().sessions
        return [rank.bytes_loaded for rank in session.ranks]

    @contextmanager
    def held_mover(self) -> Iterator[None]:
        """The one mover stands still: what it copies takes as long as this."""
        (mover,) = self.movers()
        os.kill(mover, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(mover, signal.SIGCONT)

    def ready_blocks(self) -> int:
        """Blocks that any engine could load."""
        return int(self.status().pool.slots_ready)
