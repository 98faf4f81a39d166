"""The leak test over HTTP: every route's answer to tokens and keys, compared with a plain filter over random worlds
(tests/support/query/leaks.py), while groups and documents change under one service and its caches.

Seeds are fixed, and one more is drawn at each run; a failure prints the world's seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
import pytest_asyncio

from deploy.local.stack import Stack
from pipeline.core.identity import document_id
from query.access.callers import storable
from query.evaluation import golden as judgements
from query.evaluation.golden import Golden, Judged
from tests.fakes.issuer import Issuer, bearer, issuing
from tests.support.query.http_kit import service_over, write_keys
from tests.support.query.leak_paths import Paths
from tests.support.query.leaks import Asker, DocumentKey, Living, Model, World, may_read
from tests.support.query.planted_conflicts import Planted, check_conflicts, plant

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

WORLDS = 2
ALL = 100
"""More passages than a caller may read in one world."""
LOOKED_UP = 3
"""Documents of each world that a caller asks for by id, whoever's they are, besides one of its own."""
NO_INFORMATION = "I don't have information on this."


@pytest_asyncio.fixture(loop_scope="module")
async def paths(stack: Stack) -> AsyncIterator[Paths]:
    async with Paths.open(stack) as paths:
        yield paths


@dataclass
class HttpCaller:
    """One who can prove it, and who that is to the plain filter."""

    world: World
    asker: Asker
    headers: dict[str, str]


def callers(worlds: list[World], issuer: Issuer, keys: Path) -> list[HttpCaller]:
    """Each asker's principals by token, and its tags by a key; every token claims all the tags that there are."""
    results, entries = [], {}
    for world in worlds:
        for asker in world.askers:
            for principal in asker.principals:
                claims = {"groups": list(world._tags), "tags": list(world._tags), "scope": " ".join(world._tags)}
                token = issuer.token(tenant=asker.tenant, email=principal, **claims)
                results.append(HttpCaller(world, Asker(asker.tenant, (principal,), ()), bearer(token)))
            if tags := storable(asker.tags):  # no file of text holds the others
                key = f"key-{len(entries)}"
                entries[key] = {"key": key, "tenant": asker.tenant, "tags": tags}
                results.append(HttpCaller(world, Asker(asker.tenant, (), tuple(tags)), {"X-Api-Key": key}))
    write_keys(keys, **entries)
    return results


class NamedDocuments:
    """The documents that the responses of a route name, with their texts."""

    def __init__(self, asker: Asker) -> None:
        self.asker = asker
        self.keys: set[DocumentKey] = set()
        self.texts: list[tuple[DocumentKey, str]] = []

    def place(self, response: dict[str, Any]) -> DocumentKey:
        key = (self.asker.tenant, response["source"], response["external_id"])
        assert response["document_id"] == str(document_id(*key)), "another tenant's document under a name of ours"
        self.keys.add(key)
        return key

    def passage(self, response: dict[str, Any]) -> None:
        self.texts.append((self.place(response), response["text"]))
        for other in response.get("also", ()):
            self.place(other)

    def check(self, now: dict[DocumentKey, Living]) -> None:
        assert self.keys <= set(now)
        for key, text in self.texts:
            assert set(text.split()) <= set(now[key].content.split()), "a text that the document no longer has"


async def request_ok(
    client: httpx.AsyncClient, method: str, path: str, caller: HttpCaller, body: Any = None
) -> dict[str, Any]:
    answer = await client.request(method, path, json=body, headers=caller.headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


class Asking:
    def __init__(
        self, paths: Paths, client: httpx.AsyncClient, worlds: list[World], everybody: list[HttpCaller]
    ) -> None:
        self.paths = paths
        self.client = client
        self.worlds = worlds
        self.everybody = everybody
        self.models = {id(world): Model() for world in worlds}
        self.questions = {id(world): world.question() for world in worlds}
        """One a world, asked by all: what one is told must not be remembered for another."""
        self.dice = random.Random(worlds[0].seed)
        self.modes = cycle(("hybrid", "keyword", "vector"))
        self.answer_modes = cycle(("hybrid", "long_context"))
        self.paths_by_id = cycle(("/v1/documents/{}", "/v1/documents/{}/why"))
        self.missing: dict[str, bytes] = {}
        """By path: the response for a document that does not exist."""
        self.passage_count = self.finding_count = self.conflict_count = 0
        self.judged: dict[int, DocumentKey] = {}
        self.planted: dict[int, list[Planted]] = {}

    async def learn(self, part: str) -> list[UUID]:
        for world in self.worlds:
            self.models[id(world)].learn(*getattr(world, part))
        return await self.paths.learn(event for world in self.worlds for event in getattr(world, part))

    async def check(self, state: str, must: dict[int, Model] | None = None) -> None:
        """must: see tests/contract/query/test_leaks.py."""
        for caller in self.everybody:
            model = self.models[id(caller.world)]
            now = model.readable(caller.asker)
            expected, exactly = set(now), must is None
            if must is not None:
                stored = may_read(must[id(caller.world)].living(), caller.asker.tenant, model.held(caller.asker))
                expected = {k for k in now if k in stored and stored[k].content == now[k].content}
            try:
                await self._search(caller, now, expected, exactly=exactly)
                await self._answer(caller, now)
                await self._by_id(caller, now)
                await self._facets(caller, now)
                await self._preview(caller, now)
                await self._conflicts(caller, now, exactly=exactly)
            except AssertionError as error:
                raise AssertionError(f"{state}, {caller.world}, {caller.asker}: {error}") from error

    async def _search(
        self, caller: HttpCaller, now: dict[DocumentKey, Living], expected: set[DocumentKey], *, exactly: bool
    ) -> None:
        body = {"query": self.questions[id(caller.world)], "mode": next(self.modes), "top": ALL}
        response = await request_ok(self.client, "POST", "/v1/search", caller, body)
        seen = NamedDocuments(caller.asker)
        for result in response["results"]:
            seen.passage(result)
        seen.check(now)
        assert seen.keys == expected if exactly else seen.keys >= expected
        counted = [step["results"] for step in response["steps"] if step["step"] == "arrange"]
        assert counted == [len(response["results"])]
        self.passage_count += len(response["results"])

    async def _answer(self, caller: HttpCaller, now: dict[DocumentKey, Living]) -> None:
        """Check an answer, which may be made from search results or from everything readable."""
        body = {"question": self.questions[id(caller.world)], "mode": next(self.answer_modes)}
        response = await request_ok(self.client, "POST", "/v1/answers", caller, body)
        seen = NamedDocuments(caller.asker)
        for citation in response["citations"]:
            seen.passage(citation)
        seen.check(now)
        assert (response["answer"] == NO_INFORMATION) == (not response["citations"])
        if not now:
            assert not response["citations"]

    async def _by_id(self, caller: HttpCaller, now: dict[DocumentKey, Living]) -> None:
        every = sorted(self.models[id(caller.world)]._documents)
        for key in [*self.dice.sample(every, LOOKED_UP), *list(now)[:1]]:
            path = next(self.paths_by_id)
            answer = await self.client.get(path.format(document_id(*key)), headers=caller.headers)
            if key not in now:
                if path not in self.missing:
                    self.missing[path] = (await self.client.get(path.format(uuid4()), headers=caller.headers)).content
                assert (answer.status_code, answer.content) == (404, self.missing[path]), key
            elif path.endswith("why"):
                body = answer.json()
                held = {f"{source}/{tag}" for source, tag in self.models[id(caller.world)].held(caller.asker)}
                assert body["document"]["external_id"] == key[2]
                assert set(body["access"]["acl_tags"]) <= held
                assert body["dead"] == []
            else:
                assert answer.json()["text"] == now[key].content, key

    async def _facets(self, caller: HttpCaller, now: dict[DocumentKey, Living]) -> None:
        response = await request_ok(self.client, "GET", "/v1/facets", caller)
        assert set(response["sources"]) == {source for _, source, _ in now}
        assert set(response["media_types"]) == ({"text/markdown"} if now else set())

    async def contradict(self) -> None:
        """Store conflicts between documents of each world, whoever may read them."""
        for world in self.worlds:
            living = list(self.models[id(world)].living())
            self.planted[id(world)] = await plant(self.paths.library, living, self.dice)

    async def _conflicts(self, caller: HttpCaller, now: dict[DocumentKey, Living], *, exactly: bool) -> None:
        """Check the list, and that a conflict can be decided on only by whom it is shown to."""
        planted = self.planted[id(caller.world)]
        response = await request_ok(self.client, "GET", "/v1/conflicts?limit=200", caller)
        check_conflicts(response["conflicts"], planted, now, exactly=exactly)
        shown = {conflict["id"] for conflict in response["conflicts"]}
        for conflict in self.dice.sample(planted, LOOKED_UP):
            path = f"/v1/conflicts/{conflict.id}"
            answer = await self.client.post(path, json={"decision": "open"}, headers=caller.headers)
            assert answer.status_code == (204 if str(conflict.id) in shown else 404), conflict
        self.conflict_count += len(shown)

    async def judge(self) -> None:
        """Store a golden question for one document of each world. The question is the document's own text, and most
        callers may read it, so that its deletion is a finding."""
        for world in self.worlds:
            model = self.models[id(world)]
            readers = Counter(
                key for caller in self.everybody if caller.world is world for key in model.readable(caller.asker)
            )
            content = {living.key: living.content for living in model.living()}
            key = max(sorted(content), key=lambda key: readers[key])
            self.judged[id(world)] = key
            golden = Golden(key[0], content[key], (Judged(key[1], key[2]),))
            async with self.paths.library.pool.connection() as connection:
                await judgements.store(connection, golden)

    async def _preview(self, caller: HttpCaller, now: dict[DocumentKey, Living]) -> None:
        """Check the previews of two deletions: of the judged document, and of any document of the tenant."""
        judged = self.judged[id(caller.world)]
        every = [k for k in sorted(self.models[id(caller.world)]._documents) if k[0] == caller.asker.tenant]
        deleted = [*([judged] if judged in every else []), *self.dice.sample(every, min(1, len(every)))]
        for key in dict.fromkeys(deleted):
            body = {"source": key[1], "documents": [{"path": key[2], "external_id": key[2]}]}
            response = await request_ok(self.client, "POST", "/v1/previews", caller, body)
            [edited] = response["documents"]
            assert edited["state"] == ("deleted" if key in now else "unknown"), key
            assert edited["removed"] == 0 or key in now
            assert response["questions"] == (1 if key in now and judged in now else 0), key
            seen = NamedDocuments(caller.asker)
            for finding in response["findings"]:
                for passage in (*finding["before"], *finding["after"]):
                    seen.texts.append((seen.place(passage), passage["excerpt"].removesuffix(" …")))
                assert all(passage["document_id"] != str(document_id(*key)) for passage in finding["after"])
            seen.check(now)
            self.finding_count += len(response["findings"])


@asynccontextmanager
async def open_asking(paths: Paths, folder: Path, seed: int) -> AsyncIterator[Asking]:
    worlds = [World(seed * 1000 + n, f"h{seed}w{n}") for n in range(WORLDS)]
    async with issuing() as issuer:
        everybody = callers(worlds, issuer, folder / "keys.toml")
        auth = issuer.settings(keys_file=folder / "keys.toml")
        async with service_over(paths.library, auth=auth) as (client, _):
            yield Asking(paths, client, worlds, everybody)


@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.slow), None])
async def test_every_http_response_shows_only_what_a_plain_access_filter_allows(
    paths: Paths, tmp_path: Path, seed: int | None
) -> None:
    drawn = random.randrange(10, 10**6) if seed is None else seed
    async with open_asking(paths, tmp_path, drawn) as asking:
        await paths.library.converge(*await asking.learn("first"))
        await asking.judge()
        await asking.contradict()
        await asking.check("settled")
        before = deepcopy(asking.models)
        moved = await asking.learn("then")
        await asking.check("the stores have not followed", must=before)
        await paths.library.converge(*moved)
        await asking.check("settled again")
        assert asking.passage_count > 50, "worlds in which nobody reads anything prove nothing"
        assert asking.finding_count > 0
        assert asking.conflict_count > 0
