"""Searching nearest vectors: one suite for the graph over the chunk table and for that in the keyword index."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from deploy.local.stack import Stack
from pipeline.core.errors import Misconfigured, Retryable
from pipeline.core.identity import document_id
from pipeline.core.model import Quantisation, VectorIndex
from pipeline.embedding.port import Embedded
from pipeline.stores.elasticsearch import create_index
from query.access.filters import NONE, Filters
from query.embedding.embedders import QueryEmbedder
from query.retrieval.search import Search
from query.retrieval.vectors import Tuning
from tests.support.pipeline.audit_kit import Audited, named
from tests.support.query.library import access, deletion, document

pytestmark = pytest.mark.stack

SUBJECTS = ("turbine", "reservoir", "spillway", "sluice", "penstock", "weir", "gate", "dam")


@pytest.fixture(params=[("pgvector", "halfvec"), ("pgvector", "binary"), ("elasticsearch", "halfvec")], ids="-".join)
def vectors(request: pytest.FixtureRequest) -> tuple[VectorIndex, Quantisation]:
    index: tuple[VectorIndex, Quantisation] = request.param
    return index


def of_any_size(audited: Audited) -> None:
    """Search the graph as in a large collection: nothing is read exactly for being few."""
    library = audited.library
    embedders = QueryEmbedder(lambda: audited.embedder)
    library.search = Search(library.pool, library.es, embedders, tuning=Tuning(always_exact_rows=0))


@pytest.fixture
async def audited(stack: Stack, vectors: tuple[VectorIndex, Quantisation]) -> AsyncIterator[Audited]:
    index, quantisation = vectors
    async with Audited.create(stack, vectors=index, quantisation=quantisation) as audited:
        of_any_size(audited)
        yield audited


@pytest.fixture
async def indexed(stack: Stack) -> AsyncIterator[Audited]:
    """Vectors in the keyword index."""
    async with Audited.create(stack, vectors="elasticsearch") as audited:
        of_any_size(audited)
        yield audited


async def by_vector(
    audited: Audited, query: str, filters: Filters = NONE, *, tag: str = "staff", top: int = 10
) -> list[str]:
    """The external ids that a search by vectors finds, nearest first."""
    caller = await audited.library.caller("acme", tag)
    answer = await audited.library.search.search(query, caller, mode="vector", top=top, filters=filters)
    return [result.passage.external_id for result in answer.results]


async def test_a_search_returns_the_nearest_passages_that_the_caller_may_read(audited: Audited) -> None:
    for staff in (True, False):
        tags, author = ["staff" if staff else "board"], "ann" if staff else "bea"
        names = SUBJECTS[:4] if staff else SUBJECTS[4:]
        await audited.library.put(
            *(document(name, f"About the {name}.", acl_tags=tags, author=author) for name in names)
        )
    await audited.library.put(document("secret", "About the turbine.", tenant="other"))
    for name in SUBJECTS[:4]:
        assert (await by_vector(audited, f"about the {name}"))[0] == name
        assert set(await by_vector(audited, f"about the {name}")) == set(SUBJECTS[:4])
        assert set(await by_vector(audited, f"about the {name}", tag="board")) == set(SUBJECTS[4:])
    assert await by_vector(audited, "about the turbine", tag="nobody") == []
    assert await by_vector(audited, "about the turbine", Filters(authors=("bea",))) == []
    assert len(await by_vector(audited, "about the turbine", Filters(authors=("ann",)))) == 4


async def test_edits_deletions_and_access_take_effect_and_leave_both_stores_as_the_ledger(audited: Audited) -> None:
    library = audited.library
    edited, deleted, revoked, granted = named("edited", "deleted", "revoked", "granted")
    await library.put(edited, deleted, revoked, granted, document("other", "Nothing of that kind."))
    await library.put(document("edited", "A text on spillways only."))
    await library.put(deletion(deleted), access(revoked, ["board"]), access(granted, ["staff", "board"]))
    assert (await by_vector(audited, "a text on spillways only"))[0] == "edited"
    assert set(await by_vector(audited, "anything")) == {"edited", "granted", "other"}
    assert set(await by_vector(audited, "anything", tag="board")) == {"revoked", "granted"}
    assert (await audited.audit())[1] == set()


async def test_a_change_of_metadata_narrows_searches_and_embeds_nothing(audited: Audited) -> None:
    await audited.library.put(*(document(name, f"About the {name}.", author="ann") for name in SUBJECTS))
    before = len(audited.embedder.texts)
    await audited.library.put(document("weir", "About the weir.", author="bea"))
    assert len(audited.embedder.texts) == before
    assert await by_vector(audited, "weir", Filters(authors=("bea",))) == ["weir"]
    assert "weir" not in await by_vector(audited, "weir", Filters(authors=("ann",)))
    assert (await audited.audit())[1] == set()


async def test_a_text_that_the_model_refuses_is_searchable_by_words_alone(audited: Audited) -> None:
    await audited.library.put(document("refused", "An unspeakable thing."), document("plain", "A plain thing."))
    assert await by_vector(audited, "unspeakable thing") == ["plain"]
    caller = await audited.library.caller("acme", "staff")
    answer = await audited.library.search.search("unspeakable", caller, mode="keyword")
    assert [result.passage.external_id for result in answer.results] == ["refused"]
    assert (await audited.audit())[1] == set()


async def test_the_audit_reports_lost_entries_which_come_back_without_embedding(audited: Audited) -> None:
    await audited.library.put(*named("a", "b", "c"))
    before, nearest = len(audited.embedder.texts), await by_vector(audited, "what is in b")
    await audited.drop_entries(await audited.rows(document_id("acme", "wiki", "b")))
    run, findings = await audited.audit()
    assert findings == {("b", "keywords", "missing")}
    await audited.repair(run)
    assert (await audited.audit())[1] == set()
    assert await by_vector(audited, "what is in b") == nearest
    assert len(audited.embedder.texts) == before


async def test_an_entry_that_lacks_its_vector_is_reported_and_written_again(indexed: Audited) -> None:
    library = indexed.library
    await library.put(*named("a", "b"))
    [first, *_] = await indexed.rows(document_id("acme", "wiki", "b"))
    stored = await library.es.get(index=indexed.index, id=str(first))
    bare = {name: value for name, value in stored["_source"].items() if name != "embedded"}
    await library.es.index(
        index=indexed.index,
        id=str(first),
        document=bare,
        version=stored["_version"],
        version_type="external_gte",
        refresh=True,
    )
    run, findings = await indexed.audit()
    assert findings == {("b", "keywords", "wrong_entry")}
    await indexed.repair(run)
    assert (await indexed.audit())[1] == set()
    entry = (await library.es.get(index=indexed.index, id=str(first)))["_source"]
    assert entry["embedded"] is True


async def test_an_index_with_vectors_is_created_once_and_is_no_index_without(indexed: Audited) -> None:
    es, dimensions = indexed.library.es, indexed.library.generation.indexed_dimensions
    await create_index(es, indexed.index, dimensions=dimensions)
    for other in (None, 128):
        with pytest.raises(Misconfigured, match=r"has other settings than expected \(field embed"):
            await create_index(es, indexed.index, dimensions=other)


async def test_words_are_searchable_while_the_model_is_away_and_vectors_when_it_is_back(
    indexed: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = indexed.library
    present = indexed.embedder.embed_documents

    async def away(_texts: Sequence[str]) -> Embedded:
        raise Retryable("the model is away", service="embedding")

    monkeypatch.setattr(indexed.embedder, "embed_documents", away)
    [id_] = await library.accept(document("late", "A text about a late turbine."))
    with pytest.raises(Retryable, match="away"):
        await library.vectors.converge(library.generation, [id_])
    await library.keywords.converge(library.generation, [id_])
    assert await library.execute("SELECT seq < want_seq FROM index_state WHERE store = 'keywords'") == [(True,)]

    await library.execute("UPDATE index_state SET pending_since = pending_since - interval '1 minute'")
    await library.keywords.converge(library.generation, [id_])
    assert await library.execute("SELECT seq < want_seq FROM index_state WHERE store = 'keywords'") == [(False,)]
    caller = await library.caller("acme", "staff")
    assert len((await library.search.search("turbine", caller, mode="keyword")).results) == 1
    assert await by_vector(indexed, "turbine") == []
    assert (await indexed.audit())[1] == set(), "its vectors are pending, which is no difference"

    monkeypatch.setattr(indexed.embedder, "embed_documents", present)
    await library.vectors.converge(library.generation, [id_])
    states = "SELECT store, seq < want_seq FROM index_state ORDER BY store DESC"
    assert await library.execute(states) == [("vectors", False), ("keywords", True)]
    await library.keywords.converge(library.generation, [id_])
    assert await library.execute(states) == [("vectors", False), ("keywords", False)]
    assert await by_vector(indexed, "turbine") == ["late"]
    assert (await indexed.audit())[1] == set()


async def test_a_row_that_is_written_while_its_entry_is_on_the_way_gets_into_the_index(
    indexed: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keywords sink planned without the row, and the vectors sink settles before the entries are confirmed."""
    library = indexed.library
    [id_] = await library.accept(document("racing", "A text about a racing turbine."))
    await library.execute("UPDATE index_state SET pending_since = pending_since - interval '1 minute'")
    store = library.keywords._keywords
    apply, bodies = store.apply, []

    async def late(writes: Sequence[object], **options: object) -> object:
        bodies.append([getattr(w, "body", None) for w in writes])
        if len(bodies) == 1:
            await library.vectors.converge(library.generation, [id_])
        return await apply(writes, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "apply", late)
    await library.keywords.converge(library.generation, [id_])
    assert ["embedded" in (body or {}) for [body] in bodies] == [False, True]
    assert await by_vector(indexed, "turbine") == ["racing"]
    assert await library.execute("SELECT DISTINCT seq < want_seq FROM index_state") == [(False,)]
