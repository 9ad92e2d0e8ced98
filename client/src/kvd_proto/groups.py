"""Attention kinds of a namespace's groups."""

from __future__ import annotations

import enum


class GroupKind(enum.Enum):
    """A group's kind of attention, which decides what makes a hit."""

    # Messages have the name, the pool's registry the value.

    FULL_ATTENTION = "full"
    SLIDING_WINDOW = "sliding"
    RECURRENT_STATE = "recurrent"
