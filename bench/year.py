"""Runs a simulated year: what a system of two million documents does every day, on one of a thousandth of its size.

    python -m bench.year [--documents 2000] [--months 12] [--day 1.0] [--json FILE]    # → bench/results/year.json

Servers, workers and the query service are real (bench.running), and so are the changes: ``penstock watch`` publishes
edited, new and deleted files, and folders whose access changes. Every rate is that of a system of two million
documents, scaled. Time is compressed, so that a day takes about ``--day`` seconds:

- What retention erases is erased as often as it would be in a day, with ages measured in simulated days. The functions
  that never erase rows of today lose this guard in the bench's own database.
- Postgres looks once a simulated day, instead of once a minute, for tables to vacuum: a harder case than the real one.
- Rows that people and failures cause (reviews, feedback, dead letters, the trail …) are written by SQL.
- Kafka's and Elasticsearch's own clocks are not compressed: a topic's size is given by what is written in a day.

Each simulated month is a sample. The report says what grew between the middle and the end of the year although the
system did not, by the kinds of ``pipeline.ledger.growth``, and ends with 3 if something is beyond its bound.
"""

from __future__ import annotations

import argparse
import asyncio
import getpass
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, LiteralString

import aiohttp
import psutil
import psycopg
from elasticsearch import Elasticsearch
from rich.console import Console
from rich.table import Table

from bench.machine import description
from bench.prose import WORDS_A_CHUNK, sentences, text
from bench.running import FOR_LONG, PENSTOCK, Running, started
from pipeline.ledger.growth import GROWTH
from pipeline.maintenance.retention import Retention
from pipeline.observability.metrics import Metrics
from pipeline.runtime.settings import PostgresSettings, RetentionSettings
from pipeline.stores.postgres import open_pool
from query.retrieval.vectors import EF_SEARCH

RESULTS = Path(__file__).parent / "results" / "year.json"
STANDS_FOR = 2_000_000
"""The documents of the system whose rates are simulated."""
CHUNKS = 5
"""Chunks of a document, about."""
IN_FOLDER = 20
DAYS_A_MONTH = 30
EDITED, CREATED, DELETED = 0.01, 0.001, 0.001
"""Shares of the documents that are edited, created and deleted in a day."""
ACCESS_DAYS = 7
"""Days between two folders whose access changes, each time to tags that nobody had before."""
SEARCHES = 5
"""Real searches in a day. The records of all others are written into the trail by SQL."""
PLANTED: Mapping[str, tuple[int, LiteralString]] = {
    "answer_reviews": (
        2,
        "INSERT INTO answer_reviews (answer_id, tenant, asked_at, question, mode, model, support, density, reasons,"
        " documents, chunks) SELECT gen_random_uuid(), 'default', now(), repeat('question ', 20), 'm', 'm', 0, 0, '{}',"
        " '{}', '{}' FROM generate_series(1, %s)",
    ),
    "answer_feedback": (
        2,
        "INSERT INTO answer_feedback (tenant, giver, subject, chunk_id, verdict, note, given_at) SELECT 'default',"
        " gen_random_uuid()::text::bytea, gen_random_uuid()::text::bytea, gen_random_uuid(), 'up', 'note', now()"
        " FROM generate_series(1, %s)",
    ),
    "answer_provenance": (
        10,
        "INSERT INTO answer_provenance (tenant, answer_id, documents) SELECT 'default', gen_random_uuid(),"
        " ARRAY(SELECT gen_random_uuid() FROM generate_series(1, 8)) FROM generate_series(1, %s)",
    ),
    "dead_letters": (
        1,
        'INSERT INTO dead_letters (id, topic, partition, "offset", stage, code, message, first_failed_at, tenant,'
        " external_id, at) SELECT gen_random_uuid()::text, 't', 0, 0, 'detect', 'x', 'x', now(), 'default', 'x', now()"
        " FROM generate_series(1, %s)",
    ),
    "memberships": (
        1,
        "INSERT INTO memberships SELECT 'default', 'wiki', gen_random_uuid()::text, '{}', now()"
        " FROM generate_series(1, %s)",
    ),
    "standing_questions": (
        1,
        "INSERT INTO standing_questions (tenant, id, principal, question, request, sentences, generation, asked_at)"
        " SELECT 'default', gen_random_uuid(), 'jane', repeat('question ', 20), '{}', '[]', 'g1', now()"
        " FROM generate_series(1, %s)",
    ),
    "superseded": (
        1,
        "INSERT INTO superseded SELECT id, 1, now(), '', '', 'Jane', NULL, NULL, NULL, NULL, '{}', repeat('text ', 900)"
        " FROM documents WHERE deleted_at IS NULL ORDER BY random() LIMIT %s ON CONFLICT DO NOTHING",
    ),
    "query_use": (
        5,
        "INSERT INTO query_use (tenant, caller, span, since) SELECT 'default', 'token:' || gen_random_uuid(), 'day',"
        " now() FROM generate_series(1, %s)",
    ),
}
"""By table, how many rows are written in a day, and the statement."""
TRAIL_RECORDS = 100
"""The records that are written in a day: each search is one."""
SETTINGS = {"standing_days": 90.0, "trail_days": 90.0}
"""Shorter than the defaults, so that half a year shows these tables in their steady state."""
PROVENANCE_DAYS = 30
LATE_DOCUMENTS = 40
"""A day ends when fewer documents are pending."""
SMALL_BYTES = 65_536
"""Smaller tables and indexes are left out of the report."""
QUERIES, NEAREST = 40, 10
GROWN, SLACK_BYTES = 1.15, 262_144
"""Bounds of what should stay flat: the ratio of the last sample to that of the middle, beyond some pages."""
REST_BYTES = 1_000
"""The bound of what a table may keep of a deleted document."""
BLOATED = 2.5
"""The bound of a table's or an index's bytes, as a multiple of a new one's with the same rows."""

OF_DELETED = tuple(table for table, growth in GROWTH.items() if growth.kind == "deleted")
FILLING = {f"{table}_pkey" for table, growth in GROWTH.items() if growth.of_document}
"""Indexes of tables that grow until every document has all its rows."""

BY_TIME, BY_TIME_BLOATED = ("index_state_settled", "index_state_settled_xid", "documents_modified"), 10.0
"""Indexes by time, and the bound of theirs: a page is used again only when all its entries have gone. With edits that
are spread evenly a seventh of such an index is in use after one and a half years (docs/growth.md)."""

stderr = Console(stderr=True, highlight=False)


class Calendar:
    """Remembers when each simulated day began."""

    def __init__(self) -> None:
        self.began: list[float] = []

    def start_day(self) -> None:
        self.began.append(time.time())

    def age(self, days: float) -> float:
        """Return, in real days, the age of what was written so many simulated days ago."""
        first = len(self.began) - 1 - round(days)
        return 36_500.0 if first < 0 else (time.time() - self.began[first]) / 86_400


class Year:
    def __init__(self, run: Running, documents: int, dice: random.Random) -> None:
        self.run, self.documents, self.dice = run, documents, dice
        self.calendar = Calendar()
        self.numbers = iter(range(10**9))
        self.files: list[Path] = []
        self.events: Counter[str] = Counter()

    def create(self) -> None:
        n = next(self.numbers)
        path = self.run.library / f"{n // IN_FOLDER:05}" / f"{n:06}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text(n, CHUNKS * WORDS_A_CHUNK))
        self.files.append(path)
        self.events["created"] += 1

    def edit(self) -> None:
        path = self.dice.choice(self.files)
        paragraphs = path.read_text().split("\n\n")
        paragraphs[self.dice.randrange(1, len(paragraphs))] = " ".join(self.dice.sample(sentences(), 6))
        path.write_text("\n\n".join(paragraphs))
        self.events["edited"] += 1

    def delete(self) -> None:
        path = self.files.pop(self.dice.randrange(len(self.files)))
        path.unlink()
        self.events["deleted"] += 1

    def restrict(self, day: int) -> None:
        """Give a folder tags that nobody had before."""
        folder = self.dice.choice(self.files).parent
        (folder / ".penstock.toml").write_text(f'acl = ["staff", "user:{getpass.getuser()}", "group-{day}"]\n')
        self.events["restricted"] += 1

    async def day(self, number: int, retention: Retention, session: aiohttp.ClientSession) -> None:
        self.calendar.start_day()
        for share, change in ((EDITED, self.edit), (CREATED, self.create), (DELETED, self.delete)):
            for _ in range(max(1, round(share * self.documents))):
                change()
        if number % ACCESS_DAYS == 0:
            self.restrict(number)
        with psycopg.connect(self.run.endpoint("postgres", "dsn"), autocommit=True) as connection:
            for count, statement in PLANTED.values():
                connection.execute(statement, [count])
            self._write_trail(connection, number)
            connection.execute("SELECT expire_provenance(%s, 1000)", [self.calendar.age(PROVENANCE_DAYS)])
        while await retention.turn():
            pass
        with Elasticsearch(self.run.endpoint("elasticsearch", "url")) as es:
            es.indices.flush()  # it does so each minute, and merges remove only what was deleted before
        for _ in range(SEARCHES):
            question = " ".join(self.dice.choice(sentences()).split()[:8])
            address = f"{self.run.endpoint('serve', 'url')}/v1/search"
            async with session.post(address, json={"query": question}, headers=self.run.bearer()) as response:
                await response.read()
                self.events[f"searches {response.status}"] += 1

    def _write_trail(self, connection: psycopg.Connection[Any], number: int) -> None:
        """Write the day's records, dated as if the year ended today, and remove partitions by age."""
        [of] = connection.execute("SELECT current_date - 365 + %s::integer", [number]).fetchone() or [None]
        name = f"records_{of:%Y%m%d}"
        if not (connection.execute("SELECT to_regclass(%s)", [f"trail.{name}"]).fetchone() or [None])[0]:
            connection.execute(f"CREATE TABLE trail.{name} (LIKE trail.records INCLUDING ALL)".encode())
            connection.execute(
                f"ALTER TABLE trail.records ATTACH PARTITION trail.{name} FOR VALUES FROM ('{of}')"
                f" TO ('{of}'::date + 1)".encode()
            )
        connection.execute(
            "INSERT INTO trail.records SELECT %(day)s, gen_random_uuid(), n, (%(day)s::timestamp AT TIME ZONE 'UTC'),"
            " 'default', 'person-' || n, 'token', '{staff}', 'search', '',"
            " ARRAY(SELECT gen_random_uuid() FROM generate_series(1, 10)), 'allowed', '', '127.0.0.1',"
            " gen_random_uuid()::text, 'bench', 'none', decode(repeat('00', 32), 'hex')"
            " FROM generate_series(1, %(count)s) n",
            {"day": of, "count": TRAIL_RECORDS},
        )
        connection.execute(
            "SELECT trail.expire(%s + (current_date - %s::date), 10)", [SETTINGS["trail_days"], of]
        ).fetchall()

    def retention_settings(self) -> RetentionSettings:
        """Return the defaults, in simulated days."""
        retained = {name: field.default for name, field in RetentionSettings.model_fields.items()} | SETTINGS
        ages = {name: self.calendar.age(days) if days else 0.0 for name, days in retained.items()}
        return RetentionSettings.model_construct(**(ages | {"trail_days": 0.0}))

    def pending(self) -> int:
        return int(self.run.sql("SELECT count(*) FROM index_state WHERE seq < want_seq")[0][0])

    def _memory_of_service(self) -> int:
        return round(psutil.Process(self.run.penstock("status")["query"]["pid"]).memory_info().rss / 2**20)

    async def catch_up(self) -> None:
        """Wait while more is pending than in a real day's last second."""
        while self.pending() > LATE_DOCUMENTS:
            self.events["waits"] += 1
            await asyncio.sleep(0.2)

    def sample(self, month: int) -> dict[str, Any]:
        sizes = {
            name: {"bytes": size, "rows": rows, "dead": dead}
            for name, size, rows, dead in self.run.sql(
                "SELECT s.relname, pg_total_relation_size(s.relid), s.n_live_tup, s.n_dead_tup"
                " FROM pg_stat_user_tables s WHERE s.schemaname = 'public' UNION ALL SELECT 'trail.records',"
                " sum(pg_total_relation_size(s.relid)), sum(s.n_live_tup), sum(s.n_dead_tup)"
                " FROM pg_stat_user_tables s JOIN pg_inherits i ON i.inhrelid = s.relid WHERE s.schemaname = 'trail'"
            )
        }
        indexes = dict(
            self.run.sql(
                "SELECT indexrelname, pg_relation_size(indexrelid) FROM pg_stat_user_indexes"
                " WHERE schemaname = 'public' AND pg_relation_size(indexrelid) > %s",
                SMALL_BYTES,
            )
        )
        with Elasticsearch(self.run.endpoint("elasticsearch", "url")) as es:
            stats = es.indices.stats(metric="docs,store,segments")["_all"]["primaries"]
        return {
            "month": month,
            "events": dict(self.events),
            "living": len(self.files),
            "tables": {
                name: {key: int(value or 0) for key, value in of.items()}
                for name, of in sizes.items()
                if of["bytes"] > SMALL_BYTES
            },
            "indexes": indexes,
            "elasticsearch": {
                "entries": stats["docs"]["count"],
                "deleted": stats["docs"]["deleted"],
                "segments": stats["segments"]["count"],
                "bytes": stats["store"]["size_in_bytes"],
            },
            "topics": _topics(self.run.folder / "data" / "kafka"),
            "folder": {
                part.name: _bytes(part)
                for part in sorted(self.run.folder.iterdir())
                if part.name not in ("data", "library")
            },
            "memory_mib": self.run.memory() | {"query": self._memory_of_service()},
        }


def _bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_blocks * 512 for file in files if file.is_file())


def _topics(folder: Path) -> dict[str, int]:
    """Return the bytes of each topic's log."""
    sizes = Counter[str]()
    for part in folder.iterdir():
        name, _, number = part.name.rpartition("-")
        if part.is_dir() and number.isdigit():
            sizes[name] += sum(file.stat().st_size for file in part.glob("*.log"))
    return dict(sorted(sizes.items()))


def compress_time(run: Running) -> None:
    """Let the functions of retention erase rows of today, and Postgres look every second for tables to vacuum."""
    for (definition,) in run.sql(
        "SELECT pg_get_functiondef(p.oid) FROM pg_proc p WHERE p.pronamespace = 'public'::regnamespace"
        " AND p.proname IN ('erase_by_age', 'erase_use_by_age', 'expire_provenance')"
    ):
        compressed = definition.replace("greatest(days, 1)", "days")
        assert compressed != definition, f"nothing to compress in {definition}"
        run.sql(compressed)
    run.sql("ALTER SYSTEM SET autovacuum_naptime = '1s'")
    run.sql("SELECT pg_reload_conf()")


FRESH = """
    SELECT c.relname, coalesce(array_to_string(c.reloptions, ', '), ''),
           ARRAY(SELECT pg_get_indexdef(i.indexrelid) FROM pg_index i WHERE i.indrelid = c.oid),
           ARRAY(SELECT attname::text FROM pg_attribute a WHERE a.attrelid = c.oid AND attnum > 0 AND NOT attisdropped
                 AND attgenerated = '')
    FROM pg_class c WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r'
"""


def compare_with_fresh(run: Running) -> dict[str, Any]:
    """Copy every table with its indexes, and return the bytes of both. Also compares searches of the vectors in the
    graph that has lived for the time, in the new one, and row by row."""
    result: dict[str, Any] = {}
    run.sql("CREATE SCHEMA fresh")
    try:
        with psycopg.connect(run.endpoint("postgres", "dsn"), autocommit=True) as connection:
            connection.execute("SET maintenance_work_mem = '512MB'")
            for table, options, indexes, columns in run.sql(FRESH):
                if not columns:
                    continue
                listed = ", ".join(f'"{column}"' for column in columns)
                connection.execute(f'CREATE TABLE fresh."{table}" (LIKE public."{table}" INCLUDING STORAGE)'.encode())
                if options:
                    connection.execute(f'ALTER TABLE fresh."{table}" SET ({options})'.encode())
                connection.execute(
                    f'INSERT INTO fresh."{table}" ({listed}) SELECT {listed} FROM public."{table}"'.encode()
                )
                for index in indexes:
                    connection.execute(index.replace(" ON public.", " ON fresh.", 1).encode())
                for name in connection.execute(
                    "SELECT indexrelid::regclass::text, pg_relation_size(indexrelid), pg_relation_size("
                    " ('public.' || relname)::regclass) FROM pg_index JOIN pg_class c ON c.oid = indexrelid"
                    " WHERE indrelid = to_regclass(%s)",
                    [f'fresh."{table}"'],
                ).fetchall():
                    result[f"{table}: {name[0].removeprefix('fresh.')}"] = [name[2], name[1]]
                result[table] = list(
                    connection.execute(
                        "SELECT pg_table_size(to_regclass(%s)), pg_table_size(to_regclass(%s))",
                        [f'public."{table}"', f'fresh."{table}"'],
                    ).fetchone()
                    or ()
                )
            large = {name: sizes for name, sizes in result.items() if sizes[0] > SMALL_BYTES}
            return {"bytes": large, "searches": _searches(connection)}
    finally:
        run.sql("DROP SCHEMA fresh CASCADE")


def _searches(connection: psycopg.Connection[Any]) -> dict[str, Any]:
    """Return recall@10 and the pages that a search reads, for both graphs."""
    connection.execute(f"SET hnsw.ef_search = {EF_SEARCH}; SET jit = off; ANALYZE fresh.chunks_g1".encode())
    vectors = connection.execute(
        # Between two rows: no row is the answer beforehand.
        "SELECT ((a.embedding + b.embedding))::text FROM (SELECT embedding, row_number() OVER () AS n"
        " FROM (SELECT embedding FROM chunks_g1 ORDER BY id LIMIT %s) x) a JOIN (SELECT embedding, row_number() OVER ()"
        " AS n FROM (SELECT embedding FROM chunks_g1 ORDER BY id DESC LIMIT %s) y) b USING (n)",
        [QUERIES, QUERIES],
    ).fetchall()

    def nearest(table: str, vector: str) -> tuple[set[str], int]:
        statement = (
            f"SELECT id FROM {table} WHERE in_graph ORDER BY embedding <=> '{vector}'::halfvec({vector.count(',') + 1})"
            f" LIMIT {NEAREST}"
        )
        ids = {str(id_) for (id_,) in connection.execute(statement.encode()).fetchall()}
        [[[plan]]] = connection.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}".encode()).fetchall()
        of = plan["Plan"]
        return ids, of["Shared Hit Blocks"] + of["Shared Read Blocks"]

    exact = []
    connection.execute("SET enable_indexscan = off")
    for (vector,) in vectors:
        exact.append(nearest("public.chunks_g1", vector)[0])
    connection.execute("SET enable_indexscan = on; SET enable_seqscan = off")
    result = {}
    for name, table in (("lived", "public.chunks_g1"), ("fresh", "fresh.chunks_g1")):
        got = [nearest(table, vector) for (vector,) in vectors]
        result[name] = {
            "recall": round(sum(len(a & b) for a, (b, _) in zip(exact, got, strict=True)) / NEAREST / QUERIES, 3),
            "pages": round(sum(pages for _, pages in got) / QUERIES),
        }
    return result


def judge(middle: Mapping[str, Any], last: Mapping[str, Any]) -> list[str]:
    """Return what grew beyond its bound between two samples."""
    grown = []
    deleted = last["events"]["deleted"] - middle["events"]["deleted"]

    def compare(what: str, before: int, now: int, slack: int = SLACK_BYTES) -> None:
        if now > GROWN * before + slack:
            grown.append(f"{what}: {before} → {now}")

    for table, now in last["tables"].items():
        growth = GROWTH["chunks_*" if table.startswith("chunks_") else table]
        rest = REST_BYTES * deleted if growth.kind == "deleted" else 0
        before = middle["tables"].get(table, {"bytes": 0})["bytes"]
        if growth.of_document is not None:
            most = growth.of_document * (last["living"] + last["events"]["deleted"])
            if now["rows"] > most:
                grown.append(f"rows of {table}: {now['rows']}, at most {most}")
        elif growth.kind != "kept":
            compare(f"bytes of {table}", before, now["bytes"], SLACK_BYTES + rest)
    for index, size in last["indexes"].items():
        if index in FILLING:
            continue
        rest = REST_BYTES * deleted if index.startswith(OF_DELETED) else 0
        if index not in BY_TIME:
            compare(f"bytes of {index}", middle["indexes"].get(index, 0), size, SLACK_BYTES + rest)
    compare(
        "bytes of Elasticsearch", middle["elasticsearch"]["bytes"], last["elasticsearch"]["bytes"], 20 * SLACK_BYTES
    )
    for process, mib in last["memory_mib"].items():
        compare(f"MiB of {process}", middle["memory_mib"].get(process, 0), mib, 10)
    for part, size in last["folder"].items():
        if "log" not in part:  # servers rotate theirs, as their operators decide
            compare(f"bytes of {part}", middle["folder"].get(part, 0), size)
    return grown


def bloated(fresh: Mapping[str, Any]) -> list[str]:
    """Return what is much larger than it would be if it were made anew."""
    beyond = [
        f"{name}: {lived} bytes, {new} anew"
        for name, (lived, new) in fresh["bytes"].items()
        if lived > (BY_TIME_BLOATED if name.endswith(BY_TIME) else BLOATED) * new + SLACK_BYTES
    ]
    lived, new = fresh["searches"]["lived"], fresh["searches"]["fresh"]
    if lived["recall"] < new["recall"] - 0.05:
        beyond.append(f"recall of the graph: {lived['recall']}, {new['recall']} anew")
    return beyond


@contextmanager
def watched(run: Running) -> Iterator[None]:
    """Publish what changes in the library while the block runs."""
    me = f"user:{getpass.getuser()}"
    log = (run.folder / "watch.log").open("w")
    process = subprocess.Popen(
        [PENSTOCK, "watch", str(run.library), "--acl", "staff", "--acl", me],
        env=run.environment,
        stdout=log,
        stderr=log,
    )
    try:
        yield
        if process.poll() is not None:
            raise SystemExit(f"`penstock watch` ended: {run.folder}/watch.log says why")
    finally:
        if process.poll() is None:
            psutil.Process(process.pid).terminate()
        process.wait(30)
        log.close()


async def simulate(run: Running, options: argparse.Namespace) -> dict[str, Any]:
    year = Year(run, options.documents, random.Random(23))
    for _ in range(options.documents):
        year.create()
    run.ingest()
    run.settle_graph()
    compress_time(run)
    year.events.clear()
    samples, fresh, dsn = [year.sample(0)], {}, run.endpoint("postgres", "dsn")
    async with (
        open_pool(PostgresSettings(dsn=dsn), "intake") as pool,
        aiohttp.ClientSession() as session,
    ):
        metrics, days = Metrics(), options.months * DAYS_A_MONTH
        with watched(run):
            await asyncio.sleep(5)  # until it follows the folder
            for number in range(days):
                began = time.monotonic()
                await year.day(number, Retention(pool, metrics, year.retention_settings()), session)
                await asyncio.sleep(max(0.0, options.day - (time.monotonic() - began)))
                await year.catch_up()
                if (number + 1) % DAYS_A_MONTH == 0:
                    await _settle(year)
                    month = (number + 1) // DAYS_A_MONTH
                    samples.append(year.sample(month))
                    if month in (options.months // 2, options.months):
                        fresh[str(month)] = compare_with_fresh(run)
                    stderr.print(f"month {month}: {year.events}")
    return {"samples": samples, "fresh": fresh}


async def _settle(year: Year) -> None:
    """Wait until both stores have followed, and statistics and vacuum with them."""
    until = time.monotonic() + 120
    while year.pending() or year.run.outside():
        if time.monotonic() > until:
            raise SystemExit("the stores have not followed within two minutes")
        await asyncio.sleep(0.5)
    await asyncio.sleep(5)


def show(result: Mapping[str, Any]) -> None:
    first, middle, last = (result["samples"][i] for i in (0, len(result["samples"]) // 2, -1))
    table = Table("what", "at first", f"month {middle['month']}", f"month {last['month']}")
    for name in sorted(last["tables"], key=lambda t: -last["tables"][t]["bytes"]):
        sizes = [s["tables"].get(name, {"bytes": 0, "rows": 0, "dead": 0}) for s in (first, middle, last)]
        if sizes[-1]["bytes"] > 100_000:
            table.add_row(name, *(f"{s['bytes'] / 2**20:.1f} MiB, {s['rows']}+{s['dead']}" for s in sizes))
    for part in ("elasticsearch", "topics", "memory_mib", "folder"):
        for key in last[part]:
            table.add_row(f"{part} {key}", *(str(s[part].get(key)) for s in (first, middle, last)))
    stderr.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=2_000)
    parser.add_argument("--months", type=int, default=12, help="fewer than eight do not reach a steady state")
    parser.add_argument("--day", type=float, default=1.0, help="seconds of a simulated day, at least")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--judge", action="store_true", help="only judge the results in that file anew")
    options = parser.parse_args()
    report = json.loads(options.json.read_text()) if options.judge else simulated(options)
    report["grown"] = judge(report["samples"][len(report["samples"]) // 2], report["samples"][-1])
    report["grown"] += bloated(report["fresh"][str(report["months"])])
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    show(report)
    for line in report["grown"]:
        stderr.print(f"[red]✗[/red] {line}")
    if report["grown"]:
        sys.exit(3)


def simulated(options: argparse.Namespace) -> dict[str, Any]:
    """Run the year. Return the samples, and the machine."""
    about = description()
    began = time.monotonic()
    with started("bench-year", partial(Running, more=FOR_LONG)) as run:
        result = asyncio.run(simulate(run, options))
    scale = {"documents": options.documents, "stands_for": STANDS_FOR, "months": options.months}
    return {**about, **scale, "seconds": round(time.monotonic() - began), **result}


if __name__ == "__main__":
    main()
