"""The targets of the measurements, where each value is in the parts' results, and how close it is to its target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from rich.table import Table

from bench.parts import MAIN_LOAD

Value = float | Mapping[str, float] | None


class Target(NamedTuple):
    key: str
    """Key in latest.json."""
    what: str
    part: str
    find: Callable[[Mapping[str, Any]], Any]
    """Finds the value in the part's result. Raises KeyError if it was not measured."""
    better: Literal["more", "less"]
    goal: float
    unit: str = ""


def key(name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda result: result[name]


def least(name: str) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function for the smallest of a mapping's values."""
    return lambda result: min(result[name].values())


def throughput(result: Mapping[str, Any]) -> float:
    """Return the share of the possible throughput, of the largest shape for which the processor is not the limit."""
    reached = [row for row in result["throughput"] if row["possible_per_s"] <= row["bare_per_s"] / 0.8]
    return float((reached or result["throughput"][:1])[-1]["of_possible"])


def least_used(result: Mapping[str, Any]) -> float:
    return min(float(row["answered_of_allowed"]) for row in result["limits"])


def most_requested(result: Mapping[str, Any]) -> float:
    return max(float(row["most_asked_of_allowed"]) for row in result["limits"])


def growth(result: Mapping[str, Any]) -> float:
    """Return the growth of the worker that grew most: its peak memory after the first sixth of the time, over its peak
    before."""
    ratios = []
    for values in result["memory_mib_every_5_s"].values():
        sixth = max(1, len(values) // 6)
        ratios.append(max(values[sixth:]) / max(values[:sixth]))
    return float(round(max(ratios), 3))


FIRST_LOAD = 1_057
"""Chunks a second of the fastest peer in an earlier measurement (docs/peers.md)."""
TARGETS = (
    Target(
        "first_load_chunks_per_s",
        "first load into both stores, 1,000 documents",
        MAIN_LOAD,
        key("first_load_chunks_per_s"),
        "more",
        FIRST_LOAD,
        "chunks/s",
    ),
    Target("unchanged_s", "nothing changed, 1,000 documents", MAIN_LOAD, key("unchanged_s"), "less", 1.0, "s"),
    Target("edit_s", "a word edited in 1 % of them", MAIN_LOAD, key("edit_s"), "less", 2.0, "s"),
    Target(
        "edit_reembedded_per_document",
        "chunks embedded again a document",
        MAIN_LOAD,
        key("edit_reembedded_per_document"),
        "less",
        3.0,
    ),
    Target("delete_s", "1 % of them deleted", MAIN_LOAD, key("delete_s"), "less", 1.0, "s"),
    Target(
        "insert_paragraph_reembedded",
        "chunks embedded again after a paragraph atop of 500",
        MAIN_LOAD,
        key("insert_paragraph_reembedded"),
        "less",
        4.0,
    ),
    Target(
        "chunker_ratio_to_tokenizer",
        "chunking over tiktoken's own rate",
        "chunking",
        key("chunker_ratio_to_tokenizer"),
        "more",
        0.7,
    ),
    Target(
        "chunker_peak_mib",
        "memory to cut a document of 8 MB",
        "chunking",
        lambda result: result["memory"]["peak_resident_megabytes"],
        "less",
        200,
        "MiB",
    ),
    Target(
        "freshness_p50_s",
        "from change to searchable at 100 edits/s, p50",
        "freshness",
        lambda result: result["freshness"]["both"]["p50"],
        "less",
        2.0,
        "s",
    ),
    Target("freshness_p99_s", "the same, p99", "freshness", key("freshness_p99_s"), "less", 5.0, "s"),
    Target("burst_20k_s", "20,000 chunks changed at once", "burst", key("burst_s"), "less", 30.0, "s"),
    Target(
        "embedding_throughput", "embedding: of inputs · parallel / 50 ms", "embedding_client", throughput, "more", 0.9
    ),
    Target(
        "embedding_limit_used", "embedding: least of a limit that is used", "embedding_client", least_used, "more", 0.8
    ),
    Target(
        "embedding_limit_asked",
        "embedding: most that is asked of a limit",
        "embedding_client",
        most_requested,
        "less",
        1.0,
    ),
    Target(
        "query_p95_ms",
        "hybrid search, 100,000 chunks, one client, p95",
        "query",
        key("query_p95_ms"),
        "less",
        40.0,
        "ms",
    ),
    Target("recall_at_10", "recall@10, the worst of all access widths", "query", least("recall_at_10"), "more", 0.97),
    Target("worker_start_s", "start of a worker", "starts", key("worker_start_s"), "less", 3.0, "s"),
    Target("memory_growth", "a worker's memory in an hour, over its first ten minutes'", "hour", growth, "less", 1.1),
    Target(
        "search_command_s", "`penstock search`, the whole process", "starts", key("search_command_s"), "less", 0.3, "s"
    ),
)
KEYS = tuple(target.key for target in TARGETS)


def picked(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the value of each key; for recall, one for each width. None: its part was not run, failed, or did not
    measure it."""
    values: dict[str, Any] = {}
    for target in TARGETS:
        result = parts.get(target.part, {}).get("result", {})
        try:
            values[target.key] = result["recall_at_10"] if target.key == "recall_at_10" else target.find(result)
        except KeyError:
            values[target.key] = None
    return values


def number(value: Value) -> float | None:
    """Return a number, or the smallest of a mapping's values."""
    return min(value.values()) if isinstance(value, Mapping) else value


def verdict(target: Target, value: float | None) -> str:
    if value is None:
        return "not measured"
    if value >= target.goal if target.better == "more" else value <= target.goal:
        return "met"
    near = value / target.goal if target.better == "more" else target.goal / value
    return f"{near:.0%} of the way"


def rows(latest: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return name, target, measurement and verdict of every target. Small sizes get no verdict."""
    lines = []
    for target in TARGETS:
        value = number(latest.get(target.key))
        sign, unit = ("≥" if target.better == "more" else "≤"), f" {target.unit}".rstrip()
        measured = "–" if value is None else f"{value:,g}{unit}"
        judged = "a small size" if latest.get("quick") and value is not None else verdict(target, value)
        lines.append((target.what, f"{sign} {target.goal:,g}{unit}", measured, judged))
    return lines


def table(latest: Mapping[str, Any]) -> Table:
    shown = Table("", "target", "measured", "", title="In a hurry: small sizes" if latest.get("quick") else None)
    for row in rows(latest):
        shown.add_row(*row)
    return shown
