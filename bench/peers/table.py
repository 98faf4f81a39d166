"""The results as two tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from bench.peers.environments import PEERS

MEASURES = (
    "", "first load, chunks/s", "nothing changed, s", "one word in 1 %: s, texts a document", "1 % deleted: s",
    "rows gone", "paragraph on top of a long document: texts", "peak RSS, MB",
)  # fmt: skip
CASES = {
    "a": "one paragraph edited", "b": "one of two equal files deleted", "c": "embedder fails mid-update",
    "d": "10 % of the rows vanish", "e": "burst of 429", "f": "only the access changed", "g": "nothing changed",
}  # fmt: skip


def measures(peers: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(title="Peers")
    for heading in MEASURES:
        table.add_column(heading)
    for name, result in ordered(peers).items():
        if "failed" in result:
            table.add_row(titles().get(name, name), result["failed"])
            continue
        gone = "yes" if result["deletes_gone"] else f"no, {result['deleted_rows_left']} stay"
        cells = (result["first_load_chunks_per_s"], result["unchanged_s"],
                 f"{result['edit_s']}, {result['edit_reembedded_per_document']}", result["delete_s"], gone,
                 f"{result['insert_paragraph_reembedded']} of {result['long_chunks']}", result["rss_mb"])  # fmt: skip
        table.add_row(titles().get(name, name), *map(str, cells))
    return table


def cases(peers: Mapping[str, Mapping[str, Any]]) -> Table:
    """A cell: the texts embedded, and whether the store was right in the end."""
    table = Table(title="Cases: texts embedded, and whether the store is right afterwards")
    table.add_column("")
    for letter, title in CASES.items():
        table.add_column(f"({letter}) {title}")
    for name, result in ordered(peers).items():
        if "cases" in result:
            table.add_row(titles().get(name, name), *(verdict(result["cases"][letter]) for letter in CASES))
    return table


def verdict(case: Mapping[str, Any]) -> str:
    """In a few words: ``12, right``."""
    if case["by_itself"]:
        words = "right"
    elif case["right"]:
        words = f"right after a repair ({case['repair_embedded']})"
    elif case.get("right_after_another_run"):
        words = "an error; right after another run"
    else:
        words = f"WRONG: {case['wrong_documents']} documents"
    if case.get("gone_meanwhile"):
        words += f", {case['gone_meanwhile']} documents not there meanwhile"
    if case.get("rows_written"):
        words += f", {case['rows_written']} rows written"
    return f"{case['embedded']}, {words}"


def ordered(peers: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Ours as they are listed, then others."""
    known = {name: peers[name] for name in titles() if name in peers}
    return known | {name: result for name, result in peers.items() if name not in known}


def titles() -> dict[str, str]:
    return {peer.name: peer.title for peer in PEERS}
