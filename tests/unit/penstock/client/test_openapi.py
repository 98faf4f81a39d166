"""The client and docs/openapi.json describe the same service: each operation, each field and its type, both ways."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, get_args
from urllib.parse import unquote

import pytest
from pydantic import BaseModel

import penstock.client
from penstock.client import AnswerMode, AsyncClient, Client, SearchFilters, SearchMode, calls
from penstock.client.models import CallerResponse, SearchResponse
from pipeline.runtime.http_server import IDLE_SECONDS

DESCRIBED = json.loads((Path(__file__).parents[4] / "docs" / "openapi.json").read_text())
SCHEMAS = DESCRIBED["components"]["schemas"]
NOT_FOR_CLIENTS = {"live", "ready", "metrics"}
OPERATIONS: dict[str, tuple[str, calls.Call[Any]]] = {
    "search": ("search", calls.search("", 10, "hybrid", None, True)),
    "answers": ("answer", calls.answer("", None, (), None, None, None, False)),
    "document": ("document", calls.document("{document_id}")),
    "why": ("story", calls.story("{document_id}")),
    "facets": ("facets", calls.facets()),
    "conflicting": ("conflicts", calls.conflicts("open", (), 50)),
    "decide_conflict": ("decide_conflict", calls.decide_conflict("{conflict_id}", "dismissed")),
    "me": ("me", calls.me()),
    "standing_list": ("standing", calls.standing()),
    "standing_show": ("standing_question", calls.standing_question("{question_id}")),
    "standing_answer": ("ask_standing", calls.ask_standing("{question_id}")),
    "standing_remove": ("remove_standing", calls.remove_standing("{question_id}")),
    "feedback": ("feedback", calls.feedback("up", None, None, None, None)),
    "previews": ("preview", calls.preview("", [], [])),
    "waiting": ("review", calls.review(50, None)),
    "resolve": ("resolve", calls.resolve("{answer_id}", "right")),
    "pipeline": ("pipeline", calls.pipeline()),
}
"""Operation → the client's method, and what it sends."""
REQUESTS = {
    "search": "SearchRequest",
    "answer": "AnswerRequest",
    "feedback": "FeedbackRequest",
    "preview": "PreviewRequest",
    "resolve": "ResolutionRequest",
    "decide_conflict": "ConflictDecisionRequest",
}
NOT_MODELS = {"ProblemResponse", "FieldError", "AnswerEvent", *REQUESTS.values()}
"""Schemas that are an exception, a union, or the arguments of a method."""
TITLES = {"title", "description", "examples", "default", "required", "additionalProperties"}
LIMITS = {"maxLength", "minLength", "maxItems", "maximum", "minimum"}


def operations() -> dict[str, tuple[str, str, dict[str, Any]]]:
    return {
        operation["operationId"]: (method.upper(), path, operation)
        for path, methods in DESCRIBED["paths"].items()
        for method, operation in methods.items()
    }


def of_schema(schema: Any) -> Any:
    """A type, without texts and limits. The values of an enumeration count as any string."""
    match schema:
        case {"$ref": reference}:
            return {"$ref": reference.rpartition("/")[2]}
        case {"enum": _}:
            return {"type": "string"}
        case {"type": "object", "additionalProperties": dict(values)}:
            return {"type": "object", "values": of_schema(values)}
        case {"type": "object"} if "properties" not in schema:
            return {"type": "object"}
        case dict():
            return {name: of_schema(value) for name, value in schema.items() if name not in TITLES | LIMITS}
        case list():
            return [of_schema(part) for part in schema]
    return schema


def fields(schema: dict[str, Any]) -> dict[str, tuple[Any, bool]]:
    """Field → its type, and whether it is always there."""
    required = schema.get("required", ())
    return {name: (of_schema(field), name in required) for name, field in schema["properties"].items()}


def test_every_operation_has_a_method_and_every_method_an_operation() -> None:
    described = operations()
    assert described.keys() - NOT_FOR_CLIENTS == OPERATIONS.keys()
    for name, (_, call) in OPERATIONS.items():
        method, path, _ = described[name]
        assert (call.method, unquote(call.path)) == (method, path)
    methods = {name for name, _ in inspect.getmembers(Client, inspect.isfunction) if not name.startswith("_")}
    assert methods == {method for method, _ in OPERATIONS.values()} | {"stream_answer", "close", "on_behalf_of"}


@pytest.mark.parametrize("name", sorted(SCHEMAS.keys() - NOT_MODELS))
def test_a_model_has_the_fields_of_its_schema(name: str) -> None:
    model = getattr(penstock.client, name)
    mode = "validation" if name in ("SearchFilters", "KeyConditions", "ProposedDocument", "Turn") else "serialization"
    assert fields(model.model_json_schema(mode=mode)) == fields(SCHEMAS[name])


def test_every_public_model_is_a_schema() -> None:
    models = {
        name
        for name in penstock.client.__all__
        if isinstance(value := getattr(penstock.client, name), type) and issubclass(value, BaseModel)
    }
    assert models == SCHEMAS.keys() - NOT_MODELS


@pytest.mark.parametrize(("method", "schema"), REQUESTS.items())
def test_a_methods_arguments_are_the_fields_of_its_request(method: str, schema: str) -> None:
    parameters = dict(inspect.signature(getattr(Client, method)).parameters)
    of_path = {"resolve": {"answer_id"}, "decide_conflict": {"conflict_id"}}.get(method, set())
    described = SCHEMAS[schema]["properties"]
    assert parameters.keys() - {"self"} - of_path == described.keys() - {"stream"}
    for name, field in described.items():
        if (
            name != "stream"
            and "default" in field
            and name not in ("filters", "documents", "facets", "folders", "turns")
        ):
            assert parameters[name].default == field["default"], name


def test_modes_have_the_values_of_the_requests() -> None:
    assert list(get_args(SearchMode)) == SCHEMAS["SearchRequest"]["properties"]["mode"]["enum"]
    assert list(get_args(AnswerMode)) == SCHEMAS["AnswerRequest"]["properties"]["mode"]["anyOf"][0]["enum"]


def test_each_event_of_a_stream_has_its_model() -> None:
    described = {
        event["properties"]["event"]["const"]: event["properties"]["data"]["$ref"].rpartition("/")[2]
        for event in SCHEMAS["AnswerEvent"]["oneOf"]
    }
    assert described.pop("error") == "ProblemResponse"
    assert {name: model.__name__ for name, model in calls.EVENTS.items()} == described


def test_both_clients_have_the_same_methods_and_arguments() -> None:
    for name, method in inspect.getmembers(Client, inspect.isfunction):
        twin = getattr(AsyncClient, {"close": "aclose"}.get(name, name), None)
        if not name.startswith("_"):
            assert inspect.signature(twin).parameters == inspect.signature(method).parameters, name


def test_a_later_services_additions_do_not_break_this_client() -> None:
    """A new field, a new value where the description lists some, and a new kind of event."""
    later = {"tenant": "acme", "principal": None, "key": "bot", "kind": "mtls", "class": "huge", "operator": False}
    caller = CallerResponse.model_validate({**later, "zone": "eu"})
    assert (caller.kind, caller.caller_class, caller.model_extra) == ("mtls", "huge", {"zone": "eu"})
    assert calls.event("progress", "{}", {}) is None
    body = b'{"results": [], "steps": [], "took_ms": 1, "relevant": false, "degraded": [], "cursor": null,'
    body += b' "facets": {}, "at_least": null, "freshness": [], "page": {"next": "x"}}'
    assert calls.search("q", 10, "hybrid", None, True).read(body) == SearchResponse.model_validate_json(body)


def test_filters_are_sent_only_where_they_are_set() -> None:
    call = calls.search("q", 10, "hybrid", SearchFilters(sources=["wiki"]), True)
    assert call.json is not None
    assert call.json["filters"] == {"sources": ["wiki"]}
    with pytest.raises(ValueError, match="source"):
        SearchFilters(source=["wiki"])  # type: ignore[call-arg]


def test_an_idle_connection_is_closed_by_the_client_before_the_service_closes_it() -> None:
    """Else a question that is sent at that moment fails, and must not be sent again."""
    from penstock.client.clients import KEEPALIVE_SECONDS

    assert KEEPALIVE_SECONDS < IDLE_SECONDS
