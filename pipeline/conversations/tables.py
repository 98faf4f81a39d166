"""The conversation tables, as one member's history is written. The caller holds the member's lock."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from pipeline.core.conversations import Chunk, Pair, Place
from pipeline.stores.postgres import Connection

LOCK_CLASS = 7_301
"""First key of the advisory lock of a member; the second is a hash of the name. (There may be no row to lock.)"""


@dataclass(frozen=True, slots=True)
class Mention:
    """An occurrence of a pair in a conversation."""

    digest: bytes
    source: str
    conversation: str
    time: datetime
    observed_at: datetime
    sent_id: str | None
    answer_id: UUID | None
    """The id that the query service gave the answer."""


@dataclass(frozen=True, slots=True)
class Member:
    tenant: str
    member: str


async def lock(connection: Connection, who: Member) -> None:
    """Lock this member's history until the end of the transaction."""
    await connection.execute(
        "SELECT pg_advisory_xact_lock(%s, hashtext(%s))", [LOCK_CLASS, f"{who.tenant}/{who.member}"]
    )


async def raise_floors(connection: Connection, who: Member, floors: Mapping[bytes, datetime]) -> None:
    """Record requests to forget. floors: the digest of a member or conversation → the moment up to which it was
    forgotten."""
    await connection.cursor().executemany(
        "INSERT INTO conversation_floors AS f (tenant, subject, forgotten_at) VALUES (%s, %s, %s)"
        " ON CONFLICT (tenant, subject) DO UPDATE SET forgotten_at = excluded.forgotten_at"
        " WHERE excluded.forgotten_at > f.forgotten_at",
        [(who.tenant, subject, moment) for subject, moment in floors.items()],
    )


async def floors(connection: Connection, who: Member, subjects: Collection[bytes]) -> dict[bytes, datetime]:
    cursor = await connection.execute(
        "SELECT subject, forgotten_at FROM conversation_floors WHERE tenant = %s AND subject = ANY(%s)",
        [who.tenant, list(subjects)],
    )
    return dict(await cursor.fetchall())


async def forget(
    connection: Connection, who: Member, *, until: datetime, said_in: tuple[str, str] | None
) -> set[bytes]:
    """Remove the mentions that were observed until then, of all conversations or of one (source, conversation).
    Returns the digests of their pairs, which may be mentioned elsewhere. The sources of an answer are removed with its
    last mention."""
    source, conversation = said_in or (None, None)
    cursor = await connection.execute(
        "DELETE FROM conversation_mentions WHERE tenant = %(tenant)s AND member = %(member)s"
        " AND observed_at <= %(until)s AND (%(source)s::text IS NULL"
        " OR (source = %(source)s AND conversation = %(conversation)s)) RETURNING digest, answer_id",
        {
            "tenant": who.tenant,
            "member": who.member,
            "until": until,
            "source": source,
            "conversation": conversation,
        },
    )
    removed = await cursor.fetchall()
    await settle_provenance(connection, who, {answer_id for _, answer_id in removed if answer_id is not None})
    return {digest for digest, _ in removed}


async def times(connection: Connection, who: Member, digests: Iterable[bytes]) -> dict[bytes, datetime]:
    """When each of these pairs was first asked, as stored with the pair; a pair that is not stored is absent."""
    cursor = await connection.execute(
        "SELECT digest, asked_at FROM conversation_pairs WHERE tenant = %s AND member = %s AND digest = ANY(%s)",
        [who.tenant, who.member, list(digests)],
    )
    return dict(await cursor.fetchall())


async def first_mentions(connection: Connection, who: Member, digests: Iterable[bytes]) -> dict[bytes, datetime]:
    """When each of these pairs was first asked, computed from its mentions; a pair without a mention is absent."""
    cursor = await connection.execute(
        "SELECT digest, min(asked_at) FROM conversation_mentions"
        " WHERE tenant = %s AND member = %s AND digest = ANY(%s) GROUP BY digest",
        [who.tenant, who.member, list(digests)],
    )
    return dict(await cursor.fetchall())


async def add_pairs(connection: Connection, who: Member, pairs: Sequence[tuple[Pair, int]]) -> None:
    """Add new pairs, each with its tokens."""
    await connection.cursor().executemany(
        "INSERT INTO conversation_pairs (tenant, member, digest, asked_at, tokens, question, answer)"
        " VALUES (%s, %s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING",
        [(who.tenant, who.member, p.digest, p.time, tokens, p.question, p.answer) for p, tokens in pairs],
    )


async def add_mentions(connection: Connection, who: Member, mentions: Iterable[Mention]) -> None:
    """Add mentions. Of several messages with the same mention the newest counts: a request to forget that is older than
    it does not remove it."""
    await connection.cursor().executemany(
        "INSERT INTO conversation_mentions AS m"
        " (tenant, member, digest, source, conversation, asked_at, observed_at, sent_id, answer_id)"
        " VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)"
        " ON CONFLICT (tenant, member, digest, source, conversation, asked_at) DO UPDATE"
        " SET observed_at = excluded.observed_at, sent_id = excluded.sent_id, answer_id = excluded.answer_id"
        " WHERE (excluded.observed_at, coalesce(excluded.sent_id, ''), coalesce(excluded.answer_id::text, ''))"
        " > (m.observed_at, coalesce(m.sent_id, ''), coalesce(m.answer_id::text, ''))",
        [
            (
                who.tenant,
                who.member,
                m.digest,
                m.source,
                m.conversation,
                m.time,
                m.observed_at,
                m.sent_id,
                m.answer_id,
            )
            for m in mentions
        ],
    )


async def answers(connection: Connection, who: Member, digests: Iterable[bytes]) -> set[UUID]:
    """The answers that the mentions of these pairs name."""
    cursor = await connection.execute(
        "SELECT DISTINCT answer_id FROM conversation_mentions"
        " WHERE tenant = %s AND member = %s AND digest = ANY(%s) AND answer_id IS NOT NULL",
        [who.tenant, who.member, list(digests)],
    )
    return {answer_id for (answer_id,) in await cursor.fetchall()}


async def settle_provenance(connection: Connection, who: Member, answers: Collection[UUID]) -> None:
    """Store the sources of these answers as long as a mention names the answer, and remove the others."""
    await connection.execute(
        "DELETE FROM conversation_provenance a WHERE tenant = %s AND answer_id = ANY(%s) AND NOT EXISTS"
        " (SELECT FROM conversation_mentions m WHERE m.tenant = a.tenant AND m.answer_id = a.answer_id)",
        [who.tenant, list(answers)],
    )
    await connection.execute(
        "INSERT INTO conversation_provenance (tenant, answer_id, documents) SELECT tenant, answer_id, documents"
        " FROM answer_provenance a WHERE tenant = %s AND answer_id = ANY(%s) AND EXISTS"
        " (SELECT FROM conversation_mentions m WHERE m.tenant = a.tenant AND m.answer_id = a.answer_id)"
        " ON CONFLICT DO NOTHING",
        [who.tenant, list(answers)],
    )


async def settle_pairs(connection: Connection, who: Member, touched: Collection[bytes]) -> None:
    """Remove the pairs without a mention among these, and give the others the time of their first mention."""
    await connection.execute(
        "DELETE FROM conversation_pairs p WHERE tenant = %s AND member = %s AND digest = ANY(%s)"
        " AND NOT EXISTS (SELECT FROM conversation_mentions m"
        "  WHERE m.tenant = p.tenant AND m.member = p.member AND m.digest = p.digest)",
        [who.tenant, who.member, list(touched)],
    )
    await connection.execute(
        "UPDATE conversation_pairs p SET asked_at = said.asked_at FROM ("
        " SELECT digest, min(asked_at) AS asked_at FROM conversation_mentions"
        " WHERE tenant = %(tenant)s AND member = %(member)s AND digest = ANY(%(touched)s) GROUP BY digest"
        ") said WHERE p.tenant = %(tenant)s AND p.member = %(member)s AND p.digest = said.digest"
        " AND p.asked_at <> said.asked_at",
        {"tenant": who.tenant, "member": who.member, "touched": list(touched)},
    )


async def is_full(
    connection: Connection, who: Member, forgotten: Collection[bytes], *, tokens: int, mentions: int
) -> bool:
    """Whether the member has this many tokens or mentions, or more, without those of the forgotten pairs that are
    still to be removed."""
    cursor = await connection.execute(
        "SELECT EXISTS (SELECT FROM conversation_members WHERE tenant = %(tenant)s AND member = %(member)s"
        " AND tokens - (SELECT coalesce(sum(p.tokens), 0) FROM conversation_pairs p WHERE p.tenant = %(tenant)s"
        " AND p.member = %(member)s AND p.digest = ANY(%(forgotten)s) AND NOT EXISTS (SELECT FROM conversation_mentions"
        " m WHERE m.tenant = p.tenant AND m.member = p.member AND m.digest = p.digest)) >= %(tokens)s)"
        " OR (SELECT count(*) >= %(mentions)s FROM (SELECT FROM conversation_mentions"
        " WHERE tenant = %(tenant)s AND member = %(member)s LIMIT %(mentions)s) m)",
        {
            "tenant": who.tenant,
            "member": who.member,
            "forgotten": list(forgotten),
            "tokens": tokens,
            "mentions": mentions,
        },
    )
    [full] = await cursor.fetchone() or (False,)
    return bool(full)


async def standing(connection: Connection, who: Member) -> tuple[int, bool]:
    """(tokens of all pairs as they are now, is_chunked as it was)."""
    cursor = await connection.execute(
        "SELECT (SELECT coalesce(sum(tokens), 0) FROM conversation_pairs WHERE tenant = %(tenant)s"
        " AND member = %(member)s), coalesce((SELECT is_chunked FROM conversation_members"
        " WHERE tenant = %(tenant)s AND member = %(member)s), false)",
        {"tenant": who.tenant, "member": who.member},
    )
    tokens, chunked = await cursor.fetchone() or (0, False)
    return int(tokens), bool(chunked)


async def save_member(connection: Connection, who: Member, *, tokens: int, chunked: bool) -> None:
    """Store the member's state, or remove it when the member has no pairs any more."""
    if not tokens:
        await connection.execute(
            "DELETE FROM conversation_members WHERE tenant = %s AND member = %s", [who.tenant, who.member]
        )
        return
    await connection.execute(
        "INSERT INTO conversation_members AS c (tenant, member, tokens, is_chunked, chunked_at)"
        " VALUES (%(tenant)s, %(member)s, %(tokens)s, %(chunked)s, CASE WHEN %(chunked)s THEN now() END)"
        " ON CONFLICT (tenant, member) DO UPDATE SET tokens = excluded.tokens,"
        " is_chunked = c.is_chunked OR excluded.is_chunked, chunked_at = coalesce(c.chunked_at, excluded.chunked_at)",
        {"tenant": who.tenant, "member": who.member, "tokens": tokens, "chunked": chunked},
    )


async def pairs_before(connection: Connection, who: Member, place: Place) -> int:
    cursor = await connection.execute(
        "SELECT count(*) FROM conversation_pairs WHERE tenant = %s AND member = %s AND (asked_at, digest) < (%s, %s)",
        [who.tenant, who.member, *place],
    )
    row = await cursor.fetchone()
    return int(row[0]) if row else 0


async def pairs_from(connection: Connection, who: Member, number: int) -> list[Pair]:
    """The pairs from this number on (0: the first), in time order."""
    cursor = await connection.execute(
        "SELECT question, answer, asked_at, digest FROM conversation_pairs WHERE tenant = %s AND member = %s"
        " ORDER BY asked_at, digest OFFSET %s",
        [who.tenant, who.member, number],
    )
    return [Pair(*row) for row in await cursor.fetchall()]


async def replace_chunks(
    connection: Connection, who: Member, position: int, chunks: Sequence[tuple[Chunk, int]]
) -> None:
    """Replace all chunks from this position on by these, each with its tokens. A chunk with the same pairs as before
    keeps its embedding."""
    await connection.execute(
        "DELETE FROM conversation_chunks WHERE tenant = %s AND member = %s AND position >= %s AND NOT digest = ANY(%s)",
        [who.tenant, who.member, position, [chunk.digest for chunk, _ in chunks]],
    )
    await connection.cursor().executemany(
        "INSERT INTO conversation_chunks AS c (tenant, member, digest, position, first_at, last_at, tokens, text)"
        " VALUES (%s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT (tenant, member, digest) DO UPDATE"
        " SET position = excluded.position, first_at = excluded.first_at, last_at = excluded.last_at"
        " WHERE (c.position, c.first_at, c.last_at) <> (excluded.position, excluded.first_at, excluded.last_at)",
        [(who.tenant, who.member, c.digest, c.position, c.first_at, c.last_at, tokens, c.text) for c, tokens in chunks],
    )


async def members_answered(connection: Connection, tenant: str, answers: Collection[UUID]) -> list[Member]:
    """The members whose conversations name one of these answers."""
    cursor = await connection.execute(
        "SELECT DISTINCT member FROM conversation_mentions WHERE tenant = %s AND answer_id = ANY(%s) ORDER BY member",
        [tenant, list(answers)],
    )
    return [Member(tenant, member) for (member,) in await cursor.fetchall()]


async def erased_answers(connection: Connection, who: Member, answers: Collection[UUID]) -> set[UUID]:
    """Those of these answers that were made from a document that was erased since."""
    cursor = await connection.execute(
        "SELECT answer_id FROM conversation_provenance a WHERE tenant = %s AND answer_id = ANY(%s) AND EXISTS"
        " (SELECT FROM documents d WHERE d.id = ANY(a.documents) AND d.erased_at IS NOT NULL)",
        [who.tenant, list(answers)],
    )
    return {answer_id for (answer_id,) in await cursor.fetchall()}


async def erase_answers(connection: Connection, who: Member, answers: Collection[UUID]) -> set[bytes]:
    """Remove every mention of the pairs that were recorded as one of these answers; returns the pairs' digests."""
    cursor = await connection.execute(
        "DELETE FROM conversation_mentions WHERE tenant = %(tenant)s AND member = %(member)s AND digest IN"
        " (SELECT digest FROM conversation_mentions WHERE tenant = %(tenant)s AND member = %(member)s"
        "  AND answer_id = ANY(%(answers)s)) RETURNING digest, answer_id",
        {"tenant": who.tenant, "member": who.member, "answers": list(answers)},
    )
    removed = await cursor.fetchall()
    await connection.execute(
        "DELETE FROM conversation_provenance WHERE tenant = %s AND answer_id = ANY(%s)",
        [who.tenant, [answer for _, answer in removed if answer is not None]],
    )
    return {digest for digest, _ in removed}
