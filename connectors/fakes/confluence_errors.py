"""How Confluence says no."""

from __future__ import annotations

from typing import Any


class Refusal(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message

    def body(self, *, v2: bool) -> dict[str, Any]:
        if "scope" in self.message:
            return {"code": self.status, "message": self.message}
        if v2:
            return {"errors": [{"status": self.status, "code": self.code, "title": self.message, "detail": None}]}
        data = {"authorized": self.status != 403, "valid": True, "errors": [], "successful": False}
        return {"statusCode": self.status, "data": data, "message": self.message}


def nothing() -> Refusal:
    """Whether it does not exist or may not be seen is not told."""
    return Refusal(404, "NOT_FOUND", "No content found with id, or you do not have permission to view it")
