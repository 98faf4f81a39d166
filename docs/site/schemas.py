"""Tables of the fields of JSON Schemas, as pydantic writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from docs.site.markdown import code, prose, table

LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} entries",
    "maxItems": "at most {} entries",
}
"""Keyword → its meaning in words."""


def fields(schema: Mapping[str, Any]) -> str:
    """The table of an object's fields. A field that has another schema's type links to that schema's heading."""
    required = schema.get("required", ())
    rows = [
        (code(name), type_of(field), _default(field, name in required), _described(field))
        for name, field in schema.get("properties", {}).items()
    ]
    return table(("field", "type", "default", "meaning"), rows)


def type_of(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in schema:
        return code(json.dumps(schema["const"]))
    if "enum" in schema:
        return ", ".join(code(json.dumps(value)) for value in schema["enum"])
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(map(type_of, schema[several])))
    match schema.get("type"):
        case "array":
            return f"list of {type_of(schema.get('items', {}))}"
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            return f"object of {type_of(schema['additionalProperties'])}"
        case "string" if "format" in schema:
            return str(schema["format"])
        case str(name):
            return name
        case _:
            return "any value"


def _default(schema: Mapping[str, Any], is_required: bool) -> str:
    if is_required:
        return "required"
    value = schema.get("default")
    return code(json.dumps(value, ensure_ascii=False)) if value not in (None, "", [], {}) else ""


def _described(schema: Mapping[str, Any]) -> str:
    limits = [text.format(f"{schema[name]:,g}") for name, text in LIMITS.items() if name in schema]
    sentences = [prose(schema.get("description", "")), f"{', '.join(limits).capitalize()}." if limits else ""]
    return " ".join(filter(None, sentences))
