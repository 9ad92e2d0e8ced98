"""Directories and files that others made or can change are refused, with the fix, and untouched."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.linux.own_directory import MOST_LINKS, NotTrustedError, Wanted, require_own, require_place
from tests.daemon_process import DaemonProcess
from tests.forked import run

STRANGER = 65534
SMALL = ("--pool-bytes", "8MiB", "--extent-bytes", "1MiB", "--http-port", "0")

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def as_stranger(work: Callable[[], object]) -> None:
    """Do it as another user, who is in no group of ours."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def open_to_all(directory: Path) -> Path:
    """Like /dev/shm: everybody may make things there."""
    directory.mkdir(mode=0o700)
    directory.chmod(0o1777)
    return directory


@pytest.fixture
def everyones(shared_directory: Path) -> Path:
    shared_directory.chmod(0o755)
    return open_to_all(shared_directory / "shm")


def refused(socket: Path, pool: Path, *more: str | Path) -> str:
    """Why the daemon doesn't start."""
    flags = ("--socket", socket, "--pool-directory", pool, *SMALL, *more)
    ended = run("serve", *map(str, flags))
    assert ended.returncode == 1, ended.stderr
    return ended.stderr.splitlines()[-1]


@as_root
def test_a_pool_that_another_user_made_first_is_refused_and_no_file_of_roots_is_touched(
    everyones: Path, tmp_path: Path
) -> None:
    pool, precious = everyones / "kvd", tmp_path / "precious"
    precious.write_text("root's own")

    def lay_a_trap() -> None:
        pool.mkdir(mode=0o777)
        for name in ("slots.table", "lock", "registry.jsonl.new", "movers.new"):
            (pool / name).symlink_to(precious)

    as_stranger(lay_a_trap)
    said = refused(tmp_path / "kvd.sock", pool)
    assert f"pool_directory {pool} is not safe to use: {pool} belongs to uid {STRANGER}" in said
    assert "remove it, or name another" in said
    assert precious.read_text() == "root's own"


@as_root
def test_extents_in_a_directory_that_another_user_made_are_refused(
    everyones: Path, tmp_path: Path
) -> None:
    extents = everyones / "extents"
    as_stranger(lambda: extents.mkdir(mode=0o777))
    said = refused(tmp_path / "kvd.sock", everyones / "kvd", "--extents-directory", extents)
    assert f"extents_directory {extents} is not safe to use: {extents} belongs to uid" in said


@as_root
def test_a_socket_in_a_directory_that_another_user_made_is_refused(
    everyones: Path, shared_directory: Path
) -> None:
    run = everyones / "run"
    as_stranger(lambda: run.mkdir(mode=0o777))
    said = refused(run / "kvd.sock", shared_directory / "pool")
    assert f"the socket's directory {run} is not safe to use: {run} belongs to uid" in said
    assert list(run.iterdir()) == []
    assert not (shared_directory / "pool").exists()


@as_root
@pytest.mark.parametrize("name", ["slots.table", "extents/00003.kv", "movers.new", "letters"])
def test_one_file_of_another_user_in_a_pool_of_ones_own_is_refused(
    daemon: DaemonProcess, name: str
) -> None:
    daemon.kill()
    planted = daemon.pool / name
    planted.unlink(missing_ok=True)
    planted.write_bytes(b"")
    os.chown(planted, STRANGER, STRANGER)
    said = refused(Path(daemon.socket), daemon.pool, "--pool-bytes", "32MiB")
    assert f"{planted} belongs to uid {STRANGER}" in said
    planted.unlink()
    daemon.start()


@as_root
def test_a_pool_of_a_daemon_of_another_user_is_taken_up_after_the_command_that_is_told(
    daemon: DaemonProcess,
) -> None:
    """As where the user of a chart or unit was changed: the directory is the new one's."""
    daemon.end()
    for path in daemon.pool.rglob("*"):
        os.chown(path, STRANGER, STRANGER)
    said = refused(Path(daemon.socket), daemon.pool, "--pool-bytes", "32MiB")
    assert f"belongs to uid {STRANGER}" in said
    assert "else remove them, or name another" in said
    (command,) = re.findall(r"\((chown -R .*?)\)", said)
    subprocess.run(command.split(), check=True)
    before = daemon.log.stat().st_size
    daemon.start()
    told = daemon.log.read_bytes()[before:]
    assert b"blocks recovered" in told
    assert b"the pool is new" not in told
    assert b"the pool is cold" not in told


@pytest.mark.parametrize("name", ["registry.jsonl", "movers", "lock"])
def test_a_pipe_in_a_pool_is_refused_and_not_waited_for(daemon: DaemonProcess, name: str) -> None:
    daemon.end()
    piped = daemon.pool / name
    piped.unlink()
    os.mkfifo(piped, 0o600)
    said = refused(Path(daemon.socket), daemon.pool, "--pool-bytes", "32MiB")
    assert f"{piped} is a pipe or a device; remove it" in said
    piped.unlink()
    daemon.start()


@pytest.mark.parametrize("name", ["registry.jsonl", "extents", "extents/00003.kv", "pool.header"])
def test_a_link_in_a_pool_is_refused_and_not_followed(daemon: DaemonProcess, name: str) -> None:
    daemon.end()
    linked, target = daemon.pool / name, daemon.pool.parent / "target"
    linked.rename(target)
    linked.symlink_to(target)
    before = target.stat()
    said = refused(Path(daemon.socket), daemon.pool, "--pool-bytes", "32MiB")
    assert f"{linked} is a link; remove it" in said
    assert target.stat().st_size == before.st_size
    linked.unlink()
    target.rename(linked)
    daemon.start()


def test_a_file_that_others_may_reach_by_a_further_name_is_refused(daemon: DaemonProcess) -> None:
    daemon.end()
    os.link(daemon.pool / "extents" / "00002.kv", daemon.pool.parent / "mine too")
    said = refused(Path(daemon.socket), daemon.pool, "--pool-bytes", "32MiB")
    assert "00002.kv has 2 names" in said
    (daemon.pool.parent / "mine too").unlink()
    daemon.start()


def own(path: Path) -> None:
    require_own(Wanted("pool_directory", path))


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o1777])
def test_an_own_directory_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    pool = tmp_path / "pool"
    pool.mkdir()
    pool.chmod(mode)
    with pytest.raises(NotTrustedError, match=rf"may write to it \(mode {mode:04o}\).*chmod 0700"):
        own(pool)
    pool.chmod(0o755)
    own(pool)


def test_a_file_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    pool.mkdir()
    (pool / "slots.table").touch()
    (pool / "slots.table").chmod(0o622)
    with pytest.raises(NotTrustedError, match=r"others may write to .*slots\.table"):
        own(pool)


def test_a_socket_that_a_killed_daemon_left_there_is_none_of_the_pools_files(
    tmp_path: Path,
) -> None:
    pool = tmp_path / "pool"
    pool.mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(pool / "kvd.sock"))
    (pool / "kvd.sock").chmod(0o660)
    own(pool)


def test_a_directory_above_that_others_may_write_to_needs_the_sticky_bit(tmp_path: Path) -> None:
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(0o777)
    for require in (require_own, require_place):
        with pytest.raises(NotTrustedError, match=r"chmod \+t"):
            require(Wanted("pool_directory", above / "pool"))
    assert list(above.iterdir()) == []
    above.chmod(0o1777)
    own(above / "pool")
    require_place(Wanted("the socket's directory", above))


def test_a_link_at_the_end_of_the_path_is_refused_and_one_of_ours_above_it_is_followed(
    tmp_path: Path,
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(NotTrustedError, match=r"link is a link; remove it, or name the directory"):
        own(tmp_path / "link")
    own(tmp_path / "link" / "pool")
    own(tmp_path / "link" / ".." / "link" / "pool")
    assert (tmp_path / "real" / "pool").stat().st_mode & 0o777 == 0o700
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(OSError, match="Too many levels"):
        own(tmp_path / "round" / "pool")


@as_root
def test_a_link_above_that_another_user_made_is_refused(everyones: Path, tmp_path: Path) -> None:
    link = everyones / "kvd"
    as_stranger(lambda: link.symlink_to("/root"))
    with pytest.raises(NotTrustedError, match=f"{link} is a link that uid {STRANGER} made"):
        own(link / "pool")
    assert not Path("/root/pool").exists()


@as_root
def test_a_directory_above_that_another_user_made_is_refused(everyones: Path) -> None:
    as_stranger(lambda: (everyones / "theirs").mkdir(mode=0o755))
    with pytest.raises(NotTrustedError, match=f"theirs belongs to uid {STRANGER}"):
        own(everyones / "theirs" / "pool")


def test_what_is_made_on_the_way_is_the_daemons_alone(tmp_path: Path) -> None:
    own(tmp_path / "a" / "b")
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o700, 0o700]


def test_as_many_links_as_the_kernel_follows_lead_to_a_directory_and_one_more_does_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "0").mkdir()
    for number in range(MOST_LINKS + 1):
        (tmp_path / str(number + 1)).symlink_to(tmp_path / str(number))
    require_place(Wanted("socket", tmp_path / str(MOST_LINKS) / "run"))
    assert (tmp_path / "0" / "run").is_dir()
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        require_place(Wanted("socket", tmp_path / str(MOST_LINKS + 1) / "other"))
    said = refused(tmp_path / str(MOST_LINKS + 1) / "kvd.sock", tmp_path / "pool")
    assert "Too many levels of symbolic links" in said
    assert [path.name for path in (tmp_path / "0").iterdir()] == ["run"]
