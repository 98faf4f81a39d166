"""Candidate settings of ranking compared with the current ones, by the real command on the real stores, and a change of
chunking by the comparison of generations."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from cli.main import app
from deploy.local.stack import Stack
from pipeline.core.errors import Misconfigured
from pipeline.core.model import ChunkParams
from query.evaluation import golden
from query.evaluation.generations import compare
from query.evaluation.golden import Golden, Judged
from query.evaluation.measures import measure
from query.evaluation.shadow import Shadowed, record
from query.retrieval.search import Search
from query.settings import RetrievalSettings, ShadowSettings
from tests.fakes.rerank import FakeRerank
from tests.support.query.generation_query_kit import Site, names
from tests.support.query.http_kit import as_
from tests.support.query.library import document
from tests.support.waiting import until

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

PLACES = ("dale", "fen", "ridge", "moor", "cove", "heath", "glen", "marsh", "holt", "brook", "wold", "strand")
TEXTS = {f"{place}.md": f"The survey of the {place} tells of its birds and its soil." for place in PLACES}
QUESTIONS = {f"zq{n}x {PLACES[n + 1]}": f"{PLACES[n]}.md" for n in range(8)}
"""Each with the document that answers it, as the model knows. The only word that occurs is another document's."""
BY_MEANING, BY_WORDS = "0", "10"
COMMON = {"PENSTOCK_QUERY_FEEDBACK": "false", "PENSTOCK_QUERY_COSINE_FLOOR": "-1"}
LONG = "\n\n".join(
    f"Part {n}. The {place} has birds and soil, and much else besides." for n, place in enumerate(PLACES)
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(stack: Stack) -> AsyncIterator[Site]:
    async with Site.create(stack, {"g3": ChunkParams(24, 8, 254)}) as site:
        await site.put(*(document(name, text) for name, text in TEXTS.items()))
        for question, name in QUESTIONS.items():
            site.models["g1"].near[question] = TEXTS[name]
        yield site


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def nothing_judged(site: Site) -> None:
    await site.library.execute("TRUNCATE eval_queries, eval_judgements, shadow_agreement")


async def judge(site: Site) -> None:
    async with site.library.pool.connection() as connection:
        for question, name in QUESTIONS.items():
            await golden.store(connection, Golden("acme", question, (Judged("wiki", name),), tags=("staff",)))


async def command(site: Site, home: Path, *options: str, **variables: str) -> tuple[int, Any, str]:
    """Exit code, what was printed as JSON, and stderr. In this process, in a thread: a command has an event loop of its
    own."""
    env = site.environment(home) | COMMON | {f"PENSTOCK_{name}": value for name, value in variables.items()}
    done = await asyncio.to_thread(CliRunner().invoke, app, ["golden", "compare", *options, "--json"], env=env)
    if isinstance(done.exception, Exception) and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, json.loads(done.stdout), done.stderr


async def by_search(site: Site, keyword_weight: str) -> dict[str, Sequence[float]]:
    """The values of each question, one search after another."""
    embedders = site.embedders()
    settings = RetrievalSettings(feedback=False, cosine_floor=-1, keyword_weight=float(keyword_weight))
    search = Search(site.library.pool, site.library.es, embedders, settings=settings)
    caller = await site.library.caller("acme", "staff")
    rankings = {question: names(await search.search(question, caller, top=50)) for question in QUESTIONS}
    await embedders.aclose()
    values = measure(rankings, {question: {name: 1} for question, name in QUESTIONS.items()})
    return {name: [float(value) for value in of] for name, of in values.items()}


async def kept(site: Site) -> list[Any]:
    tables = ("eval_runs", "shadow_agreement")
    rows = [await site.library.execute(f"SELECT count(*) FROM {table}") for table in tables]
    return [*rows, await site.library.execute("SELECT count(*) FROM eval_queries WHERE baseline IS NOT NULL")]


async def test_settings_that_rank_significantly_worse_are_refused_and_nothing_is_stored(
    site: Site, tmp_path: Path
) -> None:
    await judge(site)
    before = await kept(site)
    code, result, errors = await command(
        site, tmp_path, QUERY_KEYWORD_WEIGHT=BY_MEANING, SHADOW_QUERY_KEYWORD_WEIGHT=BY_WORDS
    )
    current, candidate = await by_search(site, BY_MEANING), await by_search(site, BY_WORDS)
    assert {value for values in current.values() for value in values} == {1.0}, "the model knows every answer"
    means = {name: sum(values) / 8 for name, values in candidate.items()}
    assert {n: of["current"] for n, of in result["measures"].items()} == dict.fromkeys(means, 1.0)
    assert {n: of["candidate"] for n, of in result["measures"].items()} == pytest.approx(means)
    ndcg = result["measures"]["nDCG@5"]
    assert ndcg["ratio"] == pytest.approx(means["nDCG@5"] - 1)
    assert (ndcg["better"], ndcg["worse"]) == (0, 8)
    assert ndcg["p"] < 0.02, "all eight questions are worse"
    assert (code, result["questions"], result["generation"]) == (3, 8, "g1")
    assert result["settings"] == ["QUERY_KEYWORD_WEIGHT 10.0 instead of 0.0"]
    assert f"error: nDCG@5 is {-ndcg['ratio']:.2%} lower by the candidate settings" in errors

    code, result, errors = await command(
        site, tmp_path, QUERY_KEYWORD_WEIGHT=BY_WORDS, SHADOW_QUERY_KEYWORD_WEIGHT=BY_MEANING
    )
    assert (code, errors, result["measures"]["nDCG@5"]["better"]) == (0, "", 8)
    assert await kept(site) == before


async def test_settings_that_rank_below_a_bound_are_refused(site: Site, tmp_path: Path) -> None:
    await judge(site)
    better = {"QUERY_KEYWORD_WEIGHT": BY_WORDS, "SHADOW_QUERY_KEYWORD_WEIGHT": BY_MEANING}
    assert (await command(site, tmp_path, "--fail-below", "nDCG@5=1.0", **better))[0] == 0
    one_more = {**better, "SHADOW_QUERY_PER_DOCUMENT": "1", "SHADOW_QUERY_KEYWORD_WEIGHT": BY_WORDS}
    code, result, errors = await command(site, tmp_path, "--fail-below", "MRR=0.9", **one_more)
    assert result["measures"]["nDCG@5"]["p"] == 1.0, "it ranks as before"
    assert (code, errors) == (
        3,
        f"error: MRR by the candidate settings is {result['measures']['MRR']['candidate']:.4f}, below 0.9\n",
    )


async def test_a_candidate_reranker_is_compared_with_the_current_order(site: Site, tmp_path: Path) -> None:
    await judge(site)
    async with FakeRerank() as fake:
        code, result, _ = await command(
            site,
            tmp_path,
            QUERY_KEYWORD_WEIGHT=BY_MEANING,
            SHADOW_RERANK_URL=fake.url(),
            SHADOW_RERANK_MODEL=fake.model,
        )
        assert code == 3, "it ranks by words"
        assert fake.stats.requests == len(QUESTIONS)
        fake.faults.errors = 1
        with pytest.raises(Exception, match="a search by the candidate settings was incomplete"):
            await command(site, tmp_path, SHADOW_RERANK_URL=fake.url(), SHADOW_RERANK_MODEL=fake.model)
    assert result["settings"] == [
        f"RERANK_URL {fake.url()} instead of none",
        f"RERANK_MODEL {fake.model} instead of none",
    ]


async def test_a_dataset_may_take_the_place_of_golden_questions(site: Site, tmp_path: Path) -> None:
    def lines(*rows: object) -> str:
        return "".join(json.dumps(row) + "\n" for row in rows)

    (tmp_path / "corpus.jsonl").write_text(lines(*({"_id": name, "text": text} for name, text in TEXTS.items())))
    (tmp_path / "queries.jsonl").write_text(lines(*({"_id": question, "text": question} for question in QUESTIONS)))
    (tmp_path / "qrels").mkdir()
    judged = [f"{question}\t{name}\t1\n" for question, name in QUESTIONS.items()]
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(judged))
    weights = {"QUERY_KEYWORD_WEIGHT": BY_MEANING, "SHADOW_QUERY_KEYWORD_WEIGHT": BY_WORDS}
    who = ("--dataset", str(tmp_path), "--tenant", "acme", "--tag")
    code, result, _ = await command(site, tmp_path, *who, "staff", **weights)
    assert (code, result["questions"], result["measures"]["nDCG@5"]["current"]) == (3, 8, 1.0)
    code, result, _ = await command(site, tmp_path, *who, "others", **weights)
    assert (code, result["measures"]["nDCG@5"]["current"]) == (0, 0.0), "who may read nothing finds nothing"


async def test_the_agreement_on_shadow_queries_is_shown_also_without_golden_questions(
    site: Site, tmp_path: Path
) -> None:
    weights: Mapping[str, str] = {"QUERY_KEYWORD_WEIGHT": BY_MEANING, "SHADOW_QUERY_KEYWORD_WEIGHT": BY_WORDS}
    async with site.library.pool.connection() as connection:
        name = "g1 with QUERY_KEYWORD_WEIGHT 10.0 instead of 0.0"
        for candidate, measured in ((name, (1.0, 0.5)), (name, None), ("g1 with another", (0.0, 0.0)), ("g3", None)):
            await record(connection, "g1", candidate, measured)
    code, result, errors = await command(site, tmp_path, **weights)
    assert (code, result["questions"], result["measures"]) == (1, 0, {})
    assert Shadowed(**result["shadow"]) == Shadowed(1, 1.0, 0.5, 1)
    assert "penstock golden add" in errors


async def test_without_candidate_settings_there_is_nothing_to_compare(site: Site, tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="PENSTOCK_SHADOW_QUERY_KEYWORD_WEIGHT"):
        await command(site, tmp_path)


async def test_another_way_of_chunking_is_shadowed_and_compared_as_a_generation(site: Site) -> None:
    """Documents are compared and words are judged, which both ways of chunking have in common."""
    await site.put(document("long.md", LONG, acl_tags=["user:ann", "staff"]))
    chunks = {name: (await site.library.execute(f"SELECT count(*) FROM chunks_{name}"))[0][0] for name in ("g1", "g3")}
    assert chunks["g3"] > chunks["g1"], "smaller chunks are more"
    async with site.library.pool.connection() as connection:
        answer = (Judged("wiki", "long.md", "The brook has birds and soil, and much else"),)
        await golden.store(connection, Golden("acme", "much else the brook has besides", answer, tags=("staff",)))
    async with site.service(shadow=ShadowSettings(share=1.0)) as (client, service):
        while service.following.seen is None:
            await asyncio.sleep(0.02)
        request = {"query": "much else besides"}
        await client.post("/v1/search", json=request, headers=as_("ann"))
        await until(lambda: not service.shadow._tasks)
    compared = await compare(site.settings, site.library.pool, "g3")
    assert (compared.candidate, compared.questions, compared.shadow.queries) == ("g3", 1, 1)
    assert 0 < compared.after["nDCG@5"] <= 1, "the anchor is found in other chunks, too"
