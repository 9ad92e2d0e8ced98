"""Copies between a GPU's memory and the pool: asynchronous, in pieces, a stream per direction."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvd.core.events import JobKind
from kvd.mover.copy_engine import KeepGoing
from kvd.mover.facts import MoverFacts
from kvd.mover.layout import LocatedPart, MoverConfig, check_config


class CudaCopyEngine:
    """The CopyEngine of GPU memory."""

    def __init__(self, config: MoverConfig) -> None:
        check_config(config)
        self._config = config

    @property
    def facts(self) -> MoverFacts:
        raise NotImplementedError

    def open_extent(self, extent: int) -> npt.NDArray[np.uint8]:
        raise NotImplementedError

    def close_extent(self, extent: int) -> None:
        raise NotImplementedError

    def warm_extent(self, extent: int, keep_going: KeepGoing) -> None:
        raise NotImplementedError

    def warm_memory(self, keep_going: KeepGoing) -> None:
        raise NotImplementedError

    def copy(self, kind: JobKind, part: LocatedPart, keep_going: KeepGoing) -> int:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
