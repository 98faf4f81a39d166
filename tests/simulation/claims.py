"""Checks each time up to which a source is recorded as complete: never later than the ledger and both stores are."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pipeline.core.identity import document_id, qualify
from pipeline.core.normalise import normalise
from tests.simulation.changes import NAMES, PERSONS
from tests.simulation.database import Transaction
from tests.simulation.statements.freshness import FRESHNESS
from topics.messages import DocumentUpserted

if TYPE_CHECKING:
    from tests.simulation.connectors import Service
    from tests.simulation.world import World

BEGIN = datetime.min.replace(tzinfo=UTC)
Text = tuple[str, str] | None
"""Title and text; None: the document does not exist."""
Readers = tuple[tuple[str, ...], tuple[str, ...]] | None


class Claims:
    """Law: when a time is recorded, every document and membership is in the ledger as the source has had it at that
    time or later, and both stores have what has not changed since."""

    def __init__(self, world: World, service: Service) -> None:
        self._world, self._service = world, service
        self._texts: dict[str, list[tuple[datetime, Text]]] = {name: [(BEGIN, None)] for name in NAMES}
        self._readers: dict[str, list[tuple[datetime, Readers]]] = {name: [(BEGIN, None)] for name in NAMES}
        self._held: dict[str, list[tuple[datetime, frozenset[str]]]] = {p: [(BEGIN, frozenset())] for p in PERSONS}
        self._unreadable: set[str] = set()
        """Documents that could not be read at any time: certificates say that such are left out."""
        self.checked = 0
        self.overclaim: str | None = None
        world.database.on_commit.append(self._committed)

    def changed(self, name: str, document: DocumentUpserted | None) -> None:
        """Note what a document has become at the source."""
        now = self._world.loop.now()
        self._unreadable |= self._service.unreadable
        text, readers = (None, None) if document is None else (_text(document), _readers(document))
        self._texts[name].append((now, text))
        self._readers[name].append((now, readers))

    def regrouped(self) -> None:
        for person in PERSONS:
            self._held[person].append((self._world.loop.now(), frozenset(self._service.held_by(person))))

    def _committed(self, tx: Transaction) -> None:
        for (table, key), row in tx.writes.items():
            if table == FRESHNESS and row is not None and self.overclaim is None:
                for what, until in (("complete", row["complete_until"]), ("access", row["access_until"])):
                    if until is not None:
                        self._check_documents(what, until)
                if row["groups_until"] is not None:
                    self._check_groups(row["groups_until"], key)

    def _check_documents(self, what: str, until: datetime) -> None:
        tables = self._world.database.tables
        histories: dict[str, Any] = {"complete": self._texts, "access": self._readers}
        for name in NAMES:
            if name in self._unreadable:
                continue
            self.checked += 1
            allowed, is_unchanged = _since(histories[what][name], until)
            id_ = document_id(self._world.story.tenant, self._world.story.source, name)
            document = tables["documents"].get((id_,))
            shown = None
            if document is not None and document["deleted_at"] is None and document["version"] is not None:
                shown = self._shown(id_, document)[what]
            if shown not in allowed:
                self.overclaim = f"OVERCLAIM: {what} until {until}, but {name} is {shown} and not one of {allowed}"
            waits = any(k[0] == id_ and r["seq"] < r["want_seq"] for k, r in tables["index_state"].items())
            if waits and is_unchanged and _since(self._readers[name], until)[1] and _since(self._texts[name], until)[1]:
                self.overclaim = f"OVERCLAIM: {what} until {until}, but {name} waits for a store"

    def _shown(self, id_: Any, document: Any) -> dict[str, Text | Readers]:
        tables = self._world.database.tables
        body = tables["document_bodies"].get((id_,))
        sets = [r for r in tables["access_sets"].values() if r["id"] == document["access_id"]]
        readers = (tuple(sorted(sets[0]["acl_tags"])), tuple(sorted(sets[0]["required_tags"]))) if sets else ((), ())
        return {"complete": (document["title"], body["text"] if body else ""), "access": readers}

    def _check_groups(self, until: datetime, key: Sequence[Any]) -> None:
        tenant, source = key
        for person in PERSONS:
            self.checked += 1
            allowed, _ = _since(self._held[person], until)
            row = self._world.database.tables["memberships"].get((tenant, person, source))
            held = set(row["groups"]) if row else set()
            for tag in set().union(*allowed, held):
                if all((tag in was) != (tag in held) for was in allowed):
                    self.overclaim = f"OVERCLAIM: groups until {until}, but {person} and {tag} are as before"


def _since(history: Sequence[tuple[datetime, Any]], until: datetime) -> tuple[list[Any], bool]:
    """The states at that time and later, and whether there is only one."""
    last = max(n for n, (at, _) in enumerate(history) if at < until)
    return [state for _, state in history[last:]], last == len(history) - 1


def _text(document: DocumentUpserted) -> Text:
    return document.title, normalise(document.content, document.media_type)[0]


def _readers(document: DocumentUpserted) -> Readers:
    acl, required = (qualify(document.source, tags) for tags in (document.acl_tags, document.required_tags))
    return tuple(sorted(acl)), tuple(sorted(required))
