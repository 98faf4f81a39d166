"""Run a program of Postgres in Penstock's database: ``python -m deploy.libpq pg_dump --format=custom --file=FILE``.

Where the database is and who we are, as the settings say, stands in a file that its owner alone may read, for as long
as the program runs: libpq takes it as the program's service. On no command line, in no environment and in no shell's
variable is a password to be seen. Further options of the program (``--dbname=postgres``) go before the file. What it
writes, such as a backup, its owner alone may read.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from psycopg.conninfo import conninfo_to_dict

from pipeline.core.errors import Misconfigured, PenstockError
from pipeline.runtime.settings import PostgresSettings, load

SERVICE = "penstock"


def service_file(connection: Mapping[str, Any]) -> str:
    """libpq's file for one service. Raises Misconfigured for a value that such a file cannot hold: it has no quotes."""
    for name, value in connection.items():
        if str(value) != str(value).rstrip() or "\n" in str(value):
            raise Misconfigured(f"PENSTOCK_POSTGRES_DSN: {name} ends with white space or has several lines; change it")
    return f"[{SERVICE}]\n" + "".join(f"{name}={value}\n" for name, value in connection.items())


def run(postgres: PostgresSettings, command: Sequence[str]) -> int:
    """Returns the program's exit code. Raises Misconfigured when there is no such program."""
    program = shutil.which(command[0])
    if program is None:
        raise Misconfigured(f"{command[0]} is not on the PATH: install Postgres's client programs")
    connection = conninfo_to_dict(postgres.dsn.get_secret_value())
    with tempfile.TemporaryDirectory(prefix="penstock-") as private:
        file = Path(private) / "service"
        file.touch(mode=0o600)
        file.write_text(service_file(connection), "utf-8")
        env = {**os.environ, "PGSERVICEFILE": str(file), "PGSERVICE": SERVICE}
        code = subprocess.run([program, *command[1:]], env=env, umask=0o077, check=False).returncode
    return code if code >= 0 else 128 - code  # ended by a signal, as a shell tells it


def main(command: Sequence[str]) -> int:
    """Returns the exit code."""
    if not command:
        typer.echo("usage: python -m deploy.libpq PROGRAM [ARGUMENT]...", err=True)
        return 2
    for ends in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ends, lambda number, _frame: sys.exit(128 + number))  # the file goes, and the program
    signal.signal(signal.SIGINT, lambda _number, _frame: None)  # Ctrl-C is the program's: psql cancels a query by it
    try:
        return run(load().postgres, command)
    except PenstockError as error:
        typer.echo(f"error: {error}", err=True)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
