"""Random documents and readers, and the access rules written down a second time, in plain Python.

Nothing here knows how the product decides: a tag is a pair (source, name) and never a joined string, access is a set of
observations of which the newest count, and an answer is one loop over all documents. Everything follows from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted, IdentityChanged

Event = DocumentUpserted | DocumentDeleted | AccessChanged | IdentityChanged
DocumentKey = tuple[str, str, str]
"""tenant, source, external_id."""
Group = tuple[str, str]
"""source, tag as that source names it."""

TAGS = (
    "staff",
    "Staff",
    "staff ",
    " ",
    "board",
    "*",
    "%",
    "_",
    "?",
    "null",
    "NULL",
    "\\",
    '"',
    "{staff}",
    "staff,board",
    "'; DROP TABLE documents; --",
    "/",
    "/staff",
    "staff/",
    "b/c",
    "wiki/staff",
    "drive/staff",
    "wiki/*",
    "wiki/",
    "user:ann",
    "user:*",
    "café",
    "cafe\u0301",
    "ﬀ",
    "ff",
    "日本語",
    "👩‍👩‍👧",
    "\u202eff\u202c",
    "\u200bstaff",
    "staff\nboard",
    "x" * 500,
    "x" * 499 + "y",
)
SOURCES = ("wiki", "drive", "wiki staff", "*", "staff", "user:ann", "b", "Ünï", "s" * 60)
PRINCIPALS = ("ann", "bob", "ANN", "staff", "wiki/ann", "*", "user:ann", "ann@example.org", "Ünï")
NOWHERE = ("", "wiki/", "*/staff", "staff\x00", "\udcff", "/", "nosuch/staff")
"""Names that a caller may claim and that no document can have, or not in this way."""
NAMES = ("report", "plan", "notes", "50%", "a_b", "ärger", "deep/er/file.md", "*", "x'; --")
COMMON = "harbour ledger"
"""In every document, so that every question meets every document."""
WORDS = (
    "anchor",
    "buoy",
    "crane",
    "dock",
    "ebb",
    "ferry",
    "gull",
    "hull",
    "keel",
    "lock",
    "mast",
    "net",
    "oar",
    "pier",
)


@dataclass(frozen=True)
class Asker:
    """A caller: a tenant, and any number of principals and tags."""

    tenant: str
    principals: tuple[str, ...]
    tags: tuple[str, ...]


@dataclass
class _Document:
    key: DocumentKey
    upserted: datetime | None = None
    content: str = ""
    deleted: datetime | None = None
    access: list[tuple[datetime, frozenset[str], frozenset[str]]] = field(default_factory=list)


@dataclass(frozen=True)
class Living:
    """A document that exists, with its access as it holds now."""

    key: DocumentKey
    content: str
    acl: frozenset[str]
    required: frozenset[str]


class Model:
    """The state after some events, independent of their order."""

    def __init__(self) -> None:
        self._documents: dict[DocumentKey, _Document] = {}
        self._memberships: dict[tuple[str, str, str], list[tuple[datetime, frozenset[str]]]] = {}

    def learn(self, *events: Event) -> None:
        for event in events:
            if isinstance(event, IdentityChanged):
                of = (event.tenant, event.source, event.principal)
                self._memberships.setdefault(of, []).append((event.observed_at, frozenset(event.groups)))
                continue
            key = (event.tenant, event.source, event.external_id)
            document = self._documents.setdefault(key, _Document(key))
            match event:
                case DocumentDeleted():
                    document.deleted = max(document.deleted or event.observed_at, event.observed_at)
                case AccessChanged():
                    document.access.append((event.observed_at, *_tags(event)))
                case DocumentUpserted():
                    document.access.append((event.observed_at, *_tags(event)))
                    if document.upserted is None or event.observed_at > document.upserted:
                        document.upserted, document.content = event.observed_at, event.content

    def living(self) -> Iterator[Living]:
        for document in self._documents.values():
            if document.upserted is None or (document.deleted and document.deleted >= document.upserted):
                continue
            newest = max(at for at, _, _ in document.access)
            ties = [(acl, required) for at, acl, required in document.access if at == newest]
            acl = frozenset.intersection(*(acl for acl, _ in ties))
            required = frozenset.union(*(required for _, required in ties))
            yield Living(document.key, document.content, acl, required)

    def held(self, asker: Asker) -> set[Group]:
        sources = {source for tenant, source, _ in self._documents if tenant == asker.tenant}
        groups = {(source, f"user:{principal}") for source in sources for principal in asker.principals}
        for tag in asker.tags:
            source, slash, rest = tag.partition("/")
            if slash and source in sources:
                groups.add((source, rest))
            else:
                groups |= {(source, tag) for source in sources}
        for (tenant, source, principal), observed in self._memberships.items():
            if tenant == asker.tenant and principal in asker.principals:
                newest = max(at for at, _ in observed)
                of_now = frozenset.intersection(*(names for at, names in observed if at == newest))
                groups |= {(source, name) for name in of_now}
        return groups

    def readable(self, asker: Asker) -> dict[DocumentKey, Living]:
        return may_read(self.living(), asker.tenant, self.held(asker))


def may_read(documents: Iterable[Living], of_tenant: str, held: set[Group]) -> dict[DocumentKey, Living]:
    """The filter itself."""
    results = {}
    for document in documents:
        tenant, source, _ = document.key
        if (
            tenant == of_tenant
            and any((source, tag) in held for tag in document.acl)
            and all((source, tag) in held for tag in document.required)
        ):
            results[document.key] = document
    return results


def is_visible_to(event: Event, readable: dict[DocumentKey, Living], asker: Asker) -> bool:
    if isinstance(event, IdentityChanged):
        return event.tenant == asker.tenant and event.principal in asker.principals
    return (event.tenant, event.source, event.external_id) in readable


def _tags(event: DocumentUpserted | AccessChanged) -> tuple[frozenset[str], frozenset[str]]:
    return frozenset(event.acl_tags), frozenset(event.required_tags)


class World:
    """Three tenants that share the names of everything, and a history in two parts: ``first`` is meant to be indexed,
    ``then`` is meant to be accepted while the stores still hold ``first``."""

    def __init__(self, seed: int, label: str) -> None:
        """label: makes the tenants this world's own, so that many worlds fit in one library."""
        self.seed = seed
        self._dice = random.Random(seed)
        self._moment = datetime.now(UTC) - timedelta(hours=20)
        self._version = 0
        dice = self._dice
        self.tenants = [f"{label}-{n}" for n in range(3)]
        self._sources = dice.sample(SOURCES, 3)
        self._tags = [*dice.sample(TAGS, 5), "staff"]
        self._principals = dice.sample(PRINCIPALS, 3)
        self.askers = [self._asker() for _ in range(8)]
        self.first: list[Event] = [self._upsert(key) for key in self._keys(24)]
        self.first += [self._twin() for _ in range(4)]
        self.first += [self._identity() for _ in range(6)]
        self.first += self._changes(6)
        self.then: list[Event] = self._changes(24)

    def __repr__(self) -> str:
        return f"World(seed={self.seed})"

    def question(self) -> str:
        return f"{COMMON} {' '.join(self._dice.sample(WORDS, 2))}"

    def _now(self) -> datetime:
        self._moment += timedelta(milliseconds=7)
        return self._moment

    def _keys(self, count: int) -> list[DocumentKey]:
        every = [(t, s, n) for t in self.tenants for s in self._sources[:2] for n in NAMES]
        return self._dice.sample(every, count)

    def _asker(self) -> Asker:
        dice = self._dice
        tags = [dice.choice(self._tags) for _ in range(dice.randint(0, 3))]
        tags += [f"{dice.choice(self._sources)}/{dice.choice(self._tags)}" for _ in range(dice.randint(0, 2))]
        tags += dice.sample(NOWHERE, dice.choice([0, 0, 1]))
        principals = dice.sample(self._principals, dice.choice([0, 1, 1, 2]))
        return Asker(dice.choice(self.tenants), tuple(principals), tuple(tags))

    def _access(self) -> tuple[list[str], list[str]]:
        dice = self._dice
        own = [f"user:{principal}" for principal in self._principals]
        acl = dice.sample([*self._tags, *own], dice.choice([0, 1, 1, 2, 3]))
        return acl, dice.sample(self._tags, dice.choice([0, 0, 0, 1, 2]))

    def _upsert(self, key: DocumentKey, content: str | None = None) -> DocumentUpserted:
        dice = self._dice
        self._version += 1
        acl, required = self._access()
        words = dice.choices(WORDS, k=dice.randint(3, 30))
        long = dice.random() < 0.1  # several passages
        text = content or f"{COMMON} {' '.join(words)}." + "".join(
            f"\n\n## {word}\n\n{COMMON} {(word + ' ') * 90}." for word in (words[:3] if long else ())
        )
        tenant, source, external_id = key
        return DocumentUpserted(
            tenant=tenant,
            source=source,
            external_id=external_id,
            observed_at=self._now(),
            version=self._version,
            title=f"{external_id} {dice.choice(WORDS)}",
            content=text,
            media_type="text/markdown",
            acl_tags=acl,
            required_tags=required,
        )

    def _twin(self) -> DocumentUpserted:
        """The text of another document, of any tenant, for other readers."""
        texts = [e.content for e in self.first if isinstance(e, DocumentUpserted)]
        return self._upsert(self._keys(1)[0], self._dice.choice(texts))

    def _identity(self) -> IdentityChanged:
        dice = self._dice
        joinable = [tag for tag in self._tags if not tag.startswith("user:")]  # such a group is refused
        return IdentityChanged(
            tenant=dice.choice(self.tenants),
            source=dice.choice(self._sources),
            observed_at=self._now(),
            principal=dice.choice(self._principals),
            groups=dice.sample(joinable, min(len(joinable), dice.choice([0, 1, 2, 3]))),
        )

    def _changes(self, count: int) -> list[Event]:
        return [event for _ in range(count) for event in self._change()]

    def _change(self) -> Sequence[Event]:
        dice = self._dice
        known = [e for e in self.first if isinstance(e, DocumentUpserted)]
        of = dice.choice(known)
        named = {"tenant": of.tenant, "source": of.source, "external_id": of.external_id}
        key = (of.tenant, of.source, of.external_id)
        acl, required = self._access()
        kind = dice.choice(
            ("access", "nobody", "tie", "late", "deleted", "recreated", "edited", "identity", "identity")
        )
        changed = AccessChanged(**named, observed_at=self._now(), acl_tags=acl, required_tags=required)
        match kind:
            case "nobody":
                return [changed.model_copy(update={"acl_tags": []})]
            case "tie":  # two connectors that looked at the same moment: the narrower holds
                other, needed = self._access()
                return [changed, changed.model_copy(update={"acl_tags": other, "required_tags": needed})]
            case "late":  # a wider access that was seen before the narrower one and arrives after it
                early = changed.model_copy(update={"acl_tags": self._tags, "required_tags": []})
                return [changed.model_copy(update={"observed_at": self._now()}), early]
            case "deleted":
                return [DocumentDeleted(**named, observed_at=self._now(), version=0)]
            case "recreated":
                return [DocumentDeleted(**named, observed_at=self._now(), version=0), self._upsert(key)]
            case "edited":
                return [self._upsert(key)]
            case "identity":
                return [self._identity()]
            case _:
                return [changed]
