"""Write Alertmanager's configuration: ``python -m deploy.alertmanager FILE``.

Receivers are as the settings ``PENSTOCK_ALERTING_…`` say, which may be files (``PENSTOCK_SECRETS_DIR``). The file holds
their secrets: only its owner can read it. ``--owner UID`` gives it to the user that runs Alertmanager.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from deploy.alertmanager.config import config
from deploy.alertmanager.settings import load
from deploy.local.process import write_atomically
from pipeline.core.errors import Misconfigured


def main(
    file: Annotated[Path, typer.Argument(help="What to write.")],
    owner: Annotated[int | None, typer.Option(help="Number of the user that may read it.")] = None,
) -> None:
    """Write Alertmanager's configuration, with the receivers that the settings name."""
    try:
        written = config(load())
    except Misconfigured as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    write_atomically(file, json.dumps(written, indent=1) + "\n", mode=0o400)
    if owner is not None:
        os.chown(file, owner, owner)
    for receiver in written["receivers"]:
        ways = [name.removesuffix("_configs") for name in receiver if name != "name"]
        typer.echo(f"{receiver['name']}: {', '.join(ways) or 'nobody is notified; the alerts are only shown'}")


if __name__ == "__main__":
    typer.run(main)
