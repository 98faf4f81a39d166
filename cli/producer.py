"""``penstock producer``: who may publish to the ingest topics, and for which tenants and sources."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.ledger import ledger
from cli.output import Json, print_json, printable, stderr, stdout
from cli.recorded import record
from cli.terminal import echo
from pipeline.core.errors import PenstockError
from pipeline.core.producers import NAME, Key, Producer, is_pattern

producer = typer.Typer(
    name="producer",
    help="Producers: who may publish to the ingest topics, for which tenants and sources (docs/wire.md).",
    no_args_is_help=True,
)

OVERLAP_DAYS = 15
"""A rotated key holds for so long: a day longer than the topics keep records, so that `penstock recover` finds them
valid."""

Name = Annotated[str, typer.Argument(help="Name of the producer: lower-case letters, digits, '.', '_', '-'.")]
KeyFile = Annotated[
    Path | None,
    typer.Option("--key-file", help="File for the new private key (mode 0600). Default: print it once."),
]
PublicKey = Annotated[
    Path | None,
    typer.Option("--public-key", help="File with a public key (Ed25519, PEM) to enrol instead of making a new pair."),
]


@producer.command()
def add(
    name: Name,
    allow: Annotated[
        list[str],
        typer.Option(
            "--allow", metavar="TENANT/SOURCE", help="Source it may publish; * matches any characters. Repeatable."
        ),
    ],
    key_file: KeyFile = None,
    public_key: PublicKey = None,
    since: Annotated[datetime | None, typer.Option("--from", help="Start of its validity (UTC). Default: now.")] = None,
    until: Annotated[datetime | None, typer.Option("--until", help="End of its validity (UTC). Default: none.")] = None,
    if_missing: Annotated[
        bool, typer.Option("--if-missing", help="Change nothing if it is enrolled with the key in --key-file.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Enrol a producer: records that it signs for these tenants and sources are accepted from now on.

    Without --public-key a new pair of keys is made. The private key is written to --key-file, or printed once, and
    stored nowhere else. A source that begins with `canary.` needs a pattern that begins so too.

    Example: penstock producer add wiki --allow acme/wiki --key-file wiki-key.pem
    """
    from pipeline.ledger import producers

    if not NAME.fullmatch(name):
        raise typer.BadParameter("a producer's name has at most 100 lower-case letters, digits, '.', '_' and '-'")
    _require_patterns(allow)
    _one_of(key_file, public_key)
    if if_missing and key_file is None:
        raise typer.BadParameter("--if-missing needs --key-file")
    if if_missing and key_file is not None and key_file.exists():
        if asyncio.run(_holds(name, key_file)):
            stderr.print(f"{name} is enrolled with the key in {key_file}", soft_wrap=True, markup=False)
            return
        public_key, key_file = key_file, None

    record("producer.add", object=f"producer:{name}")

    async def enrol(key_id: str, public: bytes) -> None:
        async with ledger("producers") as connection:
            await producers.add(connection, name, allow, key_id, public, since=_utc(since), until=_utc(until))

    _with_key(name, key_file, public_key, enrol, {"allow": allow}, json_output=json_output)


@producer.command()
def allow(
    name: Name,
    patterns: Annotated[
        list[str], typer.Argument(metavar="TENANT/SOURCE...", help="All sources that it may publish from now on.")
    ],
    json_output: Json = False,
) -> None:
    """Replace the list of sources that a producer may publish. Its keys stay; other sources are refused within seconds.

    Example: penstock producer allow connectors acme/wiki 'acme/shop-*'
    """
    from pipeline.ledger import producers

    _require_patterns(patterns)

    record("producer.allow", object=f"producer:{name}")

    async def change() -> None:
        async with ledger("producers") as connection:
            await producers.allow(connection, name, patterns)

    asyncio.run(change())
    if json_output:
        print_json({"producer": name, "allow": patterns})
    else:
        stdout.print(f"{name} may publish {', '.join(map(printable, patterns))}", soft_wrap=True, markup=False)


@producer.command()
def rotate(
    name: Name,
    key_file: KeyFile = None,
    public_key: PublicKey = None,
    overlap_days: Annotated[
        float, typer.Option("--overlap-days", min=0, help="Days for which its present keys stay valid.")
    ] = OVERLAP_DAYS,
    json_output: Json = False,
) -> None:
    """Give a producer a new key. Its present keys stay valid for 15 days, longer than Kafka stores their records.

    If a key may be known to others, --overlap-days 0 invalidates it at once. Records signed with it that have not been
    read yet become dead letters.

    Example: penstock producer rotate wiki --key-file wiki-key-2.pem
    """
    from pipeline.ledger import producers

    _one_of(key_file, public_key)

    record("producer.rotate", object=f"producer:{name}")

    async def replace(key_id: str, public: bytes) -> None:
        async with ledger("producers") as connection:
            await producers.rotate(connection, name, key_id, public, timedelta(days=overlap_days))

    _with_key(name, key_file, public_key, replace, {"overlap_days": overlap_days}, json_output=json_output)


@producer.command()
def remove(name: Name, json_output: Json = False) -> None:
    """Remove a producer and its keys, within seconds. Its records that have not been read yet become dead letters.

    Example: penstock producer remove wiki
    """
    from pipeline.ledger import producers

    record("producer.remove", object=f"producer:{name}")

    async def end() -> None:
        async with ledger("producers") as connection:
            await producers.remove(connection, name)

    asyncio.run(end())
    if json_output:
        print_json({"producer": name, "removed": True})
    else:
        stdout.print(f"removed {name}", markup=False)


@producer.command("list")
def list_(
    everything: Annotated[bool, typer.Option("--all", help="Include producers that have ended.")] = False,
    json_output: Json = False,
) -> None:
    """List the enrolled producers, the sources that they may publish, and their keys.

    Example: penstock producer list --json
    """
    from pipeline.ledger import producers

    async def registry() -> Any:
        async with ledger("producers") as connection:
            return await producers.load(connection)

    known, now = asyncio.run(registry()), datetime.now(UTC)
    shown = [
        producer
        for producer in known.producers.values()
        if everything or producer.term.until is None or producer.term.until > now
    ]
    keys = {producer.name: [key for key in known.keys.values() if key.producer == producer.name] for producer in shown}
    if json_output:
        print_json([_json(producer, keys[producer.name], now) for producer in shown])
        return
    for producer in shown:
        stdout.print(
            f"{producer.name}  {', '.join(map(printable, producer.allow))}{_until(producer, now)}",
            soft_wrap=True,
            markup=False,
        )
        for key in keys[producer.name]:
            if everything or key.term.until is None or key.term.until > now:
                stdout.print(f"  key {key.key_id}{_until(key, now)}", soft_wrap=True, markup=False)
    if not shown:
        stderr.print(
            "no producer is enrolled: run penstock producer add NAME --allow TENANT/SOURCE",
            soft_wrap=True,
            markup=False,
        )


def _require_patterns(patterns: list[str]) -> None:
    for pattern in patterns:
        if not is_pattern(pattern):
            raise typer.BadParameter(f"{printable(pattern)}: write the pattern as TENANT/SOURCE")


def _json(entry: Producer, keys: list[Key], now: datetime) -> dict[str, Any]:
    def term(subject: Producer | Key) -> dict[str, Any]:
        until = subject.term.until
        return {
            "valid_from": subject.term.since.isoformat(),
            "valid_until": until.isoformat() if until else None,
            "in_force": subject.term.holds(now),
        }

    return {
        "producer": entry.name,
        "allow": list(entry.allow),
        **term(entry),
        "keys": [{"key_id": key.key_id, **term(key)} for key in keys],
    }


def _until(subject: Producer | Key, now: datetime) -> str:
    since, until = subject.term.since, subject.term.until
    if since > now:
        return f"  from {since:%Y-%m-%d %H:%M} UTC"
    if until is None:
        return ""
    return f"  {'until' if until > now else 'ended'} {until:%Y-%m-%d %H:%M} UTC"


def _utc(moment: datetime | None) -> datetime | None:
    return moment.replace(tzinfo=UTC) if moment is not None and moment.tzinfo is None else moment


def _one_of(key_file: Path | None, public_key: Path | None) -> None:
    if key_file is not None and public_key is not None:
        raise typer.BadParameter("give --key-file (a new pair is made) or --public-key, not both")


def _read(path: Path) -> bytes:
    """The public key in a file. Raises PenstockError."""
    from topics.signatures import NotAKey, public_key_of

    try:
        return public_key_of(path.read_bytes())
    except (OSError, NotAKey) as error:
        why = str(error) if isinstance(error, NotAKey) else "no such file, or not readable"
        raise PenstockError(f"{path}: {why}") from error


async def _holds(name: str, key_file: Path) -> bool:
    """Whether the producer is in force with the key in the file."""
    from pipeline.core.producers import Unauthorised
    from pipeline.ledger import producers
    from topics.signatures import key_id

    expected = key_id(_read(key_file))
    async with ledger("producers") as connection:
        registry = await producers.load(connection)
    try:
        return registry.key(expected, datetime.now(UTC)).producer == name
    except Unauthorised:
        return False


def _with_key(
    name: str,
    key_file: Path | None,
    public_key: Path | None,
    enrol: Any,
    more: dict[str, Any],
    *,
    json_output: bool,
) -> None:
    """Make or read a key, enrol it, and print the result. The file of a private key that could not be enrolled is
    removed."""
    from topics.signatures import key_id, new_private_key, public_key_of

    private = None if public_key is not None else new_private_key()
    public = _read(public_key) if public_key is not None else public_key_of(private or b"")
    if private is not None and key_file is not None:
        _write(key_file, private)
    try:
        asyncio.run(enrol(key_id(public), public))
    except BaseException:
        if private is not None and key_file is not None:
            key_file.unlink(missing_ok=True)
        raise
    printed = private.decode() if private is not None and key_file is None else None
    if json_output:
        entry = {"producer": name, "key_id": key_id(public), **more}
        print_json(entry | {"key_file": str(key_file) if key_file else None, "private_key": printed})
        return
    stderr.print(f"{name}: key {key_id(public)} is enrolled", soft_wrap=True, markup=False)
    if printed is not None:
        stderr.print("Its private key, shown once: keep it in a file that nobody else can read.", soft_wrap=True)
        echo(printed, nl=False)
    elif key_file is not None:
        stderr.print(f"Its private key: {key_file} (PENSTOCK_KAFKA_SIGNING_KEY_FILE)", soft_wrap=True, markup=False)


def _write(path: Path, private: bytes) -> None:
    """A new file that nobody else can read. Raises PenstockError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise PenstockError(f"{path} exists and is not overwritten: choose another --key-file") from error
    except OSError as error:
        raise PenstockError(f"{path} cannot be written: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(private)
