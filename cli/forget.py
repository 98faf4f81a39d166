"""``penstock forget``: erasure of a document, source, tenant or person.

First what is to be erased is withdrawn by the usual wire; when the ledger and both stores have followed, what is left
of it is erased where it stands (pipeline.ledger.personal). The receipt says what was erased where, and what remains
until when. Every step may be repeated: a command that was cut off is finished by the same command again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, LiteralString, NamedTuple
from uuid import UUID

import typer

from cli.export import person_rows, person_scope
from cli.output import Json, print_json, stdout
from cli.recorded import recording
from cli.withdraw import Document, Source, Tenant, Yes, agreed, the_document, wire, withdrawal
from pipeline.core.errors import PenstockError

if TYPE_CHECKING:
    from cli.forget_remains import Part
    from pipeline.kafka.producer import Producer
    from pipeline.ledger.personal import Scope, Subject
    from pipeline.runtime.settings import Settings
    from pipeline.stores.postgres import Connection, Pool

PAGE = 200
"""Documents whose rest is erased in one transaction."""
LOOK_SECONDS = 0.2
CANARY_SECONDS = 600.0
"""A canary that has not changed for so long is published by nobody: a round takes eight minutes at most."""
CANARY_END_SECONDS = 5.0
"""How long the canaries' worker takes to end the rounds of removed sources, once it has read that they are removed."""
OF_ANSWERS = ("answer_reviews", "answer_feedback", "eval_queries")
"""Tables whose rows may be a person's only by the answers that conversations of the person name."""

forget = typer.Typer(name="forget", help="Erase a document, source, tenant or person.", no_args_is_help=True)
Wait = Annotated[
    float,
    typer.Option("--wait", metavar="SECONDS", help="Maximum seconds to wait until both stores have every change."),
]


@forget.command("document")
def forget_document(
    name: Document,
    tenant: Tenant = "default",
    source: Source = None,
    yes: Yes = False,
    wait: Wait = 300.0,
    json_output: Json = False,
) -> None:
    """Erase one document. If its source still has it and publishes it again, it comes back.

    Example: penstock forget document docs/jane.md --yes --json
    """

    async def plan(work: Work) -> Plan:
        id_, of_source, external_id, erased = await the_document(work.pool, tenant, name, source)
        record = partial(recording, "forget.document", tenant=tenant, object=f"document:{id_}")
        step = partial(work.rest if erased else work.document, tenant, of_source, id_, external_id)
        what = "what is left of" if erased else ""
        return Plan(f"Erase {what} {of_source}/{external_id}?".replace("  ", " "), step, record, already_erased=erased)

    _forget("document", name, plan, yes=yes, wait=wait, json_output=json_output)


@forget.command("source")
def forget_source(
    name: Annotated[str, typer.Argument(help="Name of the source: that of its connector.", show_default=False)],
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="The tenant, if several have a connector of this name.")
    ] = None,
    yes: Yes = False,
    wait: Wait = 300.0,
    json_output: Json = False,
) -> None:
    """Erase everything that came from a source. Its connector is removed first.

    Example: penstock forget source wiki --yes --json
    """

    async def plan(work: Work) -> Plan:
        from connectors.withdraw import tenant_of

        of_tenant = await tenant_of(work.pool, name, tenant)
        count = (await withdrawal(work.pool, work.producer, of_tenant, name).extent()).documents
        question = f"Erase source {name} of tenant {of_tenant}: {count} documents?"
        record = partial(recording, "forget.source", tenant=of_tenant, object=f"source:{name}")
        return Plan(question, partial(work.source, of_tenant, name), record)

    _forget("source", name, plan, yes=yes, wait=wait, json_output=json_output)


@forget.command("tenant")
def forget_tenant(
    name: Annotated[str, typer.Argument(help="The tenant.", show_default=False)],
    yes: Yes = False,
    wait: Wait = 300.0,
    json_output: Json = False,
) -> None:
    """Erase everything of a tenant: all sources, conversations, reviews, feedback and golden questions.

    Example: penstock forget tenant acme --yes --json
    """

    async def plan(work: Work) -> Plan:
        from connectors.withdraw import sources_of

        sources = await sources_of(work.pool, name)
        record = partial(recording, "forget.tenant", tenant=name, object=f"tenant:{name}")
        question = f"Erase tenant {name} with its {len(sources)} sources?"
        return Plan(question, partial(work.tenant, name, sources), record)

    _forget("tenant", name, plan, yes=yes, wait=wait, json_output=json_output)


@forget.command("person")
def forget_person(
    name: Annotated[str, typer.Argument(help="Name of the person, as in sources and tokens.", show_default=False)],
    tenant: Annotated[str, typer.Option("--tenant", help="Tenant of the person.")] = "default",
    yes: Yes = False,
    wait: Wait = 300.0,
    json_output: Json = False,
) -> None:
    """Erase the data about a person: memberships, conversations, reviews, feedback, golden questions that are asked as
    this person, and the name as an author or as a value of metadata. Documents that mention the person stay: use
    `penstock forget document`.

    Example: penstock forget person jane@acme.com --tenant acme --yes --json
    """

    async def plan(work: Work) -> Plan:
        rows = sum(len(matches) for matches in (await person_rows(work.pool, tenant, name)).values())
        record = partial(recording, "forget.person", tenant=tenant, person=name)
        return Plan(f"Erase {name} of tenant {tenant}: {rows} rows?", partial(work.person, tenant, name), record)

    _forget("person", name, plan, yes=yes, wait=wait, json_output=json_output)


class Plan(NamedTuple):
    question: str
    step: Callable[[], Awaitable[None]]
    record: Callable[[], Awaitable[None]]
    """Writes the record of the step to the audit trail, before the step."""
    already_erased: bool = False
    """True if the document's row was erased before, by age or by this command."""


def _forget(
    subject: str, name: str, plan: Callable[[Work], Awaitable[Plan]], *, yes: bool, wait: float, json_output: bool
) -> None:
    """Ask, erase and print the receipt. Exits with 1 if the operator did not agree."""

    async def working() -> Receipt | None:
        from pipeline.runtime.settings import load

        async with wire() as (pool, producer):
            work = Work(load(), pool, producer, wait)
            planned = await plan(work)
            if not agreed(planned.question, yes=yes, quiet=json_output):
                return None
            await planned.record()
            await planned.step()
            return await work.receipt(subject, name, already_erased=planned.already_erased)

    receipt = asyncio.run(working())
    if json_output:
        print_json({"done": False} if receipt is None else receipt.json())
    elif receipt is not None:
        if receipt.already_erased:
            stdout.print("already erased", markup=False)
        elif receipt.is_unknown:
            stdout.print("nothing is stored under this name: check its spelling", markup=False)
        for where, count in sorted(receipt.erased.items()):
            stdout.print(f"  erased   {count:>8}  {where}", markup=False)
        for part in receipt.remains:
            stdout.print(f"  remains  {part.until or '':>8}  {part.where}: {part.why}", markup=False, soft_wrap=True)
    if receipt is None:
        raise typer.Exit(1)


@dataclass(slots=True)
class Receipt:
    forgot: str
    name: str
    at: datetime
    erased: dict[str, int]
    """Numbers of rows, entries or messages, by where they were."""
    remains: list[Part]
    """The parts that are not erased yet."""
    already_erased: bool = False

    @property
    def is_unknown(self) -> bool:
        """Whether nothing was erased and nothing waits to be, as with a misspelt name or after an earlier run."""
        waits = any(part.where == "Elasticsearch" for part in self.remains)
        return not (self.erased or self.already_erased or waits)

    def json(self) -> dict[str, Any]:
        return {
            "done": True,
            "forgot": self.forgot,
            "name": self.name,
            "at": self.at.isoformat(),
            "erased": self.erased,
            "remains": [part._asdict() for part in self.remains],
            **({"already_erased": True} if self.already_erased else {}),
            **({"unknown": True} if self.is_unknown else {}),
        }


@dataclass
class Work:
    """One run of the command. Raises Retryable while a service is away, PenstockError where workers did not follow."""

    settings: Settings
    pool: Pool
    producer: Producer
    wait_seconds: float
    erased: Counter[str] = field(default_factory=Counter)
    left_entries: int = 0
    """Entries that are still in Elasticsearch, although the ledger wants none of them."""
    pending_entries: int = 0
    """Documents of the person's tenant whose entries in Elasticsearch are yet to be written anew."""
    promoted_from_feedback: int = 0
    """Golden questions that remain of the tenant, and that were promoted from feedback of people who are not known."""

    async def document(self, tenant: str, source: str, id_: UUID, name: str) -> None:
        """Erase a document that nobody is about to publish again."""
        chunks = await self._judged(tenant, [id_])
        await self._erase_feedback(tenant, chunks=chunks.get(id_, ()))
        stamp = await withdrawal(self.pool, self.producer, tenant, source).documents([name])
        await self._until(
            "SELECT EXISTS (SELECT FROM documents d WHERE d.id = %(id)s AND d.deleted_floor >= %(stamp)s"  # noqa: S608 — constants of this module
            f" AND {_SETTLED})",
            "the document's deletion",
            id=id_,
            stamp=stamp,
        )
        if not await self._erase_documents(tenant, source, {id_: name}, chunks):
            raise PenstockError(
                f"{source}/{name} changed meanwhile and was not erased: delete it at its source, then run this"
                " command again"
            )
        await self.unused_access_sets(tenant)

    async def rest(self, tenant: str, source: str, id_: UUID, name: str) -> None:
        """Erase what still names a document whose own row was erased before, by age or on demand."""
        await self._erase_documents(tenant, source, {id_: name}, {})
        await self.unused_access_sets(tenant)

    async def source(self, tenant: str, name: str) -> None:
        withdrawn = withdrawal(self.pool, self.producer, tenant, name)
        principals = [
            who
            for (who,) in await self._all(
                "SELECT principal FROM memberships WHERE tenant = %(tenant)s AND source = %(source)s UNION"
                " SELECT principal FROM connector_principals WHERE tenant = %(tenant)s AND source = %(source)s",
                tenant=tenant,
                source=name,
            )
        ]
        last = UUID(int=0)
        chunks: dict[UUID, set[UUID]] = {}
        await withdrawn.remove()
        while page := await self._all(
            "SELECT id FROM documents WHERE tenant = %(tenant)s AND source = %(source)s AND id > %(last)s"
            " AND deleted_at IS NULL ORDER BY id LIMIT %(page)s",
            tenant=tenant,
            source=name,
            last=last,
            page=PAGE,
        ):
            last = page[-1][0]
            judged = await self._judged(tenant, [id_ for (id_,) in page])
            await self._erase_feedback(tenant, chunks=[chunk for ids in judged.values() for chunk in ids])
            chunks |= judged
        await withdrawn.whole()
        [(sent,)] = await self._all("SELECT clock_timestamp()")
        await self._until(
            "SELECT count(*) = 2 AND NOT EXISTS (SELECT FROM documents d WHERE d.tenant = %(tenant)s AND d.source ="  # noqa: S608 — constants of this module
            f" %(source)s AND NOT ({_SETTLED}))"
            " FROM handled WHERE stage IN ('detect', 'identities') AND until > %(sent)s",
            f"the deletions of source {name}",
            tenant=tenant,
            source=name,
            sent=sent,
        )
        last, changed = UUID(int=0), 0
        while page := await self._all(
            "SELECT id, external_id FROM documents WHERE tenant = %(tenant)s AND source = %(source)s AND id > %(last)s"
            " ORDER BY id LIMIT %(page)s",
            tenant=tenant,
            source=name,
            last=last,
            page=PAGE,
        ):
            last = page[-1][0]
            changed += len(page) - await self._erase_documents(tenant, name, dict(page), chunks)
        await self.unused_access_sets(tenant)
        if changed:
            raise PenstockError(
                f"{changed} documents of source {name} changed meanwhile and were not erased: stop everything that"
                " publishes for it, then run this command again"
            )
        await self._tombstones(tenant, {name: principals})
        await self._refuse_memberships(tenant, name, "source", [name])
        await self._erase("source", _scope(tenant, source=name))

    async def tenant(self, name: str, sources: Sequence[str]) -> None:
        from connectors.withdraw import sources_of
        from pipeline.core.canary import is_canary
        from pipeline.ledger.personal import raise_tenant_floor
        from pipeline.stores.postgres import translated

        for source in sources:
            if not is_canary(source):
                await self.source(name, source)
        failure: PenstockError | None = None
        if canaries := [source for source in await sources_of(self.pool, name) if is_canary(source)]:
            await self._canaries_ended(name, canaries)
            for source in canaries:
                try:
                    await self.source(name, source)
                except PenstockError as error:  # one that goes on holds nothing of the tenant's, and must keep nothing
                    failure = error
        members = [
            who
            for (who,) in await self._all(
                "SELECT member FROM conversation_members WHERE tenant = %(tenant)s", tenant=name
            )
        ]
        for member in members:
            await self._conversations(name, member)
        with translated("erasure"):
            async with self.pool.connection() as connection:
                await raise_tenant_floor(connection, name)
        await self._erase("tenant", _scope(name))
        if failure is not None:
            raise failure
        await self._access_sets(name, "true")

    async def _canaries_ended(self, tenant: str, canaries: Sequence[str]) -> None:
        """Wait until no worker publishes canaries of this tenant any more, whose connectors are removed. Whether one
        runs is only seen in what it has published."""
        from pipeline.core.canary import LIST_SECONDS

        [(is_published,)] = await self._all(
            "SELECT EXISTS (SELECT FROM documents WHERE tenant = %(tenant)s AND source = ANY(%(canaries)s)"
            " AND changed_at > clock_timestamp() - make_interval(secs => %(recently)s))",
            tenant=tenant,
            canaries=[*canaries],
            recently=CANARY_SECONDS,
        )
        if is_published:
            await asyncio.sleep(LIST_SECONDS + CANARY_END_SECONDS)

    async def person(self, tenant: str, name: str) -> None:
        rows = await self._all(
            "SELECT source FROM memberships WHERE tenant = %(tenant)s AND principal = %(person)s UNION"
            " SELECT source FROM connector_principals WHERE tenant = %(tenant)s AND principal = %(person)s",
            tenant=tenant,
            person=name,
        )
        for (source,) in rows:
            stamp = await withdrawal(self.pool, self.producer, tenant, source).principals([name])
            await self._until(
                "SELECT EXISTS (SELECT FROM memberships WHERE tenant = %(tenant)s AND source = %(source)s"
                " AND principal = %(person)s AND observed_at >= %(stamp)s)",
                f"the groups in source {source}",
                tenant=tenant,
                source=source,
                person=name,
                stamp=stamp,
            )
        scope = await person_scope(self.pool, tenant, name)
        # Before the conversations: once they are erased, nothing says whose these answers were.
        await self._erase("person", scope, only=OF_ANSWERS)
        await self._conversations(tenant, name)
        await self._named(tenant, name)
        await self._tombstones(tenant, {source: [name] for (source,) in rows})
        await self._refuse_memberships(tenant, name, "person", [source for (source,) in rows])
        await self._erase("person", scope)
        [(self.pending_entries,)] = await self._all(
            "SELECT count(DISTINCT d.id) FROM index_state s JOIN documents d ON d.id = s.document_id"
            " WHERE d.tenant = %(tenant)s AND s.store = 'keywords' AND s.seq < s.want_seq"
            " AND s.generation IN (SELECT name FROM generations WHERE state <> 'retired')",
            tenant=tenant,
        )
        [(self.promoted_from_feedback,)] = await self._all(
            "SELECT count(*) FROM eval_queries WHERE tenant = %(tenant)s AND cardinality(givers) > 0", tenant=tenant
        )
        await self._access_sets(
            tenant,
            "(acl_tags || required_tags) && ARRAY[%(tag)s] OR EXISTS (SELECT FROM unnest(acl_tags || required_tags) tag"
            " WHERE right(tag, length(%(tag)s) + 1) = '/' || %(tag)s)",
            tag=f"user:{name}",
        )

    async def receipt(self, forgot: str, name: str, *, already_erased: bool = False) -> Receipt:
        from cli.forget_remains import remains

        now = datetime.now(UTC)
        return Receipt(forgot, name, now, dict(self.erased), await remains(self, forgot, now), already_erased)

    # Steps

    async def _judged(self, tenant: str, ids: Sequence[UUID]) -> dict[UUID, set[UUID]]:
        """The passages of documents about which somebody gave feedback, by document, while it is known whose they
        are."""
        rows = await self._all(
            "SELECT DISTINCT m.document_id, m.chunk_id FROM (SELECT document_id, unnest(chunk_ids) AS chunk_id"
            " FROM manifests WHERE document_id = ANY(%(ids)s)) m WHERE EXISTS (SELECT FROM answer_feedback f"
            " WHERE f.tenant = %(tenant)s AND f.chunk_id = m.chunk_id)",
            tenant=tenant,
            ids=list(ids),
        )
        judged: dict[UUID, set[UUID]] = {}
        for document, chunk in rows:
            judged.setdefault(document, set()).add(chunk)
        return judged

    async def _erase_documents(
        self, tenant: str, source: str, named: Mapping[UUID, str], chunks: Mapping[UUID, Collection[UUID]]
    ) -> int:
        """Erase those of these documents that are deleted and no longer in either store, and return their number. Their
        rows are locked, so that nobody can publish them again meanwhile. named: id to external id."""
        from pipeline.ledger.personal import lock_deleted
        from pipeline.stores.postgres import translated

        with translated("erasure"):
            async with self.pool.connection() as connection, connection.transaction():
                ids = await lock_deleted(connection, list(named))
                if ids:
                    passages = [chunk for id_ in ids for chunk in chunks.get(id_, ())]
                    counts = await self._erase_locked(
                        connection, tenant, source, ids, [named[i] for i in ids], passages
                    )
                    self.erased.update({f"postgres {table}": count for table, count in counts.items()})
        if ids:  # again: an answer may have been recorded while the rows were erased, and before that could be seen
            await self._erase_answers(tenant, await self._made_from(tenant, ids))
        await self._entries(ids)
        return len(ids)

    async def _erase_locked(
        self,
        connection: Connection,
        tenant: str,
        source: str,
        ids: Sequence[UUID],
        names: Sequence[str],
        chunks: Sequence[UUID],
    ) -> dict[str, int]:
        from pipeline.ledger.personal import erase

        made_from = await self._made_from(tenant, ids)
        await self._erase_answers(tenant, made_from)
        scope = _scope(
            tenant,
            source=source,
            ids=list(ids),
            names=list(names),
            chunks=list(chunks),
            answers=made_from,
        )
        return await erase(connection, "document", scope)

    async def _made_from(self, tenant: str, ids: Sequence[UUID]) -> list[UUID]:
        """The answers that were made from these documents."""
        rows = await self._all(
            " UNION ".join(
                f"SELECT answer_id FROM {table} WHERE tenant = %(tenant)s AND documents && %(ids)s::uuid[]"  # noqa: S608 — names listed here
                for table in ("answer_reviews", "answer_provenance", "conversation_provenance")
            ),
            tenant=tenant,
            ids=list(ids),
        )
        return [answer for (answer,) in rows]

    async def _erase_answers(self, tenant: str, answers: Sequence[UUID]) -> None:
        """Erase these answers in the review queue, feedback on them, and the pairs of all conversations that were
        recorded with them."""
        from pipeline.conversations.record import Conversations
        from pipeline.embedding.tokens import byte_pairs
        from pipeline.observability.metrics import Metrics

        await self._erase_feedback(tenant, answers=answers)
        count = byte_pairs().count
        conversations = Conversations(
            self.pool, None, lambda texts: count(texts), Metrics(), self.settings.conversations
        )
        if pairs := await conversations.erase(tenant, answers):
            self.erased["postgres conversation_pairs"] += pairs
        if reviews := await self._all(
            "DELETE FROM answer_reviews WHERE tenant = %(tenant)s AND answer_id = ANY(%(answers)s::uuid[]) RETURNING 1",
            tenant=tenant,
            answers=list(answers),
        ):
            self.erased["postgres answer_reviews"] += len(reviews)

    async def _erase_feedback(
        self, tenant: str, *, chunks: Collection[UUID] = (), answers: Collection[UUID] = ()
    ) -> None:
        """Erase feedback on passages or answers of documents, before anything says no longer whose they were: a run
        that ends in between could not be finished by the next one."""
        if chunks or answers:
            scope = _scope(tenant, chunks=list(chunks), answers=list(answers))
            await self._erase("document", scope, only=("answer_feedback",))

    async def _erase(self, subject: Subject, scope: Scope, only: Collection[str] | None = None) -> None:
        from pipeline.ledger.personal import erase
        from pipeline.stores.postgres import translated

        with translated("erasure"):
            async with self.pool.connection() as connection, connection.transaction():
                counts = await erase(connection, subject, scope, only=only)
        self.erased.update({f"postgres {table}": count for table, count in counts.items()})

    async def unused_access_sets(self, tenant: str) -> None:
        """Erase all unused access sets of the tenant: a command that was interrupted and run again no longer knows
        which sets its documents had."""
        await self._access_sets(
            tenant,
            "NOT EXISTS (SELECT FROM documents d WHERE d.tenant = access_sets.tenant AND d.access_id = access_sets.id)",
        )

    async def _access_sets(self, tenant: str, which: LiteralString, **values: Any) -> None:
        from pipeline.ledger.personal import erase_access_sets
        from pipeline.stores.postgres import translated

        rows = await self._all(
            f"SELECT id FROM access_sets WHERE tenant = %(tenant)s AND ({which})",  # noqa: S608 — callers hand literals
            tenant=tenant,
            **values,
        )
        if rows:
            with translated("erasure"):
                async with self.pool.connection() as connection:
                    count = await erase_access_sets(connection, tenant, [id_ for (id_,) in rows])
            if count:
                self.erased["postgres access_sets"] += count

    async def _entries(self, ids: Sequence[UUID]) -> None:
        """Count the documents' entries that are left in Elasticsearch. The workers have deleted them, unless something
        went wrong."""
        from pipeline.stores.elasticsearch import connect

        es = connect(self.settings.elasticsearch)
        try:
            for (index,) in await self._all("SELECT DISTINCT keyword_index FROM generations WHERE cleared_at IS NULL"):
                if await es.indices.exists(index=index):
                    await es.indices.refresh(index=index)
                    query = {"terms": {"document_id": [str(id_) for id_ in ids]}}
                    self.left_entries += (await es.count(index=index, query=query))["count"]
        finally:
            await es.close()

    async def _named(self, tenant: str, name: str) -> None:
        """Erase the name as the author of documents and as a value of their metadata, and have their keyword entries
        written anew: in one transaction, since whom they named is not known afterwards."""
        from pipeline.ledger.generations import writable
        from pipeline.ledger.personal import FORGET_NAME, NAMES_PERSON, names_person, without_person
        from pipeline.ledger.repair import want_again
        from pipeline.stores.postgres import translated

        ids = [
            id_
            for (id_,) in await self._all(
                f"SELECT id FROM documents d WHERE tenant = %(tenant)s AND {NAMES_PERSON}",  # noqa: S608 — constants
                tenant=tenant,
                person=name,
            )
        ]
        if not ids:
            return
        for id_ in ids:
            with translated("erasure"):
                async with self.pool.connection() as connection, connection.transaction():
                    which = {"id": id_, "person": name}
                    done = await connection.execute(
                        f"UPDATE documents d SET {FORGET_NAME} WHERE id = %(id)s AND {NAMES_PERSON}",  # noqa: S608 — constants
                        which,
                    )
                    if done.rowcount == 0:
                        continue
                    await connection.execute(
                        f"UPDATE document_bodies SET metadata = {without_person('metadata')}"  # noqa: S608 — constants
                        f" WHERE document_id = %(id)s AND {names_person('metadata')}",
                        which,
                    )
                    self.erased["postgres documents"] += 1
                    # Those of now: with the document's lock, none has it as it was that is not among them.
                    for generation in await writable(connection):
                        await want_again(connection, generation.name, "keywords", id_)
                    await connection.execute(
                        "UPDATE index_state SET next_at = now() WHERE document_id = %s AND store = 'keywords'", [id_]
                    )
        await self._until(
            f"SELECT count(*) >= %(wanted)s FROM documents d WHERE d.id = ANY(%(ids)s) AND {_ENTRIES_WRITTEN}",  # noqa: S608 — constants of this module
            "the documents that named the person",
            ids=list(ids),
            wanted=len(ids),
        )
        self.erased["elasticsearch documents"] += len(ids)

    async def _conversations(self, tenant: str, member: str) -> None:
        from pipeline.core.conversations import subject_digest
        from pipeline.kafka.client import deliver
        from topics.messages import ConversationForgotten
        from topics.registry import CONVERSATIONS

        stamp = datetime.now(UTC)
        [(pairs,)] = await self._all(
            "SELECT count(*) FROM conversation_pairs WHERE tenant = %(tenant)s AND member = %(member)s",
            tenant=tenant,
            member=member,
        )
        message = ConversationForgotten(tenant=tenant, source="erasure", member=member, observed_at=stamp)
        await deliver([self.producer.send(CONVERSATIONS, message)])
        await self._until(
            "SELECT EXISTS (SELECT FROM conversation_floors WHERE tenant = %(tenant)s AND subject = %(subject)s"
            " AND forgotten_at >= %(stamp)s)",
            "the conversations",
            tenant=tenant,
            subject=subject_digest(member),
            stamp=stamp,
        )
        if pairs:
            self.erased["postgres conversation_pairs"] += pairs

    async def _tombstones(self, tenant: str, principals: dict[str, list[str]]) -> None:
        """Send tombstones, so that compaction removes the keys, and the names in them, from the topic. It comes
        after the principals' empty sets of groups were accepted: compaction may remove a set that was not read yet."""
        from pipeline.kafka.client import deliver
        from pipeline.stages.identities import TOMBSTONE
        from topics.registry import IDENTITIES

        keys = [f"{tenant}/{source}/{name}".encode() for source, names in principals.items() for name in names]
        await deliver(self.producer.send_tombstone(IDENTITIES, key, [TOMBSTONE]) for key in keys)

    async def _refuse_memberships(
        self, tenant: str, name: str, of: Literal["source", "person"], sources: Sequence[str]
    ) -> None:
        """Have memberships from before refused: those of a source or of a person, whom these sources name."""
        from connectors.runner.rows import keep_stamp
        from pipeline.ledger.personal import raise_floor
        from pipeline.stores.postgres import translated

        with translated("erasure"):
            async with self.pool.connection() as connection:
                floor = await raise_floor(connection, tenant, name, of)
                for source in sources:
                    await keep_stamp(connection, tenant, source, floor)

    async def _until(self, statement: str, what: str, **values: Any) -> None:
        try:
            async with asyncio.timeout(self.wait_seconds):
                while not (await self._all(statement, **values))[0][0]:  # noqa: ASYNC110 # another process does it
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            raise PenstockError(
                f"{what}: not complete after {self.wait_seconds:g} s, so not everything is erased yet; check with"
                " `penstock status` that the workers run, then run this command again"
            ) from None

    async def _all(self, statement: str, **values: Any) -> list[tuple[Any, ...]]:
        return await _all(self.pool, statement, **values)


_PENDING = """SELECT FROM index_state s WHERE s.document_id = d.id
        AND s.seq < s.want_seq AND s.generation IN (SELECT name FROM generations WHERE state <> 'retired')"""
_SETTLED = f"d.announced_seq >= d.seq AND NOT EXISTS ({_PENDING})"
_ENTRIES_WRITTEN = f"NOT EXISTS ({_PENDING} AND s.store = 'keywords')"
"""Vectors name nobody, and those of a text that the model does not embed are pending without end."""


def _scope(tenant: str, **fields: Any) -> Scope:
    from pipeline.ledger.personal import Scope

    return Scope(tenant, **fields)


async def _all(pool: Pool, statement: str, **values: Any) -> list[tuple[Any, ...]]:
    from pipeline.stores.postgres import translated

    with translated("erasure"):
        async with pool.connection() as connection:
            return await (await connection.execute(statement.encode(), values)).fetchall()
