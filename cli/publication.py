"""The options of a search or an answer that wait for published changes."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.core.publication import MAX_WAIT_SECONDS, publications_of


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
