"""deploy/chart: written from the manifests, and its schema rejects what the templates do not read."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from deploy.helm.chart import files
from deploy.helm.source import CHART
from deploy.helm.values import Values, defaults

DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
BY_HAND = {"production-values.yaml"}


@cache
def schema() -> Any:
    from jsonschema import Draft202012Validator  # here, because its import takes a second

    return Draft202012Validator(json.loads((CHART / "values.schema.json").read_text()))


def test_the_chart_is_what_the_manifests_yield() -> None:
    expected = files()
    assert {str(path.relative_to(CHART)) for path in CHART.rglob("*") if path.is_file()} == set(expected) | BY_HAND
    for path, text in expected.items():
        assert (CHART / path).read_text() == text, f"{path}: python -m deploy.helm"


def parts(model: BaseModel, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every part of the values whose keys are ours."""
    yield path
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from parts(value, (*path, field.alias or name))


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """As Helm merges a file of values over the chart's."""
    both = {key: merged(base[key], over[key]) for key in base.keys() & over.keys() if isinstance(base[key], dict)}
    return {**base, **over, **both}


@pytest.mark.parametrize("path", list(parts(defaults())), ids=lambda path: ".".join(path) or "top")
def test_the_values_schema_rejects_an_unknown_key_at_every_level(path: tuple[str, ...]) -> None:
    values = copy.deepcopy(DEFAULTS)
    part = values
    for key in path:
        part = part[key]
    assert schema().is_valid(values)
    part["unknwon"] = 1
    [error] = schema().iter_errors(values)
    assert "'unknwon' was unexpected" in error.message


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("image.digest", "sha256:123"),
        ("settings.penstock_kafka_bootstrap", "kafka:9092"),
        ("settings.PENSTOCK_KAFKA_REPLICATION", 3),
        ("detect.minReplicas", 0),
        ("query.resources.requests.memory", "1 GB"),
        ("traces.endpoint", "http://collector"),
        ("keda.enabled", "yes"),
    ],
)
def test_the_values_schema_rejects_a_wrong_value(path: str, wrong: object) -> None:
    values = copy.deepcopy(DEFAULTS)
    *parents, key = path.split(".")
    part = values
    for parent in parents:
        part = part[parent]
    part[key] = wrong
    assert not schema().is_valid(values)


def test_the_example_for_production_is_valid_and_pins_its_image() -> None:
    example = yaml.safe_load((CHART / "production-values.yaml").read_text())
    values = merged(DEFAULTS, example)
    schema().validate(values)
    assert Values.model_validate(values).image.digest
    assert all(values["egress"].values()), "a kind of server that cannot be reached"


def test_every_value_that_a_template_reads_exists_and_every_value_is_read() -> None:
    read = set[str]()
    for template in (CHART / "templates").iterdir():
        read |= set(re.findall(r"\.Values\.([A-Za-z_.]+)", template.read_text()))
    for path in read:
        value: Any = DEFAULTS
        for key in path.split("."):
            assert key in value, f"a template reads {path}, which is no value"
            value = value[key]
    unread = [
        ".".join(path)
        for path in leaves(DEFAULTS)
        if not any(".".join(path[:n]) in read for n in range(1, len(path) + 1)) and path[0] != "global"
    ]
    assert not unread


def leaves(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)
