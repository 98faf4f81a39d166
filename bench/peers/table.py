"""The results as two tables, for a terminal and for docs/peers.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from bench.peers.environments import PEERS

MEASURES = (
    "",
    "first load, chunks/s",
    "nothing changed, s",
    "one word in 1 %: s, texts a document",
    "1 % deleted: s",
    "rows gone",
    "paragraph on top of a long document: texts",
    "peak RSS, MB",
)
CASES = {
    "a": "one paragraph edited",
    "b": "of two equal files one deleted (two pairs)",
    "c": "embedder fails mid-update",
    "d": "10 % of the rows vanish",
    "e": "burst of 429",
    "f": "only the access changed",
    "g": "nothing changed",
}


Grid = list[list[str]]
"""Rows of cells; the first row is the heading."""


def measures(peers: Mapping[str, Mapping[str, Any]]) -> Grid:
    grid = [list(MEASURES)]
    for name, result in ordered(peers).items():
        if "failed" in result:
            grid.append([titles().get(name, name), f"failed: {result['failed']}", *[""] * (len(MEASURES) - 2)])
            continue
        gone = "yes" if result["deletes_gone"] else f"no, {result['deleted_rows_left']} stay"
        cells = (
            f"{result['first_load_chunks_per_s']} ({result['chunks']} in {result['first_load_s']} s)",
            result["unchanged_s"],
            f"{result['edit_s']}, {result['edit_reembedded_per_document']}",
            result["delete_s"],
            gone,
            f"{result['insert_paragraph_reembedded']} of {result['long_chunks']}",
            result["rss_mb"],
        )
        grid.append([titles().get(name, name), *map(str, cells)])
    return grid


def cases(peers: Mapping[str, Mapping[str, Any]]) -> Grid:
    """Return the table of cases; a cell has the texts embedded, and whether the store was right in the end."""
    grid = [["", *(f"({letter}) {title}" for letter, title in CASES.items())]]
    for name, result in ordered(peers).items():
        if "cases" in result:
            grid.append([titles().get(name, name), *(verdict(result["cases"][letter]) for letter in CASES)])
    return grid


def for_terminal(grid: Grid, title: str) -> Table:
    table = Table(*grid[0], title=title)
    for row in grid[1:]:
        table.add_row(*row)
    return table


def for_page(grid: Grid) -> str:
    """Return a table as Markdown."""
    heading, *rows = grid
    return "\n".join(f"| {' | '.join(row)} |" for row in (heading, ["---"] * len(heading), *rows))


def verdict(case: Mapping[str, Any]) -> str:
    """Return a case's result in a few words, such as ``12, right``."""
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
    """Return the peers in the order of PEERS, then others."""
    known = {name: peers[name] for name in titles() if name in peers}
    return known | {name: result for name, result in peers.items() if name not in known}


def titles() -> dict[str, str]:
    return {peer.name: peer.title for peer in PEERS}
