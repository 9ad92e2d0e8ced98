"""`kvd verify` on a running daemon names each kind of damage to its files, and harms nothing."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvd.cli.exits import EXIT_FOUND
from kvd.cli.verify import KEPT_FINDINGS, Report, as_text, ask, whole_report
from kvd.core.upkeep.verify import Finding
from kvd.runtime.driver import TICK_SECONDS
from kvd.runtime.verify import MAX_FINDINGS, Look
from kvd_proto import layout
from kvd_proto.v1 import operator_pb2
from tests.control.daemon_rig import Caller, RawEngine, block, refusal
from tests.control.running_daemon import RunningDaemon
from tests.faults.scene import links, target
from tests.forked import run
from tests.waiting import wait_until

RECORD, HEADER, SUM = 128, 64, 8
SLOTS_PER_EXTENT = (1 << 20) // 4096
KEYS = list(range(1, 9))
Damage = Callable[["Victim"], None]


class Victim:
    """A daemon with an engine's blocks in it, whose files are damaged under it and mended again."""

    def __init__(self) -> None:
        self.daemon = RunningDaemon("--payload-checksums", "true")
        self.daemon.extent_bytes = 1 << 20
        # At each tick another one looks at its files, and ends where one was cut short.
        self.daemon.module = "tests.control.daemon_that_misses_nothing"
        self.daemon.start()
        self.engine = RawEngine(self.daemon.socket)
        assert self.engine.store({key: block(key) for key in KEYS}).status == 1
        slots = self.words("slots.table", RECORD)
        (self.row,) = {n // SLOTS_PER_EXTENT for n, word in enumerate(slots) if word & 0xFF == 1}

    def path(self, name: str) -> Path:
        return self.daemon.pool / name

    def words(self, name: str, record: int) -> list[int]:
        """The first word of each record."""
        content = self.path(name).read_bytes()
        return [
            int.from_bytes(content[at : at + 8], "little") for at in range(0, len(content), record)
        ]

    def flip(self, path: Path, at: int, bits: int = 0x40) -> None:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
            mapping[at] ^= bits

    def record(self, ordinal: int) -> int:
        return (self.row * SLOTS_PER_EXTENT + ordinal) * RECORD

    @property
    def page(self) -> Path:
        """The index page, as the daemon's own user may write to it."""
        pages = (str(link) for link in links(self.daemon.pid) if "kvd-page" in target(link))
        return Path(min(pages))

    def found(self, *, with_bytes: bool = True) -> set[str]:
        """Names of the broken invariants."""
        report = ask(self.daemon.socket, 20.0, with_bytes=with_bytes)
        return {each.invariant for each in report.findings}

    def live_on(self) -> None:
        """Return after as long as it takes the daemon to look at its files, and longer."""
        with contextlib.closing(Caller(self.daemon.socket)) as tool:
            began = tool.status().uptime_seconds
            wait_until(lambda: tool.status().uptime_seconds > began + 4 * TICK_SECONDS)

    def close(self) -> None:
        self.engine.close()
        self.daemon.remove()


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    made = Victim()
    try:
        yield made
        assert made.found() == set(), "damage that was not mended"
        assert made.engine.load(KEYS) == [block(key) for key in KEYS], "verify harmed something"
    finally:
        made.close()


def key_of_a_record(victim: Victim) -> None:
    victim.flip(victim.path("slots.table"), victim.record(3) + 64)


def record_that_is_not_ready(victim: Victim) -> None:
    victim.flip(victim.path("slots.table"), victim.record(3), 1)


def record_of_no_block(victim: Victim) -> None:
    victim.flip(victim.path("slots.table"), victim.record(100), 1)


def record_of_no_row(victim: Victim) -> None:
    other = 0 if victim.row else 1
    victim.flip(victim.path("slots.table"), (other * SLOTS_PER_EXTENT + 5) * RECORD, 1)


def header_of_the_row(victim: Victim) -> None:
    victim.flip(victim.path("rows.table"), victim.row * HEADER + 8)


def header_of_no_row(victim: Victim) -> None:
    victim.flip(victim.path("rows.table"), (0 if victim.row else 1) * HEADER + 8)


def sum_of_a_block(victim: Victim) -> None:
    at = (victim.row * SLOTS_PER_EXTENT + 2) * SUM
    victim.flip(victim.path("checksums.table"), at)


def byte_of_a_block(victim: Victim) -> None:
    victim.flip(victim.path(f"extents/{victim.row:05d}.kv"), 2 * 4096 + 77)


def byte_of_the_registry(victim: Victim) -> None:
    victim.flip(victim.path("registry.jsonl"), 40)


def closed_page(victim: Victim) -> None:
    victim.flip(victim.page, layout.PAGE_CLOSED_OFFSET, 1)


def table_of_the_page(victim: Victim) -> None:
    victim.flip(victim.page, layout.PAGE_TABLE_OFFSET, 1)


TWICE: dict[Damage, str] = {  # flipped, and flipped back
    key_of_a_record: "records",
    record_that_is_not_ready: "records",
    record_of_no_block: "records",
    record_of_no_row: "records",
    header_of_the_row: "rows",
    header_of_no_row: "rows",
    sum_of_a_block: "checksums",
    byte_of_a_block: "bytes",
    byte_of_the_registry: "registry",
    closed_page: "pages",
    table_of_the_page: "pages",
}


@pytest.mark.parametrize("damage", TWICE, ids=lambda damage: damage.__name__)
def test_damage_to_a_file_is_named_and_the_daemon_lives_on(victim: Victim, damage: Damage) -> None:
    damage(victim)
    try:
        found = victim.found()
        assert TWICE[damage] in found, found
    finally:
        damage(victim)
    assert victim.found() == set()


def test_a_tag_of_no_block_and_a_lost_one_are_named(victim: Victim) -> None:
    first, size = layout.page_table_span(layout.PAGE_SMALLEST_LEVEL)
    before = victim.page.read_bytes()
    words = range(first, first + size, 8)
    tag = next(at for at in words if any(before[at : at + 8]))
    empty = next(at for at in words if not any(before[at : at + 8]))
    victim.flip(victim.page, empty, 1)
    assert victim.found() == {"pages"}
    victim.flip(victim.page, empty, 1)
    bits = before[tag]
    victim.flip(victim.page, tag, bits or 1)
    assert victim.found() == {"pages"}
    victim.flip(victim.page, tag, bits or 1)
    assert victim.found() == set()


@contextlib.contextmanager
def moved(path: Path) -> Iterator[None]:
    aside = path.with_name(path.name + ".aside")
    path.rename(aside)
    try:
        yield
    finally:
        aside.rename(path)


@pytest.mark.parametrize(
    ("name", "invariant"), [("extents/00003.kv", "files"), ("registry.jsonl", "registry")]
)
def test_a_file_that_is_gone_is_named(victim: Victim, name: str, invariant: str) -> None:
    with moved(victim.path(name)):
        victim.live_on()
        assert victim.found() == {invariant}
    assert victim.found() == set()


def test_a_file_of_another_size_is_named(victim: Victim) -> None:
    path = victim.path("extents/00003.kv")
    with moved(path):
        path.write_bytes(b"short")
        assert victim.found() == {"files"}
        path.unlink()
    registry = victim.path("registry.jsonl")
    whole = registry.read_bytes()
    os.truncate(registry, len(whole) - 5)
    victim.live_on()
    assert victim.found() == {"registry"}
    registry.write_bytes(whole)


def test_a_table_that_was_cut_short_is_named_and_not_read() -> None:
    cut = Victim()
    try:
        os.truncate(cut.path("slots.table"), 0)
        report = ask(cut.daemon.socket, 20.0)
        assert [each.invariant for each in report.findings] == ["files"]
        assert report.findings[0].problem == "it was cut short"
        assert not cut.daemon.has_ended
    finally:
        cut.daemon.kill()  # it would write to the table
        cut.close()


def test_bytes_are_compared_only_where_that_is_asked_for(victim: Victim) -> None:
    byte_of_a_block(victim)
    assert victim.found(with_bytes=False) == set()
    byte_of_a_block(victim)
    report = ask(victim.daemon.socket, 20.0)
    assert (report.blocks, report.bytes) == (len(KEYS), len(KEYS) * 4096)


def command(victim: Victim, *flags: str) -> subprocess.CompletedProcess[str]:
    return run("verify", "--socket", victim.daemon.socket, *flags)


def test_the_command_tells_a_whole_daemon_from_a_broken_one(victim: Victim) -> None:
    said = command(victim)
    assert said.returncode == 0, said
    assert "8 blocks looked at" in said.stdout
    assert said.stdout.endswith("all is whole\n")
    key_of_a_record(victim)
    said = command(victim, "--json")
    key_of_a_record(victim)
    assert said.returncode == EXIT_FOUND
    report = json.loads(said.stdout)
    assert report["whole"] is False
    assert report["findings"][0]["invariant"] == "records"
    assert f"row {victim.row} " in report["findings"][0]["place"]
    assert command(victim, "--json").returncode == 0


def test_the_command_says_where_no_daemon_answers(victim: Victim, tmp_path: Path) -> None:
    said = command(victim, "--socket", str(tmp_path / "nobody.sock"))
    assert (said.returncode, said.stdout) == (1, "")
    assert "no daemon answers" in said.stderr


def test_a_part_that_there_is_not_is_refused(victim: Victim) -> None:
    tool = Caller(victim.daemon.socket)
    for part in (5, 99, 2**31 - 1):
        request = operator_pb2.VerifyRequest.FromString(b"\x08" + _varint(part))
        code, reason, field = refusal(lambda r=request: tool.call(tool.operator.Verify, r))  # type: ignore[misc]
        assert (code, reason, field) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT", "part")
    beyond = operator_pb2.VerifyRequest(part="VERIFY_PART_BLOCKS", after=2**64 - 1)
    assert tool.call(tool.operator.Verify, beyond).blocks == 0
    tool.close()


def _varint(number: int) -> bytes:
    content = b""
    while number > 0x7F:
        content += bytes([number & 0x7F | 0x80])
        number >>= 7
    return content + bytes([number])


def test_an_answer_names_so_many_findings_and_counts_the_others() -> None:
    look, report = Look(), Report()
    look.add([Finding("slots", f"row {number}", "wrong") for number in range(MAX_FINDINGS + 3)])
    look.add(None)
    assert (len(look.findings), look.more_findings, look.unsettled) == (MAX_FINDINGS, 3, 1)
    some = [operator_pb2.Finding(place=each.place) for each in look.findings]
    for _ in range(1 + KEPT_FINDINGS // MAX_FINDINGS):
        report.add(operator_pb2.VerifyResponse(findings=some, more_findings=3, unsettled=1))
    assert len(report.findings) == KEPT_FINDINGS
    assert report.more_findings == MAX_FINDINGS + 3 * report.looks
    assert report.unsettled == report.looks


def test_a_comparison_given_up_is_not_said_to_be_for_changes_alone() -> None:
    """An index page of a million blocks is too large to be counted, however idle the daemon."""
    *_, last = as_text(Report(blocks=1_000_000, unsettled=1))
    assert "comparisons given up: 1;" in last
    assert "too large for one look" in last


def test_a_look_goes_on_where_the_one_before_ended() -> None:
    asked: list[tuple[int, int]] = []

    def call(request: operator_pb2.VerifyRequest) -> operator_pb2.VerifyResponse:
        asked.append((request.part, request.after))
        last = len(asked) == 4
        return operator_pb2.VerifyResponse(
            next_part=0 if last else "VERIFY_PART_BLOCKS",  # type: ignore[arg-type]
            next_after=10 * len(asked),
            blocks=2,
        )

    report = whole_report(call, with_bytes=True)
    assert asked == [(0, 0), (2, 10), (2, 20), (2, 30)]
    assert (report.looks, report.blocks) == (4, 8)


def test_blocks_of_a_time_without_checksums_are_whole() -> None:
    running = RunningDaemon("--payload-checksums", "false")
    try:
        running.extent_bytes = 1 << 20
        running.start()
        engine = RawEngine(running.socket)
        assert engine.store({key: block(key) for key in KEYS}).status == 1
        engine.close()
        assert not ask(running.socket, 20.0).findings
        running.stop()
        running.more_flags = ()  # as the daemon chooses: it keeps those that there are
        running.start()
        report = ask(running.socket, 20.0)
        assert (list(report.findings), report.blocks) == ([], len(KEYS))
    finally:
        running.remove()
