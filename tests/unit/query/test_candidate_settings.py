"""Candidate settings of ranking, which are tried beside the current ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from pipeline.core.errors import Misconfigured
from query.settings import QuerySettings, differences, load


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))


def loaded(monkeypatch: pytest.MonkeyPatch, **variables: str) -> QuerySettings:
    for name, value in variables.items():
        monkeypatch.setenv(f"PENSTOCK_{name}", value)
    return load()


def test_without_candidate_settings_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load().candidate() is None
    equal = loaded(monkeypatch, QUERY_FEEDBACK="false", SHADOW_QUERY_FEEDBACK="false", SHADOW_RERANK_URL="")
    assert equal.candidate() is None


def test_what_is_not_set_is_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    current = loaded(
        monkeypatch,
        QUERY_PER_DOCUMENT="4",
        QUERY_KEYWORD_WEIGHT="1.2",
        SHADOW_QUERY_KEYWORD_WEIGHT="1.5",
        SHADOW_QUERY_COSINE_FLOOR="0.2",
        SHADOW_RERANK_POOL="20",
    )
    candidate = current.candidate()
    assert candidate is not None
    assert candidate.retrieval == current.retrieval.model_copy(update={"keyword_weight": 1.5, "cosine_floor": 0.2})
    assert candidate.rerank == current.rerank.model_copy(update={"pool": 20})
    assert differences(current, candidate) == (
        "QUERY_KEYWORD_WEIGHT 1.5 instead of 1.2",
        "QUERY_COSINE_FLOOR 0.2 instead of none",
        "RERANK_POOL 20 instead of 50",
    )


def test_another_reranker_gets_neither_the_key_nor_the_floor_of_the_current_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded(monkeypatch, RERANK_URL="https://one.example/rerank", RERANK_API_KEY="secret", RERANK_FLOOR="0.4")
    other = loaded(monkeypatch, SHADOW_RERANK_URL="https://two.example/rerank").candidate()
    assert other is not None
    assert (other.rerank.url, other.rerank.api_key, other.rerank.floor) == ("https://two.example/rerank", None, None)
    keyed = loaded(monkeypatch, SHADOW_RERANK_API_KEY="another", SHADOW_RERANK_FLOOR="0.1").candidate()
    assert keyed is not None
    assert (keyed.rerank.api_key, keyed.rerank.floor) == (SecretStr("another"), 0.1)
    for name in ("SHADOW_RERANK_API_KEY", "SHADOW_RERANK_FLOOR"):
        monkeypatch.delenv(f"PENSTOCK_{name}")
    local = loaded(monkeypatch, SHADOW_RERANK_URL="", SHADOW_RERANK_ONNX_PATH=str(tmp_path)).candidate()
    assert local is not None
    assert (local.rerank.url, local.rerank.onnx_path, local.rerank.api_key) == (None, tmp_path, None)
    monkeypatch.delenv("PENSTOCK_SHADOW_RERANK_ONNX_PATH")
    none = load().candidate()
    assert none is not None
    assert (none.rerank.url, none.rerank.onnx_path, none.rerank.api_key) == (None, None, None)


def test_another_model_of_the_same_reranker_keeps_its_key_and_not_its_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(monkeypatch, RERANK_URL="https://one.example/rerank", RERANK_API_KEY="secret", RERANK_FLOOR="0.4")
    other = loaded(monkeypatch, RERANK_MODEL="small", SHADOW_RERANK_MODEL="large").candidate()
    assert other is not None
    assert (other.rerank.api_key, other.rerank.floor) == (SecretStr("secret"), None)


def test_differences_show_no_key_and_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    current = loaded(
        monkeypatch,
        RERANK_URL="https://ann:hush@one.example:8443/rerank?token=hush",
        RERANK_API_KEY="hush",
        SHADOW_RERANK_URL="https://two.example/rerank?key=hush",
        SHADOW_QUERY_FEEDBACK="false",
    )
    candidate = current.candidate()
    assert candidate is not None
    assert differences(current, candidate) == (
        "QUERY_FEEDBACK false instead of true",
        "RERANK_URL https://two.example/rerank instead of https://one.example:8443/rerank",
        "RERANK_API_KEY none instead of a key",
    )


def test_a_candidate_setting_out_of_range_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Misconfigured, match="PENSTOCK_SHADOW_QUERY_NEIGHBOUR_WEIGHT"):
        loaded(monkeypatch, SHADOW_QUERY_NEIGHBOUR_WEIGHT="1.0")
