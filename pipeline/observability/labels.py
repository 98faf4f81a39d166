"""Metrics whose label names and values are checked by mypy.

A label set is a NamedTuple: its fields are the label names, in the order in which they are declared. ``labels`` of a
metric takes the fields of its set, by name or by position, so that a wrong name, number or type is a type error. At run
time the metrics are those of prometheus_client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from typing import NamedTuple, ParamSpec, Protocol, TypeVar, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric

P = ParamSpec("P")
M_co = TypeVar("M_co", covariant=True)


class Labelled(Protocol[P, M_co]):
    """A metric with labels: ``labels`` returns the metric of one combination of values."""

    def labels(self, *args: P.args, **kwargs: P.kwargs) -> M_co: ...
    def remove(self, *values: str) -> None: ...
    def clear(self) -> None: ...
    def collect(self) -> Iterable[Metric]: ...


def _names(label_set: Callable[P, NamedTuple]) -> tuple[str, ...]:
    return tuple(signature(label_set).parameters)


def counter(
    name: str, documentation: str, label_set: Callable[P, NamedTuple], *, registry: CollectorRegistry
) -> Labelled[P, Counter]:
    """A counter with these labels."""
    return cast("Labelled[P, Counter]", Counter(name, documentation, _names(label_set), registry=registry))


def gauge(
    name: str, documentation: str, label_set: Callable[P, NamedTuple], *, registry: CollectorRegistry
) -> Labelled[P, Gauge]:
    """A gauge with these labels."""
    return cast("Labelled[P, Gauge]", Gauge(name, documentation, _names(label_set), registry=registry))


def histogram(
    name: str,
    documentation: str,
    label_set: Callable[P, NamedTuple],
    *,
    buckets: Sequence[float],
    registry: CollectorRegistry,
) -> Labelled[P, Histogram]:
    """A histogram with these labels."""
    metric = Histogram(name, documentation, _names(label_set), buckets=buckets, registry=registry)
    return cast("Labelled[P, Histogram]", metric)
