"""One line in the log for each thing that an operator did, whatever the level of the log."""

from __future__ import annotations

import logging

log = logging.getLogger("kvd.audit")
log.setLevel(logging.INFO)


def note(action: str, uid: int | None, **what: object) -> None:
    """This was done by the user; None: by the settings. In JSON each is a field of `audit`."""
    said = {name: value for name, value in what.items() if value is not None}
    who = {} if uid is None else {"uid": uid}
    text = " ".join(f"{name}={value!r}" for name, value in {**who, **said}.items())
    fields = {"action": action, **who, **said}
    # Operators are trusted not to fill the log: none of these is left out as one of too many.
    log.info("operator: %s %s", action, text, extra={"audit": fields, "counted": True})
