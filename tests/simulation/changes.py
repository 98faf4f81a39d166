"""The steps of a history: changes of documents, memberships, queries and disasters, as a list that can be shrunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from random import Random
from typing import Any

from pipeline.core.model import Chunk
from tests.faults.story import KINDS, SECTIONS, TAGS, UNEMBEDDABLE, Page, Story
from topics.messages import DocumentUpserted
from topics.registry import DOCUMENTS_BACKFILL, DOCUMENTS_LIVE, IDENTITIES, INDEX_BACKFILL, INDEX_LIVE

NAMES = ("a", "b", "c")
PERSONS = ("ann", "bob")
STAGES = ("detect", "vectors", "keywords", "identities")
SERVICES = ("postgres", "kafka", "elasticsearch", "embedding")
CONNECTED_SHARE = 0.35
"""The share of histories whose documents come from a source by connectors."""

KAFKA_LOSES_SHARE = 0.06
"""The share of histories in which Kafka loses records, of those in which Postgres loses none: each keeps what the other
lost."""
LOSING = (DOCUMENTS_LIVE, DOCUMENTS_LIVE, DOCUMENTS_BACKFILL, INDEX_LIVE, INDEX_BACKFILL, IDENTITIES)

UNDISTURBING = ("change", "membership", "source", "groups", "broken", "query")
"""Kinds of steps that break nothing."""


@dataclass(frozen=True)
class Step:
    """One thing that happens to the world at a moment."""

    at: float
    kind: str
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.at:8.3f} s  {self.kind} {' '.join(str(arg) for arg in self.args)}"


class ShortStory(Story):
    """The fault suite's changes, with texts of one word a section."""

    def wait_until(self, moment: datetime) -> None:
        """From now on, changes are observed at this time or later."""
        self._now = max(self._now, moment)

    def _upsert(self, name: str, page: Page, version: int, rng: Random | None) -> DocumentUpserted:
        content = "\n\n".join(UNEMBEDDABLE if n == SECTIONS - 1 else f"subject{n}" for n in page.sections)
        return DocumentUpserted(
            tenant=self.tenant,
            source=self.source,
            external_id=name,
            observed_at=self._tick(rng),
            version=version,
            title=page.title,
            content=content,
            media_type=page.media_type,
            acl_tags=list(page.acl),
            required_tags=list(page.required),
            author=page.author,
            metadata=dict(page.metadata),
        )


def cut(text: str, *_: Any, **__: Any) -> list[Chunk]:
    """A chunk a paragraph: stands in for the product's chunker, which takes longer than everything else."""
    chunks, start = [], 0
    for paragraph in text.split("\n\n"):
        if paragraph.strip():
            chunks.append(Chunk(paragraph, ((start, start + len(paragraph)),), 1))
        start += len(paragraph) + 2
    return chunks


def is_connected(seed: int) -> bool:
    """Whether the documents of this history come from a source by connectors."""
    return Random(f"connected {seed}").random() < CONNECTED_SHARE


def drawn(rng: Random, *, connected: bool = False) -> list[Step]:
    """The steps of one history, in their order."""
    steps: list[Step] = []
    now = 0.0
    pace = rng.choice((0.05, 1.0, 10.0, 60.0))
    names = NAMES[: rng.randint(1, len(NAMES))]
    disasters = rng.choice((0.0, 0.0, 0.15, 0.4))
    for _ in range(rng.randint(3, 12)):
        now += rng.expovariate(1.0) * pace
        roll = rng.random()
        if roll < disasters:
            steps.append(_disaster(now, rng, connected=connected))
        elif roll < 0.12 + disasters:
            steps.append(_regrouped(now, rng) if connected else _member(now, rng))
        elif roll < 0.15 + disasters:
            steps.append(Step(now, "broken", (rng.choice(names),)))
        elif connected:
            steps.append(Step(now, "source", (rng.choice(SOURCE_KINDS), rng.choice(names), rng.getrandbits(16))))
        else:
            steps.append(Step(now, "change", (rng.choice(_KINDS), rng.choice(names), rng.getrandbits(16))))
    for _ in range(rng.randint(1, 4)):
        steps.append(Step(rng.uniform(0.0, now + 5.0), "query", (rng.choice(PERSONS), rng.choice(TAGS))))
    if rng.random() < KAFKA_LOSES_SHARE and not any(step.kind == "lost tail" for step in steps):
        steps.append(_kafka_loses(rng.uniform(0.0, now + 5.0), rng))
    return sorted(steps, key=lambda step: step.at)


_KINDS: Sequence[str] = sorted(KINDS)
SOURCE_KINDS = (
    "rewrite",
    "edit",
    "shrink",
    "retitle",
    "retype",
    "touch",
    "delete",
    "twin",
    "access",
    "revoke",
    "hide",
    "rename",
    "back",
    "back",
    "back",
    "unreadable",
)
"""Changes at a source: the changes of a story that a person makes, the revert of a document's last change, and a
document whose text cannot be read."""


def _member(now: float, rng: Random) -> Step:
    groups = tuple(rng.sample(TAGS, rng.randint(0, 2)))
    return Step(now, "membership", (rng.choice(PERSONS), groups))


def _regrouped(now: float, rng: Random) -> Step:
    """Draw the members of one tag: principals, and tags whose holders hold it too."""
    tag = rng.choice(TAGS)
    members = tuple(rng.sample(PERSONS, rng.randint(0, 2)))
    of = tuple(rng.sample((*TAGS, f"user:{PERSONS[0]}"), rng.choice((0, 0, 1))))
    return Step(now, "groups", (tag, members, of))


def _kafka_loses(now: float, rng: Random) -> Step:
    topic = rng.choice(LOSING).name
    if rng.random() < 0.3:
        return Step(now, "topic made anew", (topic, rng.random() < 0.5))
    return Step(now, "lost records", (topic, rng.randrange(2), rng.randint(1, 6)))


def _disaster(now: float, rng: Random, *, connected: bool) -> Step:
    stages = (*STAGES[:3], *(("connectors",) * 3 if connected else ()))
    services = (*SERVICES, "the source") if connected else SERVICES
    kinds = ("kill", "kill", "pause", "pause", "outage", "join", "rewind", "lost tail")
    stage = rng.choice(stages)
    match rng.choice((*kinds, "lease lost", "lease lost", "expired") if connected else kinds):
        case "kill":
            return Step(now, "kill", (stage, rng.getrandbits(4), round(rng.uniform(0.1, 20.0), 2)))
        case "pause":
            return Step(
                now, "pause", (stage, rng.getrandbits(4), round(rng.choice((2.0, 20.0, 150.0)) * rng.random(), 2))
            )
        case "outage":
            return Step(now, "outage", (rng.choice(services), round(rng.uniform(0.5, 90.0), 2)))
        case "join":
            return Step(now, "join", (stage,))
        case "rewind":
            return Step(now, "rewind", (rng.choice(STAGES),))
        case "lost tail":
            return Step(now, "lost tail", (rng.randint(1, 12),))
        case kind:
            return Step(now, kind)
