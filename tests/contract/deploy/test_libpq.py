"""Postgres's own programs get the login by ``python -m deploy.libpq``, and nobody else sees it."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.sql import SQL, Identifier, Literal
from pydantic import SecretStr

from deploy.libpq import service_file
from deploy.local.dist import postgres_bin
from deploy.local.stack import Stack
from pipeline.core.errors import Misconfigured
from pipeline.runtime.settings import PostgresSettings
from pipeline.stores.postgres import migrate
from tests.support.deploy.roles_kit import logins, run_file
from tests.support.space import PROJECT

pytestmark = pytest.mark.stack

GUIDE = PROJECT / "docs" / "upgrade.md"
AWKWARD = 'it\'s # a \\ "pass=word" %20'


@pytest.fixture
def environment(stack: Stack, tmp_path: Path) -> Iterator[dict[str, str]]:
    """A reader's, with a password that is hard to quote."""
    admin = stack.endpoints()["postgres"]["dsn"]
    user = f"penstock_libpq_{secrets.token_hex(4)}"
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(Identifier(user), Literal(AWKWARD)))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "PG"))}
    yield {
        **kept,
        "PATH": f"{postgres_bin()}{os.pathsep}{kept['PATH']}",
        "TMPDIR": str(tmp_path),
        "PENSTOCK_HOME": str(tmp_path),
        "PGDATABASE": "another",
        "PENSTOCK_POSTGRES_DSN": make_conninfo(admin, user=user, password=AWKWARD),
    }
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(SQL("DROP ROLE {}").format(Identifier(user)))


def libpq(*command: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy.libpq", *command],
        env=env,
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_program_gets_the_login_and_may_use_another_database(environment: dict[str, str]) -> None:
    parts = conninfo_to_dict(environment["PENSTOCK_POSTGRES_DSN"])
    who = "SELECT current_user, current_database()"
    assert libpq("psql", "-Atc", who, env=environment).stdout == f"{parts['user']}|{parts['dbname']}\n"
    other = libpq("psql", "-d", "postgres", "-Atc", who, env=environment)
    assert (other.stdout, other.returncode) == (f"{parts['user']}|postgres\n", 0)


def test_what_a_program_writes_is_readable_by_its_owner_alone(environment: dict[str, str], tmp_path: Path) -> None:
    """A backup holds every text, and was everybody's on the machine to read."""
    file = tmp_path / "backup"
    assert libpq("psql", "-Atc", "SELECT 1", "-o", str(file), env=environment).returncode == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_exit_code_is_the_programs_and_a_missing_program_is_reported(environment: dict[str, str]) -> None:
    assert libpq("psql", "-qc", "nonsense", env=environment).returncode == 1
    done = libpq("pg_nothing", env=environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: pg_nothing is not on the PATH: install Postgres's client programs\n"
    assert libpq(env=environment).returncode == 2


def test_the_password_is_in_no_process_arguments_and_its_file_is_removed(
    environment: dict[str, str], tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "deploy.libpq", "psql", "-c", "SELECT pg_sleep(60)"], env=environment, cwd=PROJECT
    ) as process:
        deadline = time.monotonic() + 30
        while not (children := psutil.Process(process.pid).children()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        [psql] = children
        shown = " ".join([*psql.cmdline(), *psutil.Process(process.pid).cmdline()])
        assert AWKWARD not in shown
        [file] = tmp_path.rglob("service")
        assert AWKWARD in file.read_text()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
    assert not psql.is_running()


def test_ctrl_c_cancels_the_programs_query_and_removes_the_password_file(
    environment: dict[str, str], stack: Stack, tmp_path: Path
) -> None:
    """It killed the program, and showed where it had been interrupted."""
    user = conninfo_to_dict(environment["PENSTOCK_POSTGRES_DSN"])["user"]
    query = "SELECT count(*) FROM pg_stat_activity WHERE usename = %s AND query LIKE '%%pg_sleep%%'"
    with (
        psycopg.connect(stack.endpoints()["postgres"]["dsn"], autocommit=True) as admin,
        subprocess.Popen(
            [sys.executable, "-m", "deploy.libpq", "psql", "-c", "SELECT pg_sleep(60)"],
            env=environment,
            cwd=PROJECT,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        deadline = time.monotonic() + 50
        while admin.execute(query, [user]).fetchone() != (1,):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: everybody in front of it
        _, output = process.communicate(timeout=30)
    assert (process.returncode, output.splitlines()) == (
        1,
        ["Cancel request sent", "ERROR:  canceling statement due to user request"],
    )
    assert list(tmp_path.iterdir()) == []


async def test_the_upgrade_guides_command_applies_the_grants(stack: Stack) -> None:
    """By the owner, to processes that could do nothing with new tables before."""
    [command] = re.findall(r"\$ python -m deploy\.libpq (.*2-grants\.sql)$", GUIDE.read_text(), re.MULTILINE)
    administrator = stack.endpoints()["postgres"]["dsn"]
    name = f"t{secrets.token_hex(5)}"
    with psycopg.connect(administrator, autocommit=True) as connection:
        connection.execute(SQL("CREATE DATABASE {} TEMPLATE template0").format(Identifier(name)))
    try:
        admin = make_conninfo(administrator, dbname=name)
        run_file(admin, "1-roles.sql")
        with logins(admin) as dsns:
            await migrate(PostgresSettings(dsn=SecretStr(dsns["penstock_owner"])))
            with psycopg.connect(dsns["penstock_worker"], autocommit=True) as worker:
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    worker.execute("SELECT * FROM documents")
                env = {**os.environ, "PENSTOCK_POSTGRES_DSN": dsns["penstock_owner"]}
                path = {"PATH": f"{postgres_bin()}{os.pathsep}{env['PATH']}"}
                for _ in range(2):  # repeats are harmless
                    done = await asyncio.to_thread(libpq, *shlex.split(command), env=env | path)
                    assert (done.returncode, done.stdout) == (0, ""), done.stderr
                assert worker.execute("SELECT * FROM documents").fetchall() == []
    finally:
        with psycopg.connect(administrator, autocommit=True) as connection:
            connection.execute(SQL("DROP DATABASE {} WITH (FORCE)").format(Identifier(name)))


@pytest.mark.parametrize("value", ["ends with a blank ", "two\nlines"])
def test_a_password_that_a_service_file_cannot_hold_is_refused_and_not_quoted(value: str) -> None:
    with pytest.raises(Misconfigured, match="password ends with") as refused:
        service_file({"password": value})
    assert value not in str(refused.value)
