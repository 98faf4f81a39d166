"""Random changes of documents at a source, and the events that a connector publishes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from random import Random

from pipeline.core.model import Lane
from tests.faults.model import Event
from topics.messages import AccessChanged, DocumentDeleted, DocumentUpserted

TAGS = ("staff", "board", "guests")
NEEDED = ("nda", "eu")
"""The required tags that documents may have."""
UNEMBEDDABLE = "unembeddable"
"""The embedding model permanently refuses a chunk with this word; keyword search has it."""
SECTIONS = 24
"""The number of sections that texts consist of: so few that documents share sections, and repeat them."""

Published = tuple[Lane, Event]


@dataclass(frozen=True)
class Page:
    """A document in the state that its source has."""

    sections: tuple[int, ...]
    title: str
    version: int
    acl: tuple[str, ...] = ("staff",)
    required: tuple[str, ...] = ()
    author: str | None = None
    metadata: dict[str, int | list[str]] = field(default_factory=dict)
    media_type: str = "text/markdown"
    source_url: str | None = None
    modified_at: datetime | None = None


def section(n: int) -> str:
    word = UNEMBEDDABLE if n == SECTIONS - 1 else f"subject{n}"
    sentences = " ".join(
        f"Detail {k * 7919 % 1000 + n} of {word} stands in line {k} and is told at some length here."
        for k in range(4 + n % 5)
    )
    if n % 3 == 0:
        sentences += f"\n\n## Ticket REF-{1000 + n}\n\nIt is seen in src/part{n}.py and told of under REF-{1000 + n}."
    return f"# Section {n}\n\nThis is about {word}. {sentences}"


class Story:
    """The history of one source. ``observed_at`` never decreases, except in what a crawler read earlier and publishes
    later (backfill).

    The clock is logical: it starts at ``begin``, and each step is a millisecond or, sometimes, zero.
    """

    def __init__(self, tenant: str, names: list[str], begin: datetime, *, source: str = "wiki") -> None:
        self.tenant, self.source, self.names = tenant, source, names
        self.events: dict[str, list[Event]] = {name: [] for name in names}
        """All published events by document, from which the model computes the expected state."""
        self._pages: dict[str, Page] = {}
        self._crawled: list[DocumentUpserted] = []
        """Events that a crawler has read and not published yet."""
        self._now = begin
        self._versions: dict[str, int] = {}

    def change(self, kind: str, name: str, rng: Random) -> list[Published]:
        """Change a document; returns the events that its connector publishes, in this order."""
        published = KINDS[kind](self, name, rng)
        for _, event in published:
            self.events[event.external_id].append(event)
        return published

    # Changes at the source

    def rewrite(self, name: str, rng: Random) -> list[Published]:
        sections = tuple(rng.randrange(SECTIONS) for _ in range(rng.randint(1, 7)))
        page = self._pages.get(name)
        page = replace(page, sections=sections) if page else self._new(name, sections, rng)
        return self._put(name, page)

    def edit(self, name: str, rng: Random) -> list[Published]:
        page = self._page(name, rng)
        sections = list(page.sections)
        where = rng.randrange(len(sections) + 1)
        if where < len(sections) and rng.random() < 0.6:
            sections[where] = rng.randrange(SECTIONS)
        else:
            sections.insert(where, rng.choice(sections) if sections and rng.random() < 0.3 else rng.randrange(SECTIONS))
        return self._put(name, replace(page, sections=tuple(sections)))

    def shrink(self, name: str, rng: Random) -> list[Published]:
        page = self._page(name, rng)
        return self._put(name, replace(page, sections=page.sections[: rng.randint(0, max(0, len(page.sections) - 1))]))

    def retitle(self, name: str, rng: Random) -> list[Published]:
        page = self._page(name, rng)
        n = rng.randrange(1000)
        modified_at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=n)
        change = rng.choice(
            (
                {"title": f"Title {n} of REF-{n}", "source_url": f"https://wiki.example.com/{n}"},
                {"author": f"author {n}", "modified_at": modified_at},
                {"metadata": {"n": n, "labels": [f"label{n % 7}"]}},
            )
        )
        return self._put(name, replace(page, **change))  # type: ignore[arg-type]

    def retype(self, name: str, rng: Random) -> list[Published]:
        """Change the media type, so that the same text is chunked again."""
        page = self._page(name, rng)
        other = "text/plain" if page.media_type == "text/markdown" else "text/markdown"
        return self._put(name, replace(page, media_type=other))

    def touch(self, name: str, rng: Random) -> list[Published]:
        return self._put(name, self._page(name, rng))

    def delete(self, name: str, rng: Random) -> list[Published]:
        """Delete a document, which need not exist."""
        page = self._pages.pop(name, None)
        event = DocumentDeleted(
            tenant=self.tenant,
            source=self.source,
            external_id=name,
            observed_at=self._tick(rng),
            version=page.version if page else 0,
        )
        return [("live", event)]

    def rename(self, name: str, rng: Random) -> list[Published]:
        page = self._page(name, rng)
        other = rng.choice(self.names)
        gone = self.delete(name, rng)
        put = self._put(other, replace(page, version=self._versions.get(other, 0)))
        return gone + put if rng.random() < 0.5 else put + gone

    def twin(self, name: str, rng: Random) -> list[Published]:
        page = self._page(rng.choice(self.names), rng)
        return self._put(name, replace(page, version=self._versions.get(name, 0)))

    def access(self, name: str, rng: Random) -> list[Published]:
        """Change the access set of a document, which need not exist."""
        acl = tuple(rng.sample(TAGS, rng.randint(1, 2)))
        return self._access(name, acl, tuple(rng.sample(NEEDED, rng.choice((0, 0, 1, 2)))), rng)

    def revoke(self, name: str, rng: Random) -> list[Published]:
        return self._access(name, (), (), rng)

    def hide(self, name: str, rng: Random) -> list[Published]:
        """Change the text and the access set in one event."""
        page = self._page(name, rng)
        sections = (*page.sections, rng.randrange(SECTIONS))
        return self._put(name, replace(page, sections=sections, acl=tuple(rng.sample(TAGS, rng.randint(0, 2)))))

    # Unusual versions

    def restore(self, name: str, rng: Random) -> list[Published]:
        """Restore an older content with a higher version."""
        old = [e for e in self.events[name] if isinstance(e, DocumentUpserted)]
        if not old:
            return self.rewrite(name, rng)
        page = self._page(name, rng)
        was = rng.choice(old)
        self._pages[name] = replace(page, version=self._bump(name))
        event = was.model_copy(
            update={"version": self._versions[name], "observed_at": self._tick(rng), "acl_tags": sorted(page.acl)}
        )
        return [("live", event)]

    def clash(self, name: str, rng: Random) -> list[Published]:
        """Publish another content with the same version."""
        page = self._page(name, rng)
        changed = replace(page, sections=(*page.sections, rng.randrange(SECTIONS)))
        return self._put(name, changed, version=page.version)

    def restart(self, name: str, rng: Random) -> list[Published]:
        """Delete and create a document, so that its versions start at 1 again."""
        gone = self.delete(name, rng)
        self._versions[name] = 0
        self._now += timedelta(milliseconds=1)
        return gone + self.rewrite(name, rng)

    def reset(self, name: str, rng: Random) -> list[Published]:
        """Publish a lower version that is observed later. It is ignored until the higher one is deleted."""
        page = self._page(name, rng)
        changed = replace(page, sections=(*page.sections, rng.randrange(SECTIONS)))
        return self._put(name, changed, version=max(0, page.version - rng.randint(1, 3)))

    # The crawler

    def crawl(self, name: str, rng: Random) -> list[Published]:
        """Let a crawler read the document to publish it later, or publish what a crawler has read before."""
        if (page := self._pages.get(name)) and (not self._crawled or rng.random() < 0.6):
            self._crawled.append(self._upsert(name, page, page.version, rng))
            if rng.random() < 0.7:
                return []
        if not self._crawled:
            return []
        return [("backfill", self._crawled.pop(rng.randrange(len(self._crawled))))]

    def _access(self, name: str, acl: tuple[str, ...], required: tuple[str, ...], rng: Random) -> list[Published]:
        if page := self._pages.get(name):
            self._pages[name] = replace(page, acl=acl, required=required)
        event = AccessChanged(
            tenant=self.tenant,
            source=self.source,
            external_id=name,
            observed_at=self._tick(rng),
            acl_tags=list(acl),
            required_tags=list(required),
        )
        return [("live", event)]

    def _page(self, name: str, rng: Random) -> Page:
        return self._pages.get(name) or self._new(name, tuple(rng.sample(range(SECTIONS), 3)), rng)

    def _new(self, name: str, sections: tuple[int, ...], rng: Random) -> Page:
        acl = tuple(rng.sample(TAGS, rng.choice((0, 1, 1, 1, 2))))
        return Page(sections, name, self._versions.get(name, 0), acl, tuple(rng.sample(NEEDED, rng.choice((0, 0, 1)))))

    def _put(self, name: str, page: Page, *, version: int | None = None) -> list[Published]:
        page = replace(page, version=self._bump(name) if version is None else version)
        self._pages[name] = page
        return [("live", self._upsert(name, page, page.version, None))]

    def _bump(self, name: str) -> int:
        self._versions[name] = self._versions.get(name, 0) + 1
        return self._versions[name]

    def _upsert(self, name: str, page: Page, version: int, rng: Random | None) -> DocumentUpserted:
        return DocumentUpserted(
            tenant=self.tenant,
            source=self.source,
            external_id=name,
            observed_at=self._tick(rng),
            version=version,
            title=page.title,
            content="\n\n".join(section(n) for n in page.sections),
            media_type=page.media_type,
            acl_tags=list(page.acl),
            required_tags=list(page.required),
            author=page.author,
            metadata=dict(page.metadata),
            source_url=page.source_url,
            source_modified_at=page.modified_at,
        )

    def _tick(self, rng: Random | None) -> datetime:
        if rng is None or rng.random() > 0.1:
            self._now += timedelta(milliseconds=1)
        return self._now


KINDS: dict[str, Callable[[Story, str, Random], list[Published]]] = {
    "rewrite": Story.rewrite,
    "edit": Story.edit,
    "shrink": Story.shrink,
    "retitle": Story.retitle,
    "retype": Story.retype,
    "touch": Story.touch,
    "delete": Story.delete,
    "rename": Story.rename,
    "twin": Story.twin,
    "access": Story.access,
    "revoke": Story.revoke,
    "hide": Story.hide,
    "restore": Story.restore,
    "clash": Story.clash,
    "restart": Story.restart,
    "reset": Story.reset,
    "crawl": Story.crawl,
}
