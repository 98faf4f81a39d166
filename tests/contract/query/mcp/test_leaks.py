"""The leak test over MCP: tokens and keys at the real endpoint, compared with a plain filter over random worlds."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import uuid4

import httpx
import pytest
import pytest_asyncio
from mcp.client import Client

from deploy.local.stack import Stack
from pipeline.core.identity import document_id
from query.evaluation import golden as judgements
from query.evaluation.golden import Golden, Judged
from query.service import Service
from tests.fakes.issuer import Issuer, Key, bearer, issuing
from tests.support.query.http_kit import service_over, write_keys
from tests.support.query.leak_paths import Paths
from tests.support.query.leaks import COMMON, Asker, DocumentKey, Living, Model, World, may_read
from tests.support.query.library import access, deletion, document
from tests.support.query.mcp_kit import WAY_IN, Bearer, call, connected, refused
from tests.support.query.planted_conflicts import Planted, check_conflicts, plant

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]

WORLDS = 2


@dataclass
class Served:
    paths: Paths
    issuer: Issuer
    address: str
    service: Service
    http: httpx.AsyncClient
    keys: dict[str, Asker]
    worlds: list[World]

    def askers(self, world: World) -> Iterator[tuple[str, Asker]]:
        """Each with what proves it: a person by token, a service of fixed tags by key."""
        for asker in world.askers:
            for principal in asker.principals:
                token = self.issuer.token(tenant=asker.tenant, email=principal)
                yield token, Asker(asker.tenant, (principal,), ())
        for key, asker in self.keys.items():
            if asker.tenant in world.tenants:
                yield key, asker


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    worlds = [World(7_000 + n, f"mcp{n}") for n in range(WORLDS)]
    keys = {f"key-{world.tenants[0]}": Asker(world.tenants[n], (), ("staff",)) for n, world in enumerate(worlds)}
    file = write_keys(
        tmp_path_factory.mktemp("keys") / "keys.toml",
        **{
            f"service{n}": {"key": key, "tenant": asker.tenant, "tags": list(asker.tags)}
            for n, (key, asker) in enumerate(keys.items())
        },
    )
    async with Paths.open(stack) as paths, issuing() as issuer:
        auth = issuer.settings(keys_file=file)
        async with service_over(paths.library, auth=auth) as (http, service):
            address = str(http.base_url).rstrip("/")
            yield Served(paths, issuer, address, service, http, keys, worlds)


def ids(response: dict[str, object]) -> set[str]:
    """Return the ids of everything that a response names."""
    results = response["results"]
    assert isinstance(results, list)
    named = {result["id"] for result in results}
    return named | {other["id"] for result in results for other in result["metadata"].get("also", [])}


async def test_every_mcp_response_shows_only_what_a_plain_access_filter_allows(served: Served) -> None:
    models = [Model() for _ in served.worlds]
    planted: list[list[Planted]] = []
    request_count = count = fetched = conflict_count = finding_count = 0
    for part in ("first", "then"):
        for world, model in zip(served.worlds, models, strict=True):
            model.learn(*getattr(world, part))
        moved = await served.paths.learn(event for world in served.worlds for event in getattr(world, part))
        for follow in (False, True):
            if follow:
                await served.paths.library.converge(*moved)
            elif part == "first":
                continue  # nothing is in the stores yet
            if not planted:
                dice = random.Random(served.worlds[0].seed)
                planted = [await plant(served.paths.library, list(model.living()), dice) for model in models]
                judged = [await judge(served, model) for model in models]
            for world, model, conflicts, of in zip(served.worlds, models, planted, judged, strict=True):
                every = {key: str(document_id(*key)) for key in (document.key for document in model.living())}
                missing = None
                for proof, asker in served.askers(world):
                    now = may_read(model.living(), asker.tenant, model.held(asker))
                    async with connected(served.address, auth=Bearer(proof)) as client:
                        answer = await call(client, "search", query=world.question(), limit=50)
                        shown = ids(answer)
                        listed = (await call(client, "conflicts", limit=50))["conflicts"]
                        check_conflicts(listed, conflicts, now, exactly=follow)
                        conflict_count += len(listed)
                        if of[0] == asker.tenant:
                            finding_count += await check_preview(client, of, every, now)
                        assert shown <= {every[key] for key in now}, (world, asker)
                        if follow:
                            assert bool(shown) == bool(now), (world, asker)
                            missing = missing or await refused(client, "fetch", id=str(uuid4()))
                            fetched += await check_fetches(client, every, now, missing)
                    request_count, count = request_count + 1, count + len(shown)
    print(f"{request_count} askers, {count} documents found, {fetched} fetched")
    assert request_count > 40
    assert count > 40, "worlds in which nobody reads anything prove nothing"
    assert fetched > 20
    assert conflict_count > 5
    assert finding_count > 0


async def judge(served: Served, model: Model) -> DocumentKey:
    """Store a golden question for a document. The question is the document's own text."""
    living = min(model.living(), key=lambda living: (len(living.required), -len(living.acl), living.key))
    async with served.paths.library.pool.connection() as connection:
        tenant, source, external_id = living.key
        await judgements.store(connection, Golden(tenant, living.content, (Judged(source, external_id),)))
    return living.key


async def check_preview(
    client: Client, of: DocumentKey, every: dict[DocumentKey, str], now: dict[DocumentKey, Living]
) -> int:
    """The deletion of the judged document: of who may not read it, it is that of none."""
    output = await call(client, "preview", source=of[1], path=of[2], content=None)
    assert output["state"] == ("deleted" if of in now else "unknown")
    assert output["questions"] == (1 if of in now else 0)
    texts = {every[key]: now[key].content.split() for key in now}
    for finding in output["findings"]:
        assert finding["question"].split() == now[of].content.split()
        for quoted in (*finding["before"], *finding["after"]):
            assert set(quoted["text"].removesuffix(" …").split()) <= set(texts[quoted["id"]])
        assert every[of] not in {quoted["id"] for quoted in finding["after"]}
    if of not in now and of in every:
        gone = await refused(client, "preview", id=every[of], content=None)
        assert gone == await refused(client, "preview", id=str(uuid4()), content=None)
    return len(output["findings"])


async def check_fetches(client, every: dict[DocumentKey, str], now: dict[DocumentKey, Living], missing: str) -> int:
    """A few of each: what may be read comes whole, what may not is answered like what does not exist."""
    some = list(now)[:2]
    for key in some:
        given = await call(client, "fetch", id=every[key])
        assert given["text"].split() == now[key].content.split()
    for key in [key for key in every if key not in now][:3]:
        assert await refused(client, "fetch", id=every[key]) == missing
    return len(some)


# Who asks is proved at each request


def body(tool: str = "search", **arguments: object) -> dict[str, object]:
    call = {"name": tool, "arguments": arguments or {"query": COMMON}}
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}


@asynccontextmanager
async def shared(served: Served) -> AsyncIterator[str]:
    """A document of tenant acme that ann may read, by a group; its id."""
    of = document(f"{uuid4().hex}.md", f"{COMMON} of the board. 4711", acl_tags=["mcp-board"])
    await served.paths.library.put(of)
    await served.paths.library.execute(
        "INSERT INTO memberships VALUES ('acme', 'wiki', 'ann', '{mcp-board}', now())"
        " ON CONFLICT (tenant, principal, source) DO UPDATE SET groups = excluded.groups"
    )
    yield str(document_id("acme", "wiki", of.external_id))
    await served.paths.library.put(deletion(of))


async def test_the_mcp_endpoint_accepts_only_valid_tokens_and_keys(served: Served) -> None:
    issuer = served.issuer
    async with shared(served) as id_:
        good = issuer.token(email="ann")
        assert "4711" in (await served.http.post("/mcp", json=body(), headers=WAY_IN | bearer(good))).text
        bad = {
            "expired": issuer.token(email="ann", exp=1_700_000_000),
            "forged": issuer.token(email="ann", key=Key.rsa("k1")),
            "unsigned": issuer.unsigned(email="ann"),
            "public key as secret": issuer.with_the_public_key_as_secret(email="ann"),
            "wrong audience": issuer.token(email="ann", aud="somebody-else"),
            "wrong issuer": issuer.token(email="ann", iss="https://evil.example.org"),
            "tampered": good[:-4] + "AAAA",
            "no key": "key-nosuch",
        }
        for name, token in bad.items():
            for requests in (body(), body("fetch", id=id_), {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}):
                answer = await served.http.post("/mcp", json=requests, headers=WAY_IN | bearer(token))
                assert answer.status_code == 401, name
                assert answer.headers["www-authenticate"].startswith("Bearer")
                assert "4711" not in answer.text
        assert (await served.http.post("/mcp", json=body(), headers=WAY_IN)).status_code == 401


async def test_each_mcp_call_is_authorised_by_its_own_token(served: Served) -> None:
    """The caller of a request is determined by its own token, also on a reused connection."""
    issuer = served.issuer
    async with shared(served) as id_:
        proof = Bearer(issuer.token(email="ann"))
        async with connected(served.address, auth=proof) as client:
            assert id_ in ids(await call(client, "search", query=COMMON))
            for other in (issuer.token(email="bob"), issuer.token(email="ann", tenant="beta")):
                proof.token = other
                assert ids(await call(client, "search", query=COMMON)) == set()  # the same question: no cache is shared
                assert "the document does not exist" in await refused(client, "fetch", id=id_)
            proof.token = issuer.token(email="ann")
            assert id_ in ids(await call(client, "search", query=COMMON))
            await served.paths.library.execute("DELETE FROM memberships WHERE principal = 'ann' AND tenant = 'acme'")
            assert ids(await call(client, "search", query=COMMON)) == set()
            assert "the document does not exist" in await refused(client, "fetch", id=id_)


async def test_no_header_argument_or_claim_widens_the_callers_access(served: Served) -> None:
    async with shared(served) as id_:
        bob = WAY_IN | bearer(served.issuer.token(email="bob", tags=["wiki/mcp-board"], groups=["mcp-board"]))
        claims = {
            "tags": ["wiki/mcp-board"],
            "principal": "ann",
            "as": "ann",
            "tenant": "acme",
            "caller": {"tags": ["*"]},
        }
        for extra in ({"X-Penstock-As": "ann"}, {"X-Penstock-Tenant": "acme"}, {"X-Forwarded-User": "ann"}):
            for tool, arguments in (("search", {"query": COMMON}), ("fetch", {"id": id_})):
                for sent in (body(tool, **arguments), body(tool, **arguments, **claims)):
                    sent["params"]["_meta"] = {**claims, "progressToken": 1}  # type: ignore[index]
                    answer = await served.http.post("/mcp", json=sent, headers=bob | extra)
                    assert answer.status_code == 200
                    assert "4711" not in answer.text
                    assert id_ not in answer.text


async def test_a_revocation_takes_effect_at_the_next_mcp_call(served: Served) -> None:
    of = document("mcp revoked.md", f"{COMMON} of the crew.", acl_tags=["user:ann"])
    await served.paths.library.put(of)
    id_ = str(document_id("acme", "wiki", "mcp revoked.md"))
    async with connected(served.address, auth=Bearer(served.issuer.token(email="ann"))) as client:
        assert id_ in ids(await call(client, "search", query=COMMON))
        await served.paths.library.accept(access(of, ["board"]))  # the stores have not followed
        assert id_ not in ids(await call(client, "search", query=COMMON))
        assert "the document does not exist" in await refused(client, "fetch", id=id_)
