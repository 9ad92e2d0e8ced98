"""What befalls a disk tier and its disks in a loop of crashes, and what must be true after it."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from kvd_proto.v1 import operator_pb2
from tests.daemon_process import is_alive
from tests.faults.ill_disk import EVERY_ILL
from tests.faults.scene import Scene
from tests.waiting import wait_until

MIB = 1 << 20
DISKS = 2
BACK_SECONDS = 40.0  # for a tier's process to serve again, whatever lies on its disks
INDEX = "index.sqlite"
CONFIG = """
[[tiers]]
name = "disk"
store = "tests.faults.ill_disk:opened"
deadline_seconds = 2.0

[tiers.options]
directories = [{disks}]
directory_bytes = "{mib}MiB"
region_bytes = "1MiB"
word = "{word}"
"""


class TierStrikes:
    """The tier of one scene. Its disks are far smaller than what is stored, its pool yet more."""

    def __init__(self, scene: Scene, dice: random.Random, mib: int = 48) -> None:
        self._scene, self._dice = scene, dice
        self._word = scene.directory / "ills"
        self._disks = [scene.directory / f"disk-{number}" for number in range(DISKS)]
        self._kept = scene.directory / "kept"  # an older index of each disk
        self._kept.mkdir()
        self.done: Counter[str] = Counter()
        self.lost_pool = False  # since this was last set
        disks = ", ".join(f'"{disk}"' for disk in self._disks)
        config = scene.directory / "kvd.toml"
        config.write_text(CONFIG.format(disks=disks, mib=mib, word=self._word))
        scene.daemon.flags["config"] = config
        scene.daemon.module = "tests.faults.quick_tiers"

    def every_one(self) -> list[Callable[[], None]]:
        """What may befall it."""
        return [
            self.kill_tier,
            self.kill_tier,
            self.freeze_tier,
            self.lose_pool,
            self.damage_disk,
            self.damage_disk,
            self.damage_disk_of_killed_tier,
            self.make_disk_ill,
            self.make_disk_ill,
        ]

    # -- strikes ----------------------------------------------------------------------------

    def kill_tier(self) -> None:
        for pid in self._scene.daemon.tiers():
            send(pid, signal.SIGKILL)

    def freeze_tier(self) -> None:
        """For a moment; past the deadline of what it has; until it is given up."""
        for pid in self._scene.daemon.tiers():
            send(pid, signal.SIGSTOP)
            time.sleep(self._dice.choice([0.2, 1.0, 2.5, 5.0]))
            send(pid, signal.SIGCONT)

    def lose_pool(self) -> None:
        """As when the node is started again: a tmpfs is empty."""
        self._with_nobody_there(self._remove_pool)

    def damage_disk(self) -> None:
        self._with_nobody_there(self._damage_some)

    def damage_disk_of_killed_tier(self) -> None:
        """While the daemon serves. Its next process may come before all is done."""
        tiers = self._scene.daemon.tiers()
        self.kill_tier()
        wait_until(lambda: not any(map(is_alive, tiers)), "the tier's end")
        self._damage_some()

    def make_disk_ill(self) -> None:
        """Until it is healed."""
        ills = self._dice.sample(EVERY_ILL, self._dice.randint(1, 4))
        share = self._dice.choice([0.02, 0.2, 0.2, 1.0])
        new = self._word.with_suffix(".new")
        new.write_text(f"{share} {' '.join(ills)}")
        new.replace(self._word)

    # -- damage -----------------------------------------------------------------------------

    def _with_nobody_there(self, act: Callable[[], None]) -> None:
        tiers = self._scene.daemon.tiers()
        self._scene.kill_daemon()
        wait_until(lambda: not any(map(is_alive, tiers)), "the tier's end")
        act()
        self._scene.daemon.start()

    def _remove_pool(self) -> None:
        shutil.rmtree(self._scene.daemon.pool)
        self._scene.daemon.pool.mkdir()
        self.lost_pool = True

    def _damage_some(self) -> None:
        damages: list[Callable[[Path], None]] = [
            self.remove_index,
            self.scribble_over_index,
            self.scribble_over_log,
            self.cut_index,
            self.remove_log,
            self.restore_index,
            self.restore_index,
            self.scribble_over_slab,
            self.scribble_over_slab,
            self.zero_slab,
            self.shuffle_slab,
            self.shuffle_slab,
            self.cut_slab,
            self.remove_slab,
            self.swap_disks,
        ]
        disk = self._dice.choice(self._disks)
        for damage in self._dice.sample(damages, self._dice.randint(1, 2)):
            with contextlib.suppress(FileNotFoundError):
                damage(disk)
                self.done[damage.__name__] += 1
        self._keep_index()

    def _keep_index(self) -> None:
        """As it is now, to come back when it says nothing true any more."""
        if self._dice.random() < 0.5:
            for disk in self._disks:
                shutil.rmtree(self._kept / disk.name, ignore_errors=True)
                (self._kept / disk.name).mkdir()
                for path in disk.glob(f"{INDEX}*"):
                    shutil.copyfile(path, self._kept / disk.name / path.name)

    def remove_index(self, disk: Path) -> None:
        for path in disk.glob(f"{INDEX}*"):
            path.unlink()

    def scribble_over_index(self, disk: Path) -> None:
        self._scribble(disk / INDEX, 0, 100)

    def scribble_over_log(self, disk: Path) -> None:
        self._scribble(disk / f"{INDEX}-wal", 0, 20)

    def cut_index(self, disk: Path) -> None:
        os.truncate(disk / INDEX, self._dice.randrange((disk / INDEX).stat().st_size + 1))

    def remove_log(self, disk: Path) -> None:
        (disk / f"{INDEX}-wal").unlink()

    def restore_index(self, disk: Path) -> None:
        """Rows of long ago, whose places are others' now."""
        kept = list((self._kept / disk.name).glob("*"))
        if not kept:
            return
        self.remove_index(disk)
        for path in kept:
            shutil.copyfile(path, disk / path.name)

    def scribble_over_slab(self, disk: Path) -> None:
        self._scribble(disk / "slab", MIB, 2000)

    def zero_slab(self, disk: Path) -> None:
        with (disk / "slab").open("r+b") as slab:
            slab.seek(MIB * self._dice.randint(1, 40))
            slab.write(bytes(4 * MIB))

    def shuffle_slab(self, disk: Path) -> None:
        """Blocks in other blocks' places, whole ones too."""
        size = (disk / "slab").stat().st_size
        step = self._dice.choice([4096, 8192, 16384])
        with (disk / "slab").open("r+b") as slab:
            for _ in range(200):
                one, other = (MIB + self._dice.randrange((size - MIB) // step) * step for _ in "ab")
                slab.seek(one)
                raw = slab.read(step)
                slab.seek(other)
                slab.write(raw)

    def cut_slab(self, disk: Path) -> None:
        os.truncate(disk / "slab", self._dice.randrange((disk / "slab").stat().st_size + 1))

    def remove_slab(self, disk: Path) -> None:
        (disk / "slab").unlink()

    def swap_disks(self, disk: Path) -> None:
        """Each directory is the other now."""
        one, other = self._disks
        between = one.with_name("between")
        one.rename(between)
        other.rename(one)
        between.rename(other)

    def _scribble(self, path: Path, first: int, times: int) -> None:
        size = path.stat().st_size
        with path.open("r+b") as file:
            for _ in range(times if size > first else 0):
                file.seek(self._dice.randrange(first, size))
                file.write(bytes([self._dice.randrange(256)]))

    # -- after them -------------------------------------------------------------------------

    def heal(self) -> None:
        """Its disks are well again, and its process serves: whatever lies there."""
        self._word.unlink(missing_ok=True)
        try:
            wait_until(lambda: self._told().serving, "the tier's process", BACK_SECONDS)
        except AssertionError as error:
            error.add_note(f"{self._told()}")
            raise

    def is_quiet(self) -> bool:
        """Whether nothing is on its way, down or up."""
        told = self._told()
        return told.bytes_down == 0 and told.bytes_up == 0

    def promoted(self) -> int:
        """Blocks that it has brought up since the daemon's start."""
        return int(self._told().blocks_promoted)

    def descriptors(self) -> Counter[str]:
        """How many the daemon and the tier's process have."""
        found: Counter[str] = Counter()
        for name, pids in (
            ("daemon", [self._scene.daemon.pid]),
            ("tier", self._scene.daemon.tiers()),
        ):
            for pid in pids:
                with contextlib.suppress(OSError):
                    found[name] = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return found

    def _told(self) -> operator_pb2.TierStatus:
        return self._scene.status().tiers[0]


def send(pid: int, number: int) -> None:
    """A signal, to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
