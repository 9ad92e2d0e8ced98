"""What a signal's handler raises amid a call of the client's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
