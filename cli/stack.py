"""``penstock up`` and ``down``: the local stack and its workers."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from cli.console import SafeConsole
from cli.terminal import echo
from pipeline.core.errors import PenstockError
from pipeline.runtime.home import TRAIL_FILE, made_secret

if TYPE_CHECKING:
    from deploy.local.stack import Stack
    from deploy.local.starting import Step
    from deploy.local.workers import Worker
    from pipeline.core.model import Generation
    from pipeline.runtime.settings import Settings

QUERY = "query"
PUBLISHERS = frozenset({"connectors", "canary"})
"""Workers that start after the indexes are made: the documents that they publish cannot be written before."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def up(
    json_output: Json = False,
    no_workers: Annotated[
        bool, typer.Option("--no-workers", help="Start only Kafka, Postgres and Elasticsearch.")
    ] = False,
) -> None:
    """Start the local stack (Kafka, Postgres and Elasticsearch), its workers and the query service.

    Everything is kept in PENSTOCK_HOME, by default the folder .penstock here. Processes that run already are left as
    they are; only the connectors worker is restarted if connectors were added to connectors.toml.

    Example: penstock up --no-workers
    """
    stack = local_stack()
    with errors(), _progress() as progress:
        started = _up(stack, progress, () if no_workers else (*_stages(), *_connectors(), *_canary(), QUERY))
    if json_output:
        _print_json(local_processes(stack))
        return
    _print_table(stack)
    if not started:
        echo("Everything was running already.")


def down(json_output: Json = False) -> None:
    """Stop the query service, the workers and the local stack. Their data stays on disk.

    Example: penstock down
    """
    with errors(), _progress() as progress:
        stopped = local_stack().down(progress)
    if json_output:
        _print_json({"stopped": stopped})
    elif not stopped:
        echo("Nothing is running.")


def local_stack() -> Stack:
    from deploy.local.stack import Stack
    from pipeline.runtime import settings

    return Stack(settings.home())


def local_processes(stack: Stack | None = None) -> dict[str, Any]:
    """The processes of the local stack on this machine: {services, workers, query}. Each has two seconds to answer."""
    stack = stack or local_stack()
    with ThreadPoolExecutor(3) as pool:
        services, workers = pool.submit(stack.services), pool.submit(stack.workers)
        query = pool.submit(stack.query).result()
    return {
        "services": {
            service.name: {"url": service.url or None, "pid": service.pid, "ready": service.ready}
            for service in services.result()
        },
        "workers": [
            {
                "name": worker.name,
                "pid": worker.pid,
                "ready": worker.ready,
                "waiting_for": worker.waiting_for,
                "reason": worker.reason,
                "stages": list(worker.stages),
                "health": worker.health,
            }
            for worker in workers.result()
        ],
        "query": {"url": query.url or None, "pid": query.pid, "ready": query.ready},
    }


@contextmanager
def local_detect_stopped(report: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Stop the local stack's detect workers, also with others in their process. Yields a function that starts them
    again (once), which happens at the end in any case. report: receives one line for each that is stopped."""
    stack = local_stack()
    stopped = [w.name for w in stack.workers() if w.pid is not None and w.name.partition("-")[0] in ("detect", "all")]

    def start_again() -> None:
        while stopped:
            name, _, instance = stopped[-1].partition("-")
            stack.start_worker(name, instance=int(instance or 0))
            stopped.pop()

    for name in stopped:
        report(f"{name}: stopping")
        stack.stop(name)
    try:
        yield start_again
    finally:
        start_again()


def local_outages() -> dict[str, str]:
    """By stage, the service that the workers of the local stack wait for."""
    stages = [stage for worker in local_stack().workers() for stage in worker.stages]
    return {
        stage["stage"]: f"waiting for {stage['waiting_for']} for {stage['waiting_seconds']:.0f} s ({stage['reason']})"
        for stage in stages
        if stage["waiting_for"]
    }


def _up(stack: Stack, progress: Callable[[str, str], None], workers: tuple[str, ...]) -> list[str]:
    """Start the services, create what they must hold, and start the workers, each as soon as what it needs is there.
    Returns what was started; stops it again on any failure."""
    if stack.is_new():  # later there may be records without a key, which a key cannot verify
        made_secret(stack.home / TRAIL_FILE)
    later = _LaterSteps(stack, progress, workers)
    services: list[str] = []
    try:
        services = stack.up(progress, on_step=later.on_step)
        later.wait()
    except BaseException:
        later.cancel()
        for name in (*later.started, *reversed(services)):
            stack.stop(name)
        raise
    return [*services, *later.started]


class _LaterSteps:
    """The steps after the start of the services, in a thread of its own: most of them do not need all services, and
    Elasticsearch takes twice as long to start as the others."""

    def __init__(self, stack: Stack, progress: Callable[[str, str], None], workers: tuple[str, ...]) -> None:
        self.started: list[str] = []
        """The workers whose start has begun."""
        self._stack = stack
        self._progress = progress
        self._workers = workers
        self._endpoints = stack.endpoints()
        self._is_prepared = stack.is_prepared() and all(service.ready for service in stack.services())
        self._steps: dict[tuple[str, Step], Future[None]] = {
            (service, step): Future() for service in stack.names for step in ("known", "ready")
        }
        self._is_cancelled = False
        self._cancel: Callable[[], object] = lambda: None
        self._threads = ThreadPoolExecutor(len(workers) + 1, thread_name_prefix="later-steps")
        self._ended = self._threads.submit(lambda: asyncio.run(self._run()))

    def on_step(self, service: str, step: Step) -> None:
        """Note that a service has taken a step."""
        with suppress(InvalidStateError):  # it was cancelled
            self._steps[service, step].set_result(None)

    def wait(self) -> None:
        """Wait until all is done. Raises the error of the step that failed."""
        self._ended.result()

    def cancel(self) -> None:
        """Start nothing more. This does not wait: a thread ends when its worker is stopped."""
        self._is_cancelled = True
        with suppress(RuntimeError):  # it has ended
            self._cancel()
        self._threads.shutdown(wait=False)

    async def _reached(self, step: Step, *services: str) -> Settings:
        """Wait until these services have taken a step. Returns the settings, with their endpoints."""
        from pipeline.runtime import settings

        for service in services or self._stack.names:
            await asyncio.wrap_future(self._steps[service, step])
        settings.loaded.cache_clear()
        return settings.load()

    async def _run(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._cancel = partial(loop.call_soon_threadsafe, task.cancel)
        if self._is_cancelled:
            return
        from cli import setup  # takes as long as the start of Postgres

        await self._reached("known")
        missing = self._missing()
        if self._is_prepared and not missing:
            return

        async def ledger() -> Generation:
            generation, lines = await setup.prepare_ledger(await self._reached("ready", "postgres"))
            self._report(lines)
            return generation

        async def topics() -> None:
            self._report(await setup.prepare_topics(await self._reached("ready", "kafka")))

        async def indexes() -> None:
            await setup.prepare_indexes(await self._reached("ready", "elasticsearch"), generation)
            self._progress("tables, topics and indexes", "ready")

        self._progress("tables, topics and indexes", "starting")

        def start(names: Iterable[str]) -> list[asyncio.Future[None]]:
            return [loop.run_in_executor(self._threads, self._start, name) for name in names]

        generation, _ = await asyncio.gather(ledger(), topics())
        await asyncio.gather(indexes(), *start(name for name in missing if name not in PUBLISHERS))
        await asyncio.gather(*start(name for name in missing if name in PUBLISHERS))
        self._stack.mark_prepared()

    def _missing(self) -> list[str]:
        """Stop the workers that must not go on, and return those that do not run."""
        stack = self._stack
        if stack.endpoints() != self._endpoints:  # a port was taken meanwhile: running workers have the old one
            for worker in stack.workers():
                stack.stop(worker.name)
            stack.stop_query()
        for worker in stack.workers():
            if worker.name in self._workers and worker.ready and _runs_too_few(worker):
                stack.stop(worker.name)
        running = {worker.name for worker in stack.workers() if worker.ready}
        for name in _replaced_by(self._workers) & running:  # in one process before and now in several, or the reverse
            stack.stop(name)
        running |= {QUERY} if stack.query().ready else set()
        return [name for name in self._workers if name not in running]

    def _start(self, name: str) -> None:
        if self._is_cancelled:
            return
        self.started.append(name)
        self._progress(name, "starting")
        if name == QUERY:
            self._stack.start_query(env=_query_environment())
        else:
            self._stack.start_worker(name)
        self._progress(name, "ready")

    def _report(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._progress("setup", line)


def _replaced_by(workers: Collection[str]) -> set[str]:
    """Return the names of the workers that do the same as these: each of the stages, or all in one process."""
    from cli.workers import ALL

    return set(ALL) if "all" in workers else {"all"} if workers else set()


def _stages() -> tuple[str, ...]:
    """The workers of the stages and of the analysis."""
    from cli.workers import ALL
    from deploy.local.stack import local_settings

    return ("all",) if local_settings().workers_together else ALL


def _query_environment() -> dict[str, str]:
    """The environment of the local query service: development mode, unless the settings say how callers are
    authenticated."""
    from query.settings import load

    serves, auth = load().serve, load().auth
    if auth.jwks_url is None and auth.keys_file is None and "development" not in serves.model_fields_set:
        return {"PENSTOCK_SERVE_DEVELOPMENT": "true"}
    return {}


def _runs_too_few(worker: Worker) -> bool:
    """Return whether connectors were added to the file since the worker read it. A file that lacks one of the worker's
    connectors is another file."""
    from connectors.declared import file_of, load

    return worker.name == "connectors" and file_of().is_file() and worker.connectors < load().plans.keys()


def _connectors() -> tuple[str, ...]:
    """The connectors worker, if connectors are declared or webhooks are sent. It gets the path of the file that was
    found."""
    from connectors.declared import VARIABLE, file_of, load
    from pipeline.runtime.settings import load as settings

    if not file_of().is_file():
        return ("connectors",) if settings().webhooks.key is not None else ()
    load()  # reports what is wrong with it before anything is started
    os.environ[VARIABLE] = str(file_of().absolute())  # the workers get our environment
    return ("connectors",)


def _canary() -> tuple[str, ...]:
    """The canary worker, if its interval is set: on one's own machine nobody is paged."""
    from pipeline.runtime.settings import load

    chosen = load().canary
    return ("canary",) if "every_seconds" in chosen.model_fields_set and chosen.every_seconds else ()


def _print_json(document: object) -> None:
    echo(json.dumps(document))


def _print_table(stack: Stack) -> None:
    from cli.status_screen import running

    console = SafeConsole(highlight=False)
    if not console.is_terminal:
        console = SafeConsole(highlight=False, width=160)
    processes = local_processes(stack)
    console.print(running(processes))
    for worker in processes["workers"]:
        if worker["reason"]:
            console.print(f"{worker['name']} is stalled: {worker['reason']}", markup=False, soft_wrap=True)
    print_page(console, stack)


def print_page(console: Console, stack: Stack) -> None:
    """Print the address of the page with the token of development mode, on a terminal only, because other output may be
    kept in logs. It is to be copied: a click would put the token on the browser's command line, which all users of the
    machine can read."""
    if console.is_terminal and (address := stack.page()) is not None:
        console.print(f"Copy into your browser: {address}", markup=False, soft_wrap=True)


@contextmanager
def errors() -> Iterator[None]:
    """Turn errors into one line on stderr and exit code 1, or 130 for Ctrl-C."""
    try:
        yield
    except PenstockError as error:
        echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        echo(f"error: {error.strerror or error}{where}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        echo("interrupted: the processes that were being started are stopped again", err=True)
        raise typer.Exit(130) from error


@contextmanager
def _progress() -> Iterator[Callable[[str, str], None]]:
    """Print a line for everything that is done, and on a terminal, below them, what is still under way."""
    console = SafeConsole(stderr=True, highlight=False)
    under_way: dict[str, str] = {}
    lock = threading.Lock()
    with console.status("") as spinner:
        spinner.stop()

        def progress(name: str, what: str) -> None:
            with lock:
                if what in ("starting", "stopping"):
                    under_way[name] = what
                else:
                    under_way.pop(name, None)
                    console.print(f"{name}: {what}", markup=False, soft_wrap=True)
                if under_way:
                    spinner.update(", ".join(f"{what} {name}" for name, what in under_way.items()))
                    spinner.start()
                else:
                    spinner.stop()

        yield progress
