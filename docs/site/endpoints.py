"""Reference of the query service's HTTP interface, from the description that it serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from docs.site.markdown import code, prose, table
from docs.site.schemas import fields, type_of
from query.http.app import describe_app


def document() -> str:
    description = describe_app().openapi()
    parts = ["## Endpoints\n\n"]
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            parts += _operation(f"{method.upper()} {path}", operation)
    parts += ["## Requests and responses\n\n"]
    for name, schema in description["components"]["schemas"].items():
        parts += [f"### {name}\n\n", f"{prose(schema.get('description', ''))}\n\n", fields(schema)]
    return "".join(parts)


def _operation(title: str, operation: Mapping[str, Any]) -> list[str]:
    parts = [f"### {code(title)}\n\n", f"{prose(operation['description'])}\n\n"]
    parameters = [
        (
            code(parameter["name"]),
            parameter["in"],
            type_of(parameter["schema"]),
            "required" if parameter.get("required") else _shown(parameter["schema"].get("default")),
            prose(parameter.get("description", "")),
        )
        for parameter in operation.get("parameters", ())
    ]
    parts.append(table(("parameter", "in", "type", "default", "meaning"), parameters))
    if body := operation.get("requestBody"):
        parts.append(f"The request's body is {_content(body)}.\n\n")
    responses = [
        (code(status), prose(response["description"]), _content(response))
        for status, response in operation["responses"].items()
    ]
    parts.append(table(("status", "meaning", "body"), responses))
    return parts


def _content(part: Mapping[str, Any]) -> str:
    shown = [
        type_of(content["schema"]) if content.get("schema") else code(media_type)
        for media_type, content in part.get("content", {}).items()
    ]
    return " or ".join(dict.fromkeys(shown))


def _shown(default: object) -> str:
    return "" if default is None else code(str(default))
