"""Filters by metadata as they are written on a command line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import typer

_FILTER = re.compile(r"(?P<name>[\w.-]{1,100}?)(?P<sign>>=|<=|!=|\+=|=|>|<)(?P<value>.+)", re.DOTALL)
_LISTS = {"=": "any", "+=": "all", "!=": "none"}
_BOUNDS = {">=": "gte", ">": "gt", "<=": "lte", "<": "lt"}


def conditions(filters: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The ``filters.metadata`` of a request from ``KEY=VALUE`` (any of the values given for a key), ``KEY+=VALUE`` (all
    of them), ``KEY!=VALUE`` (none of them), ``KEY>=VALUE``, ``>``, ``<=`` and ``<``. A bound that is a number is
    compared as one. Raises typer.BadParameter."""
    by_key: dict[str, dict[str, Any]] = {}
    for text in filters:
        written = _FILTER.fullmatch(text)
        if written is None:
            raise typer.BadParameter("write a filter as KEY=VALUE, KEY+=VALUE, KEY!=VALUE, or with >=, >, <= or <")
        name, sign, value = written["name"], written["sign"], written["value"]
        of_key = by_key.setdefault(name, {})
        if sign in _LISTS:
            of_key.setdefault(_LISTS[sign], []).append(value)
        elif _BOUNDS[sign] in of_key:
            raise typer.BadParameter(f"{name}{sign} is given twice")
        else:
            of_key[_BOUNDS[sign]] = _number(value)
    return by_key


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
