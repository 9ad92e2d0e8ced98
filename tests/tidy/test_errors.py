"""Every reason that a client may branch on has one gRPC code and a line in docs/errors.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from kvd.control import errors as edge
from kvd.core import errors
from kvd.tiers.store import TierReason
from kvd_client.worker.cuda_refusals import CudaRefusal
from tests.tidy.source import ROOT, parse, python_files, where

DOCUMENT = ROOT / "docs" / "errors.md"
# Reasons that a verdict on a job, or the end of one, may carry: answers, not errors. A job
# whose own fields break a rule is refused with one of those that a call may fail with.
VERDICT_REASONS = {
    errors.NO_ROOM,
    errors.QUOTA,
    errors.KEY_MISSING,
    errors.RANKS_MISSING,
    errors.QUEUE_FULL,
    errors.DRAINING,
    errors.EXPIRED,
    errors.MOVER_GONE,
    errors.COPY_FAILED,
    errors.ABANDONED,
    errors.CHECKSUM_MISMATCH,
    errors.SESSION_CLOSED,
    errors.RESET,
}
ROW = re.compile(r"^\| `([A-Z_]+)` \| ([^|]+) \|", re.MULTILINE)


def documented() -> list[tuple[str, str]]:
    """Each row's reason, and the cell after it: in the first table that is its gRPC code."""
    return ROW.findall(DOCUMENT.read_text())


def error_classes(of: type[errors.KvdError] = errors.KvdError) -> list[type[errors.KvdError]]:
    """KvdError and every class under it."""
    return [of, *(c for sub in of.__subclasses__() for c in error_classes(sub))]


def test_every_error_has_a_grpc_code() -> None:
    assert {c.reason for c in error_classes()} <= edge.STATUS_OF.keys()


def reasons_passed(path: Path) -> Iterator[tuple[int, str]]:
    """Line and value of every `reason="SOME_REASON"` in a file."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.keyword) and node.arg == "reason":
            value = node.value.value if isinstance(node.value, ast.Constant) else None
            if isinstance(value, str) and value.isupper():
                yield node.value.lineno, value


def test_every_reason_written_in_the_code_is_known() -> None:
    known = edge.STATUS_OF.keys() | VERDICT_REASONS
    assert [
        f"{where(path, line)} {reason}"
        for path in python_files()
        if path.is_relative_to(ROOT / "kvd")
        for line, reason in reasons_passed(path)
        if reason not in known
    ] == []


def test_the_protocols_limits_name_reasons_that_exist() -> None:
    named = re.findall(r"\breason ([A-Z_]+)\b", (ROOT / "proto/kvd/v1/common.proto").read_text())
    assert named
    assert set(named) <= edge.STATUS_OF.keys()


def test_the_document_lists_exactly_the_reasons_there_are() -> None:
    there_are = edge.STATUS_OF.keys() | VERDICT_REASONS | set(CudaRefusal) | set(TierReason)
    assert {reason for reason, _ in documented()} == there_are


def test_the_document_names_each_errors_code() -> None:
    rows = documented()
    assert [
        (reason, code.name)
        for reason, code in edge.STATUS_OF.items()
        if (reason, code.name) not in rows
    ] == []
