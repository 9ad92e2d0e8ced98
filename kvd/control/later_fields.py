"""Fields of a message that only later releases have, where to pass over them would be wrong."""

from __future__ import annotations

from google.protobuf.message import Message

from kvd.core.errors import InvalidArgument


def require_known(message: Message, field: str) -> None:
    """Raise InvalidArgument if the message, or one within it, has a field that we don't know."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()  # type: ignore[attr-defined]  # the stubs leave it out
    if known.ByteSize() != message.ByteSize():
        raise InvalidArgument(
            f"{field} has fields that this daemon does not know: the client is of a later release",
            field,
        )
