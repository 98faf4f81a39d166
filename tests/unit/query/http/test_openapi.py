"""The published description of the HTTP interface is what the code serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from query.http.app import describe_app, text

PUBLISHED = Path(__file__).parents[4] / "docs" / "openapi.json"
GUIDE = PUBLISHED.with_name("http.md")


def test_the_published_openapi_document_is_up_to_date() -> None:
    assert PUBLISHED.read_text() == text(), "stale: python -m query.http.app > docs/openapi.json"


def operations() -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (method, path, operation)
        for path, methods in json.loads(text())["paths"].items()
        for method, operation in methods.items()
    ]


def test_every_route_describes_its_security_and_error_responses() -> None:
    for method, path, operation in operations():
        assert operation["description"], path
        if path.startswith("/v1/"):
            assert operation["security"] == [{"token": []}, {"key": []}], path
            for status, answer in operation["responses"].items():
                if status >= "400":
                    assert list(answer["content"]) == ["application/problem+json"], (method, path, status)


def test_every_route_is_in_the_http_guide() -> None:
    guide = GUIDE.read_text()
    for method, path, _ in operations():
        assert f"`{method.upper()} {path}`" in guide, (method, path)


def test_references_in_the_openapi_document_resolve() -> None:
    description = describe_app().openapi()

    def check(node: Any) -> None:
        if isinstance(node, dict):
            if isinstance(ref := node.get("$ref"), str):
                results: Any = description
                for part in ref.removeprefix("#/").split("/"):
                    results = results[part]
            for value in node.values():
                check(value)
        elif isinstance(node, list):
            for value in node:
                check(value)

    check(description)
