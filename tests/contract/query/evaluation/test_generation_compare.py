"""Two generations compared by judged questions, against the same numbers worked out by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from math import log2
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from cli.main import app
from deploy.local.stack import Stack
from pipeline.core.errors import Misconfigured, Retryable
from query.evaluation import golden
from query.evaluation.generations import Comparison, compare
from query.evaluation.golden import Golden, Judged
from query.evaluation.questions import NothingJudged
from query.evaluation.shadow import Shadowed, record
from query.retrieval.search import Search
from tests.support.query.generation_query_kit import Site, names
from tests.support.query.library import deletion, document

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

PLACES = ("dale", "fen", "ridge", "moor", "cove", "heath", "glen", "marsh", "holt", "brook", "wold", "strand")
TEXTS = {f"{place}.md": f"The survey of the {place} tells of its birds and its soil." for place in PLACES}
QUESTIONS: Mapping[str, Mapping[str, int]] = {
    f"zq{n}x": {f"{PLACES[n]}.md": 3, f"{PLACES[n + 3]}.md": 1, f"{PLACES[n + 6]}.md": 2} for n in range(6)
}
"""Words that stand nowhere, so that the model alone decides; and what answers them, with its gain."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(stack: Stack) -> AsyncIterator[Site]:
    """g1's model puts each question where its best answer is, g3's all but two of them elsewhere."""
    async with Site.create(stack) as site:
        await site.put(*(document(name, text) for name, text in TEXTS.items()))
        for n, (question, judged) in enumerate(QUESTIONS.items()):
            site.models["g1"].near[question] = TEXTS[next(iter(judged))]
            site.models["g3"].near[question] = TEXTS[f"{PLACES[n if n < 2 else n + 1]}.md"]
        yield site


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def nothing_judged(site: Site) -> None:
    await site.library.execute("TRUNCATE eval_queries, eval_judgements, shadow_agreement")


async def judge(site: Site) -> None:
    async with site.library.pool.connection() as connection:
        for question, judged in QUESTIONS.items():
            anchors = {name: name.removesuffix(".md") for name in judged}
            answers = tuple(Judged("wiki", name, f"of the {anchors[name]}", gain) for name, gain in judged.items())
            await golden.store(connection, Golden("acme", question, answers, tags=("staff",)))


def by_hand(rankings: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """The textbook's definitions, linear gains."""

    def ndcg(question: str, depth: int) -> float:
        gains = QUESTIONS[question]
        got = sum(gains.get(name, 0) / log2(n + 2) for n, name in enumerate(rankings[question][:depth]))
        best = sorted(gains.values(), reverse=True)[:depth]
        return got / sum(gain / log2(n + 2) for n, gain in enumerate(best))

    def reciprocal(question: str) -> float:
        return next((1 / (n + 1) for n, name in enumerate(rankings[question]) if name in QUESTIONS[question]), 0.0)

    def recall(question: str) -> float:
        return len(set(rankings[question][:50]) & set(QUESTIONS[question])) / len(QUESTIONS[question])

    of = len(QUESTIONS)
    return {
        "nDCG@5": sum(ndcg(q, 5) for q in QUESTIONS) / of,
        "nDCG@10": sum(ndcg(q, 10) for q in QUESTIONS) / of,
        "recall@50": sum(map(recall, QUESTIONS)) / of,
        "MRR": sum(map(reciprocal, QUESTIONS)) / of,
    }


async def measured_by_search(site: Site, name: str) -> dict[str, float]:
    """One question after another, by the search that the service has."""
    embedders = site.embedders()
    search = Search(site.library.pool, site.library.es, embedders)
    caller = await site.library.caller("acme", "staff")
    generation = await site.generation(name)
    rankings = {}
    for question in QUESTIONS:
        response = await search.search(question, caller, top=100, generation=generation)
        assert response.degraded == ()
        rankings[question] = names(response)
    await embedders.aclose()
    return by_hand(rankings)


def same(comparison: Comparison, before: Mapping[str, float], after: Mapping[str, float]) -> None:
    assert dict(comparison.before) == pytest.approx(before)
    assert dict(comparison.after) == pytest.approx(after)
    assert comparison.change == pytest.approx(after["nDCG@5"] / before["nDCG@5"] - 1)
    assert comparison.difference.mean == pytest.approx(after["nDCG@5"] - before["nDCG@5"])
    assert comparison.difference.low <= comparison.difference.mean <= comparison.difference.high


async def test_the_comparison_of_generations_matches_measures_computed_by_hand(site: Site, tmp_path: Path) -> None:
    before, after = await measured_by_search(site, "g1"), await measured_by_search(site, "g3")
    assert before["MRR"] == 1.0, "g1 knows every answer"
    assert after["nDCG@5"] < 0.9 * before["nDCG@5"], "else nothing would be compared"
    with pytest.raises(NothingJudged, match="penstock golden add"):
        await compare(site.settings, site.library.pool, "g3")
    await judge(site)
    worse = await compare(site.settings, site.library.pool, "g3")
    assert (worse.active, worse.candidate, worse.questions) == ("g1", "g3", len(QUESTIONS))
    same(worse, before, after)
    assert worse.change < -0.02
    assert 0 < worse.p <= 1

    await site.state(g3="active", g1="previous", g2="building")
    better = await compare(site.settings, site.library.pool, "g1")
    same(better, after, before)
    assert better.change > 0
    await site.state(g1="active", g3="building", g2="previous")

    itself = await compare(site.settings, site.library.pool, "g1")
    assert (itself.change, itself.p, itself.before) == (0.0, 1.0, itself.after)

    write(tmp_path)
    of_folder = await compare(site.settings, site.library.pool, "g3", dataset=tmp_path, tenant="acme", tags=["staff"])
    same(of_folder, before, after)
    nobody = await compare(site.settings, site.library.pool, "g3", dataset=tmp_path, tenant="acme", tags=["others"])
    assert (nobody.before["nDCG@5"], nobody.after["nDCG@5"], nobody.change) == (0.0, 0.0, 0.0)


def write(folder: Path) -> None:
    """BEIR's layout."""

    def lines(*rows: object) -> str:
        return "".join(json.dumps(row) + "\n" for row in rows)

    (folder / "corpus.jsonl").write_text(lines(*({"_id": name, "text": text} for name, text in TEXTS.items())))
    (folder / "queries.jsonl").write_text(lines(*({"_id": question, "text": question} for question in QUESTIONS)))
    (folder / "qrels").mkdir()
    judged = [f"{q}\t{name}\t{gain}\n" for q, gains in QUESTIONS.items() for name, gain in gains.items()]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(judged))


async def test_eval_and_search_commands_use_the_active_generations_model_whatever_the_settings_name(
    site: Site, tmp_path: Path
) -> None:
    write(tmp_path)
    named = site.environment(tmp_path)

    async def command(*arguments: str) -> Any:
        """In this process, in a thread: each command has an event loop of its own."""
        who = ("--tenant", "acme", "--tag", "staff", "--json")
        response = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, *who], env=named)
        assert response.exit_code == 0, response.output
        return json.loads(response.stdout)

    expected = await measured_by_search(site, "g3")
    await site.state(g3="active", g1="previous", g2="building")
    try:
        judged = (await command("eval", str(tmp_path), "--no-load"))["runs"]["hybrid"]
        response = await command("search", TEXTS["fen.md"], "--mode", "vector")
    finally:
        await site.state(g1="active", g3="building", g2="previous")
    assert {name: judged[name] for name in expected} == pytest.approx(expected, abs=1e-4)
    assert (response["results"][0]["external_id"], response["degraded"]) == ("fen.md", [])
    assert site.models["g3"].texts[-1] == TEXTS["fen.md"]


async def test_an_unknown_generation_or_degraded_search_cannot_be_compared(site: Site) -> None:
    await judge(site)
    with pytest.raises(Misconfigured, match="no generation g7"):
        await compare(site.settings, site.library.pool, "g7")
    site.models["g3"].api_key = "another"
    try:
        with pytest.raises(Retryable, match="a search of generation g3 was incomplete"):
            await compare(site.settings, site.library.pool, "g3")
    finally:
        site.models["g3"].api_key = "key-g3"
    assert (await compare(site.settings, site.library.pool, "g3")).change < 0


async def test_a_judgement_whose_document_was_deleted_is_left_out_of_the_comparison(site: Site) -> None:
    gone = document("gone.md", "The survey of the quarry tells of its birds and its soil.")
    await site.put(gone)
    await judge(site)
    async with site.library.pool.connection() as connection:
        await golden.store(connection, Golden("acme", "zq9x", (Judged("wiki", "gone.md"),), tags=("staff",)))
    assert (await compare(site.settings, site.library.pool, "g3")).questions == len(QUESTIONS) + 1
    await site.put(deletion(gone))
    assert (await compare(site.settings, site.library.pool, "g3")).questions == len(QUESTIONS)


async def test_the_comparison_includes_the_measurements_of_shadow_queries(site: Site) -> None:
    await judge(site)
    async with site.library.pool.connection() as connection:
        for active, candidate, measured in (
            ("g1", "g3", (1.0, 0.9)),
            ("g3", "g1", (0.5, 0.4)),
            ("g1", "g3", None),
            ("g1", "g2", (0.0, 0.0)),
        ):
            await record(connection, active, candidate, measured)
    differences = (await compare(site.settings, site.library.pool, "g3")).shadow
    assert differences == Shadowed(2, pytest.approx(0.75), pytest.approx(0.65), 1)  # type: ignore[arg-type]
