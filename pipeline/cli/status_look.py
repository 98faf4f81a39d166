"""Everything that ``penstock status`` shows, asked at once, each part in its own short time: half a world is shown as
half a world, and what did not answer is named."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TypeVar

from elasticsearch import AuthorizationException
from prometheus_client.parser import text_string_to_metric_families

from deploy.local.stack import Stack
from pipeline.cli.status_ledger import address, declared_here
from pipeline.cli.status_ledger import look as look_at_ledger
from pipeline.cli.status_local import local
from pipeline.conversations.record import Conversations
from pipeline.core.errors import PenstockError
from pipeline.groups import group, groups, kafka_translated
from pipeline.settings import Settings
from pipeline.stages.detect import Detect
from pipeline.stages.identities import Identities
from pipeline.stages.keywords import KeywordSink
from pipeline.stages.vectors import VectorSink
from pipeline.stores.elasticsearch import connect, translated
from topics.offsets import lag

T = TypeVar("T")

PART_SECONDS = 10.0
"""A machine that is busy is no service that is away: Kafka is asked for five groups, after everything was imported."""
LEDGER_SECONDS = 15.0
"""Its parts have three seconds each of their own."""
STAGES = (Detect, Identities, Conversations, VectorSink, KeywordSink)
LEDGER = (
    "generations",
    "freshness",
    "pending",
    "dead_letters",
    "skipped",
    "connectors",
    "audit",
    "embedding",
    "producers",
)
SUCCESS = "penstock_canary_success_timestamp_seconds"


async def look(stack: Stack, settings: Settings) -> dict[str, Any]:
    """Never raises because something is away: that is what it tells. docs/status.md describes the parts."""
    away: list[str] = []
    here, ledger, stages, entries = await asyncio.gather(
        _part(away, "this machine", PART_SECONDS, asyncio.to_thread(local, stack)),
        _part(
            away,
            "Postgres",
            LEDGER_SECONDS,
            look_at_ledger(settings.postgres, declared_here(), away, mode=settings.producers),
        ),
        _part(away, "Kafka", PART_SECONDS, _stages(settings)),
        _part(away, "Elasticsearch", PART_SECONDS, _elasticsearch(settings)),
    )
    is_known = here is not None
    here = here or {"services": {}, "workers": [], "query": {"url": None, "pid": None, "ready": False}}
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        **here,
        "machine": {"ready": is_known},
        "services": _services(here["services"], settings, {
            "kafka": stages is not None, "postgres": ledger is not None, "elasticsearch": entries is not None,
        }),
        "stages": stages,
        **{name: (ledger or {}).get(name) for name in LEDGER},
        "canaries": await _canaries(here["workers"]),
        "extraction": await _extraction(here["workers"]),
        "away": away,
    }  # fmt: skip


def ready(told: Mapping[str, Any]) -> bool:
    """Whether all that is meant to run here does."""
    everything = [told["machine"], *told["services"].values(), *told["workers"]]
    if told["query"]["url"]:
        everything.append(told["query"])
    return all(one["ready"] for one in everything)


async def _part(away: list[str], what: str, seconds: float, work: Awaitable[T]) -> T | None:
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        away.append(f"{what} did not answer within {seconds:g} s")
    except (PenstockError, OSError) as error:
        away.append(str(error) if what in str(error) else f"{what}: {error}")
    return None


def _services(found: Mapping[str, Any], settings: Settings, answers: Mapping[str, bool]) -> dict[str, Any]:
    """A service that this machine's stack does not run is where the settings say: ready where it has just answered."""
    told = {}
    for name, answered in answers.items():
        one = dict(found.get(name) or {"url": None, "pid": None, "ready": False})
        if one["pid"] is None and (answered or _is_set(settings, name)):
            one |= {"url": _address(settings, name), "ready": answered}
        told[name] = one
    return told


def _is_set(settings: Settings, name: str) -> bool:
    """Somebody said where it is: the default is nobody's word."""
    part, field = {"kafka": (settings.kafka, "bootstrap"), "postgres": (settings.postgres, "dsn")}.get(
        name, (settings.elasticsearch, "url")
    )
    return field in part.model_fields_set


def _address(settings: Settings, name: str) -> str:
    """For people: never with a password."""
    if name == "kafka":
        return settings.kafka.bootstrap
    if name == "elasticsearch":
        return settings.elasticsearch.url.rpartition("@")[2]
    return address(settings.postgres)


async def _stages(settings: Settings) -> list[dict[str, Any]]:
    """For each stage: how many workers are in its group, on which hosts, and how far it is behind, by lane."""
    topics = sorted({topic.name for stage in STAGES for topic in stage.topics.values()})
    found = []
    async with groups(settings.kafka) as kafka:
        with kafka_translated():
            logs = await kafka.logs(topics, datetime.now(UTC))
            for stage in STAGES:
                at = await kafka.committed(group(stage.name))
                members = await kafka.members(group(stage.name))
                behind = {lane: lag(logs, at, topic.name) for lane, topic in stage.topics.items()}
                found.append(
                    {"stage": stage.name, "members": len(members), "hosts": sorted(set(members)), "lag": behind}
                )
    return found


async def _elasticsearch(settings: Settings) -> bool:
    """Whoever searches only has no right to ask for the cluster's health: that it says so is an answer too."""
    es = connect(settings.elasticsearch)
    try:
        with translated(_address(settings, "elasticsearch")), suppress(AuthorizationException):
            await es.options(request_timeout=PART_SECONDS, max_retries=0, retry_on_timeout=False).cluster.health()
    finally:
        await es.close()
    return True


async def _canaries(workers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """When each source's canary was last found, by store, as the canary worker here says; None: none runs here."""
    watching = [one for one in workers if one["name"].partition("-")[0] == "canary" and one["ready"]]
    if not watching:
        return None
    pages = await asyncio.gather(*(asyncio.to_thread(_page, one["health"], "/metrics") for one in watching))
    now = datetime.now(UTC).timestamp()
    found: dict[str, dict[str, float]] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == SUCCESS:
                    ages = found.setdefault(sample.labels["source"], {})
                    ages[sample.labels["store"]] = round(max(0.0, now - sample.value), 1)
    return [{"source": source, "found_seconds_ago": ages} for source, ages in sorted(found.items())]


async def _extraction(workers: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """How files are read, {files, kernel, of}: as the connectors worker here says of itself (it may run in a container,
    or with other settings), else what this machine would do. Of several that are not alike, one that confines nothing.
    """
    running = [one for one in workers if one["name"].partition("-")[0] == "connectors" and one["ready"]]
    pages = await asyncio.gather(*(asyncio.to_thread(_page, one["health"], "/status") for one in running))
    told = [{**one, "of": "the connectors worker"} for one in map(_extraction_of, pages) if one is not None]
    if not told:
        from connectors.extraction.remote import condition  # brings an HTTP client along

        return {**await condition(), "of": "this machine"}
    return min(told, key=lambda one: one["files"] == "confined")


def _extraction_of(page: str) -> dict[str, str] | None:
    try:
        found = json.loads(page)["extraction"]
        return {"files": str(found["files"]), "kernel": str(found["kernel"])}
    except (ValueError, KeyError, TypeError):
        return None


def _page(address: str, path: str) -> str:
    """What it answers; nothing when it does not within two seconds."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()
