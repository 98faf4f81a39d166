"""Metrics with typed labels are prometheus_client's metrics, with the names of their label set."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from prometheus_client import CollectorRegistry

from pipeline.observability.labels import counter, gauge, histogram


class StoreLaneLabels(NamedTuple):
    store: str
    lane: str


def test_metric_labels_have_the_names_and_order_of_their_label_set() -> None:
    registry = CollectorRegistry()
    counter("writes", "Writes", StoreLaneLabels, registry=registry).labels(store="vectors", lane="live").inc()
    gauge("waiting", "Waiting", StoreLaneLabels, registry=registry).labels("vectors", "live").set(2)
    seconds = histogram("seconds", "Seconds", StoreLaneLabels, buckets=(1, 2), registry=registry)
    seconds.labels(lane="live", store="vectors").observe(1.5)
    labels = {"store": "vectors", "lane": "live"}
    assert registry.get_sample_value("writes_total", labels) == 1
    assert registry.get_sample_value("waiting", labels) == 2
    assert registry.get_sample_value("seconds_bucket", {**labels, "le": "2.0"}) == 1


def test_a_wrong_label_name_raises_an_error() -> None:
    writes = counter("writes", "Writes", StoreLaneLabels, registry=CollectorRegistry())
    with pytest.raises(ValueError, match="label names"):
        writes.labels(store="vectors", line="live")  # type: ignore[call-arg]  # mypy reports it as well
