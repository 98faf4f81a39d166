"""What the measurements are held against, where each stands in the parts' results, and how near it came."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from rich.table import Table

from bench.parts import MAIN_LOAD

Found = float | Mapping[str, float] | None


class Target(NamedTuple):
    key: str
    """In latest.json."""
    what: str
    part: str
    find: Callable[[Mapping[str, Any]], Any]
    """In the part's result. Raises KeyError where it is not measured."""
    better: Literal["more", "less"]
    goal: float
    unit: str = ""


def key(name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda result: result[name]


def least(name: str) -> Callable[[Mapping[str, Any]], Any]:
    """The smallest of a mapping's values, for "for every width"."""
    return lambda result: min(result[name].values())


def throughput(result: Mapping[str, Any]) -> float:
    """Of the possible, at the largest shape that is possible here: beyond it the processor is the limit."""
    reached = [row for row in result["throughput"] if row["possible_per_s"] <= row["bare_per_s"] / 0.8]
    return float((reached or result["throughput"][:1])[-1]["of_possible"])


def answered(result: Mapping[str, Any]) -> float:
    return min(float(row["answered_of_allowed"]) for row in result["limits"])


def asked(result: Mapping[str, Any]) -> float:
    return max(float(row["most_asked_of_allowed"]) for row in result["limits"])


def growth(result: Mapping[str, Any]) -> float:
    """Of the worker that grew most: its largest memory after the first sixth of the time, over its largest before."""
    found = []
    for values in result["memory_mib_every_5_s"].values():
        sixth = max(1, len(values) // 6)
        found.append(max(values[sixth:]) / max(values[:sixth]))
    return float(round(max(found), 3))


FIRST_LOAD = 1_057
"""Chunks a second: the fastest peer's of an earlier measurement. docs/peers.md has what peers do beside us."""
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
        "embedding_limit_used", "embedding: least of a limit that is used", "embedding_client", answered, "more", 0.8
    ),
    Target("embedding_limit_asked", "embedding: most that is asked of a limit", "embedding_client", asked, "less", 1.0),
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
    """Each key's value; of recall the widths'. None: its part was not run, failed, or did not measure it."""
    found: dict[str, Any] = {}
    for target in TARGETS:
        result = parts.get(target.part, {}).get("result", {})
        try:
            found[target.key] = result["recall_at_10"] if target.key == "recall_at_10" else target.find(result)
        except KeyError:
            found[target.key] = None
    return found


def number(value: Found) -> float | None:
    """A mapping's smallest."""
    return min(value.values()) if isinstance(value, Mapping) else value


def verdict(target: Target, value: float | None) -> str:
    if value is None:
        return "not measured"
    if value >= target.goal if target.better == "more" else value <= target.goal:
        return "met"
    near = value / target.goal if target.better == "more" else target.goal / value
    return f"{near:.0%} of the way"


def rows(latest: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """What, target, measured, verdict: of every target. Small sizes are not judged."""
    told = []
    for target in TARGETS:
        value = number(latest.get(target.key))
        sign, unit = ("≥" if target.better == "more" else "≤"), f" {target.unit}".rstrip()
        measured = "–" if value is None else f"{value:,g}{unit}"
        judged = "a small size" if latest.get("quick") and value is not None else verdict(target, value)
        told.append((target.what, f"{sign} {target.goal:,g}{unit}", measured, judged))
    return told


def table(latest: Mapping[str, Any]) -> Table:
    shown = Table("", "target", "measured", "", title="In a hurry: small sizes" if latest.get("quick") else None)
    for row in rows(latest):
        shown.add_row(*row)
    return shown
