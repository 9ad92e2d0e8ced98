"""Prometheus metrics that another connector of the same engine may declare, too.

Two of vLLM's offloading connectors under MultiConnector declare metrics of the same names, and
the second one would end the server. So kvd's are made late, when all connectors have declared
theirs: at the first figure or the first scrape. A name that is taken by then is shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from prometheus_client import REGISTRY, Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


def shareable(metric_types: Mapping[Any, Any]) -> dict[Any, Any]:
    """VLLM's classes of metrics, each made late.

    With several API servers an engine tells one of them at a time. So of a gauge what was told last
    counts, as vLLM has it for its own; else each server would go on telling what it heard once.
    """
    late = Latecomers()
    REGISTRY.register(late)
    made = {kind: partial(late.declare, made_by) for kind, made_by in metric_types.items()}
    if Gauge in made:
        made[Gauge] = partial(made[Gauge], multiprocess_mode="mostrecent")
    return made


class Latecomers(Collector):
    """Makes what was declared when somebody scrapes; it has no names of its own."""

    def __init__(self) -> None:
        self._declared: list[SharedMetric] = []

    def declare(self, made_by: Any, **settings: Any) -> SharedMetric:
        self._declared.append(SharedMetric(made_by, settings))
        return self._declared[-1]

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        """What is made only now: this scrape can't know of it otherwise."""
        for metric in self._declared:
            made = metric.make()
            if made is not None:
                yield from made.collect()


class SharedMetric:
    """Stands for one metric; what is counted goes to the only one of its name."""

    def __init__(self, made_by: Any, settings: dict[str, Any]) -> None:
        self._made_by = made_by
        self._settings = settings
        self._metric: Any = None

    def make(self) -> Any:
        """The metric if nobody had made it before; None where it is there."""
        if self._metric is not None:
            return None
        try:
            self._metric = self._made_by(**self._settings)
        except ValueError:  # another connector's, with the same labels
            self._metric = REGISTRY._names_to_collectors[self._settings["name"]]
            return None
        return self._metric if hasattr(self._metric, "collect") else None

    def labels(self, *values: Any) -> SharedSeries:
        return SharedSeries(self, values)

    def series(self, values: tuple[Any, ...]) -> Any:
        self.make()
        return self._metric.labels(*values)


class SharedSeries:
    """A metric with its labels."""

    def __init__(self, metric: SharedMetric, values: tuple[Any, ...]) -> None:
        self._metric = metric
        self._values = values

    def inc(self, amount: float = 1) -> None:
        self._metric.series(self._values).inc(amount)

    def set(self, value: float) -> None:
        self._metric.series(self._values).set(value)

    def observe(self, value: float) -> None:
        self._metric.series(self._values).observe(value)
