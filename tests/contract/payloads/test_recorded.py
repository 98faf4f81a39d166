"""Answers, pages, messages, events and feeds that other projects publish in their packages, through the connectors' own
code.

The fakes were written from the same documents as the connectors, so both share each mistake. These payloads are
evidence that does not depend on them. ``sources.toml`` names where they come from, and what each must become.
"""

from __future__ import annotations

import asyncio
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from functools import cache

import pytest

from connectors.website.listings import BadListing
from pipeline.core.errors import PenstockError
from tests.contract.payloads.readers import VENDORS, readers
from tests.contract.payloads.readers.base import Outcome, Reader
from tests.contract.payloads.sources import Package, Payload, expected, packages, payloads
from tests.contract.payloads.visible import SLACK_REASONS, of_message

LICENCES = {
    *("Apache-2.0", "Apache-2.0 AND MIT", "BSD-2-Clause", "ISC", "LGPL-3.0-or-later", "MIT", "MIT OR Apache-2.0"),
}
NPM = pytest.mark.skipif(shutil.which("npm") is None, reason="without npm its packages are not fetched")
ALL = [
    pytest.param(package, id=package.name, marks=[NPM] if package.registry == "npm" else [])
    for package in packages().values()
]


@cache
def recorded(name: str) -> list[Payload]:
    return payloads(packages()[name])


def same(name: str, actual: object, wished: str) -> bool:
    if name == "modified" and actual and wished:
        return datetime.fromisoformat(str(actual)) == datetime.fromisoformat(wished)
    return str(actual) == wished


def violations(payload: Payload, outcome: Outcome) -> Iterator[str]:
    if payload.group.refused:
        yield f"it was read, not refused as {payload.group.refused}"
    for name, template in payload.group.facts.items():
        wished = expected(template, payload.value)
        if not same(name, outcome.facts.get(name), wished):
            yield f"{name} is {outcome.facts.get(name)!r}, not {wished!r}"
    if outcome.lost:
        yield f"lost: {sorted(outcome.lost)[:5]}"


async def check(payload: Payload, reader: Reader) -> list[str]:
    try:
        outcome = await reader(payload)
    except (PenstockError, BadListing) as error:
        refusal = f"{type(error).__name__}: {error}"
        is_declared = bool(payload.group.refused) and payload.group.refused in refusal
        return [] if is_declared else [f"refused: {refusal}"]
    return [*violations(payload, outcome)]


async def check_all(package: Package) -> dict[str, list[str]]:
    async with readers() as every:
        results = {row.id: await check(row, every[row.group.reader]) for row in recorded(package.name)}
    return {id: lines for id, lines in results.items() if lines}


@pytest.mark.parametrize("package", ALL)
def test_every_recorded_payload_becomes_what_it_says(package: Package) -> None:
    assert asyncio.run(check_all(package)) == {}


@pytest.mark.parametrize("package", ALL)
def test_every_group_and_every_exception_of_a_package_has_payloads(package: Package) -> None:
    rows = recorded(package.name)
    assert [group.files for group in package.groups if not any(row.group is group for row in rows)] == []
    assert all(reason for group in package.groups for reason in group.exceptions.values())
    with tarfile.open(package.archive) as archive:
        paths = {name.partition("/")[2] for name in archive.getnames()}
    assert {path for group in package.groups for path in group.exceptions} <= paths


def test_there_are_200_payloads_by_ten_owners_without_npm() -> None:
    rows = {package.name: recorded(package.name) for package in packages().values() if package.registry == "pypi"}
    readers = Counter(row.group.reader.partition(" ")[0] for inner in rows.values() for row in inner)
    assert readers.total() >= 200
    assert readers.keys() == VENDORS.keys()
    assert len({packages()[name].owner for name in rows}) >= 10
    assert {package.licence for package in packages().values()} <= LICENCES


def test_every_reason_for_leaving_text_of_a_message_out_applies() -> None:
    rows = [row for package in packages().values() if package.registry == "pypi" for row in recorded(package.name)]
    messages = [row.value for row in rows if row.group.reader == "slack message"]
    paths = {path for message in messages for path, _ in of_message(message)}
    assert [end for end in SLACK_REASONS if not any(path.endswith(end) for path in paths)] == []
