"""The local cross-encoder: a real ONNX file, run by the real runtime on the real tokenizer. It ranks by shared words
and learnt nothing: this shows that the path works, and says nothing about quality."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest

from pipeline.core.errors import Misconfigured, Poison
from query.rerank.cross_encoder import LEAST_PASSAGE, WINDOW, CrossEncoder
from tests.support.query import cross_encoder_kit as kit

QUESTION = "where does the turbine hall get its water from"
TEXTS = [
    "Tea needs water.",
    "The reservoir feeds water to the turbine hall.",
    "",
    "where does the from get its",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.write(tmp_path_factory.mktemp("models") / "overlap")


async def rank(folder: Path, question: str = QUESTION, texts: list[str] = TEXTS) -> list[float]:
    encoder = CrossEncoder(folder)
    try:
        return list(await encoder.rerank(question, texts))
    finally:
        await encoder.aclose()


async def test_the_cross_encoder_ranks_by_the_models_scores(folder: Path) -> None:
    scores = await rank(folder)
    assert scores[1] == max(scores)
    assert scores[2] == min(scores) == pytest.approx(1 / (1 + math.exp(4)), rel=1e-3)  # logit -4: no word in common
    assert all(0 < score < 1 for score in scores)


@pytest.mark.parametrize("shape", [{"labels": 2}, {"takes_types": False}])
async def test_models_with_two_labels_or_without_token_types_give_the_same_scores(
    folder: Path, tmp_path: Path, shape: dict[str, object]
) -> None:
    """Two labels, as models trained to classify have; no token types, as RoBERTa's family."""
    other = kit.write(tmp_path / "other", **shape)  # type: ignore[arg-type]
    assert await rank(other) == pytest.approx(await rank(folder), rel=1e-5)


async def test_scores_of_a_mixed_batch_equal_the_scores_of_single_pairs(folder: Path) -> None:
    texts = [*TEXTS, "word " * 300 + "turbine", "hall " * 40] * 5
    encoder = CrossEncoder(folder)
    try:
        together = await encoder.rerank(QUESTION, texts)
        alone = [(await encoder.rerank(QUESTION, [text]))[0] for text in texts[:6]]
    finally:
        await encoder.aclose()
    assert list(together) == pytest.approx(alone * 5, rel=1e-4)


async def test_a_long_passage_is_truncated_and_the_question_is_not(folder: Path) -> None:
    question = "quicksilver " * 60 + "platypus"
    encoder = CrossEncoder(folder)
    try:
        [long] = encoder.pairs(question, ["filler " * 2_000 + "platypus"])
        [short] = encoder.pairs(question, ["filler"])
        early, late = await encoder.rerank(
            "platypus", ["platypus " + "filler " * 2_000, "filler " * 2_000 + " platypus"]
        )
    finally:
        await encoder.aclose()
    question_tokens = [token for token, kind in zip(long.ids, long.type_ids, strict=True) if kind == 0]
    assert question_tokens == [token for token, kind in zip(short.ids, short.type_ids, strict=True) if kind == 0]
    assert len(long) == WINDOW
    assert early > 0.9
    assert late < 0.1


async def test_a_question_too_long_for_the_window_is_poison(folder: Path) -> None:
    with pytest.raises(Poison, match="too long for the reranker") as raised:
        await rank(folder, "quicksilver " * 500)
    assert raised.value.code == "too_long"
    assert "quicksilver" not in str(raised.value)


async def test_the_tokenizers_maximum_length_limits_the_window(tmp_path: Path) -> None:
    folder = kit.write(tmp_path / "short", model_max_length=128)
    encoder = CrossEncoder(folder)
    assert [len(pair) for pair in encoder.pairs("a question", ["word " * 1000, "word"])] == [128, 6]
    await encoder.aclose()
    assert LEAST_PASSAGE < 128
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 1e30}))  # as some say: no limit
    encoder = CrossEncoder(folder)
    assert [len(pair) for pair in encoder.pairs("a question", ["word " * 1000])] == [WINDOW]
    await encoder.aclose()


async def test_callers_share_the_model_and_a_cancelled_one_does_not_affect_the_others(folder: Path) -> None:
    encoder = CrossEncoder(folder)
    try:
        expected = await encoder.rerank(QUESTION, TEXTS)
        callers = [asyncio.create_task(encoder.rerank(QUESTION, TEXTS * 10)) for _ in range(8)]
        await asyncio.sleep(0)
        for caller in callers[::2]:
            caller.cancel()
        results = await asyncio.gather(*callers, return_exceptions=True)
    finally:
        await encoder.aclose()
    assert all(isinstance(result, asyncio.CancelledError) for result in results[::2])
    for result in results[1::2]:
        assert isinstance(result, list)
        assert result == pytest.approx([*expected] * 10, rel=1e-4)


async def test_an_invalid_model_folder_is_misconfigured_with_what_is_missing(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(Misconfigured, match=r"PENSTOCK_RERANK_ONNX_PATH must be a folder with model\.onnx"):
        CrossEncoder(tmp_path / "nowhere")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "model.onnx").write_bytes(b"no model")
    with pytest.raises(Misconfigured, match="cannot be loaded"):
        CrossEncoder(broken)
    (broken / "model.onnx").write_bytes((folder / "model.onnx").read_bytes())
    with pytest.raises(Misconfigured, match=r"tokenizer\.json is not a tokenizer"):
        CrossEncoder(broken)


async def test_a_model_with_other_outputs_than_one_score_is_misconfigured(tmp_path: Path) -> None:
    folder = kit.write(tmp_path / "three", labels=3)
    with pytest.raises(Misconfigured, match="must be one score per pair"):
        await rank(folder)
