"""Settings: which source wins, what is refused, and what --print-config says."""

from __future__ import annotations

import grp
import json
import pwd
import re
from pathlib import Path

import pytest

from kvd.cli import serving
from kvd.config import settings
from kvd.config.settings import Config, ConfigError
from kvd.config.tenant_rule import TenantRule
from kvd.config.values import memory_bytes, parse_size
from kvd.core.keys import TenantId
from kvd.pool.config import Checksums
from tests.forked import run


def load(*flags: str, environment: dict[str, str] | None = None, file: str = "") -> Config:
    given = ["--config", file] if file else []
    read = serving.command.make_context("serve", [*given, *flags]).params
    return settings.load(read, environment or {})


@pytest.fixture
def write(tmp_path: Path):  # type: ignore[no-untyped-def]
    def made(text: str) -> str:
        path = tmp_path / "kvd.toml"
        path.write_text(text)
        return str(path)

    return made


def test_flags_win_over_variables_over_the_file_over_defaults(write) -> None:  # type: ignore[no-untyped-def]
    file = write('policy = "arc"\nstore_threshold = 3\nlease_ttl_ms = 500\n')
    environment = {"KVD_POLICY": "s3fifo", "KVD_STORE_THRESHOLD": "4"}
    loaded = load("--policy", "lru", environment=environment, file=file)
    assert (loaded.policy, loaded.store_threshold, loaded.lease_ttl_ms) == ("lru", 4, 500)
    assert loaded.http_port == 9470


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GiB", 4 << 30),
        ("1.5 GiB", 3 << 29),
        ("64MiB", 64 << 20),
        ("1gb", 10**9),
        ("1234567", 1234567),
        ("50%", 500),
    ],
)
def test_sizes_are_read(text: str, expected: int) -> None:
    assert parse_size(text, lambda: 1000) == expected


HUGE = "9" * 400


@pytest.mark.parametrize(
    "text", ["", "-1", "4 bananas", "0%", "101%", "GiB", "1e9", HUGE, HUGE + "GiB", "8388608TiB"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|share"):
        parse_size(text, lambda: 1000)


def test_a_share_of_memory_is_a_share_of_what_there_is() -> None:
    whole = memory_bytes()
    assert load("--pool-bytes", "60%").pool_bytes == int(whole * 60.0 / 100)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--pool-bytes", "lots"], "pool_bytes"),
        (["--extent-bytes", "100"], "extent_bytes"),
        (["--extent-bytes", "0"], "extent_bytes"),
        (["--pool-bytes", "1MiB"], "pool_bytes"),
        (["--pool-bytes", "8TiB"], "pool_bytes"),
        (["--policy", "mru"], "policy"),
        (["--http-port", "99999"], "http_port"),
        (["--socket", "relative.sock"], "socket"),
        (["--socket", "/" + "x" * 98], "socket"),
        (["--socket", "/" + "\xe9" * 49], "socket"),
        (["--socket", "/run/\udcff.sock"], "socket"),
        (["--socket", "/"], "socket"),
        (["--socket", "/run/kvd/"], "socket"),
        (["--socket", "/run/.."], "socket"),
        (["--pool-directory", "/run/\udcff"], "pool_directory"),
        (["--extents-directory", "/run/\0"], "extents_directory"),
        (["--pool-directory", "/x" * 1920], "pool_directory"),
        (["--pool-directory", "/" + "\xe9" * 128], "pool_directory"),
        (["--extents-directory", "/run/" + "x" * 256], "extents_directory"),
        (["--socket-mode", "999"], "socket_mode"),
        (["--lease-share", "2"], "lease_share"),
        (["--store-threshold", "0"], "store_threshold"),
        (["--gpu-context-bytes", "10%"], "gpu_context_bytes"),
        (["--gpu-context-bytes", "17GiB"], "gpu_context_bytes"),
        (["--gpu-staging-bytes", "64KiB"], "gpu_staging_bytes"),
        (["--gpu-staging-bytes", "1048577"], "gpu_staging_bytes"),
        (["--log-level", "loud"], "log_level"),
        (["--operators", "no-such-user"], "operators"),
        (["--any-filesystem", "perhaps"], "any_filesystem"),
        (["--payload-checksums", "automatic"], "payload_checksums"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_and_where_it_came_from(
    flags: list[str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        load(*flags)
    assert "must be" in str(caught.value) or "raise pool_bytes" in str(caught.value)


def test_a_path_may_be_as_long_as_the_kernel_has_it_with_room_for_files_below() -> None:
    for path in ("/x" * 1919, "/run/" + "x" * 255):
        assert load("--pool-directory", path).pool_directory == Path(path)


@pytest.mark.parametrize("name", ["drain_seconds", "lease_share", "pool_bytes", "http_port"])
def test_a_number_of_the_file_that_is_too_large_is_refused(write, name: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=f"{name} is 9.*it must be"):
        load(file=write(f"{name} = {HUGE}\n"))


def test_more_tenants_than_one_status_can_name_are_refused(write) -> None:  # type: ignore[no-untyped-def]
    most = settings.MAX_TENANTS
    tables = [f"[tenants.t{n}]\nuids = [{n}]\n" for n in range(most + 1)]
    assert len(load(file=write("".join(tables[:most]))).tenants) == most
    with pytest.raises(ConfigError, match=f"tenants has {most + 1} tables; at most {most}"):
        load(file=write("".join(tables)))


@pytest.mark.parametrize("value", ["true", "false"])
@pytest.mark.parametrize("name", ["drain_seconds", "private_grace_seconds", "lease_share"])
def test_a_switch_is_no_number(write, name: str, value: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=f"{name} is .*it must be a number from"):
        load(file=write(f"{name} = {value}\n"))


def test_an_unknown_key_of_the_file_is_refused_with_the_known_ones(write) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=r"pool_size.*known:.*pool_bytes"):
        load(file=write('pool_size = "4GiB"\n'))


@pytest.mark.parametrize("wrong", ["pool-bytes", "pool_byte", "Pool_Bytes"])
def test_a_slip_in_a_key_is_refused_with_the_key_that_would_do_alone(write, wrong: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=f"unknown key '{wrong}'; 'pool_bytes' would do$"):
        load(file=write(f'{wrong} = "4GiB"\n'))


@pytest.mark.parametrize("value", ["true", '["::"]', "5", '""'])
def test_an_address_is_text(write, value: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=r"http_address is .*must be an address or host name"):
        load(file=write(f"http_address = {value}\n"))


@pytest.mark.parametrize(
    "value",
    [
        *(" ", "a b", "127.0.0.1 ", "node\n", "a..b", "x" * 254),
        *("127.0.0.1:9470", "[::1]", "127.0.0.1/8", "256.1.1.1", "::1::", "*"),
    ],
)
def test_what_can_be_no_address_is_refused_before_anything_is_begun(value: str) -> None:
    with pytest.raises(ConfigError, match=r"http_address is .*without a port or brackets"):
        load("--http-address", value)


@pytest.mark.parametrize(
    "value", ["::", "::1", "fe80::1%eth0", "0.0.0.0", "node-1.example.", "my_node", "bücher.org"]
)
def test_addresses_and_names_of_hosts_are_taken(value: str) -> None:
    assert load("--http-address", value).http_address == value


def test_a_byte_order_mark_which_no_editor_shows_is_named(write) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="byte order mark: save it as UTF-8 without one"):
        load(file=write('\ufeffpolicy = "lru"\n'))
    assert load(file=write('policy = "arc"\r\nlog_level = "info"\r\n')).policy == "arc"


def test_a_file_is_read_up_to_its_bound_and_named_beyond_it(write) -> None:  # type: ignore[no-untyped-def]
    most = settings.MAX_CONFIG_BYTES
    assert load(file=write("#" * most)).policy == "lru"
    with pytest.raises(ConfigError, match=f"has more than {most} bytes: make it smaller"):
        load(file=write("#" * (most + 1)))


@pytest.mark.parametrize(
    "text",
    ["not toml at all", 'policy = "lru', "x = " + "[" * 100_000, "drain_seconds = " + "9" * 5000],
    ids=["words", "half a text", "too deep", "too many digits"],
)
def test_a_file_that_is_no_toml_is_refused(write, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="no TOML"):
        load(file=write(text))


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        load(file="/nowhere/kvd.toml")


def test_tenants_have_users_and_quotas(write) -> None:  # type: ignore[no-untyped-def]
    file = write('pool_bytes = "1GiB"\n[tenants.acme]\nuids = [1000]\nquota = "25%"\n')
    assert load(file=file).tenants == (
        TenantRule(TenantId("acme"), frozenset({1000}), frozenset(), 1 << 28),
    )


def test_users_and_groups_are_named_or_numbered(write) -> None:  # type: ignore[no-untyped-def]
    user, group = pwd.getpwall()[-1], grp.getgrall()[-1]
    tenant = f'[tenants.a]\nuids = ["{user.pw_name}", 7]\ngids = ["{group.gr_name}", "8"]\n'
    loaded = load("--operators", f"{user.pw_name},9", file=write(tenant))
    [rule] = loaded.tenants
    assert rule.uids == {user.pw_uid, 7}
    assert rule.gids == {group.gr_gid, 8}
    assert loaded.operators == (user.pw_uid, 9)
    assert load(file=write(settings.as_toml(loaded))) == loaded


@pytest.mark.parametrize(
    ("field", "given", "said"),
    [
        ("uids", "no-such", "tenants.a.uids is ['no-such']; it must be users by number, or by"),
        ("uids", "no-such", "(getent passwd); it has no user 'no-such'"),
        ("gids", "no-such", "(getent group); it has no group 'no-such'"),
        ("uids", r"ro\u0000ot", "it has no user 'ro\\x00ot'"),
        ("uids", "", "it has no user ''"),
        ("uids", "-1", "a whole number from 0 to 4294967294"),
        ("gids", "4294967295", "a whole number from 0 to 4294967294"),
    ],
)
def test_a_user_that_the_system_does_not_know_is_refused_by_field_and_name(  # type: ignore[no-untyped-def]
    write, field: str, given: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(file=write(f'[tenants.a]\n{field} = ["{given}"]\n'))


def test_shares_of_a_pool_that_stands_are_of_its_own_size(write) -> None:  # type: ignore[no-untyped-def]
    tenant = '[tenants.acme]\nuids = [1000]\nquota = "50%"\n'
    standing = load(file=write(f'pool_bytes = "1GiB"\n{tenant}'))
    again = {"config": write(f'pool_bytes = "4GiB"\n{tenant}')}
    read = settings.load(again, {}, standing=standing)
    assert (read.pool_bytes, read.tenants) == (4 << 30, standing.tenants)


@pytest.mark.parametrize(
    "text",
    [
        "[tenants.acme]\n",
        '[tenants.acme]\nuids = ["me"]\n',
        "[tenants.acme]\nuids = [1]\nquota = -5\n",
        "[tenants.acme]\nusers = [1]\n",
        "[tenants.acme]\nuids = [1]\nquota = 99999999999999999999\n",
        "tenants = 3\n",
    ],
)
def test_an_impossible_tenant_is_refused(write, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="tenants"):
        load(file=write(text))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("users = [1]", "unknown key 'users'; known: uids, gids, quota"),
        ('quota = "25"', "tenants.acme.quota is '25'; it must be a size of 4KiB or more"),
        ("quota = 4095", '"25%"'),
    ],
    ids=["key", "percent forgotten", "less than a block"],
)
def test_a_tenants_mistake_is_named_with_what_would_do(write, line: str, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(file=write(f"[tenants.acme]\nuids = [1]\n{line}\n"))


def test_printed_names_are_toml_whatever_is_in_them(write) -> None:  # type: ignore[no-untyped-def]
    name = r"a\"\\\n\t\u0000\u001b\u007f\U0001f600\u00e9"
    loaded = load(file=write(f'[tenants."{name}"]\nuids = [1]\n'))
    assert load(file=write(settings.as_toml(loaded))) == loaded


def test_the_printed_settings_say_the_same_when_read_again(write) -> None:  # type: ignore[no-untyped-def]
    tenants = '[tenants."a b"]\nuids = [7]\ngids = [8, 9]\nquota = 4096\n'
    first = load("--policy", "arc", "--operators", "5,6", file=write(tenants))
    assert load(file=write(settings.as_toml(first))) == first


@pytest.mark.parametrize(("said", "meant"), [("auto", None), ("16MiB", 16 << 20)])
def test_a_size_of_extents_that_is_left_to_the_daemon_is_printed_so(  # type: ignore[no-untyped-def]
    write, said: str, meant: int | None
) -> None:
    first = load("--extent-bytes", said)
    assert first.extent_bytes == meant
    assert load(file=write(settings.as_toml(first))) == first
    with pytest.raises(ConfigError, match=r"extent_bytes is 'autos'.*\"auto\""):
        load("--extent-bytes", "autos")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("", Checksums.AUTO),
        ('"auto"', Checksums.AUTO),
        ('"on"', Checksums.ON),
        ("true", Checksums.ON),  # what the setting took before
        ('"off"', Checksums.OFF),
        ("false", Checksums.OFF),
    ],
)
def test_checksums_are_on_off_or_left_to_the_daemon(  # type: ignore[no-untyped-def]
    write, written: str, meant: Checksums
) -> None:
    file = write(f"payload_checksums = {written}\n" if written else "")
    first = load(file=file)
    assert first.payload_checksums is meant
    assert load(file=write(settings.as_toml(first))) == first


def test_the_flag_for_checksums_without_a_value_turns_them_on() -> None:
    assert load("--payload-checksums").payload_checksums is Checksums.ON
    assert load("--payload-checksums", "false").payload_checksums is Checksums.OFF


@pytest.mark.parametrize(
    "wrong",
    [
        'log_format = "json"\npool_bytes = "many"\n',
        'log_format = "json"\npool_byte = 1\n',
        'log_format = "json"\n[[tiers]]\n',
        'log_format = "json"\n[tenants]\na = 5\n',
    ],
)
def test_a_daemon_whose_log_is_json_says_in_it_what_is_wrong_with_its_settings(
    tmp_path: Path, wrong: str
) -> None:
    file = str(tmp_path / "kvd.toml")
    Path(file).write_text(wrong)
    (line,) = said_by("serve", "--config", file).splitlines()
    said = json.loads(line)
    assert said["level"] == "critical"
    for plainly in (["--log-format", "text"], ["--check"]):
        assert said_by("serve", "--config", file, *plainly) == f"kvd: {said['message']}\n"


def test_a_gateway_says_in_its_logs_form_why_it_can_not_begin() -> None:
    words = ["--certificate=/none", "--key=/none", "--authority=/none", "--log-format=json"]
    for more in ([], ["--config=/none"]):
        assert "/none" in json.loads(said_by("gateway", *words, *more))["message"]


def said_by(*words: str) -> str:
    """What a process says that can't begin. Its own: it sets up its log and its signals."""
    done = run(*words)
    assert done.returncode == 2
    return done.stderr
