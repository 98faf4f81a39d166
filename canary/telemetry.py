"""Metrics of the worker ``canary``. Labels are bounded: declared sources, stores, ways, reasons."""

from __future__ import annotations

from typing import NamedTuple

from prometheus_client import CollectorRegistry, Gauge

from pipeline.observability.labels import counter, gauge, histogram
from pipeline.observability.metrics import PortMetrics

BUCKETS = (0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 90, 120, 180, 240, 300)
"""Seconds, with exact edges at both objectives: 30 for a revocation, 300 for a change."""


class SourceStoreLabels(NamedTuple):
    source: str
    store: str


class SourceWayLabels(NamedTuple):
    source: str
    way: str


class SourceOfReasonLabels(NamedTuple):
    source: str
    of: str
    reason: str


class CanaryMetrics:
    """Each process, and each test, has a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.ports = PortMetrics(r)
        self.canaries = Gauge(
            "penstock_canaries",
            "Canaries that this process runs; 0: another process runs them, or they are off",
            registry=r,
        )
        self.desired = Gauge(
            "penstock_canaries_wanted", "Canaries that some process should run; 0: they are off", registry=r
        )
        self.seconds = histogram(
            "penstock_canary_seconds",
            "Time from a canary's publication until a search of that store returned it",
            SourceStoreLabels,
            buckets=BUCKETS,
            registry=r,
        )
        self.withdrawn = histogram(
            "penstock_canary_withdrawn_seconds",
            "Time from a canary's revocation (way: access) or deletion (way: delete) until no search returned it",
            SourceWayLabels,
            buckets=BUCKETS,
            registry=r,
        )
        self.success = gauge(
            "penstock_canary_success_timestamp_seconds",
            "Time at which a canary was last found in a store; before the first time, when the search for it began",
            SourceStoreLabels,
            registry=r,
        )
        self.failures = counter(
            "penstock_canary_failures",
            "Canaries that were not found (of: vectors, keywords), still found (of: access, delete) or not sent (of: "
            "publish) in time, by reason: late, unavailable (the search failed), unpublished",
            SourceOfReasonLabels,
            registry=r,
        )
