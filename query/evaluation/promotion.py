"""Golden questions from what people thought of answers and passages.

An answer that a review called right becomes a question whose judgements are the passages that it cites, and whose
reference is its text; a passage that was rated up for a query becomes a judgement of that query. The person in whose
name the question will be asked must be able to read everything it is made from, now: for anybody else, the answer or
passage does not exist. The question keeps where it comes from, and is erased with it
(docs/adr/0079-trustworthy-evaluation.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from psycopg import Rollback, sql

from pipeline.core.sentences import sentences
from pipeline.ledger import generations
from pipeline.stores.postgres import Connection
from query.access.callers import identify
from query.access.tenant_rows import set_tenant
from query.access.verify import READS_ALL
from query.answers.support import cites
from query.evaluation import golden as judgements
from query.evaluation.golden import MAX_ANCHOR_CHARACTERS, Golden, Judged
from query.retrieval.words import best_coverage

MOST_LISTED = 200


@dataclass(frozen=True, slots=True)
class Candidate:
    """A question that can be promoted."""

    subject: UUID
    """The answer or the passage."""
    question: str
    judged: tuple[Judged, ...]
    reference: str | None
    """The answer's text; None: it comes from feedback on a passage."""
    answers: tuple[UUID, ...]
    givers: tuple[bytes, ...]
    documents: tuple[UUID, ...]
    """Those of all passages that it was made from."""


@dataclass(frozen=True, slots=True)
class Asker:
    """In whose name promoted questions are asked: as for ``penstock golden add``."""

    tenant: str
    principals: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()


async def candidates(connection: Connection, asker: Asker, subject: UUID | None = None) -> list[Candidate]:
    """Reviewed answers and rated passages that can become golden questions, the newest first, at most MOST_LISTED of
    each. subject: only those of this answer or passage. Raises psycopg.Error."""
    await set_tenant(connection, asker.tenant)
    caller = await identify(connection, asker.tenant, principals=asker.principals, tags=asker.tags)
    table = sql.Identifier((await generations.active(connection)).chunk_table)
    values = {"tenant": asker.tenant, "tags": sorted(caller.tags), "subject": subject, "most": MOST_LISTED}
    return [
        *await _from_reviews(connection, table, values),
        *await _from_feedback(connection, table, values),
    ]


_REVIEWS = sql.SQL("""
    SELECT answer_id, question, answer, documents, chunks FROM answer_reviews
    WHERE tenant = %(tenant)s AND resolved_as = 'right' AND answer IS NOT NULL
      AND (%(subject)s::uuid IS NULL OR answer_id = %(subject)s) AND {reads_all}
    ORDER BY asked_at DESC, answer_id LIMIT %(most)s
""").format(reads_all=READS_ALL.format(documents=sql.SQL("documents")))
_FEEDBACK = sql.SQL("""
    SELECT c.id, f.query, array_agg(f.giver), c.document_id, c.text
    FROM answer_feedback f JOIN {chunks} c ON c.id = f.chunk_id
    WHERE f.tenant = %(tenant)s AND f.verdict = 'up' AND trim(f.query) <> ''
      AND (%(subject)s::uuid IS NULL OR f.chunk_id = %(subject)s) AND {reads_all}
    GROUP BY c.id, f.query ORDER BY max(f.given_at) DESC, f.query LIMIT %(most)s
""")
_PASSAGES = sql.SQL("SELECT id, document_id, text FROM {chunks} WHERE id = ANY(%s)")


async def _from_reviews(connection: Connection, table: sql.Identifier, values: Mapping[str, object]) -> list[Candidate]:
    """An answer that cites no passage of the active generation is left out: nothing could be judged by it."""
    made = []
    cursor = await connection.execute(_REVIEWS, values)
    for answer_id, question, answer, documents, chunks in await cursor.fetchall():
        cited = [chunks[n - 1] for n in cites(answer) if 0 < n <= len(chunks)]
        cursor = await connection.execute(_PASSAGES.format(chunks=table), [cited])
        passages = [(document, text) for _, document, text in await cursor.fetchall()]
        if judged := await _judged(connection, question, passages):
            made.append(Candidate(answer_id, question.strip(), judged, answer, (answer_id,), (), tuple(documents)))
    return made


async def _from_feedback(
    connection: Connection, table: sql.Identifier, values: Mapping[str, object]
) -> list[Candidate]:
    statement = _FEEDBACK.format(chunks=table, reads_all=READS_ALL.format(documents=sql.SQL("ARRAY[c.document_id]")))
    made = []
    for chunk, query, givers, document, text in await (await connection.execute(statement, values)).fetchall():
        if judged := await _judged(connection, query, [(document, text)]):
            made.append(Candidate(chunk, query.strip(), judged, None, (), tuple(givers), (document,)))
    return made


async def _judged(connection: Connection, question: str, passages: Sequence[tuple[UUID, str]]) -> tuple[Judged, ...]:
    """A judgement for each passage."""
    cursor = await connection.execute(
        "SELECT id, source, external_id FROM documents WHERE id = ANY(%s)", [[document for document, _ in passages]]
    )
    names = {id_: (source, external_id) for id_, source, external_id in await cursor.fetchall()}
    judged = {Judged(*names[document], anchor(question, text)) for document, text in passages if document in names}
    return tuple(sorted(judged, key=lambda judgement: judgement.key))


def anchor(question: str, passage: str) -> str:
    """The sentence of the passage that has most words in common with the question, the first of equal ones. Empty, for
    the whole passage, if every sentence is too long for an anchor."""
    fitting = [sentence for sentence in sentences(passage) if len(sentence) <= MAX_ANCHOR_CHARACTERS]
    return max(fitting, key=lambda sentence: best_coverage(question, [sentence]), default="")


async def promote(connection: Connection, asker: Asker, subject: UUID) -> list[Golden]:
    """Make golden questions of an answer or a passage. A question that exists already keeps its asker and reference,
    and gets the additional judgements. Empty: there is nothing that this asker may read, or it was withdrawn or erased
    meanwhile. Raises psycopg.Error."""
    made: list[Golden] = []
    async with connection.transaction() as whole:
        promoted = await candidates(connection, asker, subject)
        known = {golden.text: golden for golden in await judgements.load(connection, asker.tenant)}
        made = [_merged(known.get(candidate.question), candidate, asker) for candidate in promoted]
        for golden, candidate in zip(made, promoted, strict=True):
            await judgements.store(connection, golden)
            await connection.execute(
                "UPDATE eval_queries SET answers = coalesce(answers, '{}') || %s::uuid[],"
                " givers = coalesce(givers, '{}') || %s::bytea[],"
                " documents = coalesce(documents, '{}') || %s::uuid[] WHERE id = %s",
                [list(candidate.answers), list(candidate.givers), list(candidate.documents), golden.id],
            )
        # Nobody would erase the questions afterwards: an erasure that passed meanwhile has not seen them.
        if not _parts(promoted) <= _parts(await candidates(connection, asker, subject)):
            made = []
            raise Rollback(whole)
    return made


def _parts(promoted: Iterable[Candidate]) -> set[tuple[str, bytes]]:
    """The questions, and the givers of each."""
    return {(candidate.question, giver) for candidate in promoted for giver in (b"", *candidate.givers)}


def _merged(known: Golden | None, candidate: Candidate, asker: Asker) -> Golden:
    if known is None:
        text = candidate.question
        return Golden(asker.tenant, text, candidate.judged, asker.principals, asker.tags, candidate.reference)
    return replace(
        known,
        judged=_distinct((*known.judged, *candidate.judged)),
        reference=known.reference or candidate.reference,
    )


def _distinct(judged: Iterable[Judged]) -> tuple[Judged, ...]:
    """The judgements without repetitions; of two of the same words, the first."""
    by_key: dict[str, Judged] = {}
    for judgement in judged:
        by_key.setdefault(judgement.key, judgement)
    return tuple(by_key.values())
