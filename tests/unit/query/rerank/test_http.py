"""The client of rerank servers: what each flavour is asked, and every way in which one can fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from connectors.git.playground import certificate
from pipeline.core.errors import Deferred, Misconfigured, PenstockError, Poison, Retryable
from query.rerank.http import HttpReranker, read
from query.settings import RerankSettings
from tests.fakes.rerank import WINDOW_WORDS, FakeRerank, scores
from tests.support.hostile_server import sending

QUESTION = "why did the turbine stop"
TEXTS = ["the tea was cold", "the turbine did stop for lack of water", "the turbine is large"]


@pytest.fixture
async def fake() -> AsyncIterator[FakeRerank]:
    async with FakeRerank(api_key="secret") as fake:
        yield fake


@asynccontextmanager
async def connected(fake: FakeRerank, flavour: str = "cohere", **options: Any) -> AsyncIterator[HttpReranker]:
    settings = RerankSettings(
        **{
            "url": fake.url(flavour),
            "flavour": flavour,
            "api_key": "secret",
            "model": fake.model,
            "timeout_seconds": 10.0,
            **options,
        }
    )
    reranker = HttpReranker(settings)
    try:
        yield reranker
    finally:
        await reranker.aclose()


@pytest.mark.parametrize("flavour", ["cohere", "jina", "tei", "vllm"])
async def test_rerank_scores_are_returned_in_the_order_of_the_texts(fake: FakeRerank, flavour: str) -> None:
    async with connected(fake, flavour) as reranker:
        assert await reranker.rerank(QUESTION, TEXTS) == pytest.approx(scores(QUESTION, TEXTS))
        assert scores(QUESTION, TEXTS)[1] == max(scores(QUESTION, TEXTS))  # not the order that it answers in
    assert fake.stats.requests == 1


async def test_each_rerank_flavour_has_its_own_request_body(fake: FakeRerank) -> None:
    for flavour in ("cohere", "jina", "tei", "vllm"):
        async with connected(fake, flavour) as reranker:
            await reranker.rerank(QUESTION, TEXTS)
    common = {"query": QUESTION, "documents": TEXTS, "top_n": 3, "model": fake.model}
    assert fake.stats.bodies == [
        common,
        common | {"return_documents": False},
        {"query": QUESTION, "texts": TEXTS, "truncate": True},
        common | {"truncate_prompt_tokens": -1},
    ]


@pytest.mark.parametrize("flavour", ["tei", "vllm"])
async def test_a_passage_beyond_the_servers_window_is_truncated_by_the_server(fake: FakeRerank, flavour: str) -> None:
    async with connected(fake, flavour) as reranker:
        assert len(await reranker.rerank(QUESTION, ["word " * (WINDOW_WORDS + 1), *TEXTS])) == 4


async def test_tei_requests_are_split_into_batches_of_32(fake: FakeRerank) -> None:
    texts = [f"{'turbine ' * (n % 7)} passage {n}" for n in range(70)]
    async with connected(fake, "tei") as reranker:
        answered = await reranker.rerank(QUESTION, texts)
    assert (fake.stats.requests, fake.stats.texts, fake.stats.largest) == (3, 70, 32)
    parts = [texts[:32], texts[32:64], texts[64:]]
    assert answered == pytest.approx([score for part in parts for score in scores(QUESTION, part)])


async def test_one_failed_batch_fails_the_call_and_cancels_the_other_requests(fake: FakeRerank) -> None:
    fake.faults.errors, fake.faults.hang = 1, 2
    async with connected(fake, "tei") as reranker:
        with pytest.raises(Retryable, match="responded with 503"):
            await asyncio.wait_for(reranker.rerank(QUESTION, ["text"] * 96), 5)
    while fake.stats.left < 2:
        await asyncio.sleep(0.01)


def set_faults(**faults: Any) -> Callable[[FakeRerank], None]:
    return lambda fake: [setattr(fake.faults, name, value) for name, value in faults.items()] and None


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        (set_faults(errors=1), Retryable, "the rerank server responded with 503"),
        (set_faults(errors=1, error_status=500), Retryable, "responded with 500"),
        (set_faults(errors=1, error_status=408), Retryable, "responded with 408"),
        (set_faults(throttle=1), Deferred, "responded with 429"),
        (set_faults(errors=1, error_status=402), Deferred, "raise its quota"),
        (set_faults(errors=1, error_status=400), Poison, "responded with 400 to this query"),
        (set_faults(errors=1, error_status=422), Poison, "PENSTOCK_RERANK_FLAVOUR"),
        (set_faults(errors=1, error_status=401), Misconfigured, "check PENSTOCK_RERANK_API_KEY"),
        (set_faults(errors=1, error_status=403), Misconfigured, "check PENSTOCK_RERANK_API_KEY"),
        (set_faults(errors=1, error_status=404), Misconfigured, "check PENSTOCK_RERANK_URL"),
        (set_faults(errors=1, error_status=302), Misconfigured, "check PENSTOCK_RERANK_URL"),
        (set_faults(disconnect=1), Retryable, "cannot be reached"),
        (set_faults(not_json=1), Retryable, "response is invalid"),
        (set_faults(nan=1), Retryable, "not a number"),
        (set_faults(drop_row=1), Retryable, "returned 2 scores for 3 passages"),
        (set_faults(repeat_row=1), Retryable, "numbered them wrongly"),
        (set_faults(endless=1), Retryable, "response is too large"),
    ],
)
async def test_rerank_server_faults_raise_the_matching_error_without_naming_the_address(
    fake: FakeRerank, fault: Callable[[FakeRerank], None], kind: type[PenstockError], says: str
) -> None:
    fault(fake)
    async with connected(fake) as reranker:
        with pytest.raises(kind, match=says) as raised:
            await reranker.rerank(QUESTION, TEXTS)
        assert type(raised.value) is kind
        assert "127.0.0.1" not in str(raised.value)  # whoever searches is shown it
        assert len(await reranker.rerank(QUESTION, TEXTS)) == 3  # and the next one is well


@pytest.mark.parametrize(("header", "seconds"), [({"retry-after": "7"}, 7.0), ({}, None)])
async def test_a_429_carries_its_retry_after(fake: FakeRerank, header: dict[str, str], seconds: float | None) -> None:
    fake.faults.throttle, fake.faults.throttle_headers = 1, header
    async with connected(fake) as reranker:
        with pytest.raises(Deferred) as raised:
            await reranker.rerank(QUESTION, TEXTS)
    assert raised.value.retry_after == seconds


async def test_a_hanging_rerank_server_times_out(fake: FakeRerank) -> None:
    fake.faults.hang = 1
    async with connected(fake, timeout_seconds=0.2) as reranker:
        with pytest.raises(Retryable, match=r"did not answer within 0.2 s"):
            await reranker.rerank(QUESTION, TEXTS)
    while not fake.stats.left:
        await asyncio.sleep(0.01)


async def test_a_broken_tls_connection_to_the_rerank_server_is_retryable(
    fake: FakeRerank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates[0]))
    async with (
        sending(b"no record of TLS", beneath=certificates) as port,
        connected(fake, url=f"https://127.0.0.1:{port}/rerank") as reranker,
    ):
        with pytest.raises(Retryable, match="cannot be reached"):
            await reranker.rerank(QUESTION, TEXTS)


async def test_an_unreachable_rerank_server_is_retryable(fake: FakeRerank) -> None:
    async with connected(fake, url="http://127.0.0.1:1/rerank") as reranker:
        with pytest.raises(Retryable, match="cannot be reached"):
            await reranker.rerank(QUESTION, TEXTS)


async def test_a_wrong_rerank_key_is_misconfigured_and_not_shown(fake: FakeRerank) -> None:
    async with connected(fake, api_key="wr0ng") as reranker:
        with pytest.raises(Misconfigured, match="PENSTOCK_RERANK_API_KEY") as raised:
            await reranker.rerank(QUESTION, TEXTS)
    assert "wr0ng" not in repr(raised.value) + repr(reranker._settings)


async def test_rerank_errors_quote_neither_question_nor_passage(fake: FakeRerank) -> None:
    """The fake's own words for these quote what it was sent, as real servers do."""
    raised: list[BaseException] = []
    async with connected(fake, url=fake.url("vllm")) as reranker:
        with pytest.raises(Poison) as too_long:
            await reranker.rerank(QUESTION, ["salaries " * 500])
        raised.append(too_long.value)
    async with connected(fake, url=fake.url("tei")) as reranker:
        with pytest.raises(Poison) as wrong_flavour:
            await reranker.rerank(QUESTION, ["salaries"])
        raised.append(wrong_flavour.value)
    with pytest.raises(Retryable) as unreadable:
        read(json.dumps({"results": "salaries"}).encode(), texts=1)
    raised.append(unreadable.value)
    for error in raised:
        chain = [error, error.__cause__, None if error.__suppress_context__ else error.__context__]
        assert not any("salaries" in repr(item) or "turbine" in repr(item) for item in chain)


@pytest.mark.parametrize(
    "url", ["rerank.example/v2/rerank", "ftp://rerank.example", "http://", "http://rerank:eighty/", "https:///x"]
)
async def test_an_invalid_rerank_url_is_misconfigured(url: str) -> None:
    with pytest.raises(Misconfigured, match="PENSTOCK_RERANK_URL"):
        HttpReranker(RerankSettings(url=url))


async def test_a_rerank_key_that_is_invalid_in_a_header_is_misconfigured() -> None:
    with pytest.raises(Misconfigured, match="PENSTOCK_RERANK_API_KEY"):
        HttpReranker(RerankSettings(url="http://rerank.example", api_key=SecretStr("sé\ncret")))


@pytest.mark.parametrize(
    "answer",
    [
        [{"index": 1, "score": 0.5}, {"index": 0, "score": 2}],
        {
            "results": [{"index": 0, "relevance_score": 2, "document": {"text": "x"}}, {"index": 1, "score": 0.5}],
            "id": 1,
        },
    ],
)
def test_rerank_responses_of_either_shape_are_read(answer: object) -> None:
    assert read(json.dumps(answer).encode(), texts=2) == [2.0, 0.5]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"null",
        b"{}",
        b'{"results": null}',
        b'[{"index": 0}]',
        b'[{"index": 0, "score": null}]',
        b'[{"index": 0, "score": "high"}]',
        b'[{"index": 0, "score": Infinity}]',
        b'[{"index": 0, "score": 1e999}]',
        b'[{"index": -1, "score": 1}]',
        b'[{"index": 1, "score": 1}]',
        b"[]",
        b'[{"index": 0.5, "score": 1}]',
    ],
)
def test_an_invalid_rerank_response_is_retryable(answer: bytes) -> None:
    with pytest.raises(Retryable):
        read(answer, texts=1)
