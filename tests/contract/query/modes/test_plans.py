"""The choice of a mode reads no more from a larger ledger: plans over twenty thousand documents."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from psycopg import AsyncCursor, sql

from deploy.local.stack import Stack
from pipeline.ledger import generations
from pipeline.stores.postgres import Connection
from query.access.callers import Caller, readable
from query.access.filters import NONE, Filters
from query.modes import survey as surveying
from query.modes.documents import read, readable_ids
from query.modes.history import history
from query.modes.survey import (
    COVERED_DOCUMENTS,
    LOCAL_SETTINGS,
    SAMPLED_ROWS,
    ReadScope,
    access_ids_of,
    coverage,
    survey,
)
from tests.contract.pipeline.ledger.test_plans import Explaining
from tests.support.deploy.roles_kit import define_roles
from tests.support.query.library import Library, WordEmbedder

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

LEDGER = 20_000
_FILL = """
    INSERT INTO access_sets (tenant, digest, acl_tags, required_tags)
        SELECT 'acme', sha256(n::text::bytea), ARRAY[CASE WHEN n <= 90 THEN 'wiki/all' ELSE 'mail/few' END], '{}'
        FROM generate_series(1, 100) n;
    INSERT INTO documents (id, tenant, source, external_id, seq, version, access_id, content_hash, title, media_type,
            author)
        SELECT md5(n::text)::uuid, 'acme', CASE WHEN n % 100 < 90 THEN 'wiki' ELSE 'mail' END, n || '.md', n, 1,
            (SELECT min(id) FROM access_sets) + n % 100, sha256(n::text::bytea), 'Title', 'text/plain',
            CASE WHEN n % 5000 = 0 THEN 'ann' END
        FROM generate_series(1, 20000) n;
    INSERT INTO document_bodies SELECT id, 'text', '{}' FROM documents;
    INSERT INTO manifests SELECT id, 'g1', content_hash, ARRAY[id], ARRAY[1], '[[[0, 4]]]', '[[]]' FROM documents;
    INSERT INTO index_state (document_id, generation, store, want_seq, seq)
        SELECT id, 'g1', store, seq, CASE WHEN seq % 3 = 0 THEN 0 ELSE seq END
        FROM documents, unnest(ARRAY['vectors', 'keywords']) store;
    DROP INDEX chunks_g1_hnsw;
    INSERT INTO chunks_g1 (id, document_id, access_id, text, embedding)
        SELECT id, id, access_id, 'text', array_fill(0.1, ARRAY[64])::halfvec FROM documents WHERE seq % 3 > 0;
    INSERT INTO conversation_members (tenant, member, tokens) VALUES ('acme', 'ada', 400);
    INSERT INTO conversation_pairs
        SELECT 'acme', CASE WHEN n <= 20 THEN 'ada' ELSE 'm' || n % 50 END, sha256(n::text::bytea),
            now() - n * interval '1 s', 20, 'Q' || n, 'A' || n
        FROM generate_series(1, 5000) n;
    INSERT INTO conversation_mentions (tenant, member, digest, source, conversation, asked_at, observed_at, answer_id)
        SELECT tenant, member, digest, 'chat', 'c', asked_at, asked_at, md5(question)::uuid FROM conversation_pairs;
    INSERT INTO conversation_provenance
        SELECT m.tenant, m.answer_id, ARRAY(SELECT id FROM documents WHERE seq % 400 = ascii(m.member) % 400)
        FROM conversation_mentions m;
    ANALYZE;
"""


class Composed(Explaining):
    """It reads text: composed statements are written out for it."""

    async def execute(self, statement: Any, values: Any = None) -> AsyncCursor[Any]:
        if isinstance(statement, sql.Composable):
            statement = statement.as_string(self._connection)
        return await super().execute(statement, values)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def library(stack: Stack) -> AsyncIterator[Library]:
    async with Library.create(stack, WordEmbedder()) as library:
        async with library.pool.connection() as connection:
            await connection.execute(_FILL.encode())
        yield library


@pytest_asyncio.fixture(loop_scope="module", params=["as the tables' owner", "below the policies by tenant"])
async def ledger(library: Library, request: pytest.FixtureRequest) -> AsyncIterator[Connection]:
    if is_held := request.param == "below the policies by tenant":
        define_roles(library.settings.postgres.dsn.get_secret_value())
    async with library.pool.connection() as connection:
        await connection.execute(LOCAL_SETTINGS, ["10000"])
        if is_held:
            await connection.execute("SET LOCAL ROLE penstock_query; SET LOCAL penstock.tenant = 'acme'")
        yield connection
        await connection.rollback()


async def scope_of(connection: Connection, *tags: str, filters: Filters = NONE) -> ReadScope:
    may = await readable(connection, Caller("acme", frozenset(tags)))
    sources = await access_ids_of(connection, may, filters.sources)
    return ReadScope(await generations.active(connection), "acme", frozenset(tags), sources, filters)


async def test_choosing_a_mode_reads_few_rows_in_a_large_ledger(ledger: Connection) -> None:
    wide = await scope_of(ledger, "wiki/all", "mail/few")
    few = await scope_of(ledger, "wiki/all", "mail/few", filters=Filters(sources=("mail",)))
    rare = await scope_of(ledger, "wiki/all", "mail/few", filters=Filters(authors=("ann",)))
    nobody = await scope_of(ledger, "wiki/nobody")
    assert len(few.access_ids) == 10
    some = [id_ for (id_,) in await (await ledger.execute("SELECT id FROM documents LIMIT 100")).fetchall()]
    hot: dict[str, tuple[int, Callable[[Any], Awaitable[Any]]]] = {
        "everything, up to 60,000 tokens": (1_025, lambda c: survey(c, wide, max_tokens=60_000)),
        "everything, up to 300,000 tokens": (16_385, lambda c: survey(c, wide, max_tokens=300_000)),
        "a collection": (1_025, lambda c: survey(c, few, max_tokens=60_000)),
        "a filter that few satisfy": (2 * 16_385, lambda c: survey(c, rare, max_tokens=60_000)),
        "everything, for the newest": (16_385, lambda c: survey(c, wide, max_tokens=None)),
        "nothing": (100, lambda c: survey(c, nobody, max_tokens=None)),
        "what is embedded of everything": (2 * SAMPLED_ROWS[0], lambda c: coverage(c, wide)),
        "what is embedded of a collection": (2 * SAMPLED_ROWS[0], lambda c: coverage(c, few)),
        "what is embedded of nothing": (100, lambda c: coverage(c, nobody)),
    }
    asker = Caller("acme", frozenset({"wiki/all", "mail/few"}))
    named: dict[str, tuple[int, Callable[[Any], Awaitable[Any]]]] = {
        "documents that are named": (200, lambda c: readable_ids(c, wide, some)),
        "a history of 20 answers, each of 50 documents": (2_000, lambda c: history(c, asker, "ada", 10_000)),
        "their texts": (200, lambda c: read(c, wide, some[:16], budget_tokens=1_000)),
    }
    beyond = {}
    for name, (most, statement) in [*hot.items(), *named.items()]:
        if name in named:
            await ledger.execute("SET LOCAL enable_hashjoin = on; SET LOCAL enable_mergejoin = on")
        explaining = Composed(ledger)
        await statement(explaining)
        if explaining.most > most:
            beyond[name] = explaining.most
    assert beyond == {}
    assert 2 * SAMPLED_ROWS[0] < LEDGER


async def test_the_sampled_share_of_missing_embeddings_is_close_to_the_actual_one(ledger: Connection) -> None:
    """A third of them waits, and none of it is in the chunk table."""
    measured = await coverage(ledger, await scope_of(ledger, "wiki/all", "mail/few"))
    assert measured.sampled
    assert measured.chunks == COVERED_DOCUMENTS
    assert 0.27 < measured.share < 0.40
    none = await coverage(ledger, await scope_of(ledger, "wiki/nobody"))
    assert (none.chunks, none.missing, none.share) == (0, 0, 0.0)


async def test_the_survey_counts_all_readable_documents(ledger: Connection) -> None:
    few = await scope_of(ledger, "mail/few")
    surveyed = await survey(ledger, few, max_tokens=None)
    assert (surveyed.complete, len(surveyed.documents)) == (True, 2_000)
    assert surveyed.size.tokens == 2_000 * (1 + surveying.PASSAGE_TOKENS)  # type: ignore[attr-defined]
    assert not (await survey(ledger, few, max_tokens=1_000)).complete
