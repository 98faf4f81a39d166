"""Which settings make a generation's own model, and which key goes with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import SecretStr

from pipeline.core.errors import Misconfigured
from pipeline.core.model import ChunkParams, EmbeddingService, Generation
from pipeline.embedding.choose import service_of, settings_of
from pipeline.settings import EmbeddingSettings

LOCAL = Generation(
    name="g1", state="active", model="all-MiniLM-L6-v2", revision="", dimensions=384, input_window=254,
    params=ChunkParams(), document_prefix="", query_prefix="", chunk_table="chunks_g1", keyword_index="chunks-g1",
    service=EmbeddingService("local"),
)  # fmt: skip
SERVED = replace(
    LOCAL, name="g2", model="large", dimensions=64, input_window=512, query_prefix="query: ",
    service=EmbeddingService("openai", "http://embed.example.org:8080/v1", send_dimensions=False),
)  # fmt: skip


def settings(**fields: object) -> EmbeddingSettings:
    return EmbeddingSettings(**fields)  # type: ignore[arg-type]


def test_settings_that_name_the_model_are_taken_as_they_are_wherever_its_server_moved() -> None:
    moved = settings(
        provider="openai", model="large", dimensions=64, query_prefix="query: ", base_url="http://elsewhere/v1"
    )
    assert settings_of(SERVED, moved) is moved
    assert settings_of(LOCAL, settings()).provider == "local"


def test_another_generations_model_is_made_from_its_row() -> None:
    made = settings_of(SERVED, settings(timeout_seconds=7.0))
    assert (made.provider, made.model, made.dimensions, made.base_url) == (
        "openai", "large", 64, "http://embed.example.org:8080/v1",
    )  # fmt: skip
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
def test_a_key_goes_to_the_host_that_it_was_given_for(own: str | None, keys: dict[str, str], sent: str | None) -> None:
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
def test_an_address_with_a_secret_in_it_is_not_written_down(url: str) -> None:
    assert service_of(settings(provider="openai", base_url=url)) is None


def test_the_key_is_no_part_of_what_is_written_down() -> None:
    service = service_of(settings(provider="openai", base_url="http://h/v1", api_key=SecretStr("secret")))
    assert "secret" not in repr(service)
