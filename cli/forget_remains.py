"""Names what remains of something that ``penstock forget`` has erased: where, until when, and why."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from pipeline.kafka.admin import retention_ms
from pipeline.kafka.client import security
from pipeline.runtime.settings import KafkaSettings, Settings
from query.settings import load as load_query
from topics.registry import CONVERSATIONS, DEAD_LETTERS, IDENTITIES

if TYPE_CHECKING:
    from cli.forget import Work

ANSWER_RETENTION, VECTOR_RETENTION = timedelta(minutes=5), timedelta(hours=1)
"""In the memory of query services (query.retrieval.cache, query.embedding.shared)."""


class Part(NamedTuple):
    where: str
    until: str | None
    """RFC 3339; None: see ``why``."""
    why: str


async def remains(work: Work, forgot: str, now: datetime) -> list[Part]:
    settings = work.settings
    return [
        *await _in_kafka(settings.kafka, forgot, now),
        *_in_copies(settings, now),
        *(_of_person(work, now) if forgot == "person" else _of_documents(settings, forgot, now)),
        *_by_age(settings, forgot, now),
        *_yet_to_do(work),
    ]


async def _in_kafka(kafka: KafkaSettings, forgot: str, now: datetime) -> list[Part]:
    retention_by_topic = await retention_ms(kafka.bootstrap, prefix=kafka.topic_prefix, security=security(kafka))
    of_people = {CONVERSATIONS.name, DEAD_LETTERS.name}
    why = "messages sent before expire with the topic's retention"
    parts = [
        _part(f"Kafka {topic}", now + timedelta(milliseconds=ms), why)
        for topic, ms in sorted(retention_by_topic.items())
        if ms >= 0 and (forgot != "person" or topic in of_people)
    ]
    if forgot != "document":
        why = "the topic is compacted: names and tombstones are removed about a day after the next compaction"
        parts.append(_part(f"Kafka {IDENTITIES.name}", None, why))
    return parts


def _in_copies(settings: Settings, now: datetime) -> Iterator[Part]:
    days = settings.retention.backups_days
    why = "run this command again after restoring a backup"
    why += "" if days else "; PENSTOCK_RETENTION_BACKUPS_DAYS is 0"
    yield _part("backups of Postgres", _after(now, days), why)
    why = "not returned any more, and dropped by then"
    yield _part("memory of query services: answers", now + ANSWER_RETENTION, why)
    why = "without the words of the questions"
    yield _part("memory of query services: vectors of questions", now + VECTOR_RETENTION, why)
    if settings.trail != "off":
        why = "the audit trail of who was shown or did what; records are removed only by age"
        yield _part("postgres trail.records", _after(now, settings.retention.trail_days), why)


def _of_person(work: Work, now: datetime) -> Iterator[Part]:
    why = (
        "documents that name the person in a text, a title or a longer value of metadata, and access tags of their"
        " source: erase or change those separately"
    )
    yield _part("documents", None, why)
    why = "doubtful answers to questions of the person that no conversation names: without the name"
    yield _part("Postgres answer_reviews", _after(now, work.settings.retention.reviews_days), why)
    if not load_query().feedback.secrets():
        why = "PENSTOCK_FEEDBACK_KEYS is not set here, so rows of the person cannot be recognised: removed by age"
        yield _part("Postgres answer_feedback", None, why)
    if work.pending_entries:
        why = (
            f"{work.pending_entries} documents whose entries are yet to be written anew: those that named the person,"
            " if an earlier run of this command did not wait for them"
        )
        yield _part("Elasticsearch", None, why)
    if work.promoted_from_feedback:
        why = (
            f"{work.promoted_from_feedback} golden questions that were promoted from feedback: those of the person"
            " under a key that is not in PENSTOCK_FEEDBACK_KEYS here cannot be recognised"
        )
        yield _part("Postgres eval_queries", None, why)


def _of_documents(settings: Settings, forgot: str, now: datetime) -> Iterator[Part]:
    why = "a row with the id only, so that late events do not bring the document back"
    yield _part("Postgres documents", None, why)
    clone = "a repository's clone keeps the history"
    if forgot == "document":
        yield _part("the connectors' folder: clones", None, f"{clone} as long as the repository does")
        why = "a source may remember its name until it reads everything again, and git after that"
        yield _part("Postgres connector_memory", None, why)
    else:
        yield _part("the connectors' folder: clones", None, f"{clone}, until the connectors worker next cleans up")
    why = "external ids in the news of the withdrawal, until the receivers of webhooks take it"
    yield _part("Postgres webhook_deliveries", now + timedelta(seconds=settings.webhooks.keep_seconds), why)


def _by_age(settings: Settings, forgot: str, now: datetime) -> Iterator[Part]:
    if forgot in ("person", "tenant"):
        days = settings.retention.budgets_days
        why = "today's use of budgets, with the caller's name, where a query service has yet to record some of it"
        yield _part("Postgres query_use", _after(now, days + 1) if days else None, why)
    if forgot in ("document", "source"):
        why = "feedback on passages that were replaced or deleted before; their document is no longer known"
        yield _part("Postgres answer_feedback", _after(now, settings.retention.feedback_days), why)


def _yet_to_do(work: Work) -> Iterator[Part]:
    if work.left_entries:
        why = f"{work.left_entries} surplus entries: `penstock audit --repair` removes them"
        yield _part("Elasticsearch", None, why)
    if work.erased["postgres uploads"]:
        why = "the files, for at most ten minutes while the connectors worker runs"
        yield _part("the connectors' folder", None, why)


def _part(where: str, until: datetime | None, why: str) -> Part:
    return Part(where, until.isoformat(timespec="seconds") if until else None, why)


def _after(now: datetime, days: float) -> datetime | None:
    """The end of a retention; None where nothing is removed by age."""
    return now + timedelta(days=days) if days else None
