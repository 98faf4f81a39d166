"""How Google's servers answer: partial, refused, or not at all for now."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from connectors.fakes.google_drive_errors import ApiError, OAuthError, invalid_value
from connectors.fakes.google_drive_fields import Mask, chosen, parse
from connectors.fakes.google_drive_listing import whole_number


@dataclass
class Faults:
    """A number of requests counts down; the rest stays until changed. Tokens are asked for without trouble."""

    throttled: int = 0
    throttle_status: int = 429
    throttle_reason: str = "rateLimitExceeded"
    retry_after: int | None = 0
    failing: int = 0
    failing_status: int = 503
    truncated: bool = False
    """Listings end early, as if that were all."""
    incomplete: bool = False
    """incompleteSearch, as when some shared drives could not be searched."""
    broken: set[str] = field(default_factory=set)
    """Ids of files that cannot be exported or downloaded: Google answers 500 whenever it is tried."""
    no_markdown: bool = False
    """Documents are exported as HTML and not as Markdown."""
    disabled: bool = False
    """The Drive API is not enabled in the project."""

    def answer(self) -> Response | None:
        """What is answered instead, if this request is one of those."""
        if self.throttled:
            self.throttled -= 1
            headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
            return _error(
                ApiError(
                    self.throttle_status,
                    self.throttle_reason,
                    "Rate limit exceeded.",
                    domain="usageLimits",
                    headers=headers,
                )
            )
        if self.failing:
            self.failing -= 1
            return _error(ApiError(self.failing_status, "backendError", "Backend Error"))
        return None


async def body_of(request: Request) -> dict[str, Any]:
    try:
        found = json.loads(await request.body())
    except ValueError:
        raise ApiError(400, "parseError", "Parse Error") from None
    return found if isinstance(found, dict) else {}


def flag(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false"):
        raise invalid_value(name)
    return value == "true"


def partial(request: Request, answer: dict[str, Any], known: Mask, usual: Mask | None = None) -> Response:
    asked = request.query_params.get("fields")
    whole_number(request.query_params, "pageSize", 100, 1000)
    return JSONResponse(chosen(answer, parse(asked) if asked else (usual or {}), known))


def _error(error: ApiError | OAuthError) -> Response:
    headers = error.headers if isinstance(error, ApiError) else None
    return JSONResponse(error.body, error.status, headers=headers)


async def answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError | OAuthError)
    return _error(error)
