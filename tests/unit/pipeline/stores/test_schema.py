"""Databases that a version may work on, and migrations that only add."""

from __future__ import annotations

import re

from pipeline.stores.postgres import migration, migrations, refusal

TAKES_AWAY = re.compile(
    r"\bDROP\s+(TABLE|COLUMN|VIEW|FUNCTION|SEQUENCE|SCHEMA|CONSTRAINT|INDEX|TYPE)|\bRENAME\b|\bTRUNCATE\b(?!\s+ON\b)"
    r"|\bALTER\s+COLUMN\s+\w+\s+(TYPE|SET\s+DATA|DROP\s+DEFAULT)|\bADD\s+COLUMN\s+[^,;]*NOT\s+NULL(?![^,;]*(DEFAULT|GENERATED))",
    re.IGNORECASE,
)
"""Matches the parts of a statement that may break a program which does not expect them. A trigger has TRUNCATE ON."""
MADE_ANEW = re.compile(r"DROP\s+\w+\s+IF\s+EXISTS\s+([\w.]+)[^;]*;\s*CREATE[^;(]*\1\b", re.IGNORECASE)
"""In the same transaction: nobody sees it gone."""


def without_comments(statements: str) -> str:
    return re.sub(r"--[^\n]*", "", statements)


def destructive_parts(statements: str) -> list[str]:
    text = without_comments(statements)
    return [match.group() for match in TAKES_AWAY.finditer(text) if not MADE_ANEW.match(text, match.start())]


def test_destructive_statements_are_recognised() -> None:
    for statement in (
        "ALTER TABLE documents DROP COLUMN author;",
        "ALTER TABLE documents RENAME COLUMN author TO writer;",
        "DROP TABLE superseded;",
        "ALTER TABLE documents ADD COLUMN tier text NOT NULL;",
        "ALTER TABLE documents ALTER COLUMN seq TYPE numeric;",
        "TRUNCATE documents;",
        "TRUNCATE ONLY documents;",
    ):
        assert destructive_parts(statement), statement
    for statement in (
        "ALTER TABLE documents ADD COLUMN tier text;",
        "ALTER TABLE documents ADD COLUMN tier text NOT NULL DEFAULT 'plain', ADD COLUMN other text;",
        "CREATE TABLE things (id bigint NOT NULL);",
        "-- DROP TABLE things;",
        "CREATE TRIGGER changed AFTER DELETE OR TRUNCATE ON things FOR EACH STATEMENT EXECUTE FUNCTION notify();",
        "DROP VIEW IF EXISTS readers.things; CREATE VIEW readers.things AS SELECT 1;",
    ):
        assert not destructive_parts(statement), statement


def test_every_migration_only_adds_or_states_the_migration_it_needs() -> None:
    known = [migration.name for migration in migrations()]
    assert known == sorted(set(known))
    assert len({name.partition("_")[0] for name in known}) == len(known), "two migrations of one number"
    for step in migrations():
        if step.needs is None:
            assert not destructive_parts(step.statements), (
                f"{step.name} takes something away: say `-- needs: …` (schema.py)"
            )
        else:
            assert step.needs in known
            assert step.needs < step.name, "what it takes away was given up in an earlier version"


def test_a_version_works_on_its_own_schema_and_with_newer_additive_migrations() -> None:
    known = ["0001_a", "0002_b"]
    own: dict[str, str | None] = dict.fromkeys(known)
    assert refusal(known, own) is None
    assert refusal(known, {**own, "0003_more": None, "0004_more": None}) is None


def test_a_database_that_lacks_a_migration_is_rejected_with_the_command_to_run() -> None:
    assert refusal(["0001_a", "0002_b"], {"0001_a": None}) == (
        "the database lacks migration 0002_b: run `penstock migrate`"
    )
    assert "0001_a" in str(refusal(["0001_a"], {}))


def test_a_destructive_migration_is_refused_only_to_versions_that_use_what_it_removed() -> None:
    """0004 takes away what 0001 made and the version of 0003 no longer uses."""
    applied = {"0001_a": None, "0002_b": None, "0003_c": None, "0004_less": "0003_c"}
    assert refusal(["0001_a", "0002_b", "0003_c"], applied) is None
    why = refusal(["0001_a", "0002_b"], applied)
    assert why is not None
    assert why.startswith("a newer version has taken away what this one uses (migration 0004_less needs 0003_c)")
    assert "\n" not in why
    assert refusal(list(applied), applied) is None


def test_the_needs_of_a_migration_are_read_from_its_comment_line() -> None:
    assert migration("0004_less", "-- Gone.\n-- needs: 0003_c\nDROP TABLE b;").needs == "0003_c"
    assert migration("0003_c", "-- it needs: nothing\nCREATE TABLE c ();").needs is None
