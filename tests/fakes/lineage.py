"""A receiver of OpenLineage events over HTTP, as Marquez and others have it: POST /api/v1/lineage.

Each event, and each of its facets, is validated against the published schemas (tests/data/openlineage). An invalid one
is refused, and its problem is in ``problems``.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from aiohttp import web
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from tests.fakes.faults import Fake, Faults, Refusal, Stats

SCHEMAS = Path(__file__).parents[1] / "data" / "openlineage"
RUN_EVENT = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"


@cache
def _registry() -> Registry[Any]:
    schemas = [json.loads(file.read_text()) for file in SCHEMAS.glob("*.json")]
    return Registry().with_resources((schema["$id"], Resource.from_contents(schema)) for schema in schemas)


def problems_of(event: dict[str, Any]) -> list[str]:
    """Everything that is wrong with an event. Raises for a facet whose schema is not there."""
    things = [event["run"], event["job"], *event.get("inputs", ()), *event.get("outputs", ())]
    facets = [
        facet
        for thing in things
        for kind in ("facets", "inputFacets", "outputFacets")
        for facet in thing.get(kind, {}).values()
    ]
    results = []
    for document, schema in [(event, RUN_EVENT), *((facet, facet["_schemaURL"]) for facet in facets)]:
        validator = Draft202012Validator(
            {"$ref": schema}, registry=_registry(), format_checker=Draft202012Validator.FORMAT_CHECKER
        )
        results += [f"{schema}: {error.json_path}: {error.message}" for error in validator.iter_errors(document)]
    return results


class FakeLineage(Fake[Faults, Stats]):
    def __init__(self) -> None:
        super().__init__(["/api/v1/lineage"], Faults(), Stats())
        self.events: list[dict[str, Any]] = []
        self.problems: list[str] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        event = json.loads(await request.read())
        if problems := problems_of(event):
            self.problems += problems
            raise Refusal(400, problems[0])
        self.events.append(event)
        return web.Response(status=201)

    def of(self, job: str) -> list[dict[str, Any]]:
        """The events of a job, in the order of their arrival."""
        return [event for event in self.events if event["job"]["name"] == job]

    def states(self, job: str) -> list[str]:
        return [event["eventType"] for event in self.of(job)]


def rows(event: dict[str, Any]) -> dict[str, int | None]:
    """By output, the rows that were written."""
    return {
        output["name"].rpartition(".")[2]: output.get("outputFacets", {}).get("outputStatistics", {}).get("rowCount")
        for output in event["outputs"]
    }
