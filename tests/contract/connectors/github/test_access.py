"""Access: collaborators by e-mail address, members of organisations, and what ``check`` says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from connectors.github.client import Api
from pipeline.core.errors import Misconfigured, Retryable
from tests.support.connectors.github_kit import Desk, desk_in, members
from tests.support.connectors.reading import listing


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_in(tmp_path) as desk:
        desk.fake.add(desk.fake.repository("acme/handbook", "ines", "sam"), "Issue", "One", "Text.")
        yield desk


def repository(desk: Desk) -> int:
    return min(desk.fake.places)


async def codes(desk: Desk, **options: object) -> set[str]:
    return {problem.code for problem in await desk.github(**options).check()}  # type: ignore[arg-type]


async def test_collaborators_read_a_private_repository(desk: Desk) -> None:
    source, name = desk.github(), f"repository:{repository(desk)}"
    assert {tag for entry in (await listing(source)).values() for tag in entry.acl_tags} == {name}
    assert await members(source) == {name: ["ines@acme.example", "sam@acme.example"]}
    desk.fake.places[repository(desk)].collaborators.discard("ines")
    assert await members(source, [name]) == {name: ["sam@acme.example"]}
    assert await members(source, ["repository:9"]) == {}


async def test_all_pages_of_collaborators_and_members_are_read(desk: Desk) -> None:
    people = {f"p{n:03}": f"p{n:03}@acme.example" for n in range(230)}
    desk.fake.organization("acme", **people)
    desk.fake.places[repository(desk)].collaborators = set(people)
    assert await members(desk.github()) == {f"repository:{repository(desk)}": sorted(people.values())}


async def test_an_address_comes_from_the_settings_then_from_saml_then_from_confirmed_domains(desk: Desk) -> None:
    known = desk.fake.organizations["acme"]
    known["members"] = {name: [f"{name}@domain.example"] for name in ("ines", "sam", "tom", "uma")}
    known["identities"] = {"ines": "Ines.Ito@Saml.example", "sam": "sam@saml.example", "tom": "no-address"}
    desk.fake.places[repository(desk)].collaborators = {"ines", "sam", "tom", "uma"}
    file = desk.folder / "people.toml"
    file.write_text('UMA = "uma@file.example"\n')
    source = desk.github(people={"Sam": "Sam@Settings.example", "uma": "uma@settings.example"}, people_file=file)
    assert await members(source) == {
        f"repository:{repository(desk)}": [
            "ines.ito@saml.example",
            "sam@settings.example",
            "tom@domain.example",
            "uma@file.example",
        ]
    }
    file.write_text("UMA = 3\n")
    with pytest.raises(Misconfigured, match="people"):
        await members(source)


async def test_a_login_without_address_is_nobody_and_check_counts_it(desk: Desk) -> None:
    desk.fake.places[repository(desk)].collaborators |= {"contractor", "machine"}
    source = desk.github()
    assert await members(source) == {f"repository:{repository(desk)}": ["ines@acme.example", "sam@acme.example"]}
    [problem] = await source.check()
    assert problem.message.startswith("2 logins have no known e-mail address and read nothing (contractor, machine)")


async def test_members_of_the_organisation_read_an_internal_repository(desk: Desk) -> None:
    place = desk.fake.places[repository(desk)]
    place.visibility, place.collaborators = "INTERNAL", set()
    source, name = desk.github(), f"organization:{desk.fake.organizations['acme']['id']}"
    [entry] = (await listing(source)).values()
    assert set(entry.acl_tags) == {name, f"repository:{place.id}"}
    held = {f"repository:{place.id}": [], name: ["ines@acme.example", "sam@acme.example"]}
    assert await members(source) == held
    assert await members(source, [name]) == {name: held[name]}
    place.visibility = "PRIVATE"
    assert await members(source) == {f"repository:{place.id}": []}


async def test_a_public_repository_is_open_to_the_tags_of_the_settings_alone(desk: Desk) -> None:
    desk.fake.places[repository(desk)].visibility = "PUBLIC"
    [entry] = (await listing(desk.github())).values()
    assert set(entry.acl_tags) == {f"repository:{repository(desk)}"}
    source = desk.github(public_acl_tags=["staff"], members={"staff": ["Otto@acme.example"]})
    [entry] = (await listing(source)).values()
    assert set(entry.acl_tags) == {f"repository:{repository(desk)}", "staff"}
    assert (await members(source))["staff"] == ["otto@acme.example"]
    assert await codes(desk, public_acl_tags=["staff"]) == {"nobody"}


async def test_hidden_collaborators_are_requested_by_rest_and_otherwise_nobody_reads(desk: Desk) -> None:
    desk.fake.faults.hidden_collaborators.add(repository(desk))
    name = f"repository:{repository(desk)}"
    assert await members(desk.github()) == {name: ["ines@acme.example", "sam@acme.example"]}
    desk.fake.faults.hidden_in_rest.add(repository(desk))
    assert await members(desk.github()) == {}
    assert await codes(desk) == {"permission"}


async def test_the_collaborators_of_a_repository_with_the_former_name_of_another_are_not_let_in(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = desk.fake.places[repository(desk)]
    desk.fake.faults.hidden_collaborators.add(place.id)
    source, by_name = desk.github(), Api.collaborators

    async def renamed(api: Api, name: str) -> list[str] | None:
        desk.fake.rename(place, "acme/elsewhere")
        desk.fake.repository(name, "otto")
        return await by_name(api, name)

    with monkeypatch.context() as patched:
        patched.setattr(Api, "collaborators", renamed)
        with pytest.raises(Retryable, match="was renamed while its collaborators were read"):
            await members(source)
    assert (await members(source))[f"repository:{place.id}"] == ["ines@acme.example", "sam@acme.example"]


async def test_hidden_members_leave_only_the_addresses_of_the_settings(desk: Desk) -> None:
    desk.fake.faults.hides_members = True
    source = desk.github(people={"ines": "ines@acme.example"})
    assert await members(source) == {f"repository:{repository(desk)}": ["ines@acme.example"]}
    assert {problem.code for problem in await source.check()} == {"permission", "nobody"}


async def test_hidden_identities_leave_the_confirmed_addresses(desk: Desk) -> None:
    desk.fake.faults.hides_identities = True
    assert await members(desk.github()) == {f"repository:{repository(desk)}": ["ines@acme.example", "sam@acme.example"]}
    assert await codes(desk) == set()


async def test_check_names_a_missing_repository_and_a_missing_secret(desk: Desk) -> None:
    names = ["acme/handbook", "acme/lost"]
    matches = await codes(desk, repositories=names, events_url="https://hub.example", webhook_secret=" ")
    assert matches == {"missing", "webhook_secret"}
    assert await codes(desk, repositories=["acme/lost"]) == {"refused"}
    assert await codes(desk, token="wrong") == {"refused"}
