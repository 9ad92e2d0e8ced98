"""What a signal's handler raises amid a call of the client's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest


class Interrupted(Exception):
    """What a signal's handler raises."""


@contextmanager
def interrupted(owner: Any, name: str, *, after: bool, at: int = 1) -> Iterator[None]:
    """What is done meanwhile raises: once in the place of the `at`th such call, or right after."""
    original: Callable[..., object] = getattr(owner, name)
    calls: list[object] = []

    def interrupt(*given: Any, **named: Any) -> object:
        calls.append(given)
        answer = original(*given, **named) if after or len(calls) != at else None
        if len(calls) == at:
            raise Interrupted
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, interrupt)
        try:
            yield
        except Interrupted:  # forgotten at once: its frames hold what the call had
            return
    pytest.fail(f"no call of {name} was interrupted")


def interrupted_at(count: int, call: Callable[[], object]) -> bool:
    """Raise where Python looks for signals the `count`th time amid a call; whether it was there."""
    seen = 0

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal seen
        is_lock = getattr(argument, "__name__", "") == "__enter__"  # `with` is entered whole
        if event in ("call", "c_return") and not is_lock:
            seen += 1
            if seen == count:
                sys.setprofile(None)
                raise Interrupted

    try:
        sys.setprofile(look)
        call()
    except Interrupted:
        return True
    finally:
        sys.setprofile(None)
    return False
