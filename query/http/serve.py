"""The query service as a process: it opens, serves until a signal, and closes in order."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import import_module

import structlog

from pipeline.core.errors import Misconfigured
from pipeline.diagnosis.ledger import UNDIVIDED, undivided
from pipeline.installed import is_installed
from pipeline.runtime.http_server import served
from pipeline.runtime.settings import Settings
from pipeline.runtime.tasks import cancel_and_wait
from pipeline.stores.postgres import Pool, translated
from query.auth.authenticator import open_authenticator, require
from query.embedding.embedders import Embedders
from query.http.app import app
from query.limits.budgets import open_meter
from query.limits.quotas import Quotas
from query.service import Service, open_service
from query.settings import QuerySettings

log = structlog.get_logger()


@asynccontextmanager
async def serving(
    settings: Settings, query: QuerySettings, *, embedders: Embedders | None = None
) -> AsyncIterator[tuple[str, Service]]:
    """Yields the address, ``http://host:port``, and the service. At the end no more requests are accepted, and running
    ones finish or are cancelled within ``pipeline.runtime.http_server.STOP_SECONDS``. Raises Misconfigured and
    Retryable."""
    require(query.auth, query.serve)
    async with AsyncExitStack() as closing:
        service = await closing.enter_async_context(open_service(settings, query, embedders=embedders))
        await warn_if_undivided(service.pool)
        authenticator = await closing.enter_async_context(open_authenticator(query.auth, query.serve))
        service.metrics.next_key_expiry.set_function(lambda: authenticator.next_key_expiry)
        service.following.start()
        quotas = Quotas(query.serve.limits_file)
        meter = await closing.enter_async_context(open_meter(service, quotas))
        application = app(service, authenticator, quotas, meter)
        host, port = query.serve.host, query.serve.port
        seconds = query.serve.body_seconds  # the gate has the same limit for a whole body
        bounds = settings.ports.model_copy(update={"head_seconds": seconds, "body_seconds": seconds})
        try:
            address = await closing.enter_async_context(
                served(application, host, port, bounds=bounds, metrics=service.metrics.ports, name="query")
            )
        except OSError as error:
            raise Misconfigured(
                f"cannot serve on {host}:{port}: {error.strerror or error}"
                " (PENSTOCK_SERVE_HOST, PENSTOCK_SERVE_PORT; port 0 means any free port)"
            ) from error
        yield address, service


async def warn_if_undivided(pool: Pool) -> None:
    """Log a warning if the database login is not restricted to one tenant's rows. Raises Retryable."""
    with translated("rows by tenant"):
        async with pool.connection() as connection:
            if await undivided(connection):
                log.warning("rows_undivided", says=UNDIVIDED)


async def run(settings: Settings, query: QuerySettings, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. on_ready: called with the address once the service listens."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serving(settings, query) as (address, service):
        on_ready(address)
        log.info("service_started", address=address, development=query.serve.development)
        evaluation = asyncio.create_task(_evaluate(service), name="evaluation")
        await stop.wait()
        log.info("service_stopping")
        await cancel_and_wait([evaluation])


async def _evaluate(service: Service) -> None:
    """Run the golden questions in the background. An error ends only the evaluation and is logged."""
    await service.following.warm.wait()  # after loading the model, which searches wait for
    await asyncio.to_thread(import_module, "query.mcp.transports")  # so that the first call over MCP need not wait
    if not is_installed("ir_measures"):
        log.info("evaluation_not_installed", extra="eval")
        gc.freeze()
        return
    evaluation = await asyncio.to_thread(import_module, "query.evaluation.service")  # takes a second
    gc.freeze()  # else collections scan all modules, which took 0.1 s of every hundredth search
    try:
        await evaluation.run(service)
    except Exception as error:  # noqa: BLE001 # logged here, because no caller awaits it
        log.error("evaluation_failed", error=type(error).__name__)
