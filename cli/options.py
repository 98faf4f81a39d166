"""Options that several commands have: whose documents, and who reads them."""

from __future__ import annotations

from typing import Annotated

import typer

Tenant = Annotated[str, typer.Option("--tenant", help="Tenant of the documents.")]
Principals = Annotated[
    list[str] | None,
    typer.Option("--as", metavar="PRINCIPAL", help="Read as this person, e.g. ann@example.org. Repeatable."),
]
Tags = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="TAG", help="Read as a holder of this access tag (TAG or SOURCE/TAG). Repeatable."),
]
