"""The migrations that this version brings, and whether it can work on a database that has others.

A migration only adds, so that the version before goes on while the next one is brought in, and after it is taken back.
One that takes something away says which migration a program must know to do without it, on a line of its own::

    -- needs: 0014_questions

That names the newest migration of the first version that no longer uses it; older programs then refuse to start.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.resources import files

_NEEDS = re.compile(r"^-- needs: (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Migration:
    name: str
    statements: str
    needs: str | None
    """The migration that a program must know to work with the schema after this one. None: it only adds."""


def migration(name: str, statements: str) -> Migration:
    found = _NEEDS.search(statements)
    return Migration(name, statements, found.group(1) if found else None)


def migrations() -> list[Migration]:
    """In their order."""
    folder = files("pipeline.stores") / "migrations"
    return sorted(
        (migration(f.name.removesuffix(".sql"), f.read_text()) for f in folder.iterdir() if f.name.endswith(".sql")),
        key=lambda one: one.name,
    )


def refusal(known: Collection[str], applied: Mapping[str, str | None]) -> str | None:
    """Why a program must not work on a database, in one line; None: it may.

    known: the migrations that it brings. applied: name → ``needs`` of those that the database has.
    """
    if missing := sorted(set(known) - applied.keys()):
        return f"the database lacks migration {missing[0]}: run `penstock migrate`"
    for name, needs in sorted(applied.items()):
        if name not in known and needs is not None and needs not in known:
            return (
                f"a newer version has taken away what this one uses (migration {name} needs {needs}): run that version,"
                " or restore the backup that was made before it (docs/upgrade.md)"
            )
    return None
