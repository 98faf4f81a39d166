"""Setting aside what a source cannot return."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest

from connectors.set_aside import (
    MAX_FAILURES,
    MAX_HELD_PARTS,
    MAX_NAMED_PARTS,
    Failures,
    SetAside,
    may_be_set_aside,
    read_isolated,
)
from connectors.web import Denied, Missing, Rejected, ServerFailed
from pipeline.core.errors import Deferred, Misconfigured, PenstockError, Retryable

NAMES = tuple("abcdefgh")


def reader(bad: str, error: PenstockError, requests: list[str]):  # type: ignore[no-untyped-def]
    async def read(names: Sequence[str]) -> Sequence[str]:
        requests.append("".join(names))
        if set(bad) & set(names):
            raise error
        return [name.upper() for name in names]

    return read


async def test_one_name_that_fails_is_isolated_with_few_requests() -> None:
    requests: list[str] = []
    error = Missing("missing", status=404)
    results, errors = await read_isolated(NAMES, reader("c", error, requests))
    assert results == list("ABDEFGH")
    assert errors == {"c": error}
    assert requests == ["abcdefgh", "abcd", "ab", "cd", "c", "d", "efgh"]


@pytest.mark.parametrize(
    "error", [Denied("refused", status=401), Deferred("429"), Retryable("no response"), Misconfigured("no")]
)
async def test_an_error_that_concerns_every_request_is_raised_at_once(error: PenstockError) -> None:
    requests: list[str] = []
    with pytest.raises(type(error)):
        await read_isolated(NAMES, reader("c", error, requests))
    assert requests == ["abcdefgh"]


def test_errors_that_may_concern_only_what_was_requested() -> None:
    for error in (Denied("", status=403), Missing("", status=404), Rejected("", status=400), ServerFailed("")):
        assert may_be_set_aside(error)


def test_a_server_that_fails_at_everything_is_never_one_documents_fault() -> None:
    failures = Failures()
    assert not any(failures.fail("a", ServerFailed("500")) for _ in range(3 * MAX_FAILURES))
    failures.succeed("b")
    assert failures.fail("a", ServerFailed("500"))


def test_failures_count_only_in_a_row() -> None:
    failures = Failures()
    for _ in range(MAX_FAILURES):
        assert not failures.fail("a", ServerFailed("500"))
        failures.succeed("a")


def test_a_rejected_request_is_the_reason_at_once() -> None:
    assert Failures().fail("a", Rejected("400", status=400))


def test_a_status_names_the_parts_until_they_can_be_read_again() -> None:
    aside = SetAside()
    aside.add("listing", "space OLD", "it is archived")
    (problem,) = aside.problems("wiki")
    assert problem.code == "set_aside"
    assert problem.message == "space OLD is set aside, and is tried again: it is archived"
    aside.replace("listing", {f"space {n:03}": "gone" for n in range(MAX_NAMED_PARTS + 5)})
    problems = aside.problems("wiki")
    assert len(problems) == MAX_NAMED_PARTS + 1
    assert problems[-1].message == "5 more parts are set aside"
    aside.replace("listing", {})
    assert aside.problems("wiki") == []


def test_very_many_parts_that_fail_are_counted_and_take_little_memory() -> None:
    """A site of 50,000 pages that refuse each request took 100 MB, and a quarter of a processor for the status."""
    aside = SetAside()
    aside.replace("pages", {f"page {number:05}": "refused" for number in range(50_000)})
    aside.add("pages", "page 99999", "refused")
    aside.add("pages", "page 00000", "denied")
    for _ in range(3):
        aside.add("pages", "page 99999", "refused")
        aside.add("pages", "page 40000", "refused")
    assert len(aside.reasons()) == MAX_HELD_PARTS
    messages = [problem.message for problem in aside.problems("s")]
    assert messages[0] == "page 00000 is set aside, and is tried again: denied"
    assert messages[-1] == f"{50_001 - MAX_NAMED_PARTS} more parts are set aside"
    aside.replace("pages", {})
    assert aside.problems("s") == []


def test_failures_of_ever_other_names_take_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site whose addresses change with each listing took a gigabyte a day."""
    monkeypatch.setattr("connectors.set_aside.MAX_FAILING", 10)
    failures, error = Failures(), ServerFailed("500")
    failures.fail("a", error)
    tracemalloc.start()
    try:
        for number in range(2_000):
            failures.fail(f"{number} {'x' * 2_000}", Denied("", status=403))
            failures.fail(f"{number} {'y' * 2_000}", error)
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()
