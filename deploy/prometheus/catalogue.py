"""Every metric there is: ``python -m deploy.prometheus.catalogue > docs/metrics.md``."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from canary.telemetry import CanaryMetrics
from connectors.extraction.service import ServiceMetrics
from pipeline.observability.metrics import Metrics
from query.evaluation.service import EvalMetrics
from query.settings import EvalSettings
from query.telemetry import QueryMetrics

RULES = Path(__file__).parent
BOARDS = RULES.with_name("grafana")
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}

HEAD = """\
# Metrics and dashboards

`python -m deploy.prometheus.catalogue > docs/metrics.md` writes this page from the code; a test compares. Every process
serves its own metrics on `/metrics`: the workers on `PENSTOCK_STREAM_HEALTH_PORT`, the query service on its own port
(to loopback, and to an operator's key), and the extraction service on its own port. Times are in seconds. No label
holds a document, a caller, a question or the text of an exception. `source` is the name of a declared source, `lane`
is `live` or `backfill`, `stage` is `detect`, `identities`, `conversations`, `vectors` or `keywords`, and `sink` and
`store` are `vectors` or `keywords`.

Pending work, lag, and the ages of sources are read from the ledger and from Kafka by one of the detect workers; the
others do not export them. Use `max`, and alert when they are absent.

A Prometheus for the local stack (`python -m deploy.local.prometheus` finds one, or unpacks Debian's):

```
mkdir watch
cp deploy/prometheus/*.yml watch/
python -m deploy.prometheus.targets > watch/targets.json
prometheus --config.file=watch/local.yml --storage.tsdb.path=watch/data --web.listen-address=127.0.0.1:9090
```
"""

DASHBOARDS = """
## Dashboards

Grafana's dashboards are files in `deploy/grafana`: Compose loads them, elsewhere import them or provision the folder.
Their variable `runbooks` is the address at which this repository can be read. A panel turns yellow and red at its
thresholds, and links to the runbook of its alert.
"""


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    kind: str
    labels: tuple[str, ...]
    help: str

    @property
    def series(self) -> tuple[str, ...]:
        """The names that queries use."""
        return tuple(self.name + suffix for suffix in SUFFIXES[self.kind])


def workers() -> list[Entry]:
    return [*_entries(Metrics()), *_entries(Metrics().ports), *_entries(CanaryMetrics())]


def query_service() -> list[Entry]:
    return [
        *_entries(QueryMetrics()),
        *_entries(QueryMetrics().ports),
        *_entries(EvalMetrics(CollectorRegistry(), EvalSettings())),
    ]


def extraction_service() -> list[Entry]:
    return [*_entries(ServiceMetrics()), *_entries(ServiceMetrics().ports)]


def recorded() -> list[str]:
    """Names that recording rules make."""
    return re.findall(r"- record: (\S+)", (RULES / "recording.yml").read_text())


def names() -> set[str]:
    """Everything that a query may name."""
    entries = (*workers(), *query_service(), *extraction_service())
    return {name for entry in entries for name in entry.series} | {*recorded(), "up", "ALERTS"}


def _entries(metrics: object) -> Iterator[Entry]:
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase):
            [described] = metric.describe()
            yield Entry(described.name, described.type, tuple(metric._labelnames), described.documentation)


def document() -> str:
    parts = [HEAD]
    tables = {
        "Workers": workers(),
        "Query service": query_service(),
        "Extraction service": extraction_service(),
    }
    for title, entries in tables.items():
        parts.append(f"\n## {title}\n\n| metric | kind | labels | what |\n|---|---|---|---|\n")
        for entry in sorted(entries, key=lambda entry: entry.name):
            shown = entry.name + ("_total" if entry.kind == "counter" else "")
            labels = ", ".join(f"`{label}`" for label in entry.labels) or "–"
            parts.append(f"| `{shown}` | {entry.kind} | {labels} | {entry.help} |\n")
    parts.append("\n## Recorded series\n\nThese are written by `deploy/prometheus/recording.yml`:\n\n")
    parts.extend(f"- `{name}`\n" for name in recorded())
    parts.append(DASHBOARDS)
    parts.extend(_described(file) for file in sorted(BOARDS.glob("*.json")))
    return "".join(parts)


def _described(file: Path) -> str:
    """Describe what a dashboard shows, with a line for each of its rows."""
    board = json.loads(file.read_text())
    lines = [f"\n### {board['title']}\n\n`deploy/grafana/{file.name}`\n\n| row | panels |\n|---|---|\n"]
    row, titles = "", list[str]()
    for panel in [*board["panels"], {"type": "row", "title": ""}]:
        if panel["type"] != "row":
            titles.append(panel["title"])
            continue
        if titles:
            lines.append(f"| {row} | {'; '.join(titles)} |\n")
        row, titles = panel["title"], []
    return "".join(lines)


if __name__ == "__main__":
    sys.stdout.write(document())
