"""When the weights of the model in this process change, and when SGLang has flushed since.

SGLang tells a storage backend of neither. So the methods that all changes and all flushes of its
cache go through are wrapped.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

UPDATER = ("sglang.srt.model_executor.model_runner_components.weight_updater", "WeightUpdater")
CHANGING = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
)
ENDING = ("end_weight_update",)
CONTROLLER = ("sglang.srt.managers.cache_controller", "HiCacheController")
FLUSHING = ("reset",)
CHECKER = ("sglang.srt.utils.weight_checker", "WeightChecker")
RESETTING = ("_reset_tensors",)  # which fills the weights with noise


class WeightsWatch:
    """How often the weights were changed, and how many of these changes came before a flush."""

    def __init__(self) -> None:
        self.changes = 0
        self.flushed_changes = 0
        self._watched: set[tuple[type, str]] = set()
        self._flushed: Callable[[], Any] = lambda: None  # the controller, while it lives

    def begin(self, updater: type, controller: type, checker: type) -> list[str]:
        """Watch these classes of SGLang's. Returns what they lack: that is not seen."""
        return [
            *self._wrap(updater, CHANGING, self._telling_change),
            *self._wrap(checker, RESETTING, self._telling_change),
            *self._wrap(updater, ENDING, self._telling_end),
            *self._wrap(controller, FLUSHING, self._telling_flush),
        ]

    def _wrap(
        self, kind: type, names: Sequence[str], wrap: Callable[[Callable[..., Any]], Any]
    ) -> list[str]:
        for name in names:
            method = getattr(kind, name, None)
            if method and (kind, name) not in self._watched:
                self._watched.add((kind, name))
                setattr(kind, name, wrap(method))
        return [name for name in names if not hasattr(kind, name)]

    def _telling_change(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def told(*args: Any, **kwargs: Any) -> Any:
            # With a filter, which may be none, a rank reads its own weights once more: those of
            # experts whose rank is gone. No flush follows, and other ranks read nothing.
            if "weight_name_filter" not in kwargs:
                self.changes += 1
            return method(*args, **kwargs)

        return told

    def _telling_end(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def told(*args: Any, **kwargs: Any) -> Any:
            # False where SGLang has loaded the weights itself: a flush that came since is enough,
            # unless it has computed anything with weights that are only now as they shall be.
            has_loaded = kwargs.get("run_post_load") is False
            is_flushed = has_loaded and self.flushed_changes == self.changes
            is_flushed = is_flushed and not _may_hold_pages(self._flushed())
            self.changes += 1
            result = method(*args, **kwargs)
            if is_flushed:
                self.flushed_changes = self.changes
            return result

        return told

    def _telling_flush(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def told(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)  # it ends the storage threads, or raises
            self.flushed_changes = self.changes
            self._flushed = weakref.ref(args[0])
            return result

        return told


def _may_hold_pages(controller: Any) -> bool:
    """Whether anything is on the device of what SGLang has computed since it flushed."""
    allocator: Any = getattr(controller, "mem_pool_device_allocator", None)
    full: Any = getattr(allocator, "full_attn_allocator", allocator)  # beside a sliding window's
    try:
        return bool(full.available_size() <= full.size - full.page_size)
    except (AttributeError, TypeError):  # this release has other names: nobody knows
        return True


watch = WeightsWatch()


def watch_weights() -> str:
    """Watch this process's model. Returns which of its changes can't be seen."""
    missing = watch.begin(*map(_class_of, (UPDATER, CONTROLLER, CHECKER)))
    return f"this release of SGLang has no {', '.join(missing)}" if missing else ""


def _class_of(place: tuple[str, str]) -> type:
    """Module and name. One without a method where this release has none: the others are watched."""
    module, name = place
    try:
        found: type = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return type(name, (), {})
    return found
