"""Refusals in the words of Google's servers.

https://developers.google.com/workspace/drive/api/guides/handle-errors
"""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """What a Google API answers instead of what was asked for. ``reason`` is what programs tell errors apart by."""

    def __init__(
        self, status: int, reason: str, message: str, *, domain: str = "global", location: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        one: dict[str, Any] = {"message": message, "domain": domain, "reason": reason}
        if location:
            kind = "header" if location == "Authorization" else "parameter"
            one |= {"location": location, "locationType": kind}
        self.body: dict[str, Any] = {"error": {"code": status, "message": message, "errors": [one]}}


class OAuthError(Exception):
    """RFC 6749, section 5.2, as https://oauth2.googleapis.com/token words it."""

    def __init__(self, status: int, error: str, description: str) -> None:
        super().__init__(description)
        self.status = status
        self.body = {"error": error, "error_description": description}


def file_not_found(id_: str) -> ApiError:
    return ApiError(404, "notFound", f"File not found: {id_}.", location="fileId")


def drive_not_found(id_: str) -> ApiError:
    return ApiError(404, "notFound", f"Shared drive not found: {id_}", location="driveId")


def invalid_value(parameter: str) -> ApiError:
    return ApiError(400, "invalid", "Invalid Value", location=parameter)


def missing(parameter: str) -> ApiError:
    return ApiError(400, "required", f"Required parameter: {parameter}", location=parameter)


def bad_credentials() -> ApiError:
    message = (
        "Request had invalid authentication credentials. Expected OAuth 2 access token, login cookie or other valid"
        " authentication credential."
    )
    return ApiError(401, "authError", message, location="Authorization", headers={"WWW-Authenticate": "Bearer"})


def insufficient_scopes() -> ApiError:
    return ApiError(403, "insufficientPermissions", "Request had insufficient authentication scopes.")


def not_enabled(api: str) -> ApiError:
    return ApiError(
        403, "accessNotConfigured",
        f"{api} has not been used in project 1 before or it is disabled. Enable it in the console, then retry.",
        domain="usageLimits",
    )  # fmt: skip
