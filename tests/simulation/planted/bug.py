"""A bug to be planted: a piece of a module's source, and what stands there instead."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """One fault of one module. `before` stands in its source once.

    `was_ours` marks those that kvd had once, as the change log and decisions tell them.
    """

    name: str
    module: str
    before: str
    after: str
    was_ours: bool = False

    @property
    def layer(self) -> str:
        """The room, for the score."""
        if self.needs_clients:
            return "client"
        room = self.module.split(".")[1]
        return {"runtime": "driver"}.get(room, "client" if room == "page" else room)

    @property
    def needs_clients(self) -> bool:
        """Whether only a world in which the real client lives can show it."""
        return self.module.startswith("kvd_client.")

    @property
    def needs_batches(self) -> bool:
        """Whether that has to be a client that asks in batches."""
        return self.module in ("kvd_client.batches", "kvd_client.leased_answers")


def bug(
    room: str, name: str, module: str, before: str, after: str, *, was_ours: bool = False
) -> Bug:
    return Bug(name, f"{room}.{module}", before, after, was_ours)
