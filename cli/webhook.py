"""``penstock webhook``: the receivers of ``documents.indexed.v1`` over HTTP, and what waits for them."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from cli.ledger import ledger
from cli.output import Json, print_json, printable, stderr, stdout
from cli.recorded import record
from cli.terminal import echo
from pipeline.core import webhooks as core
from pipeline.core.errors import Misconfigured

if TYPE_CHECKING:
    from pipeline.ledger.webhooks import Endpoint
    from pipeline.stores.postgres import Connection

T = TypeVar("T")

webhook = typer.Typer(
    name="webhook",
    help="Webhooks: report over HTTP what became searchable or was withdrawn (docs/events.md).",
    no_args_is_help=True,
)

OVERLAP_HOURS = 24.0

Name = Annotated[str, typer.Argument(help="Name of the webhook: lower-case letters, digits, '.', '_', '-'.")]


@webhook.command()
def add(
    name: Name,
    url: Annotated[str, typer.Argument(help="Address of the receiver, https://…")],
    tenant: Annotated[str, typer.Option("--tenant", help="Tenant whose events it receives.")] = "default",
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--source", metavar="SOURCE", help="Source; * matches any characters. Repeatable. Default: all sources."
        ),
    ] = None,
    answers: Annotated[
        bool, typer.Option("--answers", help="Also report which standing questions of the tenant are invalidated.")
    ] = False,
    conflicts: Annotated[
        bool, typer.Option("--conflicts", help="Also report which passages of the tenant contradict or repeat others.")
    ] = False,
    allow_private: Annotated[
        bool, typer.Option("--allow-private", help="Allow an address that is not public, and http.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Add a receiver. It gets every event that is announced from now on, signed with a secret that is printed once.

    Events of one document arrive in order, each at least once. What fails is tried again for a day. The secret is not
    stored: it is derived from PENSTOCK_WEBHOOKS_KEY, which the connectors worker needs too.

    Example: penstock webhook add shop https://shop.example.com/hooks/penstock --tenant acme --source 'wiki*'
    """
    from connectors.webhooks.send import checked
    from pipeline.ledger import webhooks

    if not core.NAME.fullmatch(name):
        raise typer.BadParameter("a webhook's name has at most 100 lower-case letters, digits, '.', '_' and '-'")
    checked(url, private=allow_private)
    secret, shown = _new_secret()
    record("webhook.add", tenant=tenant, object=f"webhook:{name}")

    async def enrol(connection: Connection) -> None:
        await webhooks.add(
            connection,
            name,
            tenant,
            source or [],
            url,
            secret,
            private=allow_private,
            answers=answers,
            conflicts=conflicts,
        )

    _in_ledger(enrol)
    _show_secret(name, shown, {"tenant": tenant, "sources": source or [], "url": url}, json_output=json_output)


@webhook.command("list")
def list_(json_output: Json = False) -> None:
    """List the webhooks with their state: what waits, since when one fails, and why it is paused.

    Example: penstock webhook list --json
    """
    from pipeline.ledger import webhooks

    async def read(connection: Connection) -> tuple[list[Endpoint], dict[str, tuple[int, int, float]]]:
        return await webhooks.endpoints(connection), await webhooks.waiting(connection)

    endpoints, waiting = _in_ledger(read)
    if json_output:
        print_json([_json(endpoint, waiting.get(endpoint.name, (0, 0, 0.0))) for endpoint in endpoints])
        return
    for endpoint in endpoints:
        waits, parked, _ = waiting.get(endpoint.name, (0, 0, 0.0))
        which = ", ".join(f"{endpoint.tenant}/{source}" for source in endpoint.sources or ("*",))
        stdout.print(f"{endpoint.name}  {printable(which)}  {printable(endpoint.url)}", soft_wrap=True, markup=False)
        state = f"  {_state(endpoint)}: {endpoint.delivered:,} delivered, {waits:,} wait, {parked:,} parked"
        stdout.print(
            state + (f"; {printable(endpoint.reason)}" if endpoint.reason else ""), soft_wrap=True, markup=False
        )
    if not endpoints:
        stderr.print("there is no webhook: run penstock webhook add NAME URL", soft_wrap=True, markup=False)


@webhook.command()
def remove(name: Name, json_output: Json = False) -> None:
    """Remove a webhook, and what waits for it.

    Example: penstock webhook remove shop
    """
    from pipeline.ledger import webhooks

    record("webhook.remove", object=f"webhook:{name}")
    _in_ledger(lambda connection: webhooks.remove(connection, name))
    _done({"webhook": name, "removed": True}, f"removed {name}", json_output=json_output)


@webhook.command()
def rotate(
    name: Name,
    overlap_hours: Annotated[
        float, typer.Option("--overlap-hours", min=0, help="Hours for which requests carry the old signature too.")
    ] = OVERLAP_HOURS,
    json_output: Json = False,
) -> None:
    """Give a webhook a new secret, which is printed once. For a day, requests are signed with the old one as well.

    Example: penstock webhook rotate shop --overlap-hours 1
    """
    from pipeline.ledger import webhooks

    secret, shown = _new_secret()
    record("webhook.rotate", object=f"webhook:{name}")
    overlap = timedelta(hours=overlap_hours)
    _in_ledger(lambda connection: webhooks.rotate(connection, name, secret, overlap))
    _show_secret(name, shown, {"overlap_hours": overlap_hours}, json_output=json_output)


@webhook.command()
def pause(name: Name, json_output: Json = False) -> None:
    """Send nothing more to a webhook. Its events wait until it is resumed, for 14 days.

    Example: penstock webhook pause shop
    """
    from pipeline.ledger import webhooks

    record("webhook.pause", object=f"webhook:{name}")
    _in_ledger(lambda connection: webhooks.pause(connection, name, "paused by an operator"))
    _done({"webhook": name, "paused": True}, f"{name} is paused", json_output=json_output)


@webhook.command()
def resume(name: Name, json_output: Json = False) -> None:
    """Send to a webhook again: what waits for it, and what was parked.

    Example: penstock webhook resume shop
    """
    from pipeline.ledger import webhooks

    record("webhook.resume", object=f"webhook:{name}")
    waits = _in_ledger(lambda connection: webhooks.resume(connection, name))
    _done({"webhook": name, "waiting": waits}, f"{name} is resumed: {waits:,} events wait", json_output=json_output)


@webhook.command()
def deliveries(
    name: Annotated[str | None, typer.Argument(help="Name of the webhook. Default: all.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="Number of events to show.")] = 50,
    json_output: Json = False,
) -> None:
    """List the events that wait for a webhook or are parked, with the reason of their last failure.

    Delivered events are not stored; `penstock webhook list` shows their number.

    Example: penstock webhook deliveries shop --json
    """
    from pipeline.ledger import webhooks

    async def read(connection: Connection) -> list[dict[str, Any]]:
        if name is not None:
            await webhooks.endpoints(connection, name)
        return await webhooks.listed(connection, name, limit)

    listed = _in_ledger(read)
    if json_output:
        print_json([{key: _plain(value) for key, value in entry.items()} for entry in listed])
        return
    for entry in listed:
        when = "parked" if entry["parked_at"] else f"next attempt {entry['next_at']:%Y-%m-%d %H:%M:%S} UTC"
        subject = entry["external_id"] or entry["document_id"]
        line = f"{entry['webhook']}  {entry['state']}  {subject}  {entry['attempts']} attempts, {when}"
        line += f": {entry['reason']}" if entry["reason"] else ""
        stdout.print(printable(line), soft_wrap=True, markup=False)
    if not listed:
        stderr.print("nothing waits", markup=False)


@webhook.command("test")
def probe(name: Name, json_output: Json = False) -> None:
    """Send a signed test event from here, and print the receiver's answer. Exit code 1: an error, or no answer.

    Its type is io.penstock.webhook.test.v1. It changes nothing, and the worker may be stopped.

    Example: penstock webhook test shop
    """
    status, reason = asyncio.run(_test(name))
    if json_output:
        print_json({"webhook": name, "status": status, "delivered": reason is None, "reason": reason})
    elif reason is None:
        stdout.print(f"{name} answered {status}", markup=False)
    else:
        stderr.print(f"error: {printable(reason)}", soft_wrap=True, markup=False)
    if reason is not None:
        raise typer.Exit(1)


async def _test(name: str) -> tuple[int | None, str | None]:
    from connectors.webhooks.send import Receiver
    from connectors.webhooks.worker import WRONG_KEY, signing_secrets
    from pipeline.ledger import webhooks
    from pipeline.runtime.settings import load
    from topics.codec import ce_source

    async with ledger("webhooks") as connection:
        [endpoint] = await webhooks.endpoints(connection, name)
    keys = signing_secrets(endpoint, load().webhooks)
    if not keys:
        raise Misconfigured(WRONG_KEY)
    now, id_ = datetime.now(UTC), f"test-{secrets.token_hex(16)}"
    body = core.cloud_event(
        id_=id_,
        type_=core.TEST_TYPE,
        source=ce_source(endpoint.tenant, "penstock"),
        time=now.isoformat(),
        data={"tenant": endpoint.tenant, "webhook": name},
    )
    receiver = Receiver(endpoint.url, private=endpoint.private)
    try:
        answer = await receiver.send(core.headers(keys, id_, now, body), body)
    finally:
        await receiver.close()
    return answer.status, answer.reason


def _new_secret() -> tuple[core.Secret, str]:
    """A new secret, and how receivers are given it. Raises Misconfigured without a key."""
    from pipeline.runtime.settings import load

    key = load().webhooks.key
    if key is None:
        raise Misconfigured(
            "PENSTOCK_WEBHOOKS_KEY is not set: give this command and the connectors worker the same random text of at"
            " least 32 characters (openssl rand -hex 32)"
        )
    secret = core.Secret.new(key.get_secret_value(), os.urandom(core.SALT_BYTES))
    made = secret.bytes_of(key.get_secret_value())
    assert made is not None
    return secret, core.printed(made)


def _show_secret(name: str, secret: str, more: dict[str, Any], *, json_output: bool) -> None:
    if json_output:
        print_json({"webhook": name, **more, "secret": secret})
        return
    stderr.print(
        f"{name}: its secret, shown once. The receiver verifies signatures with it:", soft_wrap=True, markup=False
    )
    echo(secret)


def _done(document: dict[str, Any], line: str, *, json_output: bool) -> None:
    if json_output:
        print_json(document)
    else:
        stdout.print(line, soft_wrap=True, markup=False)


def _state(endpoint: Endpoint) -> str:
    if endpoint.paused_at is not None:
        return "paused"
    return "failing" if endpoint.failures else "working"


def _json(endpoint: Endpoint, waiting: tuple[int, int, float]) -> dict[str, Any]:
    waits, parked, oldest = waiting
    return {
        "webhook": endpoint.name,
        "tenant": endpoint.tenant,
        "sources": list(endpoint.sources),
        "answers": endpoint.answers,
        "conflicts": endpoint.conflicts,
        "url": endpoint.url,
        "private": endpoint.private,
        "state": _state(endpoint),
        "reason": endpoint.reason,
        "failing_since": _plain(endpoint.failing_since),
        "paused_at": _plain(endpoint.paused_at),
        "created_at": _plain(endpoint.created_at),
        "delivered": endpoint.delivered,
        "delivered_at": _plain(endpoint.delivered_at),
        "waiting": waits,
        "parked": parked,
        "oldest_seconds": round(oldest, 1),
        "rotating": endpoint.old_secret is not None,
    }


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value


def _in_ledger(work: Callable[[Connection], Awaitable[T]]) -> T:
    async def run() -> T:
        async with ledger("webhooks") as connection:
            return await work(connection)

    return asyncio.run(run())
