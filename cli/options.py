"""Options that several commands have: whose documents, who reads them, and which changes a search waits for."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.core.publication import MAX_WAIT_SECONDS, publications_of

Tenant = Annotated[str, typer.Option("--tenant", help="Tenant of the documents.")]
Principals = Annotated[
    list[str] | None,
    typer.Option("--as", metavar="PRINCIPAL", help="Read as this person, e.g. ann@example.org. Repeatable."),
]
Tags = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="TAG", help="Read as a holder of this access tag (TAG or SOURCE/TAG). Repeatable."),
]


def _token(text: str) -> str:
    try:
        publications_of(text)
    except ValueError as error:
        raise typer.BadParameter(
            f'{error}: give the "token" of `penstock ingest --json`, `penstock connector run --json`, an upload or a'
            " producer"
        ) from error
    return text


AtLeast = Annotated[
    str | None,
    typer.Option(
        "--at-least",
        metavar="TOKEN",
        parser=_token,
        help="Wait until you can see these published changes in both stores.",
    ),
]
WaitSeconds = Annotated[
    float,
    typer.Option("--wait-seconds", help="How long --at-least waits.", min=0, max=MAX_WAIT_SECONDS),
]
