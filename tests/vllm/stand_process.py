"""A stand that answers orders, in a forked process of its own, and what it runs there."""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.vllm.engine import FORKS
from tests.vllm.node_daemon import PATIENCE_SECONDS, with_kvd

Ask = Callable[[Any], dict[str, Any]]


@contextlib.contextmanager
def stand_process(module: str, *arguments: Any) -> Iterator[Ask]:
    """`serve(orders, *arguments)` of a module of this folder, until the context ends, without a
    fault. What is given to the function is an order; its answer is returned."""
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=_serve, args=(module, theirs, arguments))
    process.start()
    theirs.close()

    def ask(order: Any) -> dict[str, Any]:
        ours.send(order)
        assert ours.poll(PATIENCE_SECONDS), "the stand says nothing any more"
        told: dict[str, Any] = ours.recv()
        return told

    try:
        yield ask
        ours.send(None)
        process.join(PATIENCE_SECONDS)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


def _serve(module: str, orders: Connection, arguments: tuple[Any, ...]) -> None:
    # Imports vLLM: in the forked process only.
    importlib.import_module(f"tests.vllm.{module}").serve(orders, *arguments)


@contextlib.contextmanager
def stand_with_kvd(
    make: Callable[[str, dict[str, Any]], Any], socket: str, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """In that process: a stand, made of a model and a transfer configuration, and its usable
    connection to the daemon."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    with tempfile.TemporaryDirectory() as folder:
        from tests.vllm.scheduler_stand import write_model

        transfer = with_kvd(socket, **options)["kv_transfer_config"]
        del transfer["kv_role"]
        stand = make(write_model(Path(folder)), transfer)
        connection = stand.connector.connector_scheduler.manager.connection
        assert connection.wait_usable(60), connection.problem
        yield stand, connection
        stand.close()
