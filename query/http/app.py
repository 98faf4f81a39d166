"""The application: routes, the gate before them, errors as problem+json, and its description (OpenAPI)."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from pipeline.traced.http import Traced
from query.http import answering, health, judging, reads
from query.http.auth import Authenticator
from query.http.gate import QUIET, Gate
from query.http.health import Health
from query.http.limits import Limits
from query.http.problems import MEDIA_TYPE, Kind, Problem
from query.http.told import ProblemTold
from query.http.trail import Recorder
from query.mcp import endpoint as mcp
from query.meter import Meter
from query.page.router import router as page
from query.quotas import Quotas
from query.service import Service

DESCRIPTION = """\
Hybrid search and cited answers over what the caller may read, now: every passage is verified against the ledger when it
is shown. Who asks is proved by a token or a key; nothing in a request can widen what is read.

Errors are `application/problem+json` (RFC 9457). Times are ISO 8601. Lists are never longer than they were asked for.
"""
_BEARER = HTTPBearer(
    auto_error=False, scheme_name="token", description="A JSON Web Token of the issuer, or an API key."
)
_KEY = APIKeyHeader(name="X-Api-Key", auto_error=False, scheme_name="key", description="A service's API key.")

_STATUS: dict[int, Kind] = {
    400: "bad-request", 404: "not-found", 405: "method-not-allowed", 413: "too-large", 415: "unsupported-media",
}  # fmt: skip
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"description": words, "model": ProblemTold}
    for status, words in (
        (400, "It cannot be read."),
        (401, "It is not proved who asks."),
        (403, "Not for this caller."),
        (404, "There is no such thing, or not for this caller."),
        (408, "It did not arrive in time."),
        (413, "Too large."),
        (422, "It has another shape, or is no question."),
        (429, "Too many requests; Retry-After says when."),
        (503, "Busy, or a part is away; Retry-After says when."),
        (504, "It took too long."),
    )
}


def app(service: Service, authenticator: Authenticator, quotas: Quotas, meter: Meter) -> FastAPI:
    """Serves what the service has, and nothing that it has not."""
    made = described()
    made.state.service = service
    made.state.authenticator = authenticator
    made.state.health = Health(service)
    mcp.mount(made, service)
    made.add_middleware(Recorder, trail=service.trail)
    made.add_middleware(
        Gate,
        authenticator=authenticator,
        limits=Limits(
            service.query.serve,
            service.metrics,
            waits_elsewhere=service.waits_elsewhere,
            weight=lambda tenant: quotas.of(tenant).weight,
        ),
        meter=meter,
        metrics=service.metrics,
        settings=service.query.serve,
    )
    made.add_middleware(Traced, quiet=QUIET)
    if origins := service.query.serve.allowed_origins:
        made.add_middleware(
            CORSMiddleware, allow_origins=list(origins), allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Api-Key"], expose_headers=["Retry-After", "Trace-Id"],
            max_age=600,
        )  # fmt: skip
    return made


def described() -> FastAPI:
    """The routes and their description, without anything behind them."""
    made = _Described(
        title="Penstock",
        summary="The query service",
        description=DESCRIPTION,
        version="1",
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    made.include_router(health.routes)
    proofs = [Depends(_BEARER), Depends(_KEY)]  # for the description: the gate has looked at them
    for part in (reads, answering, judging):
        made.include_router(part.routes, dependencies=proofs, responses=_PROBLEMS)
    made.include_router(page)
    made.add_exception_handler(HTTPException, _http_error)
    made.add_exception_handler(RequestValidationError, _invalid)
    made.add_exception_handler(Problem, _problem)
    return made


def text() -> str:
    """The description as it is published in docs/openapi.json."""
    return json.dumps(described().openapi(), indent=2, ensure_ascii=False) + "\n"


class _Described(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """FastAPI would have errors be application/json."""
        if self.openapi_schema is None:
            for path in super().openapi()["paths"].values():
                for operation in path.values():
                    for answer in operation["responses"].values():
                        content = answer.get("content", {})
                        schema = content.get("application/json", {}).get("schema", {})
                        if schema.get("$ref", "").endswith(f"/{ProblemTold.__name__}"):
                            content[MEDIA_TYPE] = content.pop("application/json")
        assert self.openapi_schema is not None
        return self.openapi_schema


async def _problem(_: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return error.response()


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = _STATUS.get(error.status_code, "failed")
    details = {
        "bad-request": "the body is no JSON that can be read",
        "not-found": "there is nothing at this address",
        "method-not-allowed": "see /openapi.json for what is taken here",
        "unsupported-media": "send Content-Type: application/json",
    }
    return Problem(kind, details.get(kind, "it cannot be answered"), headers=error.headers).response()


async def _invalid(_: Request, error: Exception) -> Response:
    """Where it is wrong and what is expected there; never what was sent."""
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    if any(one["type"] == "json_invalid" for one in found):
        return Problem("bad-request", "the body is no JSON").response()
    errors = [{"pointer": _pointer(one["loc"]), "detail": str(one["msg"])[:200]} for one in found[:20]]
    detail = f"{errors[0]['pointer'] or 'the body'}: {errors[0]['detail']}"
    return Problem("invalid", detail, errors=errors).response()


def _pointer(loc: tuple[int | str, ...]) -> str:
    """RFC 6901, within the body or the path."""
    parts = [str(part)[:100].replace("~", "~0").replace("/", "~1") for part in loc[1:]]
    return "".join(f"/{part}" for part in parts)


if __name__ == "__main__":
    print(text(), end="")
