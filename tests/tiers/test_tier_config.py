"""Tiers in the configuration file: their order, their defaults, and what is refused and how."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

from kvd.config import settings
from kvd.config.settings import Config, ConfigError
from kvd.config.tiers import KINDS, SHARED_KINDS, TierRule
from kvd.linux.plain_file import MAX_PEM_BYTES
from kvd.pool.config import Checksums
from kvd.tiers.options import path, read_options, seconds, secret_of
from kvd.tiers.process import QueueBounds
from kvd.tiers.store import TierUnusable
from kvd_proto.limits import MAX_TIERS
from tests import forked

LEAST = '[[tiers]]\nname = "disk"\nstore = "site.disk:open"\n'
WHOLE = """
[[tiers]]
name = "disk"
store = "site.disk:open_store"
medium = "STORAGE"
write = "demotion"
deadline_seconds = 2
queue_keys = 100
queue_reads = 200
queue_writes = 300
options = {directories = ["/a", "/b"], direct = true, threads = 4, share = 0.5}

[[tiers]]
name = "far-2"
store = "open:Store"
medium = "REMOTE"
write = "reuse"
reuse = 3
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "kvd.toml"


def load(place: Path, text: str) -> Config:
    place.write_text(text)
    return settings.load({"config": str(place)}, {})


def test_there_is_no_tier_where_none_is_named(place: Path) -> None:
    assert load(place, "").tiers == ()
    assert load(place, "tiers = []").tiers == ()


def test_a_tier_has_the_documented_defaults(place: Path) -> None:
    [tier] = load(place, LEAST).tiers
    assert tier == TierRule("disk", "site.disk:open")
    assert (tier.write, tier.medium, tier.deadline_seconds) == ("through", "STORAGE", 5.0)
    assert tier.bounds == QueueBounds()


def test_tiers_keep_their_order_and_every_field(place: Path) -> None:
    disk, far = load(place, WHOLE).tiers
    assert disk.options == {
        "directories": ["/a", "/b"],
        "direct": True,
        "threads": 4,
        "share": 0.5,
    }
    assert disk.bounds == QueueBounds(100, 200, 300)
    assert (disk.write, disk.deadline_seconds) == ("demotion", 2.0)
    assert (far.name, far.medium, far.write, far.reuse) == ("far-2", "REMOTE", "reuse", 3)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_names_a_store_that_is_there(place: Path, kind: str) -> None:
    [tier] = load(place, f'[[tiers]]\nname = "a"\nkind = "{kind}"\n').tiers
    module, _, name = tier.store.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    assert load(place, settings.as_toml(load(place, place.read_text()))).tiers == (tier,)


def test_a_tier_that_nodes_share_is_remote_unless_the_site_says_other(place: Path) -> None:
    least = '[[tiers]]\nname = "a"\nkind = "{}"\n'
    assert load(place, least.format("disk")).tiers[0].medium == "STORAGE"
    for kind in SHARED_KINDS:
        assert load(place, least.format(kind)).tiers[0].medium == "REMOTE"
        [tier] = load(place, least.format(kind) + 'medium = "STORAGE"\n').tiers
        assert tier.medium == "STORAGE"


def test_the_printed_tiers_say_the_same_when_read_again(place: Path) -> None:
    first = load(place, WHOLE)
    assert load(place, settings.as_toml(first)) == first


def with_field(line: str) -> str:
    """The least tier with one line instead of its own of that name, or beside them."""
    name = line.partition(" = ")[0]
    kept = [own for own in LEAST.splitlines() if not own.startswith(name + " ")]
    return "\n".join([*kept, line])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('name = ""', r"tiers\[0\]\.name is ''.*1 to 64 small letters"),
        (f'name = "{"x" * 65}"', r"tiers\[0\]\.name .*1 to 64"),
        ('name = "Disk"', r"tiers\[0\]\.name .*small letters"),
        ("name = 3", r"tiers\[0\]\.name is 3"),
        ('store = "site.disk"', r'tiers\[0\]\.store .*"package\.module:name"'),
        ('store = "site.disk:"', r"tiers\[0\]\.store"),
        ('store = "../x:y"', r"tiers\[0\]\.store"),
        ('medium = "CPU"', r"tiers\[0\]\.medium is 'CPU'.*STORAGE, REMOTE"),
        ('write = "never"', r"tiers\[0\]\.write .*through, demotion, reuse"),
        ("reuse = 3", r'tiers\[0\]\.reuse counts only with write = "reuse"'),
        ('write = "reuse"\nreuse = 1', r"tiers\[0\]\.reuse is 1.*2 to 255"),
        ('write = "reuse"\nreuse = 256', r"tiers\[0\]\.reuse is 256"),
        ("deadline_seconds = 0.049", r"tiers\[0\]\.deadline_seconds .*0\.05 to 600"),
        ("deadline_seconds = 601", r"tiers\[0\]\.deadline_seconds"),
        ("deadline_seconds = nan", r"tiers\[0\]\.deadline_seconds"),
        ("queue_keys = 0", r"tiers\[0\]\.queue_keys .*1 to 65536"),
        ("queue_keys = 65537", r"tiers\[0\]\.queue_keys"),
        ("queue_reads = 8193", r"tiers\[0\]\.queue_reads .*1 to 8192"),
        ("queue_writes = 8193", r"tiers\[0\]\.queue_writes .*1 to 8192"),
        ("options = [1]", r"tiers\[0\]\.options .*a table"),
        ("options = {a = {b = 1}}", r"tiers\[0\]\.options .*a is none"),
        ("options = {a = [1]}", r"tiers\[0\]\.options .*a is none"),
        ("options = {a = 2026-11-23}", r"tiers\[0\]\.options .*a is none"),
        ("speed = 3", r"tiers\[0\] has an unknown key 'speed'; known: name, kind, store"),
        ('kind = "disk"', r"tiers\[0\] needs one of kind \(disk[^)]*\) and store"),
    ],
)
def test_what_can_not_be_is_refused_by_its_field(place: Path, line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(place, with_field(line))


@pytest.mark.parametrize(
    "line",
    [
        f'name = "{"x" * 64}"',
        'write = "reuse"\nreuse = 2',
        'write = "reuse"\nreuse = 255',
        "deadline_seconds = 0.05",
        "deadline_seconds = 600",
        "queue_keys = 1",
        "queue_keys = 65536",
        "queue_reads = 8192",
        "queue_writes = 8192",
    ],
)
def test_what_may_just_be_is_taken(place: Path, line: str) -> None:
    assert len(load(place, with_field(line)).tiers) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tiers = 3\n", "list of tables"),
        ("tiers = [1]\n", "list of tables"),
        ("[tiers.disk]\nname = 3\n", "list of tables"),
        ('[[tiers]]\nstore = "a:b"\n', r"tiers\[0\] has no name"),
        ('[[tiers]]\nname = "a"\n', r"tiers\[0\] needs one of kind \(disk[^)]*\) and store"),
        ('[[tiers]]\nname = "a"\nkind = "disc"\n', r"tiers\[0\]\.kind is 'disc'.*one of disk"),
        (LEAST * 2, r"tiers\[1\]\.name is 'disk', as of an earlier one"),
    ],
)
def test_a_list_that_can_not_be_is_refused(place: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(place, text)


def test_there_are_as_many_tiers_as_a_request_may_name(place: Path) -> None:
    tables = [LEAST.replace("disk", f"t{number}", 1) for number in range(MAX_TIERS + 1)]
    assert len(load(place, "".join(tables[:-1])).tiers) == MAX_TIERS
    with pytest.raises(ConfigError, match="there are 9"):
        load(place, "".join(tables))


def test_the_printed_configuration_shows_the_tiers(place: Path) -> None:
    place.write_text(LEAST)
    shown = forked.run("serve", "--config", str(place), "--print-config")
    assert 'name = "disk"' in shown.stdout, shown.stderr


def test_tiers_and_checksums_of_payloads_can_be_had_together(place: Path) -> None:
    config = load(place, "payload_checksums = true\n" + LEAST)
    assert config.payload_checksums is Checksums.ON
    assert [tier.name for tier in config.tiers] == ["disk"]


@pytest.mark.parametrize(
    ("kind", "said"), [("pipe", "is no plain file"), ("huge", "has more than")]
)
def test_secrets_are_read_from_small_plain_files(tmp_path: Path, kind: str, said: str) -> None:
    secret = tmp_path / "secret"
    if kind == "pipe":
        os.mkfifo(secret)
    else:
        with secret.open("wb") as file:
            file.truncate(MAX_PEM_BYTES + 1)
    with pytest.raises(TierUnusable, match=f"password_file: .*secret {said}"):
        secret_of("password_file", secret)


@pytest.mark.parametrize("given", [10**400, -(10**400), True, "4", float("nan")], ids=range(5))
def test_seconds_that_can_not_be_are_refused_by_name(given: float | str) -> None:
    with pytest.raises(TierUnusable, match=r"^wait: .* is not a number of seconds from 0 to 60$"):
        read_options({"wait": given}, {"wait": seconds(0, 60)})


@pytest.mark.parametrize("given", ["data", "/a\0b", 7], ids=range(3))
def test_paths_that_can_not_be_are_refused_by_name(given: int | str) -> None:
    with pytest.raises(TierUnusable, match=r"^place: .* is not an absolute path, without a zero"):
        read_options({"place": given}, {"place": path})
