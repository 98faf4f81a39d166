"""Options that cannot be meant are refused before a program is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from connectors.airbyte.options import AirbyteOptions
from connectors.airbyte.source import Airbyte
from connectors.declared import options
from pipeline.core.errors import Misconfigured

STREAM = {"title": "{title}", "text": "{owner.name}: {body}"}


def declared(stream: dict[str, Any], **more: Any) -> AirbyteOptions:
    values = {"program": ["source-desk"], "acl_tags": ["staff"], "streams": {"notes": {**STREAM, **stream}}, **more}
    return AirbyteOptions.model_validate(values)


@pytest.mark.parametrize(
    ("stream", "more", "message"),
    [
        ({}, {"acl_tags": []}, "does not say who may read"),
        ({"acl": ["team"], "acl_tags": ["staff"]}, {}, "acl_tags would open every row"),
        ({"text": "{body!r}"}, {}, "write {field}"),
        ({"text": "{body:>99999}"}, {}, "write {field}"),
        ({"text": "{}"}, {}, "write {field}"),
        ({"text": "{a[0]}"}, {}, "write {field}"),
        ({"url": "javascript:{id}"}, {}, "write an https address"),
        ({"members": {"a": ["b"]}}, {}, "Extra inputs"),
        ({}, {"program": ["bin/source-desk"]}, "absolute path"),
        ({}, {"program": []}, "at least 1"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(stream: Any, more: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        declared(stream, **more)


def test_a_stream_without_readers_is_refused_with_one_line_that_says_what_to_write() -> None:
    table = {"program": ["source-desk"], "streams": {"notes": STREAM}}
    with pytest.raises(Misconfigured) as raised:
        options(Airbyte, table, "desk", {})
    assert str(raised.value).count("\n") == 0
    assert "acl_tags" in str(raised.value)
    assert "streams.notes.acl" in str(raised.value)


def test_readers_of_a_stream_replace_the_tags_of_the_source() -> None:
    streams = {"a": STREAM, "b": {**STREAM, "acl": ["team"], "required_tags": ["board"]}}
    options = declared({}, required_tags=["employed"], streams=streams)
    a, b = options.effective("a"), options.effective("b")
    assert (a.acl_tags, a.acl, a.required_tags) == (("staff",), (), ("employed",))
    assert (b.acl_tags, b.acl, b.required_tags) == ((), ("team",), ("employed", "board"))


def test_the_secret_part_of_a_configuration_is_merged_into_the_file(tmp_path: Path) -> None:
    file = tmp_path / "desk.json"
    file.write_text(json.dumps({"url": "https://desk.example", "auth": {"kind": "token", "token": "placeholder"}}))
    options = declared({}, config_file=file, config='{"auth": {"token": "s3cret"}}')
    expected = {"url": "https://desk.example", "auth": {"kind": "token", "token": "s3cret"}}
    assert options.configuration() == expected
    assert "s3cret" not in repr(options)


@pytest.mark.parametrize("config", ["{", "[1]"])
def test_a_configuration_that_is_no_object_is_refused_without_showing_it(config: str) -> None:
    with pytest.raises(Misconfigured, match="config"):
        declared({}, config=config).configuration()
