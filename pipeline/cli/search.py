"""``penstock search``: ask both stores, as somebody."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.moment import past_moment

if TYPE_CHECKING:
    from rich.console import Console

    from query.access import Caller
    from query.filters import Filters
    from query.model import Found, Mode, Result

SNIPPET_CHARACTERS = 320
COMMON = frozenset(
    ("and", "are", "but", "can", "does", "for", "from", "how", "into", "not", "that", "the", "this", "was", "what",
     "when", "where", "which", "who", "why", "with")
)  # fmt: skip
"""Not worth a highlight."""
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def search(
    query: Annotated[str, typer.Argument(help="What to look for, in your own words.")],
    tenant: Annotated[str, typer.Option(help="Whose documents.")] = "default",
    principals: Annotated[
        list[str] | None, typer.Option("--as", metavar="PRINCIPAL", help="See what this person sees. Repeatable.")
    ] = None,
    tags: Annotated[
        list[str] | None,
        typer.Option("--tag", metavar="TAG", help="Hold this access tag (TAG, or SOURCE/TAG). Repeatable."),
    ] = None,
    top: Annotated[int, typer.Option(help="How many passages, 1 to 100.")] = 10,
    mode: Annotated[str, typer.Option(help="hybrid, vector or keyword.")] = "hybrid",
    sources: Annotated[
        list[str] | None, typer.Option("--source", metavar="SOURCE", help="Only from this source. Repeatable.")
    ] = None,
    authors: Annotated[
        list[str] | None, typer.Option("--author", metavar="AUTHOR", help="Only by this author. Repeatable.")
    ] = None,
    media_types: Annotated[
        list[str] | None,
        typer.Option(
            "--type", metavar="TYPE", help="Only of this media type, e.g. text/markdown or text/*. Repeatable."
        ),
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option(parser=past_moment, metavar="TIME", help="Changed at its source since: 2h, 7d or a time."),
    ] = None,
    before: Annotated[
        datetime | None, typer.Option(parser=past_moment, metavar="TIME", help="Changed at its source before.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Search. Without --as and --tag you are the local user, who reads what `penstock ingest` stored for him.

    Example: penstock search "how do I undo a commit" --top 5 --type text/markdown --since 30d
    """
    from query.filters import Filters
    from query.model import BadQuery, as_json

    if not principals and not tags:
        from pipeline.cli.readers import local_user

        principals = [local_user("say who asks with --as or --tag")]
    try:
        filters = Filters(tuple(sources or ()), tuple(authors or ()), tuple(media_types or ()), since, before)
        caller, found = asyncio.run(_search(query, tenant, principals or [], tags or [], top, mode, filters))  # type: ignore[arg-type]  # checked there
    except BadQuery as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    if json_output:
        typer.echo(json.dumps(as_json(found), ensure_ascii=False))
        return
    _show(found, query, caller, [*(f"user:{p}" for p in principals or []), *(tags or [])])


async def _search(
    query: str, tenant: str, principals: Sequence[str], tags: Sequence[str], top: int, mode: Mode, filters: Filters
) -> tuple[Caller, Found]:
    from pipeline import tracing
    from query.filters import check as check_filters
    from query.model import check

    check(query, top, mode)
    check_filters(filters)
    with tracing.running("search"), tracing.begin("search", attributes={"penstock.tenant": tenant}):
        return await _found(query, tenant, principals, tags, top, mode, filters)


async def _found(
    query: str, tenant: str, principals: Sequence[str], tags: Sequence[str], top: int, mode: Mode, filters: Filters
) -> tuple[Caller, Found]:
    from pipeline.settings import dist, load
    from query.embedders import GenerationEmbedders

    settings = load()
    embedders = None
    if mode != "keyword":
        embedders = GenerationEmbedders.by_settings(settings.embedding, dist() / "models")
        embedders.start()  # while the clients are imported and connected
        await asyncio.sleep(0)
    from query.retrieval import open_search
    from query.settings import load as load_query

    async with open_search(settings, embedders, load_query()) as library:
        caller = await library.identify(tenant, principals=principals, tags=tags)
        return caller, await library.search(query, caller, top=top, mode=mode, filters=filters)


def _show(found: Found, query: str, caller: Caller, names: Sequence[str]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    for number, result in enumerate(found.results, start=1):
        _show_result(console, number, result, query)
    if noise := _noise(found):
        console.print(noise)
    elif not found.results:
        who = " ".join(names)
        console.print(
            f"Nothing readable as {escape(who)} in tenant {escape(caller.tenant)} matches; use --tag or --as."
        )
    for reason in found.degraded:
        console.print(f"[yellow]incomplete:[/] {escape(reason)}")
    steps = ", ".join(f"{s.name} {s.took_ms:g}" for s in found.steps)
    console.print(f"[dim]{found.took_ms:g} ms ({escape(steps)})[/]")


def _noise(found: Found) -> str | None:
    """Why what was found is not shown."""
    why = next((step.facts for step in found.steps if step.name == "confidence"), {})
    if found.relevant or "cosine" not in why:
        return None
    return f"Nothing relevant: the nearest passage has a cosine of {why['cosine']}, below the floor of {why['floor']}."


def _show_result(console: Console, number: int, result: Result, query: str) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from pipeline.cli.output import printable

    passage = result.passage
    ranks = ", ".join(f"{ranker} #{rank}" for ranker, rank in sorted(result.ranks.items(), reverse=True))
    if result.rerank_score is not None:
        ranks += f", reranked {result.rerank_score:.3f}"
    console.print(
        Text.assemble(
            f"{number:>2}. ",
            (printable(passage.title or passage.external_id), "bold"),
            (f"  {ranks}  {result.score:.4f}", "dim"),
        ),
        soft_wrap=True,
    )
    place = printable(passage.source_url or f"{passage.source}/{passage.external_id}")
    console.print(Padding(Text(place, "cyan"), (0, 0, 0, 4)))
    if about := _about(result):
        console.print(Padding(Text(printable(about), "dim"), (0, 0, 0, 4)))
    text = Text(printable(snippet(result.text, query)))
    if words := wanted(query):
        text.highlight_regex(re.compile(rf"\b(?:{'|'.join(words)})\w*", re.IGNORECASE), "bold yellow")
    console.print(Padding(text, (0, 0, 1, 4)))


def _about(result: Result) -> str:
    """Where in its document, by whom, from when, and where else."""
    at = result.source_modified_at
    others = [passage.title or passage.external_id for passage in result.also]
    parts = [
        " › ".join(result.headings),
        result.author or "",
        f"{at:%Y-%m-%d}" if at else "",
        f"also in {', '.join(others)}" if others else "",
    ]
    return "  ·  ".join(part for part in parts if part)


def wanted(query: str) -> list[str]:
    """The query's words, cut to roughly their stem, as regular expressions; longest first."""
    words = {word.lower() for word in re.findall(r"\w+", query) if len(word) > 2} - COMMON
    stems = {re.sub(r"(?:ing|ed|es|s|e)$", "", word) if len(word) > 4 else word for word in words}
    return [re.escape(word) for word in sorted(stems, key=lambda w: (-len(w), w))]


def snippet(text: str, query: str) -> str:
    """The stretch of a passage, on one line, that holds most different words of the query."""
    flat = " ".join(text.split())
    if len(flat) <= SNIPPET_CHARACTERS:
        return flat
    hits = [(m.start(), w) for w in wanted(query) for m in re.finditer(rf"\b{w}", flat, re.IGNORECASE)]
    starts = sorted({0, *(max(0, start - 60) for start, _ in hits)})

    def different_words(start: int) -> int:
        return len({w for at, w in hits if start <= at < start + SNIPPET_CHARACTERS})

    start = max(starts, key=lambda s: (different_words(s), -s))
    start = flat.rfind(" ", 0, start) + 1 if start else 0
    end = start + SNIPPET_CHARACTERS
    if end < len(flat):
        end = max(flat.rfind(" ", start, end), start + SNIPPET_CHARACTERS // 2)
    return ("… " if start else "") + flat[start:end] + (" …" if end < len(flat) else "")
