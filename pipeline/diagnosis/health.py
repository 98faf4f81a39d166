"""The health of the whole system, for ``penstock status``.

All parts are read concurrently, each with a time limit of its own. A part that does not answer is named in ``away``,
and the others are reported. docs/status.md describes the report.
"""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TypeVar

from elasticsearch import AuthorizationException
from prometheus_client.parser import text_string_to_metric_families

from pipeline.analysis.tasks import TOPICS
from pipeline.conversations.record import Conversations
from pipeline.core.errors import PenstockError
from pipeline.diagnosis.connector_status import Schedule
from pipeline.diagnosis.lag import StageTopics, read_progress
from pipeline.diagnosis.ledger import address, ledger_report
from pipeline.runtime.settings import Settings
from pipeline.stages.detect import Detect
from pipeline.stages.identities import Identities
from pipeline.stages.keywords import KeywordSink
from pipeline.stages.vectors import VectorSink
from pipeline.stores.elasticsearch import connect, translated

T = TypeVar("T")
LocalProcesses = Callable[[], dict[str, Any]]
"""Blocking; returns {services, workers, query}: the processes of the local stack on this machine."""
Extraction = Callable[[], Awaitable[Mapping[str, str]]]
"""Returns {files, kernel}: how this machine would read files."""

PART_SECONDS = 10.0
"""Long, because a busy machine is not an outage: five consumer groups are read after everything was imported."""
LEDGER_SECONDS = 15.0
"""The ledger's parts have limits of three seconds each."""
HTTP_SECONDS = 2.0
STAGES = (Detect, Identities, Conversations, VectorSink, KeywordSink)
LEDGER_PARTS = (
    "generations",
    "freshness",
    "pending",
    "dead_letters",
    "skipped",
    "connectors",
    "audit",
    "embedding",
    "producers",
    "webhooks",
)
CANARY_SUCCESS_METRIC = "penstock_canary_success_timestamp_seconds"
NOT_RUNNING: dict[str, Any] = {"url": None, "pid": None, "ready": False}


async def health_report(
    local_processes: LocalProcesses, settings: Settings, *, schedules: Mapping[str, Schedule], extraction: Extraction
) -> dict[str, Any]:
    """The report of `penstock status`. A service that is away is listed in it, and raises nothing."""
    away: list[str] = []
    local, ledger, stages, elasticsearch = await asyncio.gather(
        _part(away, "this machine", PART_SECONDS, asyncio.to_thread(local_processes)),
        _part(
            away,
            "Postgres",
            LEDGER_SECONDS,
            ledger_report(settings.postgres, schedules, away, mode=settings.producers),
        ),
        _part(away, "Kafka", PART_SECONDS, _stages(settings)),
        _part(away, "Elasticsearch", PART_SECONDS, _elasticsearch(settings)),
    )
    machine_ready = local is not None
    local = local or {"services": {}, "workers": [], "query": NOT_RUNNING}
    answered = {
        "kafka": stages is not None,
        "postgres": ledger is not None,
        "elasticsearch": elasticsearch is not None,
    }
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        **local,
        "machine": {"ready": machine_ready},
        "services": _services(local["services"], settings, answered),
        "stages": stages,
        **{name: (ledger or {}).get(name) for name in LEDGER_PARTS},
        "canaries": await _canaries(local["workers"]),
        "extraction": await _extraction(local["workers"], extraction),
        "away": away,
    }


async def _part(away: list[str], name: str, seconds: float, work: Awaitable[T]) -> T | None:
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        away.append(f"{name} did not answer within {seconds:g} s")
    except (PenstockError, OSError) as error:
        away.append(str(error) if name in str(error) else f"{name}: {error}")
    return None


def _services(local: Mapping[str, Any], settings: Settings, answered: Mapping[str, bool]) -> dict[str, Any]:
    """A service that this machine's stack does not run is that of the settings, and ready if it has just answered."""
    services = {}
    for name, has_answered in answered.items():
        service = dict(local.get(name) or NOT_RUNNING)
        if service["pid"] is None and (has_answered or _is_set(settings, name)):
            service |= {"url": _address(settings, name), "ready": has_answered}
        services[name] = service
    return services


def _is_set(settings: Settings, service: str) -> bool:
    """True: the service's address was set, and is not the default."""
    part, field = {"kafka": (settings.kafka, "bootstrap"), "postgres": (settings.postgres, "dsn")}.get(
        service, (settings.elasticsearch, "url")
    )
    return field in part.model_fields_set


def _address(settings: Settings, service: str) -> str:
    """The service's address without a password, for people."""
    if service == "kafka":
        return settings.kafka.bootstrap
    if service == "elasticsearch":
        return settings.elasticsearch.url.rpartition("@")[2]
    return address(settings.postgres)


async def _stages(settings: Settings) -> list[dict[str, Any]]:
    """For each stage, and each task of the analysis: the workers in its group, their hosts, and its lag by lane."""
    stages: StageTopics = {stage.name: stage.topics for stage in STAGES} | {
        task: {"live": topics[0]} for task, topics in TOPICS.items()
    }
    progress = await read_progress(settings.kafka, stages, members=True)
    return [
        {"stage": stage, "members": len(hosts), "hosts": sorted(set(hosts)), "lag": progress.lag_by_lane(stage)}
        for stage, hosts in progress.hosts.items()
    ]


async def _elasticsearch(settings: Settings) -> bool:
    """A role that may only search has no right to read the cluster's health; the refusal is an answer, too."""
    es = connect(settings.elasticsearch)
    try:
        with translated(_address(settings, "elasticsearch")), suppress(AuthorizationException):
            await es.options(request_timeout=PART_SECONDS, max_retries=0, retry_on_timeout=False).cluster.health()
    finally:
        await es.close()
    return True


def _ready_workers(workers: Iterable[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    return [worker for worker in workers if worker["name"].partition("-")[0] == name and worker["ready"]]


async def _canaries(workers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Seconds since each source's canary was last found, by store, according to this machine's canary workers; None:
    none runs here."""
    watching = _ready_workers(workers, "canary")
    if not watching:
        return None
    pages = await asyncio.gather(*(asyncio.to_thread(_get, worker["health"], "/metrics") for worker in watching))
    now = datetime.now(UTC).timestamp()
    ages: dict[str, dict[str, float]] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == CANARY_SUCCESS_METRIC:
                    by_store = ages.setdefault(sample.labels["source"], {})
                    by_store[sample.labels["store"]] = round(max(0.0, now - sample.value), 1)
    return [{"source": source, "found_seconds_ago": by_store} for source, by_store in sorted(ages.items())]


async def _extraction(workers: Sequence[Mapping[str, Any]], extraction: Extraction) -> dict[str, str]:
    """How files are read, {files, kernel, of}: by the connectors worker here (it may run in a container, or with other
    settings), else by this machine. Of several workers, one that confines nothing takes precedence."""
    running = _ready_workers(workers, "connectors")
    pages = await asyncio.gather(*(asyncio.to_thread(_get, worker["health"], "/status") for worker in running))
    answers = [{**answer, "of": "the connectors worker"} for answer in map(_extraction_of, pages) if answer is not None]
    if not answers:
        return {**await extraction(), "of": "this machine"}
    return min(answers, key=lambda answer: answer["files"] == "confined")


def _extraction_of(page: str) -> dict[str, str] | None:
    try:
        extraction = json.loads(page)["extraction"]
        return {"files": str(extraction["files"]), "kernel": str(extraction["kernel"])}
    except (ValueError, KeyError, TypeError):
        return None


def _get(address: str, path: str) -> str:
    """The body of the response; empty when there is none within HTTP_SECONDS."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=HTTP_SECONDS)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()
