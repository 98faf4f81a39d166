"""Settings of a generation's own model, its key, and the limits of a build."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import SecretStr

from pipeline.core.errors import Misconfigured
from pipeline.core.model import EmbeddingService, Quantisation, VectorIndex
from pipeline.embedding.choose import service_of, settings_of
from pipeline.generations.limits import Feed, Limits, Paused
from pipeline.generations.migration import default_quantisation
from pipeline.runtime.settings import EmbeddingSettings, load
from tests.support.pipeline.generations import generation

LOCAL = generation(model="all-MiniLM-L6-v2", dimensions=384, service=EmbeddingService("local"))
SERVED = replace(
    LOCAL,
    name="g2",
    model="large",
    dimensions=64,
    input_window=512,
    query_prefix="query: ",
    service=EmbeddingService("openai", "http://embed.example.org:8080/v1", send_dimensions=False),
)


def settings(**fields: object) -> EmbeddingSettings:
    return EmbeddingSettings(**fields)  # type: ignore[arg-type]


def test_settings_that_name_the_generations_model_are_used_even_with_another_address() -> None:
    moved = settings(
        provider="openai", model="large", dimensions=64, query_prefix="query: ", base_url="http://elsewhere/v1"
    )
    assert settings_of(SERVED, moved) is moved
    assert settings_of(LOCAL, settings()).provider == "local"


def test_settings_of_another_generations_model_are_built_from_its_row() -> None:
    made = settings_of(SERVED, settings(timeout_seconds=7.0))
    assert (made.provider, made.model, made.dimensions, made.base_url) == (
        "openai",
        "large",
        64,
        "http://embed.example.org:8080/v1",
    )
    assert (made.input_window, made.query_prefix, made.send_dimensions) == (512, "query: ", False)
    assert made.timeout_seconds == 7.0
    back = settings_of(LOCAL, made)
    assert (back.provider, back.model, back.dimensions, back.base_url) == ("local", "all-MiniLM-L6-v2", 384, None)


@pytest.mark.parametrize(
    ("own", "keys", "sent"),
    [
        ("http://embed.example.org:8080/v2", {}, "mine"),
        ("http://other.example.org/v1", {}, None),
        (None, {}, None),  # OpenAI's own key
        ("http://other.example.org/v1", {"embed.example.org:8080": "theirs"}, "theirs"),
        ("http://other.example.org/v1", {"other.example.org": "theirs"}, None),
    ],
)
def test_an_api_key_is_sent_only_to_the_host_it_was_set_for(
    own: str | None, keys: dict[str, str], sent: str | None
) -> None:
    made = settings_of(
        SERVED, settings(provider="openai", model="small", base_url=own, api_key=SecretStr("mine"), api_keys=keys)
    )
    assert (made.api_key and made.api_key.get_secret_value()) == sent


def test_a_generation_of_an_older_version_needs_settings_that_name_its_model() -> None:
    old = replace(LOCAL, service=None)
    assert settings_of(old, settings()).model == ""
    with pytest.raises(Misconfigured, match=r"settings name large \(64 .* g1 was built with all-MiniLM-L6-v2 \(384\)"):
        settings_of(old, settings(provider="openai", model="large", dimensions=64))


@pytest.mark.parametrize("url", ["https://user:pass@embed.example.org/v1", "https://embed.example.org/v1?key=secret"])
def test_a_service_address_that_contains_a_secret_is_not_stored(url: str) -> None:
    assert service_of(settings(provider="openai", base_url=url)) is None


def test_the_api_key_is_not_stored_with_the_service() -> None:
    service = service_of(settings(provider="openai", base_url="http://h/v1", api_key=SecretStr("secret")))
    assert "secret" not in repr(service)


def test_api_keys_that_are_not_json_are_rejected_without_being_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_EMBEDDING_API_KEYS", "host=secret")
    with pytest.raises(Misconfigured, match="api_keys") as raised:
        load()
    assert "secret" not in str(raised.value)
    monkeypatch.setenv("PENSTOCK_EMBEDDING_API_KEYS", '{"host": "secret"}')
    assert load().embedding.api_keys["host"].get_secret_value() == "secret"


def test_without_limits_a_build_takes_whole_pages_and_never_waits() -> None:
    feed = Feed(Limits())
    assert feed.page([10**9] * 200, spent=10**12) == 200
    assert feed.wait(5.0) == 0.0


def test_a_build_keeps_within_its_tokens_per_minute_in_steps_of_ten_seconds() -> None:
    feed = Feed(Limits(tokens_per_minute=6_000))
    now, sent = 0.0, 0
    for _ in range(30):
        page = feed.page([300] * 200, spent=sent)
        now += feed.wait(now)
        sent += page * 300
        assert sent <= 6_000 * now / 60 + 1_000
    assert sent == pytest.approx(6_000 * now / 60, rel=0.1)


def test_a_document_larger_than_a_step_is_taken_alone_and_then_waited_for() -> None:
    feed = Feed(Limits(tokens_per_minute=600))
    assert feed.page([50_000, 10], spent=0) == 1
    assert feed.wait(0.0) == 0.0
    assert feed.page([10], spent=50_000) == 1
    assert feed.wait(0.0) == 5_000.0


def test_a_build_pauses_at_its_token_budget_and_continues_with_a_larger_one() -> None:
    def run(budget: int, spent: int) -> int:
        feed = Feed(Limits(budget_tokens=budget, price=2.0), name="generation g2")
        while True:
            if not feed.fits(70, spent):
                feed.all_spent()  # in truth a document costs less than was reckoned
            spent += 60 * feed.page([70] * 5, spent)
            assert spent <= budget

    with pytest.raises(Paused, match=r"generation g2 is paused: 960 of the 1,000 tokens .* spent \(0\.00\)"):
        run(1_000, 0)
    with pytest.raises(Paused, match="of the 2,000 tokens"):
        run(2_000, 960)


def test_estimated_tokens_count_against_the_budget_until_the_actual_cost_is_known() -> None:
    feed = Feed(Limits(budget_tokens=1_000))
    assert feed.page([100] * 50, spent=0) == 10
    assert not feed.fits(100, spent=0)
    feed.all_spent()
    assert feed.fits(100, spent=400)


def test_copied_vectors_do_not_count_against_the_budget() -> None:
    feed = Feed(Limits(budget_tokens=1_000), ratio=0.1)
    assert feed.page([100] * 200, spent=0) == 100


@pytest.mark.parametrize(
    ("dimensions", "held", "new", "vectors", "expected"),
    [
        (384, "halfvec", 1_536, "pgvector", "binary"),
        (1_536, "binary", 384, "pgvector", "halfvec"),
        (1_536, "halfvec", 1_536, "pgvector", "halfvec"),
        (384, "binary", 768, "pgvector", "binary"),
        (1_536, "halfvec", 3_072, "pgvector", "halfvec"),
        (1_536, "binary", 1_536, "elasticsearch", "halfvec"),
    ],
)
def test_a_graph_holds_what_was_chosen_or_what_is_usual_for_its_dimensions(
    dimensions: int, held: Quantisation, new: int, vectors: VectorIndex, expected: Quantisation
) -> None:
    active = generation(dimensions=dimensions, quantisation=held)
    assert default_quantisation(active, new, vectors) == expected
