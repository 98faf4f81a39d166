"""The parts of the documentation site that are generated from the code are complete, and in words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal
from xml.etree import ElementTree

import pytest
from pydantic import BaseModel, Field, SecretStr

from cli.main import COMMANDS
from docs.site import commands, diagram, endpoints, events, messages, settings
from docs.site.markdown import code, prose, table
from docs.site.schemas import fields
from pipeline.observability.events import LOG_EVENTS
from query.http.app import describe_app
from query.settings import QuerySettings
from tests.unit.test_imports import sources
from topics.messages import MESSAGES

OF_DEVELOPMENT = ("deploy.local.service", "deploy.cluster.control_plane")
"""Modules with settings of the local stack's servers and of tests."""


def rows(markdown: str) -> list[list[str]]:
    lines = [line for line in markdown.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def declared_prefixes() -> set[str]:
    prefixes: set[str] = set()
    for module, path in sources().items():
        if module not in OF_DEVELOPMENT:
            prefixes |= set(re.findall(r'env_prefix="([A-Z_]+)"', path.read_text()))
    return prefixes


def test_every_class_of_settings_is_in_the_reference() -> None:
    assert declared_prefixes() == {str(part.model_config["env_prefix"]) for part in settings.PARTS}
    assert QuerySettings not in settings.PARTS
    assert all(issubclass(field.annotation, BaseModel) for field in QuerySettings.model_fields.values())  # type: ignore[arg-type]


@pytest.mark.parametrize("document", [settings.document, settings.connector_options])
def test_every_setting_and_option_is_described(document: object) -> None:
    described = rows(document())  # type: ignore[operator]
    assert len(described) > 70
    assert [row[0] for row in described if not row[3] or re.fullmatch(r"(At|More|Less) [^.]*\.", row[3])] == []


def test_a_setting_is_shown_with_its_type_default_and_limits() -> None:
    by_name = {row[0]: row[1:] for row in rows(settings.document())}
    assert by_name["`PENSTOCK_STREAM_LANES`"][:2] == ["integer", "`8`"]
    assert by_name["`PENSTOCK_PRODUCERS`"][:2] == ["`off`, `warn`, `enforce`", "`off`"]
    assert by_name["`PENSTOCK_EMBEDDING_API_KEY`"][:2] == ["secret", ""]
    assert by_name["`PENSTOCK_AUTH_ALGORITHMS`"][1] == '`["RS256"]`'
    assert by_name["`PENSTOCK_SERVE_PORT`"][2].endswith("At least 0, at most 65,535.")


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (str | None, "text"),
        (Literal["a", "b"], "`a`, `b`"),
        (Annotated[float, Field(gt=0)], "number"),
        (tuple[Path, ...], "JSON list of path"),
        (dict[str, SecretStr], "JSON object"),
        (bool, "true or false"),
        (SecretStr | None, "secret"),
    ],
)
def test_types_are_shown_in_words(annotation: object, words: str) -> None:
    assert settings.type_name(annotation) == words


def test_every_command_is_in_the_reference() -> None:
    titles = re.findall(r"^#+ penstock (.+)$", commands.document(), re.MULTILINE)
    assert {title.split()[0] for title in titles} == {*COMMANDS, "migrate", "worker"}
    assert {"dead replay", "generation cutover", "trail verify", "connector conform"} <= set(titles)
    assert len(titles) == len(set(titles))


def test_a_command_is_shown_with_its_arguments_options_and_examples() -> None:
    text = commands.document()
    ingest = text[text.index("## penstock ingest") : text.index("## penstock watch")]
    assert "penstock ingest PATHS … [OPTIONS]" in ingest
    assert "`--acl` `TAG`" in ingest
    assert "$ penstock ingest docs/ --acl staff --wait" in ingest
    assert "Example" not in text


def test_every_message_endpoint_and_event_is_in_the_reference() -> None:
    assert set(re.findall(r"^### (\S+)$", messages.document(), re.MULTILINE)) == MESSAGES.keys()
    shown = set(re.findall(r"^### `(\w+ /\S*)`$", endpoints.document(), re.MULTILINE))
    paths = describe_app().openapi()["paths"]
    assert shown == {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert {row[0].strip("`") for row in rows(events.document())[1:]} == LOG_EVENTS


def test_fields_of_a_schema_are_shown_with_links_to_other_schemas() -> None:
    schema = {
        "required": ["filters"],
        "properties": {
            "filters": {"$ref": "#/components/schemas/SearchFilters", "description": "Restricts\nthe documents."},
            "top": {"type": "integer", "maximum": 100, "default": 10},
            "tags": {"type": "array", "items": {"type": "string"}, "default": []},
        },
    }
    assert rows(fields(schema))[1:] == [
        ["`filters`", "[SearchFilters](#searchfilters)", "required", "Restricts the documents."],
        ["`top`", "integer", "`10`", "At most 100."],
        ["`tags`", "list of string", "", ""],
    ]


def test_cells_of_tables_are_one_line_each() -> None:
    assert table(("a", "b"), [("x | y", "one\n  two")]).splitlines()[2] == r"| x \| y | one two |"
    assert table(("a",), []) == ""
    assert code("a `b`") == "`` a `b` ``"
    assert prose("See docs/wire.md, or\nthe code.") == "See [wire.md](../wire.md), or the code."


def test_a_flowchart_becomes_boxes_and_arrows() -> None:
    drawn = diagram.svg('flowchart TD\n    a["first"]\n    b["second & last"]\n    a --> b\n')
    parts = [element.tag.rpartition("}")[2] for element in ElementTree.fromstring(drawn).iter()]
    assert (parts.count("rect"), parts.count("polyline")) == (2, 1)
    assert "second &amp; last" in drawn


@pytest.mark.parametrize("source", ["sequenceDiagram\n", "flowchart TD\n  a -.-> b\n"])
def test_a_diagram_of_another_kind_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=r"sequenceDiagram|not understood"):
        diagram.svg(source)
