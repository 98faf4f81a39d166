"""Setting aside what a source cannot return."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from connectors.set_aside import MAX_FAILURES, MAX_NAMED_PARTS, Failures, SetAside, may_be_set_aside, read_isolated
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
