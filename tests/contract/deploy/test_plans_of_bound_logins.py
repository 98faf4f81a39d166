"""A login of connectors that is bound to tenants learns no text of other tenants from plans: two databases that differ
in nothing else look the same to it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import product
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from deploy.local.stack import Stack
from tests.support.deploy.roles_kit import define_roles, logins

pytestmark = pytest.mark.stack

ROWS = {"mine": range(1, 6), "anna": range(1001, 1301), "theirs": range(2001, 2301)}
"""Numbers of the rows of each tenant in each table. The others come before and after the login's own in an index."""
TEXT = "CASE WHEN n % 2 = 0 AND n > 1000 THEN '{word}' ELSE 'invoice' END || lpad(n::text, 4, '0')"
OF_TYPE = {
    "bigint": "n",
    "integer": "n",
    "double precision": "n",
    "boolean": "n % 2 = 0",
    "timestamp with time zone": "'2026-01-01'::timestamptz + n * interval '1 hour'",
    "text": TEXT,
    "text[]": f"ARRAY[{TEXT}]",
    "jsonb": f"to_jsonb({TEXT})",
    "bytea": f"substr(sha256(({TEXT})::bytea), 1, 8)",
    "uuid": f"md5({TEXT})::uuid",
}
LONG = {"problem_message", "argument", "problem", "event"}
"""Columns whose texts are stored outside of the row, so that a comparison reads further pages."""
OF_COLUMN = {
    "tenant": "tenant",
    "subject": "'document'",
    "id": "md5(n::text)::uuid",  # of an upload: random
    **dict.fromkeys(LONG, "(SELECT string_agg(md5(n || ' ' || part), '') FROM generate_series(1, 100) part)"),
}
CHECKED = {"guard", "activities", "counts", "problems", "reconciliation", "full_state"}
"""Columns that keep their defaults: they accept certain values alone."""
GUESSES = {
    "text": (
        "{} = 'dismiss2002'",
        "{} BETWEEN 'dismiss' AND 'dismist'",
        "starts_with({}, 'dism')",
        "md5({}) = md5('dismiss2002')",
    ),
    "text[]": ("{} = '{{dismiss2002}}'", "{} @> '{{dismiss2002}}'"),
    "jsonb": ("{} = '\"dismiss2002\"'", "{}['dismiss2002'] IS NULL"),
    "bytea": ("{} = substr(sha256('dismiss2002'), 1, 8)",),
    "uuid": ("{} = md5('dismiss2002')::uuid", "{} < md5('dismiss2002')::uuid"),
}
WAYS = (
    "enable_seqscan = off",
    "enable_memoize = off",
    "enable_bitmapscan = off",
    "enable_hashjoin = off",
    "enable_indexscan = off",
    "enable_material = off",
    "enable_mergejoin = off",
    "enable_nestloop = off",
    "enable_sort = off",
    "constraint_exclusion = on",
    "ROLE penstock_connectors",
)
"""Settings of a login, one at a time."""


class Bound:
    """The tables of connectors, as their owner and as a login that is bound to three tenants."""

    def __init__(self, owner: psycopg.Connection, login: psycopg.Connection) -> None:
        self.owner, self.login = owner, login
        self.columns: dict[str, dict[str, str]] = {}
        for table, column, type_ in owner.execute(
            "SELECT c.relname, a.attname, format_type(a.atttypid, NULL) FROM pg_policy p"
            " JOIN pg_class c ON c.oid = p.polrelid JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0"
            " WHERE p.polname = 'rows_of_a_login' AND NOT a.attisdropped AND a.attidentity = ''"
            " ORDER BY c.relname NOT IN ('connectors', 'webhooks'), c.relname, a.attnum"
        ):
            self.columns.setdefault(table, {})[column] = type_
        for table in self.columns:
            owner.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)".encode())

    def fill(self, word: str) -> None:
        """Write all rows anew. Half of the other tenants' texts begin with this word."""
        self.owner.execute(f"TRUNCATE {', '.join(self.columns)}".encode())
        tenants = " UNION ALL ".join(
            f"SELECT '{tenant}', generate_series({numbers.start}, {numbers.stop - 1})"
            for tenant, numbers in ROWS.items()
        )
        for table, columns in self.columns.items():
            values = {
                name: OF_COLUMN.get(name, OF_TYPE[type_]).format(word=word)
                for name, type_ in columns.items()
                if name not in CHECKED
            }
            self.owner.execute(
                f"INSERT INTO {table} ({', '.join(values)}) SELECT {', '.join(values.values())}"
                f" FROM ({tenants}) t (tenant, n)".encode()
            )
            self.owner.execute(f"REINDEX TABLE {table}".encode())
            self.owner.execute(f"VACUUM (FREEZE, ANALYZE) {table}".encode())

    def statements(self) -> Iterator[tuple[str, str]]:
        """Return each statement with the name of its table."""
        for table, columns in self.columns.items():
            for statement in _statements(table, columns):
                yield table, statement

    def seen(self, ways: tuple[str, ...]) -> dict[str, str]:
        """Return what the login is shown of each statement: the plan with what it read, and the server's counts."""
        results = {}
        for way, (table, statement) in product(ways, [*self.statements()]):
            explain = f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, SUMMARY OFF, FORMAT JSON) {statement}"
            for _ in range(2):  # the first time, pages of the catalog count too
                self.login.execute(f"SET LOCAL {way}".encode())
                before = self._counts(table)
                [[[shown]]] = self.login.execute(explain.encode()).fetchall()
                counts = [now - then for now, then in zip(self._counts(table), before, strict=True)]
                self.login.rollback()
            shown.pop("Planning", None)
            results[f"{way}: {statement}"] = _without_chance(json.dumps(shown)) + str(counts)
        return results

    def _counts(self, table: str) -> list[int]:
        [counts] = self.login.execute(
            "SELECT seq_tup_read, idx_scan, idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = %s", [table]
        ).fetchall()
        return [count or 0 for count in counts]


def _statements(table: str, columns: dict[str, str]) -> Iterator[str]:
    texts = [name for name, type_ in columns.items() if type_ == "text" and name not in LONG | {"tenant"}]
    first, last = texts[0], texts[-1]
    for name, type_ in columns.items():
        for guess in GUESSES.get(type_, ()):
            yield f"SELECT FROM {table} WHERE {guess.format(name)}"
    for name in texts:
        yield f"SELECT min({name}), max({name}) FROM {table}"
        yield f"SELECT FROM {table} t JOIN (VALUES ('dismiss1002'), ('dismiss2002'), ('x')) v (x) ON t.{name} = v.x"
        yield f"SELECT FROM {table} WHERE ctid BETWEEN '(0,0)' AND '(5,0)' AND {name} = 'dismiss2002'"
        for long in sorted(LONG & columns.keys()):
            long_too = f"{long} = ANY (ARRAY[repeat('x', 3200)])"
            yield f"SELECT FROM {table} WHERE {name} = ANY ('{{dismiss2002}}') AND {long_too}"
    yield f"SELECT FROM {table} WHERE tenant = 'theirs' AND {first} = 'dismiss2002'"
    yield f"SELECT FROM {table} WHERE (tenant, {first}) > ('theirs', 'dismiss') ORDER BY tenant, {first} LIMIT 1"
    yield f"SELECT FROM {table} TABLESAMPLE SYSTEM (100) REPEATABLE (1) WHERE {first} = 'dismiss2002'"
    yield f"SELECT FROM {table} a JOIN {table} b ON a.{first} = b.{last} WHERE a.{first} > 'dism'"
    if table not in ("webhooks", "webhook_deliveries", "connector_freshness"):
        yield f"DELETE FROM {table} WHERE {first} = 'dismiss2002' RETURNING *"
        yield f"UPDATE {table} SET {first} = {first} WHERE {last} = 'dismiss2002' RETURNING *"
        yield (
            f"MERGE INTO {table} t USING (VALUES ('dismiss2002')) v (x) ON t.{last} = v.x"
            f" WHEN MATCHED THEN UPDATE SET {first} = x"
        )


def _without_chance(shown: str) -> str:
    """Remove whether a page was in memory."""
    return re.sub(
        r'"Shared Hit Blocks": (\d+), "Shared Read Blocks": (\d+), "Shared Dirtied Blocks": \d+,'
        r' "Shared Written Blocks": \d+',
        lambda blocks: f'"Shared Blocks": {int(blocks[1]) + int(blocks[2])}',
        shown,
    )


@pytest.fixture(scope="module")
def bound(stack: Stack) -> Iterator[Bound]:
    server = json.loads((stack.home / "endpoints.json").read_text())["postgres"]["dsn"]
    name = f"t{uuid4().hex[:10]}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
    admin = make_conninfo(**{**conninfo_to_dict(server), "dbname": name})
    define_roles(admin)
    with (
        psycopg.connect(admin, autocommit=True) as owner,
        logins(admin) as dsns,
        psycopg.connect(dsns["penstock_connectors"]) as login,
    ):
        yield Bound(owner, login)


@pytest.mark.parametrize(
    "ways", [pytest.param(WAYS[:1], id="few"), pytest.param(WAYS, id="all", marks=pytest.mark.slow)]
)
def test_a_bound_login_is_shown_the_same_whatever_other_tenants_texts_are(bound: Bound, ways: tuple[str, ...]) -> None:
    """Conditions were compared in indexes before the policy, and estimates came from the texts of all tenants."""
    bound.owner.execute("SELECT bind_connectors(%s, 'mine', 'more', 'most')", [bound.login.info.user])
    bound.fill("dismiss")
    before = bound.seen(ways)
    bound.fill("invoice")
    after = bound.seen(ways)
    assert len(before) > 400 * len(ways)
    differing = {statement: (plan, after[statement]) for statement, plan in before.items() if plan != after[statement]}
    assert not differing, f"{len(differing)} of {len(before)}, such as {[*differing.items()][:2]}"


def test_prepared_plans_follow_a_change_of_what_a_login_is_bound_to(bound: Bound) -> None:
    bound.fill("dismiss")
    bound.owner.execute("SELECT unbind_connectors(%s)", [bound.login.info.user])
    bound.login.execute("SET plan_cache_mode = force_generic_plan")
    bound.login.execute("PREPARE look AS SELECT DISTINCT tenant FROM connector_items")

    def seen() -> tuple[set[str], str]:
        tenants = {tenant for (tenant,) in bound.login.execute("EXECUTE look").fetchall()}
        plan = "".join(line for (line,) in bound.login.execute("EXPLAIN EXECUTE look").fetchall())
        bound.login.commit()
        return tenants, plan

    for tenants in (["mine"], ["theirs", "anna"], ["it's 1, {2}"], ["mine", "other"]):
        assert seen()[0] == {"mine", "anna", "theirs"}
        for order in (tenants, ["anna"], tenants):
            bound.owner.execute("SELECT bind_connectors(%s, VARIADIC %s)", [bound.login.info.user, order])
            visible, plan = seen()
            assert visible == {*order} & {"mine", "anna", "theirs"}
            assert all(tenant.replace("'", "''") in plan for tenant in order), plan
        bound.owner.execute("SELECT unbind_connectors(%s)", [bound.login.info.user])


def test_texts_have_statistics_only_while_no_login_is_bound(bound: Bound) -> None:
    def texts_in_statistics() -> int:
        bound.owner.execute("ANALYZE")
        [[count]] = bound.owner.execute(
            "SELECT count(*) FROM pg_stats WHERE schemaname = 'public' AND tablename = ANY (%s)"
            " AND strpos(concat(most_common_vals, histogram_bounds), 'invoice') > 0",
            [[table for table in bound.columns if not table.startswith("webhook")]],
        ).fetchall()
        return int(count)

    bound.fill("invoice")
    bound.owner.execute("SELECT unbind_connectors(%s)", [bound.login.info.user])
    assert texts_in_statistics() > 0
    bound.owner.execute("SELECT bind_connectors(%s, 'mine')", [bound.login.info.user])
    assert texts_in_statistics() == 0
    bound.owner.execute("SELECT pg_clear_attribute_stats('public', 'connector_items', 'source', false)")  # a restore
    bound.owner.execute("SELECT conceal_restored_texts()")
    [[sources]] = bound.owner.execute(
        "SELECT n_distinct FROM pg_stats WHERE tablename = 'connector_items' AND attname = 'source'"
    ).fetchall()
    assert sources == 5
    bound.owner.execute("ALTER TABLE connector_asks ADD COLUMN later text DEFAULT 'invoice'")  # a later migration
    assert texts_in_statistics() == 1
    bound.owner.execute("SELECT conceal_restored_texts()")
    assert texts_in_statistics() == 0
    bound.owner.execute("ALTER TABLE connector_asks DROP COLUMN later")
    bound.owner.execute("SELECT unbind_connectors(%s)", [bound.login.info.user])
    assert texts_in_statistics() > 0


def test_look_ups_in_a_large_source_read_no_more_than_they_look_up_while_a_login_is_bound(bound: Bound) -> None:
    """A source that counts as a few rows is read as a whole for each page of names."""
    bound.owner.execute("SELECT bind_connectors(%s, 'mine')", [bound.login.info.user])
    bound.owner.execute(f"TRUNCATE {', '.join(bound.columns)}".encode())
    for table, columns, values in (
        ("connector_items", "scope, external_id", "'', n::text"),
        ("connector_principals", "principal, digest, observed_at", "n::text, 'x', now()"),
        ("connector_publications", "document_id, kind, observed_at", "lpad(to_hex(n), 32, '0')::uuid, 'access', now()"),
    ):
        bound.owner.execute(
            f"INSERT INTO {table} (tenant, source, {columns}) SELECT 'mine', 'wiki', {values}"
            " FROM generate_series(1, 50000) n".encode()
        )
        bound.owner.execute(f"VACUUM ANALYZE {table}".encode())
    of_source = "t.tenant = 'mine' AND t.source = 'wiki'"
    names = f"unnest('{{{','.join(map(str, range(1, 51)))}}}'::text[]) g (name)"
    ids = f"unnest('{{{','.join(str(UUID(int=n)) for n in range(1, 51))}}}'::uuid[]) g (id)"
    for statement in (
        f"SELECT FROM {names} JOIN connector_items t ON {of_source} AND t.external_id = g.name",
        f"SELECT FROM connector_items t WHERE {of_source} AND t.external_id = ANY (ARRAY(SELECT name FROM {names}))",
        f"SELECT FROM connector_items t WHERE {of_source} AND t.external_id > '3' ORDER BY t.external_id LIMIT 500",
        f"SELECT FROM connector_items t WHERE {of_source} AND scope = '' ORDER BY t.external_id LIMIT 500",
        f"UPDATE connector_principals t SET digest = '' FROM {names} WHERE {of_source} AND t.principal = g.name",
        f"DELETE FROM connector_publications t USING {ids}"
        f" WHERE {of_source} AND t.document_id = g.id AND t.kind = 'access'",
    ):
        for connection in (bound.login, bound.owner):
            with connection.transaction(force_rollback=True):
                [[[plan]]] = connection.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}".encode()).fetchall()
            assert max(_rows(plan["Plan"])) <= 500, (statement, plan)


def _rows(node: dict[str, Any]) -> Iterator[float]:
    yield (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
    for child in node.get("Plans", ()):
        yield from _rows(child)
