"""Lineage, by OpenLineage: which run read and wrote which data sets. The only place that knows its library, which is
imported only where a receiver is named.

Off (none of OpenLineage's own variables or files names a receiver) every function here does nothing. On, a run is
reported when it begins and when it ends, with numbers and names of data sets; never content, a title or a person. A
thread sends the events from a bounded queue: a receiver that is slow or away delays and fails no work.
docs/events.md lists the jobs.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID, uuid4, uuid5

import structlog

from pipeline.core.errors import PenstockError
from pipeline.installed import is_installed

if TYPE_CHECKING:
    from openlineage.client import OpenLineageClient
    from openlineage.client.event_v2 import RunEvent
    from prometheus_client import Counter

    from pipeline.observability.labels import Labelled

log = structlog.get_logger()

QUEUE_EVENTS = 1_000
"""Events that wait for the receiver. Further ones are lost, and counted."""
FLUSH_SECONDS = 5.0
"""How long a process that ends waits for its last events at most: one try of the library's HTTP transport."""
NAMESPACE = "OPENLINEAGE_NAMESPACE"
"""The variable that names the namespace of jobs, as in OpenLineage's other integrations."""
DEFAULT_NAMESPACE = "penstock"
_RUNS = UUID("7d0f5d60-9ec5-5c0c-9a5f-1f0a6a3b6d11")
"""The name space of the ids of runs that several processes report."""
_NO_RECEIVER = frozenset({"OPENLINEAGE_DISABLED", "OPENLINEAGE_CLIENT_LOGGING", NAMESPACE})

JobType = Literal["LOAD", "MIGRATION", "AUDIT", "CONNECTOR", "WORKER"]
State = Literal["START", "COMPLETE", "FAIL", "ABORT"]
Outcome = Literal["sent", "lost"]


@dataclass(frozen=True, slots=True)
class Assertion:
    """A rule that a data set was compared with."""

    name: str
    violations: int


@dataclass(frozen=True, slots=True)
class Dataset:
    """A data set under OpenLineage's name for it."""

    namespace: str
    name: str
    rows: int | None = None
    """The rows that the run wrote, of an output."""
    assertions: tuple[Assertion, ...] = ()
    """The results of the run's tests, of an input."""


def shared_id(*parts: object) -> UUID:
    """The id of a run that several processes report, from what they all know of it."""
    return uuid5(_RUNS, "/".join(map(str, parts)))


@dataclass(slots=True)
class Run:
    """A run of a job. ``begin``, then one of ``complete``, ``fail`` and ``abort``; ``job`` does all of it."""

    job: str
    """Its name, such as ``load.acme.wiki``."""
    type: JobType
    id: UUID = field(default_factory=uuid4)
    inputs: Sequence[Dataset] = ()
    outputs: Sequence[Dataset] = ()
    parent: Run | None = None

    def wrote(self, *rows: int) -> None:
        """Set the number of rows that each of the first outputs received, in their order."""
        self.outputs = [
            replace(output, rows=number) for output, number in zip(self.outputs, rows, strict=False)
        ] + list(self.outputs[len(rows) :])

    def begin(self) -> None:
        _report(self, "START")

    def complete(self) -> None:
        _report(self, "COMPLETE")

    def fail(self, error: BaseException) -> None:
        """An error of ours is reported by its line, any other by its type: its text may quote content."""
        _report(self, "FAIL", str(error) if isinstance(error, PenstockError) else type(error).__name__)

    def abort(self) -> None:
        _report(self, "ABORT")


@contextmanager
def job(
    name: str,
    type_: JobType,
    *,
    inputs: Iterable[Dataset] = (),
    outputs: Iterable[Dataset] = (),
    parent: Run | None = None,
    aborts: type[Exception] | tuple[type[Exception], ...] = (),
) -> Iterator[Run]:
    """Report the body as a run: it begins, and completes, fails (an exception) or is aborted (a cancellation, Ctrl-C,
    or one of ``aborts``). A connector or worker runs until it is stopped, and completes then. parent: the run that this
    one is a part of."""
    run = Run(name, type_, inputs=list(inputs), outputs=list(outputs), parent=parent)
    run.begin()
    try:
        yield run
    except aborts:
        run.abort()
        raise
    except Exception as error:
        run.fail(error)
        raise
    except BaseException:
        if type_ in ("CONNECTOR", "WORKER"):
            run.complete()
        else:
            run.abort()
        raise
    run.complete()


# A process


def is_on() -> bool:
    """Whether this process reports, so that what only a report needs has to be read."""
    return _sender is not None


def is_enabled(environment: Mapping[str, str] = os.environ, folder: Path | None = None) -> bool:
    """Whether OpenLineage's own variables or file name a receiver. folder: where the file is looked for; None:
    ``.openlineage`` in the home folder."""
    if environment.get("OPENLINEAGE_DISABLED", "").strip().lower() == "true":
        return False
    named = any(
        name.startswith("OPENLINEAGE_") and name not in _NO_RECEIVER and environment[name] for name in environment
    )
    if not named and not _file(folder).is_file():
        return False
    if not is_installed("openlineage"):
        log.error("lineage_off", reason="OpenLineage's client is not installed: pip install 'penstock[lineage]'")
        return False
    return True


def _file(folder: Path | None = None) -> Path:
    return (folder or Path.home() / ".openlineage") / "openlineage.yml"


@contextmanager
def running(events: Labelled[[Outcome], Counter] | None = None) -> Iterator[None]:
    """Report runs inside, where ``is_enabled``. events: counts them by outcome.

    On leaving, the last events are sent for FLUSH_SECONDS at most. Nothing raises here, whatever a receiver does.
    """
    global _sender  # one a process, like the log
    if _sender is not None or not is_enabled():
        yield
        return
    _sender = _Sender(events)
    try:
        yield
    finally:
        sender, _sender = _sender, None
        sender.close(FLUSH_SECONDS)


class _Sender:
    """Sends events in order from a thread of its own."""

    def __init__(self, events: Labelled[[Outcome], Counter] | None) -> None:
        self._events = events
        self._queue: queue.Queue[tuple[Run, State, str | None, datetime] | None] = queue.Queue(QUEUE_EVENTS)
        self._has_failed = False
        self._is_closed = False
        """Set when the last events are given up."""
        self._thread = threading.Thread(target=self._send_all, name="lineage", daemon=True)
        self._thread.start()

    def put(self, run: Run, state: State, message: str | None) -> None:
        try:
            self._queue.put_nowait((replace(run), state, message, datetime.now(UTC)))
        except queue.Full:
            self._lost("too many events wait for the receiver")

    def close(self, seconds: float) -> None:
        until = monotonic() + seconds
        with suppress(queue.Full):
            self._queue.put(None, timeout=seconds)
            self._thread.join(max(0.0, until - monotonic()))
        if self._thread.is_alive():
            self._is_closed = True
            with suppress(queue.Full):
                self._queue.put_nowait(None)  # wakes the thread
            self._lost("the receiver did not answer before the process ended")

    def _send_all(self) -> None:
        client: OpenLineageClient | None = None
        while not self._is_closed and (item := self._queue.get()) is not None:
            try:
                client = client or _client()
                client.emit(_event(*item))
            except Exception as error:  # noqa: BLE001 # whatever a receiver or its settings cause: it disturbs no work
                self._lost(type(error).__name__)
            else:
                self._has_failed = False
                self._count("sent")

    def _lost(self, reason: str) -> None:
        """Count a lost event, and log the first one since the last that was sent."""
        self._count("lost")
        if not self._has_failed:
            log.warning("lineage_lost", reason=reason)
        self._has_failed = True

    def _count(self, outcome: Outcome) -> None:
        if self._events is not None:
            self._events.labels(outcome).inc()


_sender: _Sender | None = None


def _report(run: Run, state: State, message: str | None = None) -> None:
    if _sender is not None:
        _sender.put(run, state, message)


def _client() -> OpenLineageClient:
    from openlineage.client import OpenLineageClient
    from openlineage.client.transport import console

    for name in ("openlineage", "urllib3"):  # each attempt; a lost event is one line of ours
        logging.getLogger(name).setLevel(logging.ERROR)

    class Client(OpenLineageClient):
        @staticmethod
        def _find_yaml_config_path() -> str | None:
            """Find the configuration without the current folder, where the library looks as well: people who write
            documents into that folder could have files written, and variables with secrets sent to them."""
            places = (os.environ.get("OPENLINEAGE_CONFIG"), str(_file()))
            return next((place for place in places if place and os.path.isfile(place)), None)

    client = Client()
    if client.transport.kind == console.ConsoleTransport.kind:  # it logs the events, which not every process shows
        console.log.setLevel(logging.INFO)
        console.log.addHandler(logging.StreamHandler(sys.stderr))
        console.log.propagate = False
    return client


def _event(run: Run, state: State, message: str | None, at: datetime) -> RunEvent:
    from openlineage.client import event_v2 as ol
    from openlineage.client import facet_v2 as facets
    from openlineage.client.constants import __version__ as adapter

    ours = version("penstock")
    producer = f"pkg:pypi/penstock@{ours}"
    ol.set_producer(producer)
    namespace = os.environ.get(NAMESPACE) or DEFAULT_NAMESPACE
    about: dict[str, Any] = {
        "processing_engine": facets.processing_engine_run.ProcessingEngineRunFacet(
            version=ours, name="Penstock", openlineageAdapterVersion=adapter
        )
    }
    if run.parent is not None:
        about["parent"] = facets.parent_run.ParentRunFacet(
            run=facets.parent_run.Run(runId=str(run.parent.id)),
            job=facets.parent_run.Job(namespace=namespace, name=run.parent.job),
        )
    if message is not None:
        about["errorMessage"] = facets.error_message_run.ErrorMessageRunFacet(
            message=message, programmingLanguage="PYTHON"
        )
    kind = facets.job_type_job.JobTypeJobFacet(
        processingType="STREAMING" if run.type in ("CONNECTOR", "WORKER") else "BATCH",
        integration="PENSTOCK",
        jobType=run.type,
    )
    return ol.RunEvent(
        eventType=ol.RunState[state],
        eventTime=at.isoformat(),
        run=ol.Run(runId=str(run.id), facets=about),
        job=ol.Job(namespace=namespace, name=run.job, facets={"jobType": kind}),
        inputs=[
            ol.InputDataset(
                namespace=dataset.namespace,
                name=dataset.name,
                inputFacets=_assertions(dataset) if state != "START" else {},
            )
            for dataset in run.inputs
        ],
        outputs=[
            ol.OutputDataset(
                namespace=dataset.namespace,
                name=dataset.name,
                outputFacets=_statistics(dataset) if state != "START" else {},
            )
            for dataset in run.outputs
        ],
        producer=producer,
    )


def _assertions(of: Dataset) -> dict[str, Any]:
    from openlineage.client.facet_v2 import data_quality_assertions_dataset as quality

    if not of.assertions:
        return {}
    results = [
        quality.Assertion(assertion=rule.name, success=rule.violations == 0, expected="0", actual=str(rule.violations))
        for rule in of.assertions
    ]
    return {"dataQualityAssertions": quality.DataQualityAssertionsDatasetFacet(assertions=results)}


def _statistics(of: Dataset) -> dict[str, Any]:
    from openlineage.client.facet_v2 import output_statistics_output_dataset as statistics

    if of.rows is None:
        return {}
    return {"outputStatistics": statistics.OutputStatisticsOutputDatasetFacet(rowCount=of.rows)}
