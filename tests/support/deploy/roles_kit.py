"""Every process as its own role of the real Postgres, by the files that an operator runs."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

FILES = Path(__file__).parents[3] / "deploy" / "roles" / "postgres"
ROLES = (
    "penstock_owner",
    "penstock_worker",
    "penstock_analysis",
    "penstock_connectors",
    "penstock_query",
    "penstock_canaries",
    "penstock_trail_reader",
    "penstock_operator",
)


def run_file(dsn: str, name: str) -> None:
    """As psql would."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute((FILES / name).read_text().encode())


def define_roles(dsn: str) -> None:
    """The roles and their rights, as an operator with this DSN makes them."""
    for name in ("1-roles.sql", "2-grants.sql"):
        run_file(dsn, name)


@contextmanager
def logins(admin: str) -> Iterator[dict[str, str]]:
    """A login in each role, with a password: role → its DSN for the administrator's database. Gone at the end."""
    names = {role: f"{role}_{secrets.token_hex(4)}" for role in ROLES}
    password = secrets.token_hex(8)
    with psycopg.connect(admin, autocommit=True) as connection:
        for role, name in names.items():
            connection.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{password}' IN ROLE {role}".encode())
            if role == "penstock_owner":  # what it makes belongs to the group, and carries the group's defaults
                connection.execute(f"ALTER ROLE {name} SET role = {role}".encode())
    try:
        yield {
            role: make_conninfo(**{**conninfo_to_dict(admin), "user": name, "password": password})
            for role, name in names.items()
        }
    finally:
        with psycopg.connect(admin, autocommit=True) as connection:
            for name in names.values():
                connection.execute(f"DROP ROLE {name}".encode())
