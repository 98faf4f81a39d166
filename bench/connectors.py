"""Measures a connector on a large source: its first crawl with a crash in the middle, a sweep, webhooks, how long
another process takes to take over, and how soon it notices changes without webhooks.

    python -m bench.connectors [--documents 20000] [--groups 5000] [--events-per-second 1000] [--only crawl] [--json]
        [--requests-per-second 100] [--points-per-hour 65000] [--words 60]

A running system (bench.running) and the fake Confluence Cloud: spaces of 200 pages, each of which may be viewed by its
share of the groups; a group has 20 members, and one page in fifty is restricted to one group. The worker of the
connectors is killed when it has published half of the pages. ``requests`` says what the source was sent and what it
refused by its rate limits (connectors.fakes.atlassian_limits): by default bursts for each endpoint, as they apply to an
API token; ``points`` is what an app would have spent of its quota. ``memory`` has the seconds, the documents published,
those in the ledger and the resident MiB of the worker during the crawl. ``listed_again`` counts the pages of results
that were requested before the crash and once more after it. ``differences`` counts the documents and people of which
the ledger does not hold what the source does. ``events``: as many signed events a second as were asked for, each about
another page that has changed; an event's milliseconds are those of its HTTP response. ``changes``: the connector has
its ordinary intervals and gets no event, each response takes 0.2 s, and pages, access and memberships change at random
times of five minutes. ``seconds`` are those until the ledger has accepted a change, by its kind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from rich.console import Console
from rich.table import Table
from starlette.types import Receive, Scope, Send

from bench.load_corpus import Corpus
from bench.running import PENSTOCK, Running, machine, running, spread
from connectors.declared import VARIABLE
from connectors.fakes.atlassian_limits import RateLimits
from connectors.fakes.confluence import FakeConfluence, requests
from connectors.fakes.confluence_state import Item
from pipeline.runtime.http_server import served

MEMBERS = 20
SPACE_PAGES = 200
RESTRICTED = 50
"""One page in so many is restricted."""
BURST = 100
"""Requests that each endpoint answers at once, after a pause."""
AGE_DAYS = 90
"""The age of the pages: had all been written just now, the first poll would read every one again."""
SAMPLES = 20
"""Measurements of memory in a crawl."""
EVENT_SECONDS = 10
POLL_SECONDS = 0.5
COMPARISON_SECONDS = 5.0
SETTLE_SECONDS = 3_600.0
"""Longest wait, after the first load, for the ledger to hold what the source does; what it lacks then is reported."""
LAST_SECONDS = 3_600.0
"""Longest wait for one of the steps."""
AT_ONCE = 64
"""Events that are sent concurrently."""


SOURCE = "wiki"
STEPS = ("crawl", "events", "takeover", "changes")
CHANGE_KINDS = ("page", "text", "restriction", "move", "trash", "purge", "space permission", "membership")
CHANGES = 12
"""Changes of each kind."""
CHANGE_SECONDS = 300.0
"""The time over which they are spread."""
REQUEST_SECONDS = 0.2
"""From a request to its response, while changes are made."""

Expected = tuple[str, list[str], list[str]]
"""The title, the tags and the required tags of a document."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change at the source, and what the ledger holds once it has accepted it."""

    kind: str
    at: float
    document: str = ""
    expected: Expected | None = None
    """The document; None: it is deleted."""
    person: str = ""
    tag: str = ""
    holds: bool = True
    """Whether the person has the tag."""


class Source:
    """A fake Confluence in a thread of its own, with the times of its requests."""

    def __init__(self, documents: int, groups: int, limits: RateLimits, words: int) -> None:
        self.fake = FakeConfluence()
        self.fake.limits = self.limits = limits
        self.times: list[float] = []
        state, corpus = self.fake.state, Corpus()
        state.advance(days=-AGE_DAYS)
        self.bot = state.add_user("penstock")
        people = [state.add_user(f"person{n}").account_id for n in range(max(groups, MEMBERS))]
        for n in range(groups):
            state.groups[f"group-{n}"] = {people[(n + 37 * k) % len(people)] for k in range(MEMBERS)}
        spaces = -(-documents // SPACE_PAGES)
        for n in range(spaces):
            readers = {f"group-{group}" for group in range(n % groups, groups, spaces)}
            state.add_space(f"S{n}", users={self.bot.account_id}, groups=readers)
        self.pages = [
            state.add_page(f"S{n % spaces}", f"Page {n}", f"<p>{corpus.text(n, words)}</p>", author=self.bot.account_id)
            for n in range(documents)
        ]
        for n in range(0, documents, RESTRICTED):
            state.restrict(self.pages[n].id, users={self.bot.account_id}, groups={f"group-{n % groups}"})
        state.events.clear()
        state.advance(days=AGE_DAYS)
        self.url = ""
        self._points = self._refused = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self.times.append(time.monotonic())
        await self.fake(scope, receive, send)

    async def _serve(self) -> None:
        async with served(self) as url:
            self.url = url + self.fake.context
            await asyncio.to_thread(self._stop.wait)

    def __enter__(self) -> Source:
        self._thread.start()
        wait_for(lambda: bool(self.url))
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def requests_since(self, began: float) -> dict[str, int]:
        """Return the number of requests, those that were refused, the most in any minute, and the points of all since
        the last call."""
        times = self.times[bisect_left(self.times, began) :]
        most = max((bisect_left(times, at + 60) - n for n, at in enumerate(times)), default=0)
        points, self._points = self.limits.points_spent - self._points, self.limits.points_spent
        refused, self._refused = self.limits.refused.total() - self._refused, self.limits.refused.total()
        return {"all": len(times), "refused": refused, "most_in_a_minute": most, "points": points}

    def listings(self) -> set[str]:
        """Return the distinct requests for pages of results with texts, and forget them."""
        requests, self.fake.requests = self.fake.requests, []
        return {line for line in requests if "/spaces/" in line and "body-format" in line}

    def documents(self) -> dict[str, Expected]:
        """Return each page, by its id, as the ledger has to hold it."""
        return {page.id: self.document(page) for page in self.pages if page.status == "current"}

    @staticmethod
    def document(page: Item) -> Expected:
        restrictions = [f"{SOURCE}/restriction:{page.id}"] if page.read else []
        return page.title, [f"{SOURCE}/space:{page.space}"], restrictions

    def change(self, kind: str, chance: random.Random) -> Change:
        """Change something. kind: of CHANGE_KINDS."""
        state = self.fake.state
        if kind == "membership":
            group = chance.choice([name for name, members in state.groups.items() if members])
            account = chance.choice(sorted(state.groups[group]))
            state.groups[group].discard(account)
            person = state.users[account].email.lower()
            return Change(kind, time.monotonic(), person=person, tag=f"group:{group}", holds=False)
        space = chance.choice([*state.spaces.values()])
        if kind == "space permission":
            newcomer, group = state.add_user(f"newcomer{len(state.users)}"), f"newcomers-{len(state.groups)}"
            state.groups[group] = {newcomer.account_id}
            person = newcomer.email.lower()
            space.readers.groups.add(group)
            return Change(kind, time.monotonic(), person=person, tag=f"space:{space.key}")
        unrestricted = [page for page in self.pages if page.status == "current" and not page.read]
        page = chance.choice([page for page in unrestricted if page.space != space.key])
        match kind:
            case "page":
                page = state.add_page(
                    space.key, f"New page {len(self.pages)}", "<p>New words.</p>", author=self.bot.account_id
                )
                self.pages.append(page)
            case "text":
                state.edit(page.id, title=f"{page.title}, edited")
            case "restriction":
                state.restrict(page.id, users={self.bot.account_id}, groups={chance.choice([*state.groups])})
            case "move":
                state.move(page.id, None, space=space.key)
            case "trash":
                state.trash(page.id)
            case "purge":
                state.trash(page.id)
                state.purge(page.id)
        expected = self.document(page) if page.status == "current" else None
        return Change(kind, time.monotonic(), document=page.id, expected=expected)

    def holders(self) -> dict[str, set[str]]:
        """Return the tags of each person."""
        state, holders = self.fake.state, defaultdict[str, set[str]](set)
        tags = [(f"group:{group}", {group}, set[str]()) for group in state.groups]
        tags += [(f"space:{space.key}", space.readers.groups, space.readers.users) for space in state.spaces.values()]
        tags += [(f"restriction:{page.id}", page.read.groups, page.read.users) for page in self.pages if page.read]
        for tag, groups, users in tags:
            for account in users.union(*(state.groups[group] for group in groups)):
                holders[state.users[account].email.lower()].add(tag)
        return holders


def wait_for(is_done: Callable[[], bool], every_seconds: float = POLL_SECONDS) -> float:
    """Return the seconds until it is done."""
    began = time.perf_counter()
    while not is_done():
        if time.perf_counter() - began > LAST_SECONDS:
            raise SystemExit(f"a step was not done within {LAST_SECONDS:.0f} s: see the logs in PENSTOCK_HOME")
        time.sleep(every_seconds)
    return round(time.perf_counter() - began, 1)


class Connectors:
    """The system with one connector, ``wiki``, and the processes that may run it."""

    def __init__(self, run: Running, source: Source) -> None:
        self._run = run
        self._source = source
        self._file = run.folder / "connectors.toml"
        self.configure(source, "poll_seconds = 9000\nsweep_seconds = 9000\ngroups_seconds = 9000\n")
        self.environment = {
            **run.environment,
            VARIABLE: str(self._file),
            "PENSTOCK_WIKI_TOKEN": source.fake.token_for(source.bot),
            "PENSTOCK_WIKI_WEBHOOK_SECRET": source.fake.webhook_secret,
            "PENSTOCK_STREAM_HEALTH_PORT": "0",
            "PENSTOCK_CONNECTORS_HTTP_PORT": "0",
        }

    def configure(self, source: Source, intervals: str = "") -> None:
        """intervals: lines of settings; none: what connectors have without."""
        self._file.write_text(
            f'[connector.wiki]\nkind = "confluence"\nbase_url = "{source.url}"\nemail = "{source.bot.email}"\n'
            + intervals
        )

    @contextmanager
    def process(self) -> Iterator[subprocess.Popen[bytes]]:
        with Path(self._run.folder, "bench-connectors.log").open("ab") as log:
            command = [PENSTOCK, "worker", "connectors"]
            process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def documents(self) -> int:
        return int(self._run.sql("SELECT count(*) FROM documents WHERE source = 'wiki' AND deleted_at IS NULL")[0][0])

    def published(self) -> int:
        return int(self._run.sql("SELECT count(*) FROM connector_items WHERE source = 'wiki'")[0][0])

    def members(self) -> int:
        return int(self._run.sql("SELECT count(*) FROM connector_groups WHERE source = 'wiki'")[0][0])

    def differences(self, source: Source) -> dict[str, int]:
        """Count the documents and the people of which the ledger does not hold what the source does."""
        documents = {
            external_id: (title, acl_tags, required_tags)
            for external_id, title, acl_tags, required_tags in self._run.sql(
                "SELECT external_id, title, acl_tags, required_tags FROM documents d JOIN access_sets a"
                " ON a.id = d.access_id WHERE source = 'wiki' AND deleted_at IS NULL"
            )
        }
        holders = {
            principal: set(groups)
            for principal, groups in self._run.sql("SELECT principal, groups FROM memberships WHERE source = 'wiki'")
        }
        return {
            "documents": _differing(documents, source.documents()),
            "people": _differing(holders, source.holders()),
        }

    def lacks(self, changes: Sequence[Change]) -> list[Change]:
        """Return the changes that the ledger has not accepted."""
        documents: dict[str, Expected] = {
            external_id: (title, acl_tags, required_tags)
            for external_id, title, acl_tags, required_tags in self._run.sql(
                "SELECT external_id, title, acl_tags, required_tags FROM documents d JOIN access_sets a"
                " ON a.id = d.access_id WHERE source = 'wiki' AND deleted_at IS NULL AND external_id = ANY(%s)",
                [change.document for change in changes],
            )
        }
        tags: dict[str, list[str]] = dict(
            self._run.sql(
                "SELECT principal, groups FROM memberships WHERE source = 'wiki' AND principal = ANY(%s)",
                [change.person for change in changes],
            )
        )
        return [
            change
            for change in changes
            if (change.document and documents.get(change.document) != change.expected)
            or (change.person and (change.tag in tags.get(change.person, ())) != change.holds)
        ]

    def row(self) -> dict[str, Any]:
        rows = self._run.sql("SELECT to_jsonb(c) FROM connectors c WHERE source = 'wiki'")
        return dict(rows[0][0]) if rows else {}

    def holder(self) -> int | None:
        """Return the process that runs the connector."""
        worker = self.row().get("worker")
        return int(worker.rpartition(":")[2]) if worker else None

    def penstock(self, *arguments: str) -> Any:
        process = subprocess.run([PENSTOCK, *arguments, "--json"], env=self.environment, stdout=-1, check=True)
        return json.loads(process.stdout)


def _differing(actual: Mapping[str, object], expected: Mapping[str, object]) -> int:
    return sum(actual.get(key) != expected.get(key) for key in actual.keys() | expected.keys())


def processor_seconds(process: subprocess.Popen[bytes]) -> float:
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def memory(process: subprocess.Popen[bytes]) -> int:
    return round(psutil.Process(process.pid).memory_info().rss / 2**20)


class Samples:
    """The memory of the worker during the crawl."""

    def __init__(self, connectors: Connectors, documents: int) -> None:
        self._connectors = connectors
        self._every = max(1, documents // SAMPLES)
        self._began = time.monotonic()
        self.rows: list[tuple[int, int, int, int]] = []
        """Seconds, documents published, documents in the ledger, MiB."""

    def until(self, is_reached: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        """Measure until that is reached."""

        def has_reached() -> bool:
            if process.poll() is not None:
                raise SystemExit("the worker of the connectors has ended: see bench-connectors.log")
            published, done = self._connectors.published(), is_reached()
            if done or not self.rows or published >= self.rows[-1][1] + self._every:
                count, seconds = self._connectors.documents(), round(time.monotonic() - self._began)
                self.rows.append((seconds, published, count, memory(process)))
            return done

        wait_for(has_reached)


def crawl(connectors: Connectors, source: Source) -> dict[str, Any]:
    documents, began = len(source.pages), time.monotonic()
    samples = Samples(connectors, documents)
    with connectors.process() as process:
        samples.until(lambda: connectors.published() >= documents // 2, process)
        processor = processor_seconds(process)
    killed, until_killed, listed = time.monotonic(), source.requests_since(began), source.listings()
    with connectors.process() as process:
        samples.until(lambda: connectors.row()["full_state"] == "done" and connectors.documents() >= documents, process)
        loaded = round(time.monotonic() - began, 1)
        processor += processor_seconds(process)
        requests_sent, listed_after = source.requests_since(killed), source.listings()
        settled = time.monotonic() + SETTLE_SECONDS
        wait_for(
            lambda: not any(connectors.differences(source).values()) or time.monotonic() > settled, COMPARISON_SECONDS
        )
        result = {
            "seconds": loaded,
            "seconds_with_all_groups": round(time.monotonic() - began, 1),
            "documents_per_second": round(documents / loaded, 1),
            "requests": {"until_the_crash": until_killed, "after_it": requests_sent},
            "listed_until_the_crash": len(listed),
            "listed_after_it": len(listed_after),
            "listed_again": len(listed & listed_after),
            "processor_ms_per_document": round(1_000 * processor / documents, 2),
            "tags": connectors.members(),
            "differences": connectors.differences(source),
            "memory": samples.rows,
            "counts": connectors.row()["counts"],
        }
        swept = time.monotonic()
        source.requests_since(swept)  # the groups may have been read meanwhile
        connectors.penstock("connector", "run", "wiki", "--sweep")
        result["sweep"] = {
            "seconds": round(time.monotonic() - swept, 1),
            "requests": source.requests_since(swept),
            "memory_mib": memory(process),
        }
    return result


async def send(source: Source, address: str, per_second: int) -> dict[str, Any]:
    """Change pages, and send the events of the changes at a steady pace."""
    count = min(per_second * EVENT_SECONDS, len(source.pages))
    for n, page in enumerate(source.pages[:count]):
        source.fake.state.edit(page.id, body=f"<p>Changed words of page {n}.</p>")
    events = requests(source.fake.state.events, source.fake.webhook_secret, cloud=True)
    places, milliseconds, statuses = asyncio.Semaphore(AT_ONCE), list[float](), dict[int, int]()
    async with aiohttp.ClientSession(address) as client:
        while True:  # until the connector has begun
            first = events[0]
            async with client.post("/v1/events/wiki", data=first.body, headers=dict(first.headers)) as response:
                if response.status == 200:
                    break
            await asyncio.sleep(POLL_SECONDS)

        async def post(event: Any) -> None:
            async with places:
                began = time.perf_counter()
                async with client.post("/v1/events/wiki", data=event.body, headers=dict(event.headers)) as response:
                    await response.read()
                milliseconds.append(1_000 * (time.perf_counter() - began))
                statuses[response.status] = statuses.get(response.status, 0) + 1

        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for n, event in enumerate(events):
                if (ahead := began + n / per_second - time.perf_counter()) > 0:
                    await asyncio.sleep(ahead)
                tasks.create_task(post(event))
        seconds = time.perf_counter() - began
    return {
        "sent": count,
        "per_second": round(count / seconds),
        "statuses": statuses,
        "milliseconds": spread(milliseconds),
    }


def webhooks(run: Running, connectors: Connectors, source: Source, per_second: int) -> dict[str, Any]:
    with connectors.process() as process:
        wait_for(lambda: connectors.holder() == process.pid)
        worker, [(version,)] = psutil.Process(process.pid), run.sql("SELECT clock_timestamp()")
        processor, began = sum(worker.cpu_times()[:2]), time.monotonic()
        source.requests_since(began)
        result = asyncio.run(send(source, connectors.row()["address"], per_second))
        result["processor_ms_per_event"] = round(1_000 * (sum(worker.cpu_times()[:2]) - processor) / result["sent"], 2)
        count = "SELECT count(*) FROM documents WHERE source = 'wiki' AND observed_at > %s"
        result["seconds_until_the_ledger_has_all"] = wait_for(lambda: run.sql(count, version)[0][0] >= result["sent"])
        result["requests"] = source.requests_since(began)
        result["memory_mib"] = memory(process)
    return result


def takeover(connectors: Connectors) -> dict[str, Any]:
    seconds = {}
    with connectors.process() as first:
        wait_for(lambda: connectors.holder() == first.pid)
        with connectors.process() as second:
            time.sleep(5)  # until it waits for the lease
            first.kill()
            seconds["seconds_after_a_kill"] = wait_for(lambda: connectors.holder() == second.pid)
            with connectors.process() as third:
                time.sleep(5)
                second.terminate()
                seconds["seconds_after_an_orderly_end"] = wait_for(lambda: connectors.holder() == third.pid)
    return seconds


def unaided(connectors: Connectors, source: Source) -> dict[str, Any]:
    """Measure how soon the ledger has changes of which no event tells."""
    chance = random.Random(1)
    connectors.configure(source)
    source.fake.faults.seconds = REQUEST_SECONDS
    kinds = [*CHANGE_KINDS] * CHANGES
    chance.shuffle(kinds)
    seconds, pending = defaultdict[str, list[float]](list), list[Change]()
    with connectors.process() as process:
        wait_for(lambda: connectors.holder() == process.pid)
        began = time.monotonic()
        source.requests_since(began)
        due = sorted(began + chance.uniform(0, CHANGE_SECONDS) for _ in kinds)
        while (due or pending) and time.monotonic() < began + LAST_SECONDS:
            while due and due[0] <= time.monotonic():
                due.pop(0)
                pending.append(source.change(kinds.pop(), chance))
            lacking = connectors.lacks(pending) if pending else []
            for change in pending:
                if change not in lacking:
                    seconds[change.kind].append(time.monotonic() - change.at)
            pending = lacking
            time.sleep(POLL_SECONDS)
        worker, elapsed = psutil.Process(process.pid), time.monotonic() - began
        result = {
            "seconds": {kind: spread(seconds[kind]) for kind in CHANGE_KINDS},
            "not_accepted": len(pending),
            "requests": source.requests_since(began),
            "elapsed_seconds": round(elapsed),
            "processor_seconds": round(sum(worker.cpu_times()[:2]), 1),
            "memory_mib": memory(process),
        }
        settled = time.monotonic() + SETTLE_SECONDS
        wait_for(
            lambda: not any(connectors.differences(source).values()) or time.monotonic() > settled, COMPARISON_SECONDS
        )
        return {**result, "differences": connectors.differences(source)}


def main() -> None:
    parser = argparse.ArgumentParser(description="A connector on a large source.")
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--groups", type=int, default=5_000)
    parser.add_argument("--events-per-second", type=int, default=1_000)
    parser.add_argument(
        "--only", action="append", choices=STEPS, metavar="STEP", help=f"of {', '.join(STEPS)}; crawl is always"
    )
    parser.add_argument("--words", type=int, default=60, help="of each page")
    parser.add_argument("--requests-per-second", type=float, default=100.0, help="of each endpoint; 0 for no limit")
    parser.add_argument(
        "--points-per-hour", type=int, help="the quota of an app (default: an API token's, which is none)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    options = parser.parse_args()
    limits = RateLimits(
        per_second=options.requests_per_second or None, burst=BURST, points=options.points_per_hour, is_announced=False
    )
    with Source(options.documents, options.groups, limits, options.words) as source, running("connectors") as run:
        connectors = Connectors(run, source)
        result: dict[str, Any] = {
            "machine": machine(),
            "documents": options.documents,
            "groups": options.groups,
            "requests_per_second": options.requests_per_second,
            "words": options.words,
        }
        steps: dict[str, Callable[[], dict[str, Any]]] = {
            "crawl": lambda: crawl(connectors, source),
            "events": lambda: webhooks(run, connectors, source, options.events_per_second),
            "takeover": lambda: takeover(connectors),
            "changes": lambda: unaided(connectors, source),
        }
        chosen = {name for name in STEPS if not options.only or name == "crawl" or name in options.only}
        for name, measure in steps.items():
            if name not in chosen:
                continue
            result[name] = measure()
            print(f"{name}: {json.dumps(result[name])}", file=sys.stderr)
    if options.json:
        json.dump(result, sys.stdout, indent=2)
        return
    table = Table(title=f"{options.documents:,} pages, {options.groups:,} groups")
    table.add_column("step")
    table.add_column("result")
    for step in (step for step in STEPS if step in result):
        for name, value in result[step].items():
            table.add_row(f"{step}: {name.replace('_', ' ')}", json.dumps(value))
    Console().print(table)


if __name__ == "__main__":
    main()
