"""The client of OpenAI-compatible servers: every way a server can fail, what comes of it, and what it costs."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from pydantic import SecretStr

from pipeline.core.errors import Deferred, Misconfigured, Poison, Retryable
from pipeline.embedding import rate
from pipeline.embedding.failures import Alone
from pipeline.embedding.http import Endpoint
from pipeline.embedding.openai import OpenAIEmbedder
from pipeline.embedding.tokens import byte_pairs
from pipeline.runtime.settings import EmbeddingSettings
from tests.fakes.openai import FakeOpenAI, Faults

TEXTS = [f"passage number {number}" for number in range(64)]
BAD = "the poison passage"


@pytest.fixture
async def fake() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI(dimensions=64) as fake:
        yield fake


@asynccontextmanager
async def connected(fake: FakeOpenAI, *, patience: float = 5.0, **options: Any) -> AsyncIterator[OpenAIEmbedder]:
    settings = EmbeddingSettings(
        **{"provider": "openai", "base_url": fake.url, "dimensions": 64, "timeout_seconds": 5.0, **options}
    )
    embedder = OpenAIEmbedder(settings, byte_pairs(), patience_seconds=patience, backoff_base_seconds=0.01)
    try:
        yield embedder
    finally:
        await embedder.aclose()


async def vectors_of(embedder: OpenAIEmbedder, texts: list[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
    embedded = await embedder.embed_documents(texts)
    assert embedded.refused == {}
    return embedded.vectors


# What a healthy server is asked.


async def test_texts_that_fit_one_batch_are_sent_in_one_request(fake: FakeOpenAI) -> None:
    async with connected(fake) as embedder:
        embedded = await embedder.embed_documents(TEXTS)
    assert (fake.stats.requests, fake.stats.inputs) == (1, 64)
    assert embedded.tokens == fake.stats.tokens == sum(byte_pairs().count(TEXTS))
    np.testing.assert_allclose(embedded.vectors, [fake.vector(text) for text in TEXTS], atol=1e-6)


async def test_requests_respect_the_input_and_token_limits_and_run_in_parallel(fake: FakeOpenAI) -> None:
    fake.faults.latency_seconds = 0.05
    async with connected(fake, batch_inputs=10, parallel_requests=3) as embedder:
        await embedder.embed_documents(TEXTS)
    assert (fake.stats.requests, fake.stats.largest_batch, fake.stats.peak_parallel) == (7, 10, 3)
    async with connected(fake, batch_tokens=100) as embedder:
        await embedder.embed_documents(TEXTS)
    assert fake.stats.requests > 8
    assert fake.stats.inputs == 128


async def test_concurrent_calls_share_the_limit_of_parallel_requests(fake: FakeOpenAI) -> None:
    fake.faults.latency_seconds = 0.02
    async with connected(fake, parallel_requests=2) as embedder:
        await asyncio.gather(*(embedder.embed_documents([text]) for text in TEXTS[:12]))
    assert (fake.stats.requests, fake.stats.peak_parallel) == (12, 2)


async def test_no_request_is_sent_when_there_is_no_text_to_embed(fake: FakeOpenAI) -> None:
    async with connected(fake) as embedder:
        await embedder.embed_documents([])
        await embedder.embed_documents(["", " ", "\ud800"])
    assert fake.stats.requests == 0


async def test_response_rows_in_another_order_are_sorted_by_their_index(fake: FakeOpenAI) -> None:
    fake.faults.reorder = True
    async with connected(fake) as embedder:
        vectors = await vectors_of(embedder, TEXTS)
    np.testing.assert_allclose(vectors, [fake.vector(text) for text in TEXTS], atol=1e-6)


async def test_dimensions_are_not_sent_to_a_model_that_does_not_support_them(fake: FakeOpenAI) -> None:
    fake.takes_dimensions = False
    async with connected(fake, send_dimensions=False) as embedder:
        await vectors_of(embedder, TEXTS)
    async with connected(fake) as embedder:
        with pytest.raises(Misconfigured, match=r"does not support specifying dimensions.*SEND_DIMENSIONS"):
            await embedder.embed_documents(TEXTS)
    assert fake.stats.requests == 3  # the texts, the texts, the probe: no bisecting


async def test_too_long_inputs_are_truncated_to_the_window_and_counted(fake: FakeOpenAI) -> None:
    counted: list[int] = []
    async with connected(fake) as embedder:
        embedder.on_truncated = counted.append
        long = "word" + " word" * 9_000
        vectors = await vectors_of(embedder, [long, "short", "語" * 20_000])
        assert counted == [2]
        await embedder.embed_query(long)
    np.testing.assert_allclose(vectors[0], fake.vector("word" + " word" * 8_190), atol=1e-6)
    assert counted == [2]


async def test_the_api_key_is_sent_and_a_wrong_one_is_misconfigured(fake: FakeOpenAI) -> None:
    fake.api_key = "right"
    async with connected(fake, api_key=SecretStr("right")) as embedder:
        await vectors_of(embedder, TEXTS)
    async with connected(fake, api_key=SecretStr("secret-but-wrong")) as embedder:
        with pytest.raises(Misconfigured, match="PENSTOCK_EMBEDDING_API_KEY") as caught:
            await embedder.embed_documents(TEXTS)
    assert "secret" not in str(caught.value)
    assert fake.stats.requests == 2


async def test_the_openai_api_key_variable_is_not_sent_to_other_servers(
    fake: FakeOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "openai-secret")
    fake.api_key = "openai-secret"
    async with connected(fake) as embedder:
        with pytest.raises(Misconfigured, match="401"):
            await embedder.embed_query("hello")
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(Misconfigured, match="no API key for OpenAI"):
        OpenAIEmbedder(EmbeddingSettings(provider="openai"), byte_pairs())


@pytest.mark.parametrize(("option", "hint"), [({"model": "no-such-model"}, "MODEL"), ({"base_url": "x"}, "BASE_URL")])
async def test_a_wrong_model_or_address_is_misconfigured(fake: FakeOpenAI, option: dict[str, str], hint: str) -> None:
    options: dict[str, Any] = {"base_url": fake.url + "/nowhere"} if "base_url" in option else dict(option)
    async with connected(fake, **options) as embedder:
        with pytest.raises(Misconfigured, match=f"404.*{hint}"):
            await embedder.embed_documents(TEXTS)


@pytest.mark.parametrize(
    "address", ["models.example/v1", "ftp://models.example", "http://", "http://[::1", "http://a:b", "http://a..b/v1"]
)
def test_an_invalid_base_url_is_misconfigured(address: str) -> None:
    with pytest.raises(Misconfigured, match="PENSTOCK_EMBEDDING_BASE_URL"):
        OpenAIEmbedder(EmbeddingSettings(provider="openai", base_url=address), byte_pairs())


def test_an_api_key_that_is_invalid_in_a_header_is_misconfigured_and_not_quoted() -> None:
    settings = EmbeddingSettings(provider="openai", base_url="http://models.example", api_key=SecretStr("secret\n"))
    with pytest.raises(Misconfigured, match="PENSTOCK_EMBEDDING_API_KEY") as caught:
        OpenAIEmbedder(settings, byte_pairs())
    assert "secret" not in str(caught.value)


async def test_requests_use_the_proxy_of_the_environment_unless_no_proxy_names_the_host(
    fake: FakeOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", fake.address)
    async with connected(fake, base_url="http://models.invalid/v1") as embedder:
        await vectors_of(embedder, TEXTS)
    monkeypatch.setenv("no_proxy", "models.invalid")
    async with connected(fake, base_url="http://models.invalid/v1", patience=0.0) as embedder:
        with pytest.raises(Retryable, match=r"models\.invalid cannot be reached"):
            await embedder.embed_documents(TEXTS)
    assert fake.stats.requests == 1


@pytest.mark.parametrize("proxy", ["http://proxy:port", "//h:1", "socks5://proxy:1080"])
def test_an_invalid_proxy_variable_is_misconfigured(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", proxy)
    with pytest.raises(Misconfigured, match="HTTP_PROXY or ALL_PROXY names no proxy"):
        Endpoint("http://models.example.com/v1", "key", 1.0)


async def test_redirects_are_not_followed(fake: FakeOpenAI) -> None:
    async def elsewhere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 307 Elsewhere\r\nlocation: {fake.url}/embeddings\r\ncontent-length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(elsewhere, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with connected(fake, base_url=f"http://127.0.0.1:{port}/v1") as embedder:
            with pytest.raises(Misconfigured, match="307"):
                await embedder.embed_documents(TEXTS)
    assert fake.stats.requests == 0


async def test_a_request_body_of_more_than_a_megabyte_can_be_retried(fake: FakeOpenAI) -> None:
    texts = [f"{number} " + "word " * 500 for number in range(500)]
    async with connected(fake, batch_tokens=10_000_000) as embedder:
        fake.faults.errors = 1  # sent twice
        await vectors_of(embedder, texts)
    assert (fake.stats.requests, fake.stats.largest_batch) == (2, 500)


# Poison.


@pytest.mark.parametrize("place", [0, 31, 63])
async def test_a_poison_text_is_isolated_by_bisection_and_the_others_are_embedded(fake: FakeOpenAI, place: int) -> None:
    fake.faults.poison = "poison"
    texts = [*TEXTS[:place], BAD, *TEXTS[place + 1 :]]
    async with connected(fake) as embedder:
        embedded = await embedder.embed_documents(texts)
    assert embedded.refused == {place: "rejected by the embedding server (400 invalid_request_error)"}
    assert not embedded.vectors[place].any()
    others = [number for number in range(64) if number != place]
    np.testing.assert_allclose(embedded.vectors[others], [fake.vector(texts[n]) for n in others], atol=1e-6)
    # The whole, a probe (nothing had succeeded yet), then two halves on each of log2(64) levels.
    assert fake.stats.requests <= 2 + 2 * math.log2(64)
    assert fake.stats.inputs == 63 + 1


@pytest.mark.parametrize("status", [500, 429])
async def test_a_text_at_which_the_server_always_fails_costs_the_others_no_second_request(
    fake: FakeOpenAI, status: int
) -> None:
    """They were sent with it again and again, for twenty seconds each time; and each 429 held up the whole client."""
    fake.faults.poison, fake.faults.poison_status = "poison", status
    fake.faults.throttle_headers = {"retry-after-ms": "1"}
    texts = [*TEXTS[:7], BAD, *TEXTS[7:15]]
    async with connected(fake, patience=60) as embedder:
        failing = asyncio.create_task(embedder.embed_documents(texts))
        served = 0
        while not failing.done():
            served += 1
            await embedder.embed_documents([f"another passage {served}"])
        with pytest.raises(Retryable) as caught:
            await failing
        assert (caught.value.alone, isinstance(caught.value, Deferred)) == (True, status == 429)
        requests = fake.stats.requests
        await vectors_of(embedder, TEXTS[:15])
        assert fake.stats.requests == requests, "they were cached"
        waits = []
        for _ in range(4):
            with pytest.raises(Retryable) as caught:
                await embedder.embed_documents([BAD])
            waits.append(caught.value.retry_after)
        probes = 4 if status == 500 else 0
        assert fake.stats.requests == requests + 4 + probes
        assert waits == [0.5, 1.0, 2.0, 4.0]


async def test_texts_at_which_the_server_always_fails_hold_up_no_other_although_every_request_has_one(
    fake: FakeOpenAI,
) -> None:
    """No request was answered, which looked like an outage: 150 texts of 300 held up the others without end."""
    fake.faults.poison, fake.faults.poison_status = "poison", 500
    texts = [f"poison {n}" if n % 2 else f"passage {n}" for n in range(64)]
    async with connected(fake, patience=30, batch_inputs=16) as embedder:
        with pytest.raises(Alone) as caught:
            await embedder.embed_documents(texts)
        assert sorted(caught.value.arrived) == [*range(0, 64, 2)]
        fake.faults.poison = None
        assert (await vectors_of(embedder, texts)).any(axis=1).all()
    assert {text[:8] for text in fake.stats.repeated} <= {"penstock"}


async def test_texts_are_embedded_although_a_minutes_limit_of_tokens_is_less_than_all_of_them(
    fake: FakeOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request was answered, however long it waited; a batch of documents was halved after ten tries, and the next
    batch again."""
    monkeypatch.setattr(rate, "SHRINK_SECONDS", 0.1)
    fake.faults.throttle_headers = {"retry-after-ms": "10"}
    fake.faults.tokens_per_minute = 100
    assert sum(byte_pairs().count(TEXTS)) > 200
    async with connected(fake, patience=30) as embedder:
        await vectors_of(embedder, TEXTS)
        statuses = fake.stats.statuses
        refused = statuses["429"]
        await vectors_of(embedder, [f"{text}, once more" for text in TEXTS[:16]])
        assert statuses["429"] - refused <= rate.SHRINK_REFUSALS, "what was learned is kept"
    assert fake.stats.most_tokens <= 100


async def test_very_many_texts_at_which_the_server_fails_delay_the_others_by_few_requests(fake: FakeOpenAI) -> None:
    """Each part of a request was tried three times before it was halved: where the server failed at a third of all
    texts, the others waited for half a minute, and longer with each change that came."""
    fake.faults.poison, fake.faults.poison_status = "poison", 503
    texts = [f"poison {n}" if n % 10 < 3 else f"passage {n}" for n in range(64)]
    async with connected(fake, patience=60) as embedder:
        with pytest.raises(Alone) as caught:
            await embedder.embed_documents(texts)
    assert len(caught.value.arrived) == 43
    assert fake.stats.requests < 160


@pytest.mark.parametrize("outage", ["errors", "silence"])
async def test_an_outage_while_failing_texts_are_looked_for_makes_no_text_fail_alone(
    fake: FakeOpenAI, outage: str
) -> None:
    """Each part was halved at its first failure, down to hundreds of requests of one text, which were tried until the
    deadline; and where the server was silent, one after the other for minutes beyond it."""
    fake.faults.poison, fake.faults.poison_status = "poison", 503
    texts = [f"poison {n}" if n % 10 < 3 else f"passage {n}" for n in range(256)]
    requests: list[str] = []

    def outage_from_the_sixth_on(outcome: str, _: float) -> None:
        requests.append(outcome)
        if len(requests) == 6:
            setattr(fake.faults, "errors" if outage == "errors" else "hang", 100_000)

    async with connected(fake, patience=1, timeout_seconds=0.5) as embedder:
        embedder.on_request = outage_from_the_sixth_on
        with pytest.raises(Retryable) as caught:
            async with asyncio.timeout(20):
                await embedder.embed_documents(texts)
        assert not caught.value.alone
        assert 6 < len(requests) < 300, "the outage came while parts were tried"


async def test_a_text_that_failed_alone_does_not_fail_alone_in_an_outage(fake: FakeOpenAI) -> None:
    """It was known as one that fails while others are answered. When the server then answered nobody, its document was
    set aside within seconds."""
    fake.faults.poison, fake.faults.poison_status = "poison", 500
    async with connected(fake, patience=0.5, batch_inputs=1) as embedder:
        with pytest.raises(Retryable):
            await embedder.embed_documents([*TEXTS[:7], BAD])
        with pytest.raises(Retryable) as caught:
            await embedder.embed_documents([BAD])
        assert caught.value.alone
        fake.faults.errors = 10_000
        for _ in range(3):
            with pytest.raises(Retryable) as caught:
                await embedder.embed_documents([BAD])
            assert not caught.value.alone
        fake.faults.errors = 0
        with pytest.raises(Retryable) as caught:
            await embedder.embed_documents([BAD])
        assert caught.value.alone


async def test_several_poison_texts_are_isolated_with_few_requests(fake: FakeOpenAI) -> None:
    fake.faults.poison = "poison"
    texts = [BAD if number in (3, 4, 40) else text for number, text in enumerate(TEXTS)]
    async with connected(fake) as embedder:
        embedded = await embedder.embed_documents(texts)
    assert embedded.refused.keys() == {3, 4, 40}
    assert fake.stats.requests <= 2 + 3 * 2 * math.log2(64)


async def test_a_batch_of_only_poison_is_refused_text_by_text(fake: FakeOpenAI) -> None:
    fake.faults.poison = "poison"
    async with connected(fake) as embedder:
        assert (await embedder.embed_documents([BAD, BAD])).refused.keys() == {0, 1}
        with pytest.raises(Poison):
            await embedder.embed_query(BAD)


async def test_a_server_that_rejects_every_text_is_misconfigured(fake: FakeOpenAI) -> None:
    fake.faults.reject_all = True
    async with connected(fake) as embedder:
        with pytest.raises(Misconfigured, match="rejects every text") as caught:
            await embedder.embed_documents(TEXTS)
    assert fake.stats.requests == 2
    assert "passage" not in str(caught.value)


async def test_refusal_reasons_never_quote_the_document(fake: FakeOpenAI) -> None:
    fake.faults.poison = "poison"
    async with connected(fake) as embedder:
        embedded = await embedder.embed_documents([BAD, "good"])
    assert "poison" not in embedded.refused[0]


async def test_a_text_whose_vector_is_nan_is_refused_alone(fake: FakeOpenAI) -> None:
    fake.faults.nan = "poison"
    for encoding_format in ("base64", "float"):
        async with connected(fake, encoding_format=encoding_format) as embedder:
            embedded = await embedder.embed_documents(["good", BAD, "fine"])
            assert embedded.refused.keys() == {1}
            assert np.isfinite(embedded.vectors).all()
            assert (await embedder.embed_documents([BAD])).refused.keys() == {0}


async def test_a_server_that_returns_only_nan_vectors_is_misconfigured(fake: FakeOpenAI) -> None:
    fake.faults.nan = "e"  # which all these texts and the client's own probe contain
    async with connected(fake) as embedder:
        with pytest.raises(Misconfigured, match="NaN"):
            await embedder.embed_documents(["one", "three"])


# A world that is down.


@pytest.mark.parametrize(
    "faults",
    [
        Faults(errors=2),
        Faults(errors=2, error_status=503),
        Faults(errors=1, error_status=529),
        Faults(throttle=2, throttle_headers={}),
        Faults(throttle=2, throttle_headers={"retry-after-ms": "20"}),
        Faults(disconnect=2),
        Faults(truncate=2),
        Faults(not_json=2),
        Faults(drop_row=2),
    ],
    ids=["500", "503", "529", "429", "429-ms", "disconnect", "truncated", "html", "rows-missing"],
)
async def test_transient_failures_are_retried_within_the_call(fake: FakeOpenAI, faults: Faults) -> None:
    fake.faults = faults
    spoilt = max(faults.errors, faults.throttle, faults.disconnect, faults.truncate, faults.not_json, faults.drop_row)
    async with connected(fake) as embedder:
        vectors = await vectors_of(embedder, TEXTS)
    np.testing.assert_allclose(vectors, [fake.vector(text) for text in TEXTS], atol=1e-6)
    assert fake.stats.requests == spoilt + 1


async def test_only_the_failed_batch_is_requested_again(fake: FakeOpenAI) -> None:
    fake.faults = Faults(errors=1)
    async with connected(fake, batch_inputs=16) as embedder:
        await vectors_of(embedder, TEXTS)
    assert (fake.stats.requests, fake.stats.inputs) == (5, 64)


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (Faults(errors=1000), "answers 500"),
        (Faults(throttle=1000, throttle_headers={}), "answers 429 rate_limit_exceeded"),
        (Faults(disconnect=1000), "cannot be reached"),
        (Faults(truncate=1000), "cannot be read"),
        (Faults(drop_row=1000), "63 rows for 64 inputs"),
        (Faults(hang=1000), "timed out"),
    ],
    ids=["500", "429", "disconnect", "truncated", "rows-missing", "hang"],
)
async def test_lasting_server_failures_raise_retryable_and_refuse_no_text(
    fake: FakeOpenAI, faults: Faults, message: str
) -> None:
    fake.faults = faults
    async with connected(fake, patience=1.0, timeout_seconds=0.2) as embedder:
        with pytest.raises(Retryable, match=message) as caught:
            await embedder.embed_documents(TEXTS)
    assert caught.value.retry_after is not None
    assert 2 <= fake.stats.requests <= 40
    assert "passage" not in str(caught.value)


async def test_a_response_without_end_is_left_before_it_fills_the_memory(fake: FakeOpenAI) -> None:
    """It was read for as long as a request may take: a minute, and gigabytes."""
    fake.faults.endless = 1
    async with connected(fake) as embedder:
        assert len(await vectors_of(embedder, TEXTS)) == len(TEXTS)
    assert fake.stats.requests == 2
    assert fake.stats.sent_bytes < 32 * 2**20


async def test_an_unreachable_server_raises_retryable() -> None:
    async with FakeOpenAI(dimensions=64) as gone:
        pass
    async with connected(gone, patience=0.1) as embedder:
        with pytest.raises(Retryable, match=r"127\.0\.0\.1 cannot be reached"):
            await embedder.embed_documents(TEXTS)


async def test_a_long_retry_after_is_passed_to_the_caller_and_blocks_every_request(fake: FakeOpenAI) -> None:
    fake.faults = Faults(throttle=1, throttle_headers={"retry-after": "30"})
    async with connected(fake, patience=1.0) as embedder:
        with pytest.raises(Retryable) as first:
            await embedder.embed_documents(TEXTS)
        for _ in range(3):  # being told so does not make the wait longer
            with pytest.raises(Retryable, match="asked this client to wait") as second:
                await embedder.embed_query("hello")
    assert first.value.retry_after is not None
    assert 30 <= first.value.retry_after < 31
    assert second.value.retry_after is not None
    assert 29 < second.value.retry_after <= first.value.retry_after
    assert fake.stats.requests == 1


async def test_a_short_retry_after_pauses_the_concurrent_requests(fake: FakeOpenAI) -> None:
    fake.faults = Faults(throttle=1, throttle_headers={"retry-after": "0.3"})
    async with connected(fake, batch_inputs=8, parallel_requests=1) as embedder:
        started = time.monotonic()
        await vectors_of(embedder, TEXTS)
        took = time.monotonic() - started
    assert took >= 0.3
    assert (fake.stats.requests, fake.stats.statuses) == (9, {"429": 1, "200": 8})


async def test_a_429_without_retry_after_is_retried_until_it_succeeds(fake: FakeOpenAI) -> None:
    fake.faults = Faults(throttle=6, throttle_headers={})
    async with connected(fake, batch_inputs=1, parallel_requests=4) as embedder:
        await vectors_of(embedder, TEXTS[:4])
    assert fake.stats.statuses == {"429": 6, "200": 4}


async def test_an_exhausted_quota_is_retryable_after_at_least_a_minute(fake: FakeOpenAI) -> None:
    fake.faults = Faults(quota=True)
    async with connected(fake) as embedder:
        with pytest.raises(Retryable, match="quota is used up") as caught:
            await embedder.embed_documents(TEXTS)
    assert caught.value.retry_after is not None
    assert caught.value.retry_after >= 60
    assert fake.stats.requests == 1


async def test_vectors_of_another_dimension_than_the_settings_are_misconfigured(fake: FakeOpenAI) -> None:
    fake.faults = Faults(wrong_dimensions=48)
    for encoding_format in ("base64", "float"):
        async with connected(fake, encoding_format=encoding_format) as embedder:
            with pytest.raises(Misconfigured, match=r"48 dimensions, the settings say 64"):
                await embedder.embed_documents(TEXTS)


async def test_a_misconfigured_failure_of_one_batch_takes_precedence_over_a_retryable_one(fake: FakeOpenAI) -> None:
    fake.faults = Faults(errors=1000, error_status=500)
    async with connected(fake, batch_inputs=32, patience=0.5, parallel_requests=1) as embedder:
        embedding = asyncio.create_task(embedder.embed_documents(TEXTS))
        while fake.stats.requests < 2:
            await asyncio.sleep(0.005)
        fake.faults = Faults(errors=1, error_status=401)
        with pytest.raises(Misconfigured):
            await embedding


@pytest.mark.parametrize(("status", "kind"), [(401, Misconfigured), (500, Retryable)])
async def test_a_failure_carries_the_tokens_billed_for_the_other_batches(
    fake: FakeOpenAI, status: int, kind: type[Misconfigured | Retryable]
) -> None:
    fake.faults = Faults(errors=1, error_status=status)
    async with connected(fake, batch_inputs=16, patience=0) as embedder:
        with pytest.raises(kind) as caught:
            await embedder.embed_documents(TEXTS)
    assert fake.stats.inputs == 48
    assert caught.value.tokens == fake.stats.tokens > 0


async def test_vectors_received_before_a_failure_are_reused_by_the_next_call_once(fake: FakeOpenAI) -> None:
    fake.faults = Faults(errors=1)
    async with connected(fake, batch_inputs=16, patience=0) as embedder:
        with pytest.raises(Retryable):
            await embedder.embed_documents(TEXTS)
        assert fake.stats.inputs == 48
        vectors = await vectors_of(embedder, TEXTS[::-1])
        assert fake.stats.inputs == 64
        await vectors_of(embedder, TEXTS)
    np.testing.assert_allclose(vectors, [fake.vector(text) for text in TEXTS[::-1]], atol=1e-6)
    assert fake.stats.inputs == 128, "given once, not remembered for good"


async def test_the_number_of_vectors_cached_after_a_failure_is_bounded(
    fake: FakeOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.embedding.openai.MAX_CACHED_VECTORS", 20)
    fake.faults = Faults(errors=1)
    async with connected(fake, batch_inputs=16, patience=0) as embedder:
        with pytest.raises(Retryable):
            await embedder.embed_documents(TEXTS)
        await vectors_of(embedder, TEXTS)
    assert fake.stats.inputs == 48 + 64 - 20


async def test_cancelling_a_call_leaves_the_client_usable(fake: FakeOpenAI) -> None:
    fake.faults = Faults(hang=4)
    async with connected(fake, batch_inputs=16, parallel_requests=4) as embedder:
        embedding = asyncio.create_task(embedder.embed_documents(TEXTS))
        while fake.stats.requests < 4:
            await asyncio.sleep(0.005)
        embedding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await embedding
        await vectors_of(embedder, TEXTS)


async def test_a_request_that_is_tried_again_after_its_client_was_closed_opens_no_connection(fake: FakeOpenAI) -> None:
    """Its session was closed by nobody, which a later test noticed."""
    fake.faults.errors = 1
    async with connected(fake, patience=0.2) as embedder:
        waiting = asyncio.create_task(embedder.embed_documents(["a"]))
        while not fake.stats.requests:
            await asyncio.sleep(0)
        await embedder.aclose()
        with pytest.raises(Retryable):
            await waiting
        assert fake.stats.requests == 1
