"""The steps of the disaster drill in order (deploy/drill.py runs them)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Say:
    text: str


@dataclass(frozen=True, slots=True)
class Step:
    typed: tuple[str, ...]
    shows: str = ""
    """A regular expression that the output of each command must match."""


def do(*typed: str, shows: str = "") -> Step:
    return Step(typed, shows)


CLEAN = r"pgvector and Elasticsearch agree"
CLOSED = "penstock down > down.log 2>&1 && penstock up --no-workers > up.log 2>&1"
"""Nobody writes, nobody searches: the three servers alone."""

SCENES: tuple[Say | Step, ...] = (
    Say("## A day like any other"),
    do(
        "mkdir notes plans",
        "for n in $(seq 1 40); do"
        ' printf "# Valve $n\\n\\nValve $n is inspected every $n days.\\n" > notes/valve-$n.md; done',
        'printf "# Merger\\n\\nThe merger with the upper dam is signed in March.\\n" > plans/merger.md',
        "penstock up > up.log 2>&1",
    ),
    do("penstock ingest notes plans --acl staff --wait", shows="searchable 41 documents"),
    do('penstock search "when is the merger signed?" --tag staff --top 1', shows="Merger"),
    Say(
        "Yesterday's backup is made by Postgres's own tool while everything runs. It does not contain roles,"
        " because they belong to the server."
    ),
    do(
        "SINCE=$(date -u +%Y-%m-%dT%H:%M:%SZ)",
        "python -m deploy.libpq pg_dump --format=custom --file=yesterday.dump",
    ),
    Say(
        "Today, one note is edited, one is deleted, one is added, and the plans are restricted to the board. Kafka"
        " and Elasticsearch contain these changes; the backup does not."
    ),
    do(
        'printf "# Valve 1\\n\\nValve 1 was replaced by a sluice.\\n" > notes/valve-1.md',
        "rm notes/valve-2.md",
        'printf "# Valve 41\\n\\nValve 41 is brand new.\\n" > notes/valve-41.md',
        "penstock ingest notes --acl staff --wait",
        "penstock ingest plans --acl board --wait",
    ),
    Say("## Postgres is lost, and restored from yesterday"),
    do(
        "penstock down > down.log 2>&1",
        "rm -r state/data/postgres",
        "penstock up --no-workers > up.log 2>&1",
        'python -m deploy.libpq psql -d postgres -q -c "DROP DATABASE penstock WITH (FORCE)"'
        ' -c "CREATE DATABASE penstock"',
        "python -m deploy.libpq pg_restore --dbname=penstock yesterday.dump",
        "penstock migrate",
    ),
    Say(
        "`up --no-workers` first created an empty database, and with it the server's roles, which the dump's"
        " grants name. The restored ledger and the stores now differ:"
    ),
    do("penstock audit | tail -n 12", shows="differ|more|less|missing|unwanted|stale|ahead"),
    Say(
        "Now the order matters. Workers that write the stores may run, but the query service must not: this ledger"
        " does not know what was revoked today. `recover` resets Kafka's offsets to the time of the backup and"
        " waits for detect:"
    ),
    do(
        "penstock worker vectors > vectors.log 2>&1 & VECTORS=$!",
        "penstock worker keywords > keywords.log 2>&1 & KEYWORDS=$!",
        "(until grep -q 'start the workers' recover.log 2> grep.log; do sleep 0.2; done; exec penstock worker detect"
        " > detect.log 2>&1) & DETECT=$!",
    ),
    do('penstock recover --since "$SINCE" 2>&1 | tee recover.log', shows="the audit is clean"),
    Say("All of today's changes are back, including the withdrawn access:"),
    do(
        "kill $VECTORS $KEYWORDS $DETECT; wait",
        "penstock up > up.log 2>&1",
    ),
    do("penstock audit", shows=CLEAN),
    do('penstock search "sluice" --tag staff --mode keyword --top 1', shows="Valve 1"),
    do('penstock search "valve 41 brand new" --tag staff --top 1', shows="Valve 41"),
    do(
        'penstock search "when is the merger signed?" --tag staff --json | grep merger.md || echo nothing',
        shows="^nothing",
    ),
    do('penstock search "when is the merger signed?" --tag board --top 1', shows="Merger"),
    Say("## Elasticsearch is lost completely"),
    do(
        "penstock down > down.log 2>&1",
        "rm -r state/data/elasticsearch",
        "penstock up > up.log 2>&1",
    ),
    Say(
        "`up` created an empty index. Searches continue with only vectors, and the audit names everything that is"
        " missing:"
    ),
    do("penstock audit | tail -n 3", shows="missing"),
    do('penstock search "valve 41 brand new" --tag staff --top 1', shows="Valve 41"),
    do("penstock rebuild keywords --yes", shows="keywords rebuilt"),
    do("penstock audit", shows=CLEAN),
    do('penstock search "sluice" --tag staff --mode keyword --top 1', shows="Valve 1"),
    Say("## The vectors are lost"),
    do(
        "TABLE=$(python -m deploy.libpq psql -Atc \"SELECT chunk_table FROM generations WHERE state = 'active'\")",
        'python -m deploy.libpq psql -qc "TRUNCATE $TABLE"',
    ),
    Say("Searches continue with only keywords. Every text whose vector is stored nowhere else must be embedded again:"),
    do('penstock search "valve 41 brand new" --tag staff --top 1', shows="Valve 41"),
    do("penstock rebuild vectors --dry-run"),
    do("penstock rebuild vectors --yes", shows="vectors rebuilt"),
    do("penstock audit", shows=CLEAN),
    Say(
        "## Kafka is lost completely\n\nThis is the worst time for it: Kafka has acknowledged changes, and no"
        " worker has read them yet."
    ),
    do(
        CLOSED,
        'printf "# Valve 3\\n\\nValve 3 leaks.\\n" > notes/valve-3.md',
        "rm notes/valve-4.md",
        "penstock ingest notes --acl staff",
    ),
    do(
        "penstock down > down.log 2>&1",
        "rm -r state/data/kafka",
        "penstock up > up.log 2>&1",
    ),
    Say(
        "Five were published, because the connectors' checkpoints were restored from yesterday too: the ledger had"
        " already received three of them from Kafka, and these cost only the comparison. Now the topics are empty,"
        " and the ledger does not know the other two. The connectors consider them published; the following makes"
        " them compare again:"
    ),
    do("penstock recover --topics-lost"),
    do("penstock ingest notes --acl staff --wait"),
    do("penstock audit", shows=CLEAN),
    do('penstock search "which valve leaks?" --tag staff --top 1', shows="Valve 3"),
    do("penstock why notes/valve-4.md | head -n 1", shows="not searchable|deleted"),
    do("penstock down > down.log 2>&1"),
)
