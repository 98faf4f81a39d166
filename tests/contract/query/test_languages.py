"""Questions and documents in other languages than English, mixed, and in an index from before there were analyzers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from deploy.local.stack import Stack
from pipeline.audit.examine import Examiner, ranges_end
from pipeline.audit.repair import Repairer
from pipeline.ledger import entry
from pipeline.stores import elasticsearch as es_store
from pipeline.stores.keywords import Keywords
from query.evaluation.place import NoKafka
from tests.support.query.library import Library, WordEmbedder, document
from tests.support.query.retrieval_kit import names

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

DOCUMENTS = (
    document(
        "urlaub", "Die Anträge auf Urlaub werden von den Leitungen der Abteilungen innerhalb von drei Tagen geprüft."
    ),
    document("reise", "Die Kosten einer Reise werden nach der Rückkehr mit dem Formular der Buchhaltung abgerechnet."),
    document(
        "bureaux", "Les bureaux régionaux sont fermés le lundi, et les responsables répondent dans les trois jours."
    ),
    document("shinsei", "有給休暇の申請は、開始日の二週間前までに人事部へ提出してください。"),
    document("kaigi", "会議室の予約は、社内の予定表から前日までに行ってください。"),
    document("leave", "Requests for leave are approved by the managers of the departments within three days."),
    document(
        "deploy", "Der Dienst wird mit deploy-prod.sh neu gestartet, wenn ERR_CONN_4711 in den Protokollen steht."
    ),
)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def library(stack: Stack) -> AsyncIterator[Library]:
    async with Library.create(stack, WordEmbedder()) as library:
        await library.put(*DOCUMENTS)
        yield library


async def search(library: Library, question: str) -> list[str]:
    caller = await library.caller("acme", "staff")
    return names(await library.search.search(question, caller, mode="keyword"))


@pytest.mark.parametrize(
    ("question", "first"),
    [
        ("Wer prüft einen Antrag?", "urlaub"),
        ("Abrechnung der Reisekosten und Formulare", "reise"),
        ("où est le bureau régional ?", "bureaux"),
        ("有給休暇を申請したい", "shinsei"),
        ("who approves a request for leave", "leave"),
    ],
)
async def test_a_passage_matches_other_forms_of_its_words(library: Library, question: str, first: str) -> None:
    assert (await search(library, question))[0] == first


async def test_words_of_a_mixed_question_match_in_both_languages(library: Library) -> None:
    assert {"urlaub", "leave"} <= set(await search(library, "Wer prüft den Antrag, approval of a request for leaves"))


@pytest.mark.parametrize(
    "question", ["ERR_CONN_4711", "Was bedeutet ERR_CONN_4711 in den Protokollen?", "deploy-prod.sh"]
)
async def test_identifiers_match_exactly_whatever_the_language(library: Library, question: str) -> None:
    assert (await search(library, question))[0] == "deploy"


async def test_a_long_question_in_three_languages_with_many_tags_is_accepted(library: Library) -> None:
    """Elasticsearch counts clauses, and refuses a search with too many."""
    parts = ("Die Frage mit der Antwort von dem", "la question avec la réponse de", "вопрос о том, что и как")
    words = " ".join(f"{part} {n}" for n in range(60) for part in parts)
    caller = await library.caller("acme", "staff", *(f"tag{n}" for n in range(600)))
    await library.search.search(words[:4_000], caller, mode="keyword")


async def test_an_index_from_before_analyzers_is_migrated_while_people_search(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`penstock migrate` extends the mapping; the audit finds entries without their language and has them written."""
    with monkeypatch.context() as before:
        fields = {k: v for k, v in es_store.MAPPING["properties"].items() if k != "analysed"}
        before.setattr(es_store, "MAPPING", {**es_store.MAPPING, "properties": fields})
        before.setattr(es_store, "ADDED_FIELDS", ("keys",))
        before.setattr(entry, "language_of", lambda text: None)
        opened = Library.create(stack, WordEmbedder())
        library = await opened.__aenter__()
        await library.put(*DOCUMENTS)
    try:
        assert "urlaub" not in await search(library, "ein geprüfter Antrag")  # English endings alone
        searching = asyncio.create_task(_search_all_along(library))
        await es_store.extend_index(library.es, library.generation.keyword_index)
        examiner = Examiner(library.pool, library.es, library.generation)
        repairer = Repairer(examiner, Keywords(library.es), NoKafka())  # type: ignore[arg-type]
        differing = await _differing(examiner)
        assert len(differing) == 6  # all but the English one
        await repairer.request_repairs(differing)
        await library.converge(*differing)
        assert await _differing(examiner) == []
        assert (await search(library, "ein geprüfter Antrag"))[0] == "urlaub"
        searching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await searching
    finally:
        await opened.__aexit__(None, None, None)


async def _search_all_along(library: Library) -> None:
    while True:
        assert (await search(library, "Kosten einer Reise"))[0] == "reise"
        assert (await search(library, "requests for leave"))[0] == "leave"
        await asyncio.sleep(0.01)


async def _differing(examiner: Examiner) -> list[object]:
    documents = await examiner.following(None)
    await examiner.refresh()
    verdicts = [verdict async for verdict in examiner.examine(ranges_end(documents, None), documents)]
    return [verdict.document for verdict in verdicts if not verdict.clean]
