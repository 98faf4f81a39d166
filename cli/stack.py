"""``penstock up`` and ``down``: the local stack and its workers."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from cli.console import SafeConsole
from pipeline.core.errors import PenstockError
from pipeline.runtime.home import TRAIL_FILE, made_secret

if TYPE_CHECKING:
    from deploy.local.stack import Stack

WORKERS = ("detect", "vectors", "keywords", "analysis")
QUERY = "query"

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def up(
    json_output: Json = False,
    no_workers: Annotated[
        bool, typer.Option("--no-workers", help="Start only Kafka, Postgres and Elasticsearch.")
    ] = False,
) -> None:
    """Start the local stack, its workers and the query service. Processes that run already are left as they are."""
    stack = local_stack()
    with errors(), _progress() as progress:
        started = _up(stack, progress, () if no_workers else (*WORKERS, *_connectors(), *_canary(), QUERY))
    if json_output:
        _print_json(local_processes(stack))
        return
    _print_table(stack)
    if not started:
        typer.echo("Everything was running already.")


def down(json_output: Json = False) -> None:
    """Stop the query service, the workers and the local stack. Their data stays on disk."""
    with errors(), _progress() as progress:
        stopped = local_stack().down(progress)
    if json_output:
        _print_json({"stopped": stopped})
    elif not stopped:
        typer.echo("Nothing is running.")


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
    """Stop the local stack's detect workers. Yields a function that starts them again (once), which happens at the end
    in any case. report: receives one line for each that is stopped."""
    stack = local_stack()
    stopped = [w.name for w in stack.workers() if w.pid is not None and w.name.partition("-")[0] == "detect"]

    def start_again() -> None:
        while stopped:
            _, _, instance = stopped[-1].partition("-")
            stack.start_worker("detect", instance=int(instance or 0))
            stopped.pop()

    for name in stopped:
        report(f"{name}: stopping")
        stack.stop(name)
    try:
        yield start_again
    finally:
        start_again()


def local_outages() -> dict[str, str]:
    """By stage, what the workers of this machine's local stack are stalled by."""
    stages = [stage for worker in local_stack().workers() for stage in worker.stages]
    return {
        stage["stage"]: f"waiting for {stage['waiting_for']} for {stage['waiting_seconds']:.0f} s ({stage['reason']})"
        for stage in stages
        if stage["waiting_for"]
    }


def _up(stack: Stack, progress: Callable[[str, str], None], workers: tuple[str, ...]) -> list[str]:
    """Services, then what they must hold, then workers. Returns what was started; stops it again on any failure."""
    if stack.is_new():  # later there may be records without a key, which a key cannot verify
        made_secret(stack.home / TRAIL_FILE)
    before = stack.endpoints()
    started = stack.up(progress)
    try:
        if stack.endpoints() != before:  # a port was taken meanwhile: workers that run look in the wrong place
            for worker in stack.workers():
                stack.stop(worker.name)
            stack.stop_query()
        running = {worker.name for worker in stack.workers() if worker.ready}
        running |= {QUERY} if stack.query().ready else set()
        missing = [name for name in workers if name not in running]
        if missing or not stack.is_prepared():
            from cli import setup
            from pipeline.runtime import settings

            settings.loaded.cache_clear()  # the endpoints may just have changed
            progress("tables, topics and indexes", "starting")
            for line in asyncio.run(setup.prepare()):
                progress("setup", line)
            stack.mark_prepared()
            progress("tables, topics and indexes", "ready")
        started += missing

        def start(name: str) -> None:
            progress(name, "starting")
            if name == QUERY:
                stack.start_query(env=_query_environment())
            else:
                stack.start_worker(name)
            progress(name, "ready")

        pool = ThreadPoolExecutor(len(workers) or 1)
        try:
            list(pool.map(start, missing))
        finally:  # not waited for after Ctrl-C: a thread ends when its worker is stopped below
            pool.shutdown(wait=False)
    except BaseException:
        for name in reversed(started):
            stack.stop(name)
        raise
    return started


def _query_environment() -> dict[str, str]:
    """On one's own machine callers are believed, unless it is set how they prove who they are."""
    from query.settings import load

    serves, auth = load().serve, load().auth
    if auth.jwks_url is None and auth.keys_file is None and "development" not in serves.model_fields_set:
        return {"PENSTOCK_SERVE_DEVELOPMENT": "true"}
    return {}


def _connectors() -> tuple[str, ...]:
    """The worker of the connectors, where any are declared, or where it sends webhooks. It looks for the file where we
    found it."""
    from connectors.declared import VARIABLE, file_of, load
    from pipeline.runtime.settings import load as settings

    if not file_of().is_file():
        return ("connectors",) if settings().webhooks.key is not None else ()
    load()  # what is wrong with it is said before anything is started
    os.environ[VARIABLE] = str(file_of().absolute())  # the workers get our environment
    return ("connectors",)


def _canary() -> tuple[str, ...]:
    """The worker of the canaries, where it was said how often: on one's own machine nobody is paged."""
    from pipeline.runtime.settings import load

    chosen = load().canary
    return ("canary",) if "every_seconds" in chosen.model_fields_set and chosen.every_seconds else ()


def _print_json(document: object) -> None:
    typer.echo(json.dumps(document))


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
    """Where the page is, with the token of development mode: on a terminal alone, because output is kept in logs.
    To be copied: a click would put the token on the browser's command line, which all users of the machine can read."""
    if console.is_terminal and (address := stack.page()) is not None:
        console.print(f"Copy into your browser: {address}", markup=False, soft_wrap=True)


@contextmanager
def errors() -> Iterator[None]:
    """One line on stderr and exit code 1; 130 for Ctrl-C."""
    try:
        yield
    except PenstockError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        typer.echo(f"error: {error.strerror or error}{where}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        typer.echo("interrupted: the processes that were being started are stopped again", err=True)
        raise typer.Exit(130) from error


@contextmanager
def _progress() -> Iterator[Callable[[str, str], None]]:
    """A line for everything that is done; on a terminal, below them, what is still under way."""
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
