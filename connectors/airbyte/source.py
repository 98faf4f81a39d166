"""An Airbyte source as a source of documents. A document is a record; its external id is the stream and the key."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from connectors.airbyte.messages import (
    Catalog,
    Configuration,
    Connection,
    Failure,
    Message,
    Record,
    Specification,
    State,
    Status,
    StreamName,
    Unstorable,
    configured,
    has_field,
    primary_key,
    state_file,
    without_secrets,
)
from connectors.airbyte.options import AirbyteOptions
from connectors.airbyte.program import Command, Ended, Program
from connectors.airbyte.records import RecordsFile, Stream, prefix_of
from connectors.base import SmallSource
from connectors.portions import pages_of
from connectors.protocol import Problem
from connectors.rows import Row
from connectors.sealed import SealedCredential
from connectors.source import (
    Context,
    Cursor,
    CursorExpired,
    Entry,
    Gone,
    Listed,
    Page,
    Playground,
    Unlisted,
)
from pipeline.core.errors import Misconfigured, PenstockError, Retryable

LISTED_PER_PAGE = 500
BY_HAND = "run the program by hand with the same configuration to see why"


@dataclass
class _Reading:
    """The streams of a run, and what it has said about them so far."""

    streams: Sequence[Stream]
    statuses: dict[StreamName, str] = field(default_factory=dict)
    failures: dict[StreamName | None, Failure] = field(default_factory=dict)

    def note(self, message: Status | Failure) -> None:
        if isinstance(message, Status):
            self.statuses[message.stream] = message.status
        else:
            self.failures[message.stream] = message

    def complete(self, ended: Ended | None) -> list[str]:
        """Return the labels of the streams that were read to their end. A program that says nothing about a stream, and
        ends without an error, has read it."""
        is_silent_success = ended is None and not self.failures
        return [
            stream.label
            for stream in self.streams
            if stream.name not in self.failures
            and (
                self.statuses.get(stream.name) == "COMPLETE" or (is_silent_success and stream.name not in self.statuses)
            )
        ]

    def failure(self, stream: Stream) -> Failure | None:
        return self.failures.get(stream.name) or self.failures.get(None)


class Airbyte(SmallSource):
    """A ``connectors.source.Source``. The program is run before each listing and each poll, and what it writes is kept
    in a file, from which all requests are answered. Entries have the time at which that run began."""

    Options = AirbyteOptions
    options: AirbyteOptions

    def __init__(self, options: AirbyteOptions, context: Context) -> None:
        super().__init__(options, context)
        self._program = Program(options, context.folder)
        self._file = RecordsFile(context.folder, options.max_records_bytes)
        self._running = asyncio.Lock()
        self._catalog: Mapping[StreamName, Mapping[str, Any]] | None = None
        self._streams: Mapping[str, Stream] = {}
        self._failed: Mapping[str, str] = {}
        """Why streams were not read to their end by the last run, by label."""
        self._began: datetime | None = None
        """When the last run began that has ended without an error."""
        self._started: datetime | None = None
        """When the run of the last ``start`` began."""

    @staticmethod
    def playground() -> AbstractAsyncContextManager[Playground]:
        from connectors.airbyte.playground import playing

        return playing()

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self._file.close)

    async def check(self) -> Sequence[Problem]:
        try:
            configuration = await self._configuration()
            problems = await self._check_configuration(configuration)
            if not problems:
                problems = [self._problem("stream", text) for text in await self._check_streams()]
            return problems
        except (Misconfigured, Ended) as error:
            return [self._problem("refused", str(error))]

    async def _check_configuration(self, configuration: Mapping[str, Any]) -> list[Problem]:
        specification = await self._answer("spec", Specification)
        if missing := [name for name in specification.required if name not in configuration]:
            return [self._problem("config", f"the program's configuration lacks {', '.join(missing)}: set config")]
        connection = await self._answer("check", Connection, config=configuration)
        if connection.is_ready:
            return []
        reason = without_secrets(connection.message, configuration) or "it does not say why"
        return [self._problem("config", f"the program cannot connect: {reason}")]

    async def _check_streams(self) -> list[str]:
        catalog = await self._discover()
        if not self.options.streams:
            return [f"declare streams to read: the program has {_names(catalog)}"]
        streams, problems = self._resolve(catalog)
        for stream in streams.values():
            schema = catalog[stream.name].get("json_schema") or {}
            fields = [
                name
                for name in stream.template.columns
                if name != stream.options.deleted and not has_field(schema, name)
            ]
            if fields:
                problems[stream.label] = f"the program names no field {', '.join(fields)}"
        texts = [f"streams.{label}: {problem}" for label, problem in sorted(problems.items())]
        held = {group.tag async for group in self.groups() if group.members or group.of}
        tags = {tag for stream in streams.values() for tag in stream.options.acl_tags}
        return texts + [f"nobody holds the tag {tag!r}: name its holders in members" for tag in sorted(tags - held)]

    async def start(self) -> Cursor:
        await self._run_since(datetime.now(UTC))
        self._started = self._began
        epoch, change = await asyncio.to_thread(self._file.position)
        return {"epoch": epoch, "change": change}

    async def full(self, cursor: Cursor | None) -> AsyncIterator[Page]:
        if cursor is None and (self._began is None or self._began != self._started):
            await self._run_since(datetime.now(UTC), reread=True)
        await self._require_run()
        after = cursor["after"] if cursor else ""
        while page := await self._page(after, self.page_documents):
            after = page[-1].external_id
            yield Page(page, {"after": after})

    async def changes(self, cursor: Cursor) -> AsyncIterator[Page]:
        await self._run_since(datetime.now(UTC))
        change = cursor["change"]
        while True:
            epoch, _ = await asyncio.to_thread(self._file.position)
            if epoch != cursor["epoch"]:
                raise CursorExpired("the file with the records was lost, and is made anew")
            ids, change = await asyncio.to_thread(self._file.changed, change, self.page_documents)
            if not ids:
                return
            async with aclosing(pages_of(ids, self.fetch, {"epoch": epoch, "change": change})) as pages:
                async for page in pages:
                    yield page

    async def list(self) -> AsyncIterator[Sequence[Listed | Unlisted]]:
        await self._run_since(datetime.now(UTC))
        yield [
            Unlisted(part=f"stream {label}", reason=reason, id_prefix=prefix_of(label))
            for label, reason in self._failed.items()
        ]
        after = ""
        while page := await self._page(after, LISTED_PER_PAGE):
            after = page[-1].external_id
            yield [
                Listed(
                    external_id=entry.external_id,
                    acl_tags=entry.acl_tags,
                    required_tags=entry.required_tags,
                    revision=entry.revision,
                    read_at=entry.read_at,
                )
                for entry in page
                if not isinstance(entry, Gone)
            ]

    async def fetch(self, external_ids: Sequence[str]) -> Sequence[Entry]:
        """Return what the file has. Documents of a stream that was never read to its end are left out: whether they
        exist is not known."""
        await self._require_run()
        read_at = await asyncio.to_thread(self._file.read_at)
        entries = await asyncio.to_thread(self._file.rows, external_ids, lambda rows: self._entries(rows, read_at))
        known = {entry.external_id: entry for entry in entries}
        for id_ in external_ids:
            label = self._label_of(id_)
            if id_ not in known and label is None:
                known[id_] = Gone(id_)
            elif id_ not in known and label in read_at:
                known[id_] = Gone(id_, read_at[label])
        return [known[id_] for id_ in dict.fromkeys(external_ids) if id_ in known]

    async def _page(self, after: str, limit: int) -> Sequence[Entry]:
        """Return documents of streams that were read to their end by the last run, in the order of their ids."""
        read_at = await asyncio.to_thread(self._file.read_at)
        labels = [label for label in read_at if label in self._streams and label not in self._failed]
        return self._entries(await asyncio.to_thread(self._file.page, after, limit, labels), read_at)

    def _entries(self, rows: Iterable[tuple[str, str, Row]], read_at: Mapping[str, datetime]) -> Sequence[Entry]:
        entries: list[Entry] = []
        for _, label, row in rows:
            if label in self._streams:
                [entry] = self._streams[label].template.entries([row]).values()
                entries.append(replace(entry, read_at=read_at.get(label)))
        return entries

    def _label_of(self, external_id: str) -> str | None:
        return next((label for label in self.options.streams if external_id.startswith(prefix_of(label))), None)

    # Runs of the program

    async def _require_run(self) -> None:
        """Run the program unless this process has: the settings may be others than those of the last process."""
        if self._began is None:
            await self._run_since(datetime.now(UTC))

    async def _run_since(self, moment: datetime, *, reread: bool = False) -> None:
        """Have a run of the program that began at ``moment`` or later. Raises Retryable and Misconfigured when no
        stream could be read."""
        async with self._running:
            if reread or self._began is None or self._began < moment:
                earlier = (await asyncio.to_thread(self._file.read_at)).values()
                began = max([datetime.now(UTC), *(at + timedelta(microseconds=1) for at in earlier)])
                try:
                    await self._read(began, reread=reread)
                except PenstockError:
                    self._catalog = None  # the next run asks the program again
                    raise
                self._began = began

    async def _read(self, began: datetime, *, reread: bool) -> None:
        catalog = await self._discover()
        self._streams, unknown = self._resolve(catalog)
        if not self._streams:
            label, problem = next(iter(unknown.items()), ("NAME", f"declare it; the program has {_names(catalog)}"))
            raise Misconfigured(f"streams.{label}: {problem}")
        streams = [*self._streams.values()]
        run, states = await asyncio.to_thread(self._file.begin, streams, unknown, reread=reread)
        reading, ended = await self._read_streams(run, streams, catalog, states)
        complete = reading.complete(ended)
        await asyncio.to_thread(self._file.complete, complete, began)
        configuration = await self._configuration()
        failed = {
            stream.label: _reason(reading.failure(stream), ended, configuration)
            for stream in streams
            if stream.label not in complete
        }
        if not complete:
            raise _error_of(reading, next(iter(failed.values())))
        self._failed = {**failed, **unknown}
        parts = {f"stream {label}": reason for label, reason in self._failed.items()}
        self.context.set_aside.replace("streams", parts)
        refused = await asyncio.to_thread(self._file.refused)
        records = {f"records of stream {label}" if label else "records": reason for label, reason in refused.items()}
        self.context.set_aside.replace("records", records)

    async def _read_streams(
        self,
        run: int,
        streams: Sequence[Stream],
        catalog: Mapping[StreamName, Mapping[str, Any]],
        states: Sequence[Mapping[str, Any]],
    ) -> tuple[_Reading, Ended | None]:
        """Have the program read the streams. Returns what it said of them, and the error with which it ended."""
        reading = _Reading(streams)
        entries = [configured(catalog[stream.name], stream.sync, stream.cursor, stream.key) for stream in streams]
        files = {"config": await self._configuration(), "catalog": {"streams": entries}}
        if states:
            files["state"] = state_file(states)
        try:
            async with aclosing(cast("Any", self._messages("read", **files))) as groups:
                async for messages in groups:
                    for message in messages:
                        if isinstance(message, Status | Failure):
                            reading.note(message)
                    stored = [message for message in messages if isinstance(message, Record | State | Unstorable)]
                    if stored:
                        await asyncio.to_thread(self._file.fold, run, stored)
        except Ended as error:
            return reading, error
        return reading, None

    async def _messages(self, command: Command, **files: Any) -> AsyncIterator[Sequence[Message]]:
        """Yield what the program writes. A new configuration is kept before anything that follows it is used."""
        async with aclosing(cast("Any", self._program.run(command, **files))) as groups:
            async for messages in groups:
                for message in messages:
                    if isinstance(message, Configuration):
                        await (await self._sealed()).store(message.value)
                yield messages

    async def _answer(self, command: Command, kind: type[Any], **files: Any) -> Any:
        """Return the message that answers a command. Raises Retryable and Misconfigured."""
        answer, failure, ended = None, None, None
        try:
            async with aclosing(cast("Any", self._messages(command, **files))) as groups:
                async for messages in groups:
                    for message in messages:
                        answer = message if isinstance(message, kind) else answer
                        failure = message if isinstance(message, Failure) else failure
        except Ended as error:
            ended = error
        if answer is not None:
            return answer
        reading = _Reading([], failures={None: failure} if failure else {})
        raise _error_of(reading, f"{command}: {_reason(failure, ended, files.get('config'))}")

    async def _discover(self) -> Mapping[StreamName, Mapping[str, Any]]:
        if self._catalog is None:
            catalog: Catalog = await self._answer("discover", Catalog, config=await self._configuration())
            self._catalog = {StreamName.of(stream): stream for stream in catalog.streams}
        return self._catalog

    def _resolve(self, catalog: Mapping[StreamName, Mapping[str, Any]]) -> tuple[dict[str, Stream], dict[str, str]]:
        """Return the declared streams as the program has them, and what is wrong with the others, by label."""
        streams: dict[str, Stream] = {}
        problems: dict[str, str] = {}
        for label in self.options.streams:
            resolved = self._stream(label, catalog)
            if isinstance(resolved, Stream):
                streams[label] = resolved
            else:
                problems[label] = resolved
        return streams, problems

    def _stream(self, label: str, catalog: Mapping[StreamName, Mapping[str, Any]]) -> Stream | str:
        """Return a declared stream, or what is wrong with it."""
        declared = self.options.effective(label)
        name = StreamName(declared.stream or label, declared.namespace)
        if name not in catalog:
            return f"the program has no such stream, but {_names(catalog)}"
        stream = catalog[name]
        key = declared.id or primary_key(stream)
        if not key:
            return "the program names no primary key: write the fields that identify a record in id"
        modes = stream.get("supported_sync_modes") or []
        cursor = declared.cursor
        has_cursor = bool(cursor or stream.get("source_defined_cursor") or stream.get("default_cursor_field"))
        sync = declared.sync or ("incremental" if "incremental" in modes and has_cursor else "full_refresh")
        if sync not in modes and modes:
            return f"the program cannot read it with sync = {sync!r}, but with {' or '.join(map(repr, modes))}"
        if sync == "incremental" and not has_cursor:
            return "the program names no cursor: write the field that grows with each change in cursor"
        return Stream(label, name, declared, tuple(key), sync, cursor)

    # The configuration

    async def _configuration(self) -> Any:
        """Return the program's configuration, which it may have replaced. Raises Misconfigured."""
        declared = await asyncio.to_thread(self.options.configuration)
        return await (await self._sealed()).load() or declared

    async def _sealed(self) -> SealedCredential:
        declared = json.dumps(await asyncio.to_thread(self.options.configuration), sort_keys=True)
        return SealedCredential(self.context.memory, declared, declared, b"penstock airbyte")


def _reason(failure: Failure | None, ended: Ended | None, configuration: Any) -> str:
    """Return one line. Of what the program says, only errors of its configuration are quoted: others may quote
    content."""
    if failure is not None and failure.kind == "config_error":
        return f"the program refuses its configuration: {without_secrets(failure.message, configuration)}"
    if failure is not None:
        kind = "a passing error" if failure.kind == "transient_error" else "an error"
        return f"the program reports {kind}: {BY_HAND}"
    return f"{ended}; {BY_HAND}" if ended else f"the program ended before the stream was complete: {BY_HAND}"


def _names(catalog: Mapping[StreamName, Mapping[str, Any]]) -> str:
    names = sorted(f"{name.namespace}.{name.name}" if name.namespace else name.name for name in catalog)
    return ", ".join(names[:50]) or "none"


def _error_of(reading: _Reading, reason: str) -> PenstockError:
    """Return the error for a run that read nothing."""
    if any(failure.kind == "config_error" for failure in reading.failures.values()):
        return Misconfigured(reason)
    return Retryable(reason)
