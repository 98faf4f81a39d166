"""A preview reports the answers that an edit would change, as the index would answer after publishing it."""

from __future__ import annotations

import random
from functools import partial
from pydoc_data.topics import topics

import pytest

from query.embedding.embedders import QueryEmbedder
from query.evaluation import golden as judgements
from query.evaluation.golden import Golden, Judged
from query.model import BadQuery
from query.preview.model import Edit, ProposedDocument, Report
from query.preview.overlaying import match, overlay, read
from query.preview.preview import Previews, _ask
from query.retrieval.overlay import OverlaidStores, Unaffected, WatchedStores
from tests.support.query.library import Library, deletion, document
from tests.support.query.questions import QUESTIONS

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

LEAVE = "# Leave\n\nEmployees have thirty days of leave each year. Unused leave expires in March."
QUESTION = "How many days of leave do employees have?"


def previews(library: Library) -> Previews:
    return Previews(library.search, library.pool, library.es, QueryEmbedder(lambda: library.embedder))


async def preview(library: Library, tenant: str, *documents: ProposedDocument, tag: str = "staff") -> Report:
    return await previews(library).preview(Edit("wiki", documents), await library.caller(tenant, tag))


async def ask(library: Library, tenant: str, text: str, *judged: Judged, tag: str = "staff") -> None:
    async with library.pool.connection() as connection:
        await judgements.store(connection, Golden(tenant, text, judged, (), (tag,)))


def changed(name: str, content: str, **fields: str) -> ProposedDocument:
    return ProposedDocument(name, content, **{"title": name, "media_type": "text/markdown"} | fields)  # type: ignore[arg-type]


async def handbook(library: Library, tenant: str) -> None:
    await library.put(
        document("leave.md", LEAVE, tenant=tenant),
        document("tea.md", "# Tea\n\nBoil water, then wait three minutes.", tenant=tenant),
        document("dam.md", "# Dams\n\nThe reservoir feeds the turbine hall.", tenant=tenant),
    )
    await ask(library, tenant, QUESTION, Judged("wiki", "leave.md", "thirty days of leave"))
    await ask(library, tenant, "How long does tea take?", Judged("wiki", "tea.md", "three minutes"))


async def test_an_edit_that_takes_an_answer_away_fails(library: Library, tenant: str) -> None:
    await handbook(library, tenant)
    report = await preview(library, tenant, changed("leave.md", "# Leave\n\nUnused leave expires in March."))
    [finding] = report.findings
    assert (finding.kind, finding.question, report.fails) == ("lost", QUESTION, True)
    [moved] = finding.moved
    assert (moved.external_id, moved.anchor, moved.before, moved.after) == ("leave.md", "thirty days of leave", 1, None)
    assert "thirty days" in finding.before[0].excerpt
    assert (report.questions, report.skipped) == (2, 0)


async def test_an_edit_that_changes_no_answer_is_silent(library: Library, tenant: str) -> None:
    await handbook(library, tenant)
    report = await preview(library, tenant, changed("dam.md", "# Dams\n\nThe old reservoir feeds the turbine hall."))
    assert [(d.state, d.new, d.removed) for d in report.documents] == [("changed", 1, 1)]
    assert (report.embedded, report.fails) == (1, False)
    assert report.findings == []


async def test_the_same_text_again_is_no_edit(library: Library, tenant: str) -> None:
    await handbook(library, tenant)
    report = await preview(library, tenant, changed("leave.md", LEAVE))
    assert [(d.state, d.chunks, d.new, d.removed) for d in report.documents] == [("unchanged", 1, 0, 0)]
    assert (report.questions, report.embedded, report.findings) == (0, 0, [])


async def test_a_deleted_document_loses_its_answers(library: Library, tenant: str) -> None:
    await handbook(library, tenant)
    report = await preview(library, tenant, ProposedDocument("leave.md"), ProposedDocument("nothing.md"))
    assert [(d.path, d.state) for d in report.documents] == [("leave.md", "deleted"), ("nothing.md", "unknown")]
    assert [(finding.question, finding.kind) for finding in report.findings] == [(QUESTION, "lost")]


async def test_an_answer_that_moves_to_a_new_document_changes_only(library: Library, tenant: str) -> None:
    await handbook(library, tenant)
    [(before,)] = await library.execute("SELECT max(seq) FROM documents")
    report = await preview(library, tenant, changed("sabbatical.md", "# Sabbatical\n\nLeave of ninety days is unpaid."))
    assert [d.state for d in report.documents] == ["new"]
    assert [(finding.question, finding.kind) for finding in report.findings] == [(QUESTION, "changed")]
    assert [c.external_id for c in report.findings[0].after][:2] == ["leave.md", "sabbatical.md"]
    assert not report.fails
    assert await library.execute("SELECT max(seq) FROM documents") == [(before,)]


async def test_an_edit_that_contradicts_another_document_fails(library: Library, tenant: str) -> None:
    logs = "# Logs\n\nThe log files of the servers are retained for {} days."
    await library.put(
        document("logs.md", logs.format(90), tenant=tenant, title="Logs"),
        document("backup.md", f"{logs.format(90)} They are copied every night.", tenant=tenant, title="Backups"),
    )
    await ask(library, tenant, "How long are log files retained?", Judged("wiki", "backup.md"))
    report = await preview(library, tenant, changed("logs.md", logs.format(30), title="Logs"))
    [finding] = report.findings
    assert (finding.kind, report.fails) == ("contradicts", True)
    [contradiction] = finding.contradictions
    assert (contradiction.kind, contradiction.other.external_id) == ("number", "backup.md")
    assert "30 days" in contradiction.new.excerpt
    await library.put(document("logs.md", logs.format(30), tenant=tenant, title="Logs"))
    again = await preview(library, tenant, changed("logs.md", f"{logs.format(30)} They are small.", title="Logs"))
    assert not again.fails, "it contradicts already"


async def test_a_folder_without_a_file_deletes_its_document(library: Library, tenant: str) -> None:
    for name in ("guide/a.md", "guide/b.md", "other/c.md"):
        await library.put(document(name, f"The page {name}.", tenant=tenant, metadata={"path": name}))
    caller = await library.caller(tenant, "staff")
    edit = Edit("wiki", [changed("guide/a.md", "The page guide/a.md.")], folders=["guide"])
    report = await previews(library).preview(edit, caller)
    assert [(d.path, d.state) for d in report.documents] == [("guide/a.md", "unchanged"), ("guide/b.md", "deleted")]


async def test_a_document_is_matched_by_its_path(library: Library, tenant: str) -> None:
    for root in ("/one", "/two"):
        await library.put(document(f"{root}/a.md", "The page.", tenant=tenant, metadata={"path": "a.md"}))
    with pytest.raises(BadQuery, match="2 documents of wiki have the path"):
        await preview(library, tenant, changed("a.md", "Another page."))
    report = await preview(library, tenant, changed("a.md", "Another page.", external_id="/two/a.md"))
    assert [(d.external_id, d.state) for d in report.documents] == [("/two/a.md", "changed")]


async def test_a_preview_shows_nothing_that_the_caller_may_not_read(library: Library, tenant: str) -> None:
    await library.put(
        document("plan.md", "The merger closes in May.", tenant=tenant, acl_tags=["board"]),
        document("news.md", "The canteen closes in May.", tenant=tenant),
    )
    await ask(library, tenant, "What closes in May?", Judged("wiki", "plan.md", "merger"), tag="board")
    deleted = await preview(library, tenant, ProposedDocument("plan.md"))
    assert [d.state for d in deleted.documents] == ["unknown"]
    overwritten = await preview(library, tenant, changed("plan.md", "The merger closes in June."))
    assert [d.state for d in overwritten.documents] == ["new"]
    assert (overwritten.questions, overwritten.findings) == (0, [])
    by_board = await preview(library, tenant, ProposedDocument("plan.md"), tag="board")
    assert [finding.kind for finding in by_board.findings] == ["lost"]


# How near it is to what publishing does


def reworded(text: str, generator: random.Random) -> str:
    """The text with a paragraph left out, one moved to the end, and a sentence added."""
    paragraphs = text.split("\n\n")
    removed = paragraphs.pop(generator.randrange(len(paragraphs)))
    moved = paragraphs.pop(generator.randrange(len(paragraphs))) if paragraphs else ""
    return "\n\n".join(
        [*paragraphs, "A loop skips a name that the break statement of a function leaves.", moved or removed]
    )


async def ranking(library: Library, tenant: str, question: str) -> list[str]:
    outcome = await library.search.search(question, await library.caller(tenant, "staff"), top=10)
    return [f"{r.passage.external_id} {r.text}" for r in outcome.results]


async def test_a_question_about_a_secret_is_not_shown_once_the_secret_was_deleted(
    library: Library, tenant: str
) -> None:
    """It was also judged for a document that everybody may read, which was all that was left of it."""
    secret = document("layoffs.md", "# Layoffs\n\nJane has to go in May.", tenant=tenant, acl_tags=["board"])
    await library.put(document("leave.md", LEAVE, tenant=tenant, acl_tags=["staff", "board"]), secret)
    text = "How many days of leave does Jane have before she has to go?"
    judged = Judged("wiki", "leave.md", "thirty days of leave"), Judged("wiki", "layoffs.md", "has to go in May")
    await ask(library, tenant, text, *judged)
    edit = changed("leave.md", "# Leave\n\nUnused leave expires in March.")
    assert (await preview(library, tenant, edit)).questions == 0
    assert (await preview(library, tenant, edit, tag="board")).questions == 1
    await library.put(secret.model_copy(update={"version": secret.version + 1, "content": "# Layoffs\n\nNobody."}))
    assert (await preview(library, tenant, edit)).questions == 0, "the words that were judged are gone"
    await library.put(deletion(secret.model_copy(update={"version": secret.version + 2})))
    assert (await preview(library, tenant, edit)).questions == 0
    shown = await previews(library).preview(Edit("wiki", (edit,)), await library.caller(tenant, "staff"), operator=True)
    assert [finding.question for finding in shown.findings] == [text]


async def test_a_preview_ranks_as_the_index_does_once_the_edit_is_published(library: Library, tenant: str) -> None:
    names = sorted(topics)[:50]
    await library.put(*(document(name, topics[name], tenant=tenant, media_type="text/x-rst") for name in names))
    generator = random.Random(7)
    edits = {name: reworded(topics[name], generator) for name in generator.sample(names, 8)}
    edit = Edit("wiki", [ProposedDocument(n, text, n, "text/x-rst") for n, text in edits.items()])
    expected = await rankings(edit, library, tenant)
    await library.put(*(document(name, text, tenant=tenant, media_type="text/x-rst") for name, text in edits.items()))
    same = first = 0
    for question, _ in QUESTIONS:
        published = await ranking(library, tenant, question)
        previewed = expected[question]
        same += len(set(published) & set(previewed)) / max(1, len(published))
        first += published[:1] == previewed[:1]
    assert same / len(QUESTIONS) > 0.93
    assert first / len(QUESTIONS) >= 0.9


async def rankings(edit: Edit, library: Library, tenant: str) -> dict[str, list[str]]:
    """The results of each question over the edit."""
    caller = await library.caller(tenant, "staff")
    async with library.pool.connection() as connection:
        known = await read(connection, caller, library.generation, edit)
    laid, _ = await overlay(library.es, library.embedder, library.generation, caller, edit, match(edit, known))
    assert min(map(len, (laid.removed, laid.new, laid.entries))) > 0
    search = library.search.over(lambda stores: OverlaidStores(stores, laid))
    results = {}
    for question, _ in QUESTIONS:
        outcome = await search.search(question, caller, top=10, generation=library.generation)
        results[question] = [f"{r.passage.external_id} {r.text}" for r in outcome.results]
    return results


async def test_an_unaffected_question_has_the_same_results_and_scores_with_the_edit(
    library: Library, tenant: str
) -> None:
    names = sorted(topics)[:50]
    await library.put(*(document(name, topics[name], tenant=tenant, media_type="text/x-rst") for name in names))
    text = reworded(topics["bitwise"], random.Random(1))
    edit = Edit("wiki", [ProposedDocument("bitwise", text, "bitwise", "text/x-rst")])
    caller = await library.caller(tenant, "staff")
    async with library.pool.connection() as connection:
        known = await read(connection, caller, library.generation, edit)
    laid, _ = await overlay(library.es, library.embedder, library.generation, caller, edit, match(edit, known))
    watched = library.search.over(lambda stores: WatchedStores(stores, laid))
    edited = library.search.over(lambda stores: OverlaidStores(stores, laid))
    unaffected = 0
    for question, _ in QUESTIONS:
        embedded = await watched.embed(question, caller, library.generation)
        ask = partial(_ask, caller=caller, generation=library.generation, embedded=embedded)
        golden = Golden(tenant, question, ())
        try:
            await ask(watched, golden)
        except Unaffected:
            unaffected += 1
            before, after = await ask(library.search, golden), await ask(edited, golden)
            assert [(r.chunk_ids, r.score) for r in after.results] == [(r.chunk_ids, r.score) for r in before.results]
    assert 5 < unaffected < len(QUESTIONS)
