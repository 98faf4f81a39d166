"""The application: routes, the gate before them, errors as problem+json, and its description (OpenAPI)."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.security import APIKeyHeader, HTTPBearer
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from pipeline.observability.traced_http import Traced
from query.auth.authenticator import Authenticator
from query.http import answers, conflicts, documents, feedback, health, previews, search, standing
from query.http.audit_trail import Recorder
from query.http.gate import QUIET, Gate
from query.http.health import Health
from query.http.schemas import ANSWER_EVENT, STREAM_EVENTS, ProblemResponse
from query.limits.budgets import Meter
from query.limits.concurrency import Limits
from query.limits.quotas import Quotas
from query.mcp import endpoint as mcp
from query.page.router import router as page
from query.problems import MEDIA_TYPE, Kind, Problem
from query.service import Service

DESCRIPTION = """\
Hybrid search and cited answers over the documents that the caller may read. Every passage is checked against the ledger
at the time of the request. The caller is authenticated by a token or an API key; nothing else in a request can extend
its access.

Errors are `application/problem+json` (RFC 9457). Times are ISO 8601.
"""
_BEARER = HTTPBearer(
    auto_error=False, scheme_name="token", description="A JSON Web Token from the configured issuer, or an API key."
)
_KEY = APIKeyHeader(name="X-Api-Key", auto_error=False, scheme_name="key", description="A service's API key.")

_STATUS: dict[int, Kind] = {
    400: "bad-request",
    404: "not-found",
    405: "method-not-allowed",
    413: "too-large",
    415: "unsupported-media",
}
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"description": words, "model": ProblemResponse}
    for status, words in (
        (400, "Malformed request."),
        (401, "Missing or invalid token or API key."),
        (403, "Forbidden for this caller."),
        (404, "Not found, or not readable by this caller."),
        (408, "The request body did not arrive in time."),
        (413, "Request body too large."),
        (422, "Invalid request or query."),
        (429, "Rate limit, share or budget exceeded; see Retry-After."),
        (503, "Service busy or unavailable; see Retry-After."),
        (504, "Request timed out."),
    )
}


def app(service: Service, authenticator: Authenticator, quotas: Quotas, meter: Meter) -> FastAPI:
    """The ASGI application of an open service."""
    application = describe_app()
    application.state.service = service
    application.state.authenticator = authenticator
    application.state.health = Health(service)
    mcp.mount(application, service)
    application.add_middleware(Recorder, trail=service.trail)
    application.add_middleware(
        Gate,
        authenticator=authenticator,
        limits=Limits(
            service.query.serve,
            service.metrics,
            uses_remote_models=service.uses_remote_models,
            weight=lambda tenant: quotas.of(tenant).weight,
        ),
        meter=meter,
        metrics=service.metrics,
        settings=service.query.serve,
    )
    application.add_middleware(Traced, quiet=QUIET)
    if origins := service.query.serve.allowed_origins:
        application.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "X-Api-Key"],
            expose_headers=["Request-Id", "Retry-After", "Trace-Id"],
            max_age=600,
        )
    return application


def describe_app() -> FastAPI:
    """The routes and their description, without a service."""
    application = _Described(
        title="Penstock",
        summary="The query service",
        description=DESCRIPTION,
        version="1",
        docs_url=None,  # its page would load scripts from another host
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    application.include_router(health.routes)
    proofs = [Depends(_BEARER), Depends(_KEY)]  # only for the description: the gate checks them
    for part in (search, documents, answers, standing, conflicts, feedback, previews):
        application.include_router(part.routes, dependencies=proofs, responses=_PROBLEMS)
    application.include_router(page)
    application.add_exception_handler(HTTPException, _http_error)
    application.add_exception_handler(RequestValidationError, _invalid)
    application.add_exception_handler(Problem, _problem)
    return application


def text() -> str:
    """The description as it is published in docs/openapi.json."""
    return json.dumps(describe_app().openapi(), indent=2, ensure_ascii=False) + "\n"


class _Described(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """The description, with problem+json as the media type of errors, where FastAPI declares application/json, and
        with the events of a stream, which it does not know."""
        if self.openapi_schema is None:
            description = super().openapi()
            schemas = description["components"]["schemas"]
            schemas |= {name: schema for name, schema in _event_schemas().items() if name not in schemas}
            for path in description["paths"].values():
                for operation in path.values():
                    for answer in operation["responses"].values():
                        content = answer.get("content", {})
                        schema = content.get("application/json", {}).get("schema", {})
                        if schema.get("$ref", "").endswith(f"/{ProblemResponse.__name__}"):
                            content[MEDIA_TYPE] = content.pop("application/json")
        assert self.openapi_schema is not None
        return self.openapi_schema


def _event_schemas() -> dict[str, Any]:
    """Schemas of the server-sent events, by name. ``AnswerEvent`` is any of them, with its name and its data."""
    _, described = models_json_schema(
        [(model, "serialization") for model in STREAM_EVENTS.values()], ref_template="#/components/schemas/{model}"
    )
    events = [
        {
            "type": "object",
            "properties": {"event": {"const": name}, "data": {"$ref": f"#/components/schemas/{model.__name__}"}},
            "required": ["event", "data"],
        }
        for name, model in STREAM_EVENTS.items()
    ]
    return {
        **described["$defs"],
        ANSWER_EVENT: {"title": ANSWER_EVENT, "description": "A server-sent event of an answer.", "oneOf": events},
    }


async def _problem(_: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return error.response()


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = _STATUS.get(error.status_code, "failed")
    details = {
        "bad-request": "the body is not valid JSON",
        "not-found": "no such path",
        "method-not-allowed": "see /openapi.json for the methods of this path",
        "unsupported-media": "send Content-Type: application/json",
    }
    return Problem(kind, details.get(kind, "the request failed"), headers=error.headers).response()


async def _invalid(_: Request, error: Exception) -> Response:
    """A problem that names the invalid fields and what is expected there, never what was sent."""
    assert isinstance(error, RequestValidationError)
    violations = error.errors()
    if any(violation["type"] == "json_invalid" for violation in violations):
        return Problem("bad-request", "the body is not valid JSON").response()
    errors = [
        {"pointer": _pointer(violation["loc"]), "detail": str(violation["msg"])[:200]} for violation in violations[:20]
    ]
    detail = f"{errors[0]['pointer'] or 'the body'}: {errors[0]['detail']}"
    return Problem("invalid", detail, errors=errors).response()


def _pointer(loc: tuple[int | str, ...]) -> str:
    """A JSON pointer (RFC 6901) within the body or the path."""
    parts = [str(part)[:100].replace("~", "~0").replace("/", "~1") for part in loc[1:]]
    return "".join(f"/{part}" for part in parts)


if __name__ == "__main__":
    print(text(), end="")
