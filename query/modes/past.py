"""What a member's conversation history is searched with (query/conversations.py serves it)."""

from __future__ import annotations

from pipeline.core.errors import PenstockError
from pipeline.core.model import Generation
from pipeline.embedding.port import Vectors
from pipeline.stores.postgres import Connection
from query.access import sayable
from query.embedder import Embedders, require_same
from query.modes.survey import Scope


async def needs_vector(connection: Connection, tenant: str, member: str) -> bool:
    """Its stored flag: a history that was never too long is served whole."""
    if len(sayable([tenant, member])) < 2:
        return False
    cursor = await connection.execute(
        "SELECT is_chunked FROM conversation_members WHERE tenant = %s AND member = %s", [tenant, member]
    )
    row = await cursor.fetchone()
    return bool(row and row[0])


async def vector_of(
    question: str, scope: Scope, embedders: Embedders | None
) -> tuple[tuple[Generation, Vectors] | None, str | None]:
    """The question's vector by the pinned generation's model; else None and why the history is searched by time."""
    by_time = "the history was searched by time and not by meaning"
    if embedders is None:
        return None, f"{by_time}: no embedding model is set"
    try:
        embedder, vector = await embedders.of(scope.generation).embed(question)
        require_same(embedder, scope.generation)
    except PenstockError as error:
        return None, f"{by_time}: {error}"
    return (scope.generation, vector), None
