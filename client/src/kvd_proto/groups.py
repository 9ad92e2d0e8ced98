"""Attention kinds of a namespace's groups."""

from __future__ import annotations

import enum


class GroupKind(enum.Enum):
    """Decides which blocks make a hit. Messages have the name, the pool's registry the value."""

    FULL_ATTENTION = "full"
    SLIDING_WINDOW = "sliding"
    RECURRENT_STATE = "recurrent"
