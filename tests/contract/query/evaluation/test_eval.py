"""Evaluation on the real servers: a collection in a place of its own, and golden judgements of what is there."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import pytest_asyncio
from click.testing import Result
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from cli.main import app
from deploy.local.stack import Stack
from pipeline.core.errors import Retryable
from query.answers.openai_chat import OpenAIChat
from query.embedding.embedders import QueryEmbedder
from query.evaluation import golden as judgements
from query.evaluation import place
from query.evaluation.baseline import SIGNIFICANT, WORST_RATIO, Change
from query.evaluation.dataset import Dataset, Document
from query.evaluation.golden import Golden, Judged
from query.evaluation.judge import grade, precision
from query.evaluation.rank import rank
from query.evaluation.report import report
from query.evaluation.service import EvalMetrics, Evaluation, newest, run_if_due
from query.model import MODES, SearchResults
from query.retrieval import feedback, vectors
from query.retrieval import search as retrieval
from query.retrieval.search import Search
from query.settings import ChatSettings, EvalSettings, RetrievalSettings
from tests.fakes.chat import FakeChat
from tests.support.processes import run_penstock
from tests.support.query import cross_encoder_kit
from tests.support.query.library import Library, WordEmbedder, deletion, document

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

PLANETS = {
    "mercury": "Mercury circles the sun in eighty-eight days and has no moon.",
    "venus": "Venus turns backwards under thick clouds of acid.",
    "mars": "Mars is red from rust; its two moons are called Phobos and Deimos.",
    "saturn": "Saturn has rings of ice, and Titan is the largest of its moons.",
}
QUESTIONS = {"q1": "which planet has rings of ice", "q2": "red from rust", "q3": "thick clouds of acid"}
RIGHT = {"q1": {"saturn": 2, "mars": 1}, "q2": {"mars": 1}, "q3": {"venus": 1}}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def library(stack: Stack) -> AsyncIterator[Library]:
    async with Library.create(stack, WordEmbedder()) as library:
        await library.put(*(document(name, text) for name, text in PLANETS.items()))
        yield library


def dataset() -> Dataset:
    documents = [Document(name, name.title(), text) for name, text in PLANETS.items()]
    return Dataset("planets", documents, QUESTIONS, RIGHT, {"q1": "long", "q2": "short", "q3": "short"})


def databases(library: Library) -> set[str]:
    with psycopg.connect(library.settings.postgres.dsn.get_secret_value()) as connection:
        return {name for (name,) in connection.execute("SELECT datname FROM pg_database").fetchall()}


# A collection


async def test_a_collection_is_evaluated_in_a_temporary_database_and_index(library: Library) -> None:
    model = WordEmbedder()
    async with place.opened(library.settings, model, dataset()) as here:
        assert await here.load(dataset().documents) == len(PLANETS)
        search = Search(here.pool, here.es, QueryEmbedder(lambda: model))
        caller = await search.identify(place.TENANT, tags=[place.TAG])
        measures = report(dataset(), *await rank(search, caller, dataset(), MODES))
        name, index = here.pool.conninfo.partition("dbname=")[2].split()[0], here.generation.keyword_index
        assert name in databases(library)
    assert name not in databases(library)
    assert not await library.es.indices.exists(index=index)
    assert measures["queries"] == 3
    assert set(measures["runs"]) == set(MODES)
    for run in measures["runs"].values():
        assert run["MRR"] == 1.0
        assert run["intervals"]["nDCG@10"][0] <= run["nDCG@10"] <= run["intervals"]["nDCG@10"][1]
    assert measures["slices"]["short"]["queries"] == 2
    assert set(measures["comparisons"]) == {"hybrid over keyword", "hybrid over vector"}
    assert measures["degraded"] == {}


async def test_the_existing_documents_can_be_evaluated_as_they_are(library: Library) -> None:
    caller = await library.caller("acme", "staff")
    measures = report(dataset(), *await rank(library.search, caller, dataset(), MODES))
    assert measures["runs"]["keyword"]["MRR"] == 1.0
    stranger = await library.caller("acme", "nobody")
    unseen = report(dataset(), *await rank(library.search, stranger, dataset(), MODES))
    assert all(run["recall@50"] == 0 for run in unseen["runs"].values())


async def test_penstock_eval_prints_one_json_document(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "qrels").mkdir()
    (tmp_path / "corpus.jsonl").write_text(
        "".join(json.dumps({"_id": name, "title": name, "text": text}) + "\n" for name, text in PLANETS.items())
    )
    (tmp_path / "queries.jsonl").write_text(
        "".join(json.dumps({"_id": q, "text": t}) + "\n" for q, t in QUESTIONS.items())
    )
    (tmp_path / "qrels" / "test.tsv").write_text(
        "query-id\tcorpus-id\tscore\n" + "".join(f"{q}\t{d}\t{g}\n" for q, of in RIGHT.items() for d, g in of.items())
    )
    saved = tmp_path / "saved.json"
    saved.write_text(
        json.dumps(
            {
                run: {name: dict.fromkeys(QUESTIONS, 0.0) for name in ("nDCG@10", "recall@50")}
                for run in ("keyword", "reranked")
            }
        )
    )
    done = await asyncio.to_thread(
        _penstock,
        stack.home,
        "eval",
        str(tmp_path),
        *("--against", str(saved), "--save", str(saved), "--rerank", "--fail-below", "nDCG@10=0.5", "--json"),
        PENSTOCK_RERANK_ONNX_PATH=str(cross_encoder_kit.write(tmp_path / "model")),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    response = json.loads(done.stdout)
    assert response["queries"] == 3
    assert {mode: set(run) >= {"nDCG@10", "recall@50"} for mode, run in response["runs"].items()} == dict.fromkeys(
        (*MODES, "reranked"), True
    )
    assert set(response["comparisons"]["reranked over hybrid"]) == {"nDCG@10", "recall@50"}
    assert response["runs"]["hybrid"]["nDCG@10"] > 0.9
    assert response["comparisons"]["keyword over the saved keyword"]["recall@50"]["difference"] > 0.8
    assert json.loads(saved.read_text())["hybrid"]["recall@50"] == dict.fromkeys(QUESTIONS, 1.0)
    wrong = await asyncio.to_thread(_penstock, stack.home, "eval", str(tmp_path / "qrels"))
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: ")
    assert len(wrong.stderr.splitlines()) == 1
    without = await asyncio.to_thread(_penstock, stack.home, "eval", str(tmp_path), "--rerank")
    assert without.returncode == 1
    assert without.stderr.startswith("error: --rerank needs a reranker: set PENSTOCK_RERANK_URL")


def _penstock(home: Path, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return run_penstock(*arguments, env={**os.environ, **settings, "PENSTOCK_HOME": str(home)})


async def test_penstock_golden_adds_exports_imports_and_removes_judgements(library: Library, tmp_path: Path) -> None:
    await replace_golden(library)
    library.write_home(tmp_path)

    async def golden(*arguments: str) -> Result:
        """In this process, in a thread: each command has an event loop of its own."""
        return await asyncio.to_thread(
            CliRunner().invoke, app, ["golden", *arguments], env={"PENSTOCK_HOME": str(tmp_path)}
        )

    asks = ["which moon is the largest", "--tenant", "acme", "--tag", "staff"]
    added = await golden("add", *asks, "--document", "wiki/saturn", "--anchor", "Titan is the")
    assert added.exit_code == 0, added.output
    assert (await golden("add", *asks, "--document", "wiki/mars")).stdout.startswith("2 judgements")
    exported = (await golden("export")).stdout
    [one] = judgements.read(exported.splitlines())
    assert {j.external_id: j.anchor for j in one.judged} == {"saturn": "Titan is the", "mars": ""}
    (tmp_path / "golden.jsonl").write_text(exported)
    assert (await golden("remove", asks[0], "--tenant", "acme")).exit_code == 0
    assert (await golden("remove", asks[0], "--tenant", "acme")).exit_code == 1
    assert (await golden("import", str(tmp_path / "golden.jsonl"))).exit_code == 0
    assert (await golden("export")).stdout == exported
    wrong = await golden("add", "q", "--document", "wiki")
    assert (wrong.exit_code, len(wrong.stderr.splitlines())) == (2, 1)


# Relevance feedback


def by_keyword(response: SearchResults) -> set[str]:
    return {result.passage.external_id for result in response.results if "keyword" in result.ranks}


async def test_relevance_feedback_finds_documents_by_words_missing_from_the_question(library: Library) -> None:
    caller = await library.caller("acme", "staff")
    model = QueryEmbedder(WordEmbedder)
    once = Search(library.pool, library.es, model, settings=RetrievalSettings(feedback=False))
    assert by_keyword(await once.search("Phobos", caller)) == {"mars"}
    assert {"mars", "saturn"} <= by_keyword(await library.search.search("Phobos", caller)), "both speak of moons"


async def test_relevance_feedback_scores_keyword_candidates_by_vector_too(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relevance feedback also scores candidates that pgvector did not offer. Those that pgvector does not have are
    returned unchanged."""
    walked = vectors.nearest

    async def nearest(*args: Any, **more: Any) -> Any:
        response, scan = await walked(*args, **more)
        return [candidate for candidate in response if candidate.text != story], scan

    monkeypatch.setattr(vectors, "nearest", nearest)
    tenant, story = f"t{uuid4().hex[:8]}", "Quarrel in the harbour."
    await library.put(
        *(document(f"near-{n}.md", f"harbour light {n}", tenant=tenant) for n in range(3)),
        document("far.md", story, tenant=tenant),
    )
    caller = await library.caller(tenant, "staff")

    async def ranks(*, feedback: bool) -> set[str]:
        settings = RetrievalSettings(feedback=feedback, cached_queries=0)
        search = Search(library.pool, library.es, QueryEmbedder(WordEmbedder), settings=settings)
        response = await search.search("harbour light quarrel", caller)
        return next(set(result.ranks) for result in response.results if result.passage.external_id == "far.md")

    assert await ranks(feedback=False) == {"keyword"}
    assert await ranks(feedback=True) == {"keyword", "vector"}
    await library.execute(f"DELETE FROM {library.generation.chunk_table} WHERE text = %s", story)
    assert await ranks(feedback=True) == {"keyword"}


async def test_words_added_by_relevance_feedback_rank_candidates_and_add_none(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = f"t{uuid4().hex[:8]}"
    await library.put(
        document("near.md", "harbour light 1", tenant=tenant),
        document("first.md", "harbour light turnip", tenant=tenant),
        document("other.md", "turnip, turnip and turnip", tenant=tenant),
        *(document(f"far-{n}.md", f"Nothing of the kind {n}.", tenant=tenant) for n in range(20)),
    )
    caller = await library.caller(tenant, "staff")

    async def ranks(*, feedback: bool) -> set[str]:
        settings = RetrievalSettings(feedback=feedback, cached_queries=0)
        search = Search(library.pool, library.es, QueryEmbedder(WordEmbedder), settings=settings)
        shown = await search.search("harbour light", caller, top=3)
        return {rank for result in shown.results if result.passage.external_id == "other.md" for rank in result.ranks}

    assert "keyword" not in await ranks(feedback=False)
    assert await ranks(feedback=True) == {"keyword", "vector"}
    monkeypatch.setattr(retrieval, "CANDIDATES", 2)
    monkeypatch.setattr(retrieval, "SPARE", 1)
    monkeypatch.setattr(retrieval, "MAX_DEPTH", 2)
    assert await ranks(feedback=True) == set(), "neither store had offered it: nobody has asked whether it may be shown"


async def test_relevance_feedback_that_times_out_leaves_the_first_results_and_a_note(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = await library.caller("acme", "staff")
    monkeypatch.setattr(feedback, "TIME_SHARE", 0)
    response = await library.search.search("Deimos", caller)
    assert by_keyword(response) == {"mars"}
    assert response.degraded == ("relevance feedback did not answer within 0 s",)


async def test_concurrent_searches_beyond_the_limit_skip_relevance_feedback_and_are_not_cached(
    library: Library,
) -> None:
    caller = await library.caller("acme", "staff")
    settings = RetrievalSettings(feedback_at_once=1)
    search = Search(library.pool, library.es, QueryEmbedder(WordEmbedder), settings=settings)
    crowd = await asyncio.gather(*(search.search("Phobos", caller) for _ in range(3)))
    hasty = [response for response in crowd if any(step.facts.get("skipped") for step in response.steps)]
    assert hasty, "the first to be done was not alone"
    assert all(by_keyword(response) == {"mars"} and not response.degraded for response in hasty)
    assert {"mars", "saturn"} <= by_keyword(await search.search("Phobos", caller))


async def test_relevance_feedback_uses_only_passages_the_caller_may_read(library: Library) -> None:
    staff = await library.caller("acme", "staff")
    forgetful = Search(
        library.pool, library.es, QueryEmbedder(WordEmbedder), settings=RetrievalSettings(cached_queries=0)
    )
    before = await forgetful.search("Phobos merger", staff)
    secret = "Phobos and Deimos: the merger with the rings of ice and the thick clouds is called off. " * 3
    await library.put(document("board", secret, acl_tags=["board"]))
    after = await forgetful.search("Phobos merger", staff)
    assert (external_ids(after), by_keyword(after)) == (external_ids(before), by_keyword(before))
    assert external_ids(await forgetful.search("Phobos merger", await library.caller("acme", "board"))) == ["board"]
    await library.put(deletion(document("board", secret)))


def external_ids(response: SearchResults) -> list[str]:
    return [result.passage.external_id for result in response.results]


# Golden judgements


def golden(text: str, *judged: Judged, tenant: str = "acme") -> Golden:
    return Golden(tenant, text, judged, tags=("staff",), reference="It is so.")


async def replace_golden(library: Library, *all_of: Golden) -> None:
    await library.execute("DELETE FROM eval_queries")
    await library.execute("DELETE FROM eval_runs")
    async with library.pool.connection() as connection:
        for item in all_of:
            await judgements.store(connection, item)


def evaluation(library: Library, *, moment: datetime | None = None, **fields: object) -> Evaluation:
    settings = EvalSettings()
    return Evaluation(
        library.pool,
        library.search,
        settings,
        EvalMetrics(CollectorRegistry(), settings),
        now=lambda: moment or datetime.now(UTC),
        **fields,  # type: ignore[arg-type]
    )


async def test_a_judgement_with_an_anchor_is_lost_when_its_words_leave_the_document(library: Library) -> None:
    text = "Neptune has storms.\n\nIts moon Triton goes round the wrong way."
    await library.put(document("neptune", text))
    anchored = golden("which moon goes the wrong way", Judged("wiki", "neptune", "Triton  goes\nround"))
    await replace_golden(library, anchored)
    one = evaluation(library)
    first = await one.run()
    assert first is not None
    assert first.means["*", "nDCG@5"] == (1.0, 1)
    assert first.means["wiki", "nDCG@5"] == (1.0, 1)
    chunks = {row[0] for row in await library.execute("SELECT unnest(chunk_ids) FROM manifests")}
    await library.put(document("neptune", f"A new paragraph about blue.\n\n{text} It will fall one day."))
    assert chunks - {row[0] for row in await library.execute("SELECT unnest(chunk_ids) FROM manifests")}
    again = await one.run()
    assert again is not None
    assert again.means["*", "nDCG@5"] == (1.0, 1)
    assert again.changes["*", "nDCG@5"] == Change(0.0, 1.0, 1, 1.0)
    await library.put(document("neptune", "Neptune is blue."))
    assert await one.run() is None
    assert one.metrics.lost._value.get() == 1
    await library.put(deletion(document("neptune", "")))
    assert await one.run() is None


async def test_a_judgement_whose_anchor_is_not_in_the_document_is_lost(library: Library) -> None:
    await replace_golden(
        library, golden("rings of ice", Judged("wiki", "saturn", "no such words"), Judged("wiki", "saturn"))
    )
    async with library.pool.connection() as connection:
        left, lost = await judgements.current(connection, await judgements.load(connection))
    assert ([entry.judged for entry in left], lost) == ([(Judged("wiki", "saturn"),)], 1)


async def test_an_evaluation_runs_every_quarter_of_an_hour_in_one_process(library: Library) -> None:
    await replace_golden(library, golden("rings of ice", Judged("wiki", "saturn")))
    start = datetime.now(UTC)
    assert await run_if_due(evaluation(library, moment=start))
    assert not await run_if_due(evaluation(library, moment=start + timedelta(minutes=14)))
    later = evaluation(library, moment=start + timedelta(minutes=15))
    assert await run_if_due(later)
    other = evaluation(library, moment=start + timedelta(minutes=16))
    assert not await run_if_due(other)
    for metrics in (later.metrics, other.metrics):
        assert metrics.ndcg.labels("*")._value.get() == pytest.approx(1.0)
        assert metrics.change.labels("nDCG@5", "*")._value.get() == 0.0
        assert metrics.compared.labels("nDCG@5", "*")._value.get() == 1
        assert metrics.floor.labels("nDCG@5")._value.get() == 0.82


def would_alert(metrics: EvalMetrics) -> bool:
    """Whether PenstockEvalDropped or PenstockEvalBelowFloor would fire for nDCG@5, by their rules."""

    def value(gauge: Any) -> float:
        return float(gauge.labels("nDCG@5", "*")._value.get())

    floor = metrics.floor.labels("nDCG@5")._value.get()
    dropped = value(metrics.change) < WORST_RATIO and value(metrics.change_p) < SIGNIFICANT
    return dropped or metrics.ndcg.labels("*")._value.get() < floor <= value(metrics.accepted)


async def test_adding_hard_questions_raises_no_alert(library: Library) -> None:
    await replace_golden(library, *(golden(text, Judged("wiki", "saturn")) for text in ("rings of ice", "Titan")))
    run = evaluation(library)
    assert await run.run() is not None
    await add_golden(library, golden("rings of ice and of nothing else", Judged("wiki", "venus")))
    for _ in range(3):
        result = await run.run()
        assert result is not None
        assert result.means["*", "nDCG@5"][0] < 0.82
        assert not would_alert(run.metrics)


async def test_a_slow_decline_over_weeks_raises_an_alert_until_it_is_accepted(library: Library) -> None:
    """Week after week, a document that fits a little better pushes a judged one down."""
    tenant, places = f"t{uuid4().hex[:8]}", range(10)
    await library.put(*(document(f"right-{n}", f"kiln number{n}", tenant=tenant) for n in places))
    questions = [golden(f"kiln number{n}", Judged("wiki", f"right-{n}"), tenant=tenant) for n in places]
    await replace_golden(library, *questions)
    ratios = []
    for week in places:
        run = evaluation(library)
        run.metrics.floor.labels("nDCG@5").set(0.0)
        result = await run.run()
        assert result is not None
        ratios.append(result.changes["*", "nDCG@5"].ratio)
        assert would_alert(run.metrics) == (week >= 6), ratios
        await library.put(document(f"wrong-{week}", f"kiln kiln number{week} number{week}", tenant=tenant))
    assert ratios == sorted(ratios, reverse=True)
    tried = await evaluation(library).run(store=False)
    assert tried is not None
    assert tried.changes["*", "nDCG@5"].is_decline
    async with library.pool.connection() as connection:
        last = await newest(connection)
    assert last is not None
    assert last.started < tried.started, "nothing is stored"
    assert await run.run(accept=True) is not None
    assert not would_alert(run.metrics)
    result = await run.run()
    assert result is not None
    assert result.changes["*", "nDCG@5"].ratio == 0.0


async def add_golden(library: Library, one: Golden) -> None:
    async with library.pool.connection() as connection:
        await judgements.store(connection, one)


def unreachable() -> WordEmbedder:
    raise Retryable("the model's server is away")


async def test_an_evaluation_with_a_degraded_search_is_not_recorded(library: Library) -> None:
    await replace_golden(library, golden("rings of ice", Judged("wiki", "saturn")))
    one = evaluation(library)
    one.search = Search(library.pool, library.es, QueryEmbedder(unreachable))
    with pytest.raises(Retryable, match="was incomplete"):
        await one.run()
    async with library.pool.connection() as connection:
        assert await newest(connection) is None


# Answers


async def test_answers_are_graded_for_faithfulness_relevancy_and_context_precision() -> None:
    contexts = ["Saturn has rings of ice and dust.", "Bread is baked from flour."]
    async with FakeChat() as fake:
        chat = OpenAIChat(ChatSettings(base_url=fake.url, model=fake.model))
        try:
            words = QueryEmbedder(WordEmbedder)
            good = await grade(
                chat, words, "rings of Saturn", "Saturn has rings of ice.", contexts, "Saturn has rings."
            )
            bad = await grade(
                chat, words, "rings of Saturn", "Saturn has rings. Pigs can fly over mountains.", contexts[::-1]
            )
            assert (good.faithfulness, good.context_recall, good.context_precision) == (1.0, 1.0, 1.0)
            assert bad.faithfulness == 0.5
            assert bad.context_recall is None
            assert bad.context_precision == pytest.approx(0.5)
            assert good.answer_relevancy is not None
            assert 0 < good.answer_relevancy <= 1
            fake.judge = lambda _: {"verdicts": "many"}
            with pytest.raises(Retryable, match="lacks a list"):
                await grade(chat, words, "q", "a", contexts)
        finally:
            await chat.aclose()


@pytest.mark.parametrize(
    ("useful", "expected"),
    [([], None), ([False, False], 0.0), ([True, False], 1.0), ([False, True], 0.5), ([True, False, True], 5 / 6)],
)
async def test_context_precision_rewards_useful_passages_that_come_first(
    useful: list[bool], expected: float | None
) -> None:
    assert precision(useful) == (None if expected is None else pytest.approx(expected))
