"""The worker ``connectors``: runs every declared instance, each with its own tasks, and the HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import structlog

from connectors.declared import Declared
from connectors.extraction.remote import condition
from connectors.http import PORT, Parts, app
from connectors.runner.instance import Instance
from connectors.runner.plan import Services
from connectors.webhooks.worker import Webhooks
from pipeline.core.errors import Misconfigured
from pipeline.kafka.client import publisher
from pipeline.observability import lineage, tracing
from pipeline.observability.metrics import EXTRACTION_STATES, Metrics
from pipeline.runtime.health import health
from pipeline.runtime.http_server import served
from pipeline.runtime.settings import Settings, home
from pipeline.runtime.stopping import run_until_stopped
from pipeline.runtime.tasks import cancel_and_wait
from pipeline.stores.postgres import open_pool

log = structlog.get_logger()

FOLDER = "connectors"
"""The part of the state folder that holds the files of sources."""
FINISH_SECONDS, STOP_SECONDS = 15.0, 28.0
"""The longest time from the signal until what is still closed is cancelled, and to the end of the process; Kubernetes
kills it after 30. What Kafka has not acknowledged by then is in doubt, and published again."""


async def run(settings: Settings, declared: Declared) -> None:
    """Run until SIGTERM or SIGINT. Raises Misconfigured at once when nothing could work."""
    await run_until_stopped(
        "connectors",
        lambda stop: _run(stop, settings, declared),
        finish_seconds=FINISH_SECONDS,
        end_seconds=STOP_SECONDS,
    )


async def _run(stop: asyncio.Event, settings: Settings, declared: Declared) -> None:
    metrics = Metrics()
    extraction = await _update_extraction(metrics, {})
    instances: dict[str, Instance] = {}
    address = ""

    def report() -> dict[str, Any]:
        return {
            "stages": [],
            "http": address,
            "extraction": extraction,
            "connectors": [instance.report() for instance in instances.values()],
        }

    async with AsyncExitStack() as stack:
        stack.enter_context(tracing.running("connectors"))
        stack.enter_context(lineage.running(metrics.lineage))
        await stack.enter_async_context(health(settings, metrics, lambda: bool(address), report))
        pool = await stack.enter_async_context(open_pool(settings.postgres, on_fence=metrics.ledger_fenced.set))
        kafka = await stack.enter_async_context(publisher(settings))
        http = app(Parts(instances, declared.keys, kafka, metrics))
        host, port = settings.connectors.http_host, settings.connectors.http_port
        try:
            address = await stack.enter_async_context(
                served(http, host, port, bounds=settings.ports, metrics=metrics.ports, name=PORT)
            )
        except OSError as error:
            raise Misconfigured(
                f"{host}:{port} cannot be listened on ({error.strerror or error}):"
                " set PENSTOCK_CONNECTORS_HTTP_PORT to another (0: any)"
            ) from error
        services = Services(
            postgres=settings.postgres,
            pool=pool,
            producer=kafka,
            metrics=metrics,
            folder=home() / FOLDER,
            events_url=settings.connectors.events_url,
            address=address,
        )
        instances.update({name: Instance(plan, services) for name, plan in declared.plans.items()})
        _show_quotas(instances, metrics)
        running = [asyncio.create_task(instance.run(), name=name) for name, instance in instances.items()]
        webhooks = Webhooks(pool, settings.kafka, settings.webhooks, metrics)
        running.append(asyncio.create_task(webhooks.run(), name="webhooks"))
        running.append(asyncio.create_task(_watch_extraction(metrics, extraction, settings.stream.vitals_seconds)))
        log.info(
            "worker_started",
            worker="connectors",
            address=address,
            connectors=sorted(instances),
            extraction=extraction,
        )
        try:
            await _until_stopped(stop, running)
        finally:
            await cancel_and_wait(running)
    log.info("worker_stopped", worker="connectors")


def _show_quotas(instances: Mapping[str, Instance], metrics: Metrics) -> None:
    uploads = {name: instance for name, instance in instances.items() if instance.plan.kind == "uploads"}
    if uploads:
        from connectors.uploads.source import quota_share

        for name, instance in uploads.items():
            for of in ("tenant", "all"):
                metrics.uploads_quota.labels(name, of).set_function(partial(quota_share, instance, of))


async def _watch_extraction(metrics: Metrics, status: dict[str, str], every_seconds: float) -> None:
    while True:
        await asyncio.sleep(every_seconds)
        await _update_extraction(metrics, status)


async def _update_extraction(metrics: Metrics, status: dict[str, str]) -> dict[str, str]:
    """Update ``status``, which says how files are read now, and its metric. Every state has a value, 1 or 0: an absent
    series is not a zero."""
    status |= await condition()
    for files in EXTRACTION_STATES:
        metrics.extraction.labels(files).set(files == status["files"])
    return status


async def _until_stopped(stop: asyncio.Event, running: list[asyncio.Task[None]]) -> None:
    """Wait for the signal. Raises when a task ends before it, which never should happen."""
    stopping = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([stopping, *running], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    for task in done - {stopping}:
        raise RuntimeError(f"the task {task.get_name()} of the connectors worker has ended") from task.exception()
