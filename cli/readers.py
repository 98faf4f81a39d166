"""Decides who may read what a person ingests, and refuses to publish what nobody could read."""

from __future__ import annotations

import getpass
from typing import NoReturn

import typer

from cli.terminal import echo
from pipeline.core.identity import INGESTED


def tag(value: str) -> str:
    if not value.strip() or "\x00" in value:
        raise typer.BadParameter("an access tag cannot be empty; leave --acl out if only you may read the documents")
    return value


def readers(acl: list[str] | None, required: list[str] | None) -> list[str]:
    """The acl_tags as they were given, else the local user's own.

    Exits with code 2 where nobody, not even that user, could read the result. (``acl = []`` in a .penstock.toml says
    that nobody shall.)
    """
    for value in (*(acl or ()), *(required or ())):
        if value.startswith(f"{INGESTED}/"):
            bare = value.removeprefix(f"{INGESTED}/")
            _refuse(f"access tag {value!r}: write {bare!r}, without the source; the source is always {INGESTED!r} here")
    if required and not acl:
        _refuse("--required needs --acl: name the readers with --acl TAG")
    return acl or [f"user:{local_user('name the readers with --acl TAG')}"]


def local_user(instead: str) -> str:
    """The operating system's name for the current user. instead: what to do where it has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user often has no name
        _refuse(f"the operating system has no user name for you: {instead}")


def _refuse(why: str) -> NoReturn:
    echo(f"error: {why}", err=True)
    raise typer.Exit(2)
