"""MiniLM on CTranslate2 against an independent reading of the same weights, and what a folder of it may suffer."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from pipeline.core.errors import Misconfigured
from pipeline.embedding import convert, local
from pipeline.embedding.local import LocalEmbedder
from pipeline.embedding.tokens import word_pieces

SENTENCES = [
    "A man is eating food.",
    "A man eats a meal.",
    "Kafka keeps the events of one key in one partition, in order.",
    "A tombstone is a record whose value is null; compaction removes what came before it. " * 4,
]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def model_dir(models: Path) -> Path:
    return convert.prepare(models)


@pytest.fixture
async def embedder(model_dir: Path) -> AsyncIterator[LocalEmbedder]:
    embedder = LocalEmbedder(model_dir, threads=1)
    yield embedder
    await embedder.aclose()


def bert(weights: dict[str, NDArray[np.float32]], ids: list[int]) -> NDArray[np.float32]:
    """The published architecture in plain numpy: BERT, six layers, twelve heads, then the mean over tokens."""
    erf = np.vectorize(math.erf, otypes=[np.float32])

    def linear(x: NDArray[np.float32], name: str) -> NDArray[np.float32]:
        return np.asarray(x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"], dtype=np.float32)

    def norm(x: NDArray[np.float32], name: str) -> NDArray[np.float32]:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
        return np.asarray(scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"], dtype=np.float32)

    def heads(x: NDArray[np.float32]) -> NDArray[np.float32]:
        return x.reshape(len(ids), 12, 32).transpose(1, 0, 2)

    x = weights["embeddings.word_embeddings.weight"][ids] + weights["embeddings.token_type_embeddings.weight"][0]
    x = norm(x + weights["embeddings.position_embeddings.weight"][: len(ids)], "embeddings.LayerNorm")
    for number in range(6):
        name = f"encoder.layer.{number}"
        query, key, value = (heads(linear(x, f"{name}.attention.self.{part}")) for part in ("query", "key", "value"))
        scores = query @ key.transpose(0, 2, 1) / math.sqrt(32)
        likelihood = np.exp(scores - scores.max(-1, keepdims=True))
        likelihood /= likelihood.sum(-1, keepdims=True)
        attended = (likelihood @ value).transpose(1, 0, 2).reshape(len(ids), 384)
        x = norm(x + linear(attended, f"{name}.attention.output.dense"), f"{name}.attention.output.LayerNorm")
        inner = linear(x, f"{name}.intermediate.dense")
        inner = inner * 0.5 * (1 + erf(inner / math.sqrt(2)))
        x = norm(x + linear(inner, f"{name}.output.dense"), f"{name}.output.LayerNorm")
    mean = x.mean(axis=0)
    return np.asarray(mean / np.linalg.norm(mean), dtype=np.float32)


@pytest.fixture(scope="module")
def published_vectors(model_dir: Path) -> list[NDArray[np.float32]]:
    """The vectors of SENTENCES by the independent reading of the published weights."""
    weights = load_file(convert.published() / "model.safetensors")
    ids = word_pieces(model_dir / convert.TOKENIZER).ids(SENTENCES)
    return [bert(weights, [101, *tokens, 102]) for tokens in ids]


@pytest.mark.heavy
@pytest.mark.parametrize(("quantization", "likeness"), [("float32", 0.99999), ("int8", 0.99)])
async def test_local_vectors_match_the_published_weights(
    models: Path, published_vectors: list[NDArray[np.float32]], quantization: convert.Quantization, likeness: float
) -> None:
    embedder = LocalEmbedder(convert.prepare(models, quantization), threads=1)
    ours = (await embedder.embed_documents(SENTENCES)).vectors
    for row, expected in zip(ours, published_vectors, strict=True):
        assert float(row @ expected) > likeness
    await embedder.aclose()


async def test_paraphrases_have_similar_vectors_and_unrelated_texts_do_not(embedder: LocalEmbedder) -> None:
    vectors = (await embedder.embed_documents(SENTENCES)).vectors
    assert float(vectors[0] @ vectors[1]) == pytest.approx(0.906, abs=0.01)
    assert float(vectors[0] @ vectors[2]) < 0.2


@pytest.mark.heavy
async def test_a_passage_has_a_bit_identical_vector_in_any_batch_and_number_of_threads(model_dir: Path) -> None:
    """In padded batches a passage moved by as much as 8-bit rounding itself does: cosine 0.996."""
    words = (Path(convert.__file__).read_text() + Path(local.__file__).read_text()).split()
    passages = [" ".join(words[at : at + 20 + at % 90]) for at in range(0, len(words), 60)]
    one, two = (LocalEmbedder(model_dir, threads=threads) for threads in (1, 2))
    together = (await two.embed_documents(passages)).vectors
    for index, text in enumerate(passages):
        np.testing.assert_array_equal((await one.embed_documents([text])).vectors[0], together[index])
    await one.aclose()
    await two.aclose()


async def test_a_cancelled_call_removes_its_passages_from_the_queue(embedder: LocalEmbedder) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await embedder.embed_documents(["word " * 250] * 500)
    async with asyncio.timeout(5):
        await embedder.embed_query("still there")


async def test_passages_longer_than_the_window_are_truncated_and_counted(model_dir: Path) -> None:
    counted: list[int] = []
    embedder = LocalEmbedder(model_dir, threads=1)
    embedder.on_truncated = counted.append
    fits = "word " * 254
    cut = (await embedder.embed_documents([fits, fits + "beyond", fits + "elsewhere entirely"])).vectors
    assert counted == [2]
    assert float(cut[0] @ cut[1]) > 0.99999
    assert float(cut[0] @ cut[2]) > 0.99999
    await embedder.embed_query(fits * 2)
    assert counted == [2]
    await embedder.aclose()


async def test_document_and_query_prefixes_are_embedded(model_dir: Path) -> None:
    prefixed = LocalEmbedder(model_dir, threads=1, document_prefix="passage: ", query_prefix="query: ")
    plain = LocalEmbedder(model_dir, threads=1)
    documents = (await plain.embed_documents(["passage: an answer", "query: an answer"])).vectors
    np.testing.assert_allclose((await prefixed.embed_documents(["an answer"])).vectors[0], documents[0], atol=1e-5)
    np.testing.assert_allclose(await prefixed.embed_query("an answer"), documents[1], atol=1e-5)
    assert (await prefixed.embed_documents([" "])).refused == {0: "empty text"}
    await prefixed.aclose()
    await plain.aclose()


async def test_the_event_loop_keeps_running_during_local_embedding(embedder: LocalEmbedder) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.005)

    ticking = asyncio.create_task(tick())
    await embedder.embed_documents([f"{number} " + "word " * 200 for number in range(8)])
    ticking.cancel()
    assert ticks > 5


def test_converting_the_model_again_changes_no_file(model_dir: Path, models: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in model_dir.iterdir()}
    assert convert.prepare(models) == model_dir
    assert {path: path.stat().st_mtime_ns for path in model_dir.iterdir()} == before


def test_the_revision_names_weights_and_quantization(model_dir: Path) -> None:
    description = convert.describe(model_dir)
    assert description.model == "all-MiniLM-L6-v2"
    assert description.revision == "53aa51172d14-int8"


@pytest.mark.heavy
def test_concurrent_conversions_by_several_processes_leave_one_model_folder(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        paths = pool.map(convert.prepare, [tmp_path / "models"] * 3)
        pool.close()
        pool.join()
    assert len(set(paths)) == 1
    assert [path.name for path in (tmp_path / "models").iterdir()] == [paths[0].name]
    assert convert.describe(paths[0]).model == local.MODEL


def test_an_unwritable_model_folder_is_misconfigured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Misconfigured, match=r"cannot write the converted embedding model to .*file"):
        convert.prepare(tmp_path / "file" / "models")


def test_an_incomplete_model_folder_is_reported_with_the_advice_to_delete_it(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="delete it"):
        LocalEmbedder(tmp_path)
    for name in (convert.DESCRIPTION, convert.TOKENIZER):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    (tmp_path / "model.bin").write_bytes((model_dir / "model.bin").read_bytes()[:1000])
    with pytest.raises(Misconfigured, match="delete it"):
        LocalEmbedder(tmp_path)


def test_a_missing_local_extra_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(convert, "find_spec", lambda name: None)
    with pytest.raises(Misconfigured, match="the local embedding model is not installed: run `make setup`"):
        convert.prepare(tmp_path)
