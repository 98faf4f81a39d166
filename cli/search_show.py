"""Output of a search for people: passages with the question's words in them, and the steps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

SNIPPET_CHARACTERS = 320
COMMON = frozenset(
    (
        "and",
        "are",
        "but",
        "can",
        "does",
        "for",
        "from",
        "how",
        "into",
        "not",
        "that",
        "the",
        "this",
        "was",
        "what",
        "when",
        "where",
        "which",
        "who",
        "why",
        "with",
    )
)
"""Not worth a highlight."""


def show(response: Mapping[str, Any], query: str, tenant: str, names: Sequence[str]) -> None:
    """response: of ``query.model.as_json``. names: of the person who asks."""
    from rich.markup import escape

    from cli.console import SafeConsole

    console = SafeConsole(highlight=False)
    if not console.is_terminal:
        console = SafeConsole(highlight=False, width=120)
    for number, result in enumerate(response["results"], start=1):
        _show_result(console, number, result, query)
    if noise := _noise(response):
        console.print(noise)
    elif not response["results"]:
        who = " ".join(names)
        console.print(
            f"No document that {escape(who)} may read in tenant {escape(tenant)} matches."
            " Use --as or --tag to read as others."
        )
    for name, facet in response["facets"].items():
        values = ", ".join(f"{value['value']} ({value['count']})" for value in facet["values"]) or "no values"
        console.print(f"[bold]{escape(name)}[/]: {escape(values)}{'' if facet['complete'] else ' …'}")
    if response["cursor"]:
        console.print(f"[dim]more: --cursor {escape(response['cursor'])}[/]", soft_wrap=True)
    for reason in response["degraded"]:
        console.print(f"[yellow]incomplete:[/] {escape(reason)}")
    for source in response.get("freshness", ()):
        console.print(f"[dim]{escape(describe_freshness(source))}[/]", soft_wrap=True)
    steps = ", ".join(f"{step['step']} {step['took_ms']:g}" for step in response["steps"])
    console.print(f"[dim]{response['took_ms']:g} ms ({escape(steps)})[/]")


def describe_freshness(source: Mapping[str, Any]) -> str:
    """One line about the certificate of a source, as JSON."""
    if "unlisted" in source["lags"]:
        return f"{source['source']}: no connector lists it; wait for what was published with --at-least"
    lags = {"stores": "the stores lag", "source": "the source was not read for long"}
    parts = [
        f"complete until {_moment(source['complete_until'])}",
        f"access verified {_moment(source['access_until'])}",
        *(lags.get(lag, lag) for lag in source["lags"]),
        *(["unreadable documents are left out"] if source["has_gaps"] else []),
    ]
    return f"{source['source']}: {', '.join(parts)}"


def _moment(time: str | None) -> str:
    return "unknown" if time is None else f"{time[:10]} {time[11:19]} UTC"


def _noise(response: Mapping[str, Any]) -> str | None:
    """Why what was found is not shown."""
    why: Mapping[str, Any] = next((step for step in response["steps"] if step["step"] == "confidence"), {})
    if response["relevant"]:
        return None
    if "rerank score" in why:
        return (
            f"No relevant passage: the best has a rerank score of {why['rerank score']}, below the minimum of"
            f" {why['rerank floor']}."
        )
    if "cosine" not in why:
        return None
    return f"No relevant passage: the nearest has a cosine of {why['cosine']}, below the minimum of {why['floor']}."


def _show_result(console: Console, number: int, result: Mapping[str, Any], query: str) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from cli.output import printable

    ranks = ", ".join(f"{ranker} #{rank}" for ranker, rank in sorted(result["ranks"].items(), reverse=True))
    if result["rerank_score"] is not None:
        ranks += f", reranked {result['rerank_score']:.3f}"
    console.print(
        Text.assemble(
            f"{number:>2}. ",
            (printable(result["title"] or result["external_id"]), "bold"),
            (f"  {ranks}  {result['score']:.4f}", "dim"),
        ),
        soft_wrap=True,
    )
    place = printable(result["source_url"] or f"{result['source']}/{result['external_id']}")
    console.print(Padding(Text(place, "cyan"), (0, 0, 0, 4)))
    if about := _about(result):
        console.print(Padding(Text(printable(about), "dim"), (0, 0, 0, 4)))
    text = Text(printable(snippet(result["text"], query)))
    if words := search_words(query):
        text.highlight_regex(re.compile(rf"\b(?:{'|'.join(words)})\w*", re.IGNORECASE), "bold yellow")
    console.print(Padding(text, (0, 0, 1, 4)))


def _about(result: Mapping[str, Any]) -> str:
    """The line below a passage: its headings, the author, the date, and other documents with the same text."""
    at = result["source_modified_at"]
    others = [passage["title"] or passage["external_id"] for passage in result["also"]]
    parts = [
        " › ".join(result["headings"]),
        result["author"] or "",
        at[:10] if at else "",
        f"also in {', '.join(others)}" if others else "",
    ]
    return "  ·  ".join(part for part in parts if part)


def search_words(query: str) -> list[str]:
    """The query's words, cut to roughly their stem, as regular expressions; longest first."""
    words = {word.lower() for word in re.findall(r"\w+", query) if len(word) > 2} - COMMON
    stems = {re.sub(r"(?:ing|ed|es|s|e)$", "", word) if len(word) > 4 else word for word in words}
    return [re.escape(word) for word in sorted(stems, key=lambda w: (-len(w), w))]


def snippet(text: str, query: str) -> str:
    """The stretch of a passage, on one line, that holds most different words of the query."""
    flat = " ".join(text.split())
    if len(flat) <= SNIPPET_CHARACTERS:
        return flat
    hits = [(m.start(), w) for w in search_words(query) for m in re.finditer(rf"\b{w}", flat, re.IGNORECASE)]
    starts = sorted({0, *(max(0, start - 60) for start, _ in hits)})

    def different_words(start: int) -> int:
        return len({w for at, w in hits if start <= at < start + SNIPPET_CHARACTERS})

    start = max(starts, key=lambda s: (different_words(s), -s))
    start = flat.rfind(" ", 0, start) + 1 if start else 0
    end = start + SNIPPET_CHARACTERS
    if end < len(flat):
        end = max(flat.rfind(" ", start, end), start + SNIPPET_CHARACTERS // 2)
    return ("… " if start else "") + flat[start:end] + (" …" if end < len(flat) else "")
