"""A program that speaks Airbyte's protocol, for tests: ``python airbyte.py read --config … --catalog … [--state …]``.

Its service is the JSON file that its configuration names. It uses nothing but the standard library, because it is run
like a program of somebody else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

STREAMS = {"notes": ["full_refresh", "incremental"], "files": ["full_refresh"]}
PROPERTIES = {
    "id": {"type": "string"},
    "title": {"type": "string"},
    "body": {"type": ["null", "string"]},
    "changed": {"type": "integer"},
    "label": {"type": "string"},
    "team": {"type": "object", "properties": {"name": {"type": "string"}}},
    "labels": {"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}}}},
    "_ab_cdc_deleted_at": {"type": ["null", "string"]},
}
HANGING = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('{}', flush=True); time.sleep(600)"
"""A child that does not end when it is asked to."""


class Service:
    """The content of the file: ``records`` by stream, the ``token``, a ``lineage`` that is another one after all states
    were lost, and the ``faults`` to show."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.content = json.loads(path.read_text("utf-8"))
        self.faults: dict[str, Any] = self.content.get("faults", {})

    def show_faults(self) -> None:
        """Count a run that shows the faults; after ``times`` such runs there are none."""
        times = self.faults.get("times")
        if times == 0:
            self.faults = {}
        elif self.faults:
            if times is not None:
                self.faults["times"] = times - 1
            self.content["shown"] = self.content.get("shown", 0) + 1
            self._path.write_text(json.dumps(self.content))

    def used_up(self, fault: str) -> bool:
        """Return whether a counted fault does not apply any more; otherwise count it."""
        left = self.faults.get(fault, 0)
        if left:
            self.faults[fault] = left - 1
            self._path.write_text(json.dumps(self.content))
        return not left


def write(kind: str, **content: Any) -> None:
    print(json.dumps({"type": kind, **content}), flush=True)


def status(stream: str, value: str) -> None:
    trace = {"stream_descriptor": {"name": stream}, "status": value}
    write("TRACE", trace={"type": "STREAM_STATUS", "emitted_at": 1.0, "stream_status": trace})


def fail(message: str, kind: str = "system_error", stream: str | None = None) -> None:
    error: dict[str, Any] = {"message": message, "failure_type": kind, "internal_message": message}
    if stream is not None:
        error["stream_descriptor"] = {"name": stream}
    write("TRACE", trace={"type": "ERROR", "emitted_at": 1.0, "error": error})


def catalog(service: Service) -> None:
    hidden = service.faults.get("hidden_streams", [])
    streams = [
        {
            "name": name,
            "json_schema": {"type": "object", "properties": PROPERTIES},
            "supported_sync_modes": modes,
            "source_defined_cursor": "incremental" in modes,
            "default_cursor_field": ["changed"] if "incremental" in modes else [],
            "source_defined_primary_key": [] if service.faults.get("no_key") else [["id"]],
        }
        for name, modes in STREAMS.items()
        if name not in hidden
    ]
    write("CATALOG", catalog={"streams": streams})


def read(service: Service, streams: Iterator[Mapping[str, Any]], state: Any) -> int:
    """Write the records of the streams. Returns the exit code."""
    faults, code = service.faults, 0
    for entry in streams:
        name = entry["stream"]["name"]
        if not faults.get("silent"):
            status(name, "STARTED")
        since = known(service, name, state) if entry["sync_mode"] == "incremental" else 0
        records = sorted(service.content["records"].get(name, []), key=lambda record: record["changed"])
        new = [record for record in records if record["changed"] > since]
        misbehave(service, name, new)
        for number, record in enumerate(new):
            if number == faults.get("dies_after"):
                if faults.get("state_at_death"):
                    write_state(service, name, new[-1]["changed"])
                return int(faults.get("exit_code", 3))
            message = {"type": "RECORD", "record": {"stream": name, "data": record, "emitted_at": 1}}
            print(json.dumps(message, ensure_ascii=not faults.get("unescaped")), flush=True)
            if number + 1 == faults.get("breaks_after"):
                print('{"type": "RECORD", "record": {"stream": "notes", "da{"type": "LOG"}', flush=True)
            if number % 2:  # sources write states in between
                write_state(service, name, record["changed"])
        if new:
            write_state(service, name, new[-1]["changed"])
        if name in faults.get("refused_streams", []):
            fail("403: this account may not read the stream", "config_error", name)
            status(name, "INCOMPLETE")
            code = 1
        elif faults.get("incomplete"):
            status(name, "INCOMPLETE")
        elif not faults.get("silent"):
            status(name, "COMPLETE")
    if faults.get("never_ends"):
        time.sleep(600)
    return code


def misbehave(service: Service, stream: str, records: Sequence[Mapping[str, Any]]) -> None:
    """Write what a program should not write, before the records of a stream."""
    faults = service.faults
    if faults.get("state_first") and records:
        write_state(service, stream, records[-1]["changed"])
    if length := faults.get("log_bytes"):
        write("LOG", log={"level": "INFO", "message": "x" * length})
        print("y" * length, file=sys.stderr, flush=True)
        print("z" * length, flush=True)
    if faults.get("unknown_messages"):
        write("HEARTBEAT", heartbeat={})
        write("CONTROL", control={"type": "PAUSE", "emitted_at": 1.0})
        write("TRACE", trace={"type": "ESTIMATE", "emitted_at": 1.0, "estimate": {"name": stream, "type": "STREAM"}})
    if faults.get("foreign_records"):
        foreign = {"id": "broken", "title": "Foreign", "body": "It belongs to another stream.", "changed": 1}
        write("RECORD", record={"stream": "others", "data": foreign, "emitted_at": 1})
        write("RECORD", record={"stream": stream, "namespace": "other", "data": foreign, "emitted_at": 1})


def known(service: Service, stream: str, state: Any) -> int:
    """Return how far a stream was read; 0 for a state that the service does not know any more."""
    values: list[Mapping[str, Any]] = [state.get(stream, {})] if isinstance(state, dict) else []
    for message in state if isinstance(state, list) else []:
        inner = [message["stream"]] if message["type"] == "STREAM" else message["global"]["stream_states"]
        values += [entry["stream_state"] for entry in inner if entry["stream_descriptor"]["name"] == stream]
    return max([v["changed"] for v in values if v.get("lineage") == service.content["lineage"]], default=0)


def write_state(service: Service, stream: str, changed: int) -> None:
    value = {"changed": changed, "lineage": service.content["lineage"]}
    described = {"stream_descriptor": {"name": stream}, "stream_state": value}
    match service.faults.get("state"):
        case "legacy":
            write("STATE", state={"data": {stream: value}})
        case "global":
            write("STATE", state={"type": "GLOBAL", "global": {"shared_state": {}, "stream_states": [described]}})
        case _:
            write("STATE", state={"type": "STREAM", "stream": described})


def main() -> int:
    """Run a command; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["spec", "check", "discover", "read"])
    for option in ("config", "catalog", "state"):
        parser.add_argument(f"--{option}", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "spec":
        write("SPEC", spec={"connectionSpecification": {"required": ["data", "token"], "properties": {}}})
        return 0
    config = json.loads(arguments.config.read_text("utf-8"))
    service = Service(Path(config["data"]))
    faults = service.faults
    write("LOG", log={"level": "INFO", "message": f"Authorization: Bearer {config['token']}"})
    print("a library prints", flush=True)
    if arguments.command == "check":
        is_ready = config["token"] == service.content["token"]
        message = f"401 for https://desk.example/?token={config['token']}"
        write(
            "CONNECTION_STATUS", connectionStatus={"status": "SUCCEEDED" if is_ready else "FAILED", "message": message}
        )
        return 0
    if arguments.command == "discover":
        catalog(service)
        return 0
    while not service.used_up("throttled"):
        write("LOG", log={"level": "WARN", "message": "429: waiting"})
    if not service.used_up("failing"):
        fail("500", "transient_error")
        return 1
    service.show_faults()
    faults = service.faults
    if config["token"] != service.content["token"]:
        fail(f"the token {config['token']} has expired", "config_error")
        return 1
    if next_token := faults.get("rotates_to"):
        service.content["token"] = next_token
        del faults["rotates_to"]
        Path(config["data"]).write_text(json.dumps(service.content))
        control = {"type": "CONNECTOR_CONFIG", "emitted_at": 1.0}
        write("CONTROL", control={**control, "connectorConfig": {"config": {**config, "token": next_token}}})
    if faults.get("sleeps"):
        time.sleep(600)
    if faults.get("hangs"):
        with subprocess.Popen([sys.executable, "-c", HANGING]) as child:
            Path(faults["hangs"]).write_text(str(child.pid))
            time.sleep(600)
    selected = json.loads(arguments.catalog.read_text("utf-8"))["streams"]
    state = json.loads(arguments.state.read_text("utf-8")) if arguments.state else None
    if faults.get("state") == "legacy" and state is not None and not isinstance(state, dict):
        fail("this program knows states as one object only")
        return 1
    return read(service, selected, state)


if __name__ == "__main__":
    sys.exit(main())
