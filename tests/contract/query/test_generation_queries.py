"""Queries while generations change under them: none fails, and no question meets another model's vectors."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import datetime
from itertools import count
from typing import Any

import httpx
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from deploy.local.stack import Stack
from pipeline.core.model import Generation
from pipeline.diagnosis.pipeline_view import pipeline_view
from pipeline.embedding import choose
from pipeline.embedding.port import Embedder
from pipeline.ledger import builds
from pipeline.runtime.settings import dist
from pipeline.stores.postgres import Connection
from query.embedding.embedders import GenerationEmbedders, QueryEmbedder
from query.embedding.generations import GenerationFollower
from query.model import SearchResults
from query.modes.gather import Modes
from query.modes.material import Question
from query.retrieval.search import Search
from query.settings import ChatSettings, RetrievalSettings
from query.telemetry import QueryMetrics
from tests.contract.query.http.test_standing_events import announced, events
from tests.support.query.generation_query_kit import Site, names
from tests.support.query.http_kit import as_
from tests.support.query.library import deletion, document

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

TOPICS = (
    "lock gates",
    "weir repairs",
    "heron nests",
    "mill wheels",
    "towpath lamps",
    "ferry times",
    "reed cutting",
    "bridge tolls",
    "silt surveys",
    "eel ladders",
    "barge rents",
    "flood marks",
)
TEXTS = {f"{n}.md": f"All about {topic}, in the year {1900 + n}." for n, topic in enumerate(TOPICS)}
CUT_OVERS = 30
ANSWERS_BETWEEN = 8
"""Queries that are answered between two changes; as many askers are at it all the time."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(stack: Stack) -> AsyncIterator[Site]:
    async with Site.create(stack) as site:
        await site.put(*(document(n, text, acl_tags=["user:ann", "staff"]) for n, text in TEXTS.items()))
        yield site


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def reset_generations(site: Site) -> None:
    await site.state(g1="active", g2="previous", g3="building")
    await site.library.execute("UPDATE builds SET origin = 'g1'")
    for model in site.models.values():
        model.reset()
        model.texts.clear()


async def search(client: httpx.AsyncClient, query: str, mode: str = "vector") -> dict[str, object]:
    answer = await client.post("/v1/search", json={"query": query, "mode": mode}, headers=as_("ann"))
    assert answer.status_code == 200, answer.text
    response: dict[str, object] = answer.json()
    return response


def mistake_in(response: dict, name: str, mode: str) -> str | None:  # type: ignore[type-arg]
    """The question is a document's very text: its own model finds it at a cosine of 1, another one anywhere."""
    if response["degraded"]:
        return str(response["degraded"])
    first = [result["external_id"] for result in response["results"]][:1]
    cosine = next(step.get("cosine") for step in response["steps"] if step["step"] == "confidence")
    if mode == "vector":
        return None if (first, cosine) == ([name], "1.00") else f"{mode}: {first} at {cosine} in place of {name}"
    if mode == "hybrid" and cosine != "1.00":
        return f"{mode}: {cosine}"
    return None if first == [name] else f"{mode}: {first} in place of {name}"


@pytest.mark.parametrize("remembered", [0, pytest.param(2_000, marks=pytest.mark.slow)])
async def test_no_query_fails_or_mixes_models_while_generations_change(site: Site, remembered: int) -> None:
    dice = random.Random(remembered)
    answered = count(1)
    change = asyncio.Event()
    over = asyncio.Event()
    failures: list[str] = []

    async with site.service(retrieval=RetrievalSettings(cached_queries=remembered)) as (client, _):

        async def ask() -> None:
            while not over.is_set():
                name, mode = dice.choice(list(TEXTS)), dice.choice(["vector", "vector", "hybrid", "keyword"])
                try:
                    if why := mistake_in(await search(client, TEXTS[name], mode), name, mode):
                        failures.append(why)
                except (AssertionError, httpx.HTTPError) as error:
                    failures.append(str(error))
                if next(answered) % ANSWERS_BETWEEN == 0:
                    change.set()

        askers = [asyncio.create_task(ask()) for _ in range(ANSWERS_BETWEEN)]
        reigned: Counter[str] = Counter()
        for _ in range(CUT_OVERS):
            await asyncio.wait_for(change.wait(), 60)
            change.clear()
            reigned[await (site.cut_over() if dice.random() < 0.7 else site.roll_back())] += 1
        over.set()
        await asyncio.gather(*askers)
    assert failures == []
    assert next(answered) > CUT_OVERS * ANSWERS_BETWEEN
    assert set(reigned) == {"g1", "g2", "g3"}
    assert all(set(model.texts) > {"warm up"} for model in site.models.values()), "each has answered questions"
    assert {s for model in site.models.values() for s in model.stats.statuses} == {"200"}, "each key went to its host"


async def test_an_edit_just_before_a_cut_over_stays_searchable_throughout(site: Site) -> None:
    """The next generation's model was slow: the cut-over came before the edit's vector, and nothing found it."""
    edit = document("fresh.md", "All about otter holts, in the year 1999.", acl_tags=["user:ann", "staff"])
    new = site.libraries[-1]
    async with site.service() as (client, _):

        async def is_searchable() -> None:
            assert mistake_in(await search(client, edit.content), "fresh.md", "vector") is None

        ids = await site.library.accept(edit)
        await asyncio.gather(*(library.converge(*ids) for library in site.libraries if library is not new))
        await new.keywords.converge(new.generation, ids)
        await is_searchable()
        cutting = asyncio.create_task(site.cut_over())
        for _ in range(10):
            await is_searchable()
        assert not cutting.done()
        await new.vectors.converge(new.generation, ids)
        assert await cutting == "g3"
        await is_searchable()


async def test_documents_that_arrive_while_a_cut_over_waits_do_not_delay_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under live traffic something always waits."""
    first, second = (document(f"{n}.md", f"All about {n}.", acl_tags=["staff"]) for n in ("before", "after"))
    ids = await site.library.accept(first)
    moment, waits = builds.moment, asyncio.Event()

    async def noted(connection: Connection) -> datetime:
        now = await moment(connection)
        waits.set()
        return now

    monkeypatch.setattr(builds, "moment", noted)
    cutting = asyncio.create_task(site.cut_over())
    await asyncio.wait_for(waits.wait(), 60)
    later = await site.library.accept(second)
    for library in site.libraries:
        await library.converge(*ids)
    assert await cutting == "g3"
    waiting = await site.library.execute("SELECT DISTINCT document_id FROM index_state WHERE seq < want_seq")
    assert waiting == [(later[0],)]
    for library in site.libraries:
        await library.converge(*later)


async def test_the_next_query_after_a_cut_over_uses_the_new_generation(site: Site) -> None:
    [name, other, third] = list(TEXTS)[:3]
    async with site.service() as (client, service):
        assert mistake_in(await search(client, TEXTS[name]), name, "vector") is None
        await site.cut_over()
        assert mistake_in(await search(client, TEXTS[other]), other, "vector") is None
        assert mistake_in(await search(client, TEXTS[name]), name, "vector") is None, "no vector of the model before"
        await site.roll_back()
        assert mistake_in(await search(client, TEXTS[third]), third, "vector") is None
        view = await pipeline_view(service.pool, service.es, site.settings)
        assert view["generation"] == {"name": "g1", "model": "model-g1", "dimensions": 64}
    texts = {n: [text for text in model.texts if text != "warm up"] for n, model in site.models.items()}
    assert (TEXTS[name] in texts["g1"], TEXTS[third] in texts["g1"]) == (True, True)
    assert set(texts["g3"]) == {TEXTS[other], TEXTS[name], TEXTS[third]}, "the third one on the chance of no change"
    assert texts["g2"] == []


async def test_a_standing_question_that_is_read_after_a_cut_over_learns_of_new_passages_again(site: Site) -> None:
    """Its probe was of the model before, whose vectors cannot be compared with new chunks."""
    text, fits = TEXTS["0.md"], "The lock gates were renewed."
    site.models["g3"].near[fits] = text
    async with site.service() as (client, _):
        question = {"question": text, "mode": "vector", "keep": True}
        id_ = (await client.post("/v1/answers", json=question, headers=as_("ann"))).json()["standing_id"]
        await site.cut_over()
        shown = (await client.get(f"/v1/standing/{id_}", headers=as_("ann"))).json()
        assert shown["state"] == "current", "the texts are the same"
        made = document("renewed.md", fits, acl_tags=["user:ann"])
        await site.put(made)
        [event] = await events(site, announced(made))
        assert (str(event.question_id), event.change) == (id_, "new")
    await site.put(deletion(made))


async def test_the_models_of_all_generations_are_warmed_up_before_a_query_needs_them(site: Site) -> None:
    async with site.service() as (client, service):
        async with asyncio.timeout(30):
            while not all(model.texts for model in site.models.values()):
                await asyncio.sleep(0.02)
        assert {n: model.texts for n, model in site.models.items()} == {n: ["warm up"] for n in site.models}
        opened = dict(service.embedders._open)  # type: ignore[attr-defined]
        await site.cut_over()
        [name] = list(TEXTS)[:1]
        assert mistake_in(await search(client, TEXTS[name]), name, "vector") is None
        assert service.embedders._open == opened, "none had to be made"  # type: ignore[attr-defined]


async def test_a_query_in_progress_finishes_on_the_generation_it_started_with(site: Site) -> None:
    [name, other] = list(TEXTS)[:2]
    embedders = site.embedders()
    library = site.library
    search = Search(library.pool, library.es, embedders)
    caller = await library.caller("acme", "staff")

    async def ask(text: str) -> SearchResults:
        return await search.search(text, caller, mode="vector")

    site.models["g1"].open.clear()
    under_way = asyncio.create_task(ask(TEXTS[name]))
    async with asyncio.timeout(30):
        while TEXTS[name] not in site.models["g1"].texts:
            await asyncio.sleep(0.01)
    await site.cut_over()
    after = await ask(TEXTS[other])
    assert not under_way.done()
    site.models["g1"].open.set()
    before = await under_way
    assert (names(before)[:1], before.degraded) == ([name], ())
    assert (names(after)[:1], after.degraded) == ([other], ())
    assert (TEXTS[name] in site.models["g3"].texts, TEXTS[other] in site.models["g3"].texts) == (False, True)
    await embedders.aclose()


async def test_a_query_can_name_its_generation_whichever_is_active(site: Site) -> None:
    embedders = site.embedders()
    search = Search(site.library.pool, site.library.es, embedders)
    caller = await site.library.caller("acme", "staff")
    [name] = list(TEXTS)[:1]
    for generation in ("g2", "g3", "g1"):
        response = await search.search(TEXTS[name], caller, mode="vector", generation=await site.generation(generation))
        assert (names(response)[:1], response.degraded) == ([name], ())
    assert [TEXTS[name] in model.texts for model in site.models.values()] == [True, True, True]
    await embedders.aclose()


async def test_without_the_generations_model_only_keywords_are_searched_with_a_note(site: Site) -> None:
    """Law 10, where the settings' model alone is at hand: the keywords answer, and it is said why."""
    one = QueryEmbedder(lambda: site.library.embedder)
    search = Search(site.library.pool, site.library.es, one)
    caller = await site.library.caller("acme", "staff")
    await site.cut_over()
    response = await search.search(TEXTS["0.md"], caller)
    assert names(response)[:1] == ["0.md"]
    assert all(result.stores == ("keyword",) for result in response.results)
    assert "generation g3 was built with model-g3" in response.degraded[0]
    assert search._vectors is not None
    assert not search._vectors._vectors, "not kept as g3's"


async def test_models_no_generation_uses_are_closed_after_a_while(site: Site) -> None:
    generations = [await site.generation(name) for name in ("g1", "g2", "g3")]
    closed: list[str] = []

    def load(generation: Generation) -> Embedder:
        model = choose.for_generation(generation, site.settings.embedding, dist() / "models")
        close = model.aclose

        async def aclose() -> None:
            closed.append(generation.name)
            await close()

        model.aclose = aclose  # type: ignore[method-assign]
        return model

    for seconds, gone in ((60.0, []), (0.0, ["g2"])):
        closed.clear()
        embedders = GenerationEmbedders(load, retire_seconds=seconds)
        for item in generations:
            await embedders.of(item).embed("words")
        await embedders.keep([generations[0], generations[2]])
        assert closed == gone
        await embedders.aclose()
        assert sorted(closed) == ["g1", "g2", "g3"]


async def test_generations_that_differ_only_in_their_tables_share_one_model(site: Site) -> None:
    embedders = site.embedders()
    one = await site.generation("g1")
    rebuilt = replace(one, name="g9", state="building", chunk_table="chunks_g9", keyword_index="chunks-g9")
    assert embedders.of(one) is embedders.of(rebuilt)
    assert embedders.of(one) is not embedders.of(replace(one, query_prefix="query: "))
    await embedders.aclose()


async def test_a_generation_with_an_unavailable_model_is_retried_without_blocking_the_others(site: Site) -> None:
    metrics, embedders = QueryMetrics(), site.embedders()
    following = GenerationFollower(site.library.pool, embedders, metrics)
    site.models["g3"].api_key = "another"

    def ready(state: str) -> float | None:
        return metrics.registry.get_sample_value("penstock_query_models_ready", {"state": state})

    with capture_logs() as said:
        await following.refresh()
        await following.refresh()
    assert [(line["event"], line["generation"], line["state"]) for line in said if "generation" in line] == [
        ("model_not_ready", "g3", "building")
    ], "said once, and not at every look"
    assert following.warm.is_set()
    assert set(following.errors) == {"g3"}
    assert (ready("active"), ready("previous"), ready("building")) == (1, 1, 0)
    assert following.seen is not None
    assert (following.seen.active.name, following.seen.candidate and following.seen.candidate.name) == ("g1", "g3")
    site.models["g3"].api_key = "key-g3"
    await following.refresh()
    assert (following.errors, ready("building")) == ({}, 1)
    assert [model.texts.count("warm up") for model in site.models.values()] == [1, 1, 1]
    await embedders.aclose()


async def test_an_incomplete_generation_is_not_a_candidate(site: Site) -> None:
    await site.library.execute("UPDATE builds SET ready_at = NULL WHERE generation = 'g3'")
    try:
        embedders = site.embedders()
        following = GenerationFollower(site.library.pool, embedders, QueryMetrics())
        await following.refresh()
        assert following.seen is not None
        assert following.seen.candidate is not None
        assert following.seen.candidate.name == "g2", "the previous one"
        await embedders.aclose()
    finally:
        await site.library.execute("UPDATE builds SET ready_at = now() WHERE generation = 'g3'")


async def test_an_answer_uses_one_generation_throughout_despite_a_cut_over(site: Site) -> None:
    """Its mode was decided on by what one generation holds: that one is searched, too."""
    embedders = site.embedders()
    caller = await site.library.caller("acme", "staff")

    class Overtaken(Search):
        async def search(self, *arguments: Any, **named: Any) -> SearchResults:
            await site.cut_over()
            return await super().search(*arguments, **named)

    search = Overtaken(site.library.pool, site.library.es, embedders)
    modes = Modes(search, site.library.pool, RetrievalSettings(), ChatSettings())
    response = await modes.gather(Question(TEXTS["5.md"], "vector"), caller, "standard")
    assert (response.passages[0].passage.external_id, response.notes) == ("5.md", [])
    assert [TEXTS["5.md"] in model.texts for model in site.models.values()] == [True, False, False]
    await embedders.aclose()
