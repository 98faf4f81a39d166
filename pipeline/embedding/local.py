"""The local model: MiniLM on CTranslate2, in the process itself, offline. ``prepare`` once, then ``LocalEmbedder``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from pipeline.core.errors import Misconfigured
from pipeline.embedding.convert import DIMENSIONS, MAX_TOKENS, MISSING_EXTRA, MODEL, TOKENIZER, describe, prepare
from pipeline.embedding.port import Embedded, Vectors
from pipeline.embedding.tokens import word_pieces
from pipeline.embedding.vectors import only_row, triage, unit

__all__ = ["MODEL", "LocalEmbedder", "prepare"]

CLS, SEP = 101, 102
INPUT_WINDOW = MAX_TOKENS - 2

PASS_TOKENS = 1024
"""Padded tokens of one pass through the model. Larger passes are slower (ADR 4): their activations leave the cache."""


class LocalEmbedder:
    """A ``port.Embedder``. Safe to share between tasks; calls wait for one another, each uses all its threads."""

    def __init__(
        self,
        model_dir: Path,
        *,
        threads: int | None = None,
        document_prefix: str = "",
        query_prefix: str = "",
        on_truncated: Callable[[int], None] = lambda count: None,
    ) -> None:
        """model_dir: what ``prepare`` returned. threads: default one for each CPU this process may use. on_truncated:
        told how many passages of a call were longer than the window and lost their end. Raises Misconfigured."""
        description = describe(model_dir)
        # MKL's 8-bit multiplication gives a passage another vector (cosine 0.9987) when it stands in a large batch;
        # oneDNN's is as fast and does not care. Read by CTranslate2 when it is loaded.
        os.environ.setdefault("CT2_USE_MKL", "0")
        try:
            import ctranslate2
        except ImportError as error:
            raise Misconfigured(MISSING_EXTRA) from error
        try:
            self._encoder = ctranslate2.Encoder(
                str(model_dir), compute_type=description.compute_type, intra_threads=threads or usable_cpus()
            )
        except (RuntimeError, ValueError) as error:
            raise Misconfigured(f"{model_dir} cannot be loaded ({error}): delete it, it is converted again") from error
        self._tokens = word_pieces(model_dir / TOKENIZER)
        self.model = description.model
        self.revision = description.revision
        self.dimensions = DIMENSIONS
        self.input_window = INPUT_WINDOW
        self.document_prefix = document_prefix
        self.query_prefix = query_prefix
        self.on_truncated = on_truncated

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return self._tokens.count(texts)

    async def embed_documents(self, texts: Sequence[str]) -> Embedded:
        keep, refused = triage(texts)
        rows, truncated = await asyncio.to_thread(self._embed, [self.document_prefix + texts[index] for index in keep])
        if truncated:
            self.on_truncated(truncated)
        vectors = np.zeros((len(texts), DIMENSIONS), dtype=np.float32)
        vectors[keep] = rows
        return Embedded(vectors, refused)

    async def embed_query(self, text: str) -> Vectors:
        keep, refused = triage([text])
        rows, _ = await asyncio.to_thread(self._embed, [self.query_prefix + text for _ in keep])
        return only_row(Embedded(rows, refused))

    async def aclose(self) -> None:
        self._encoder.unload_model()

    def _embed(self, texts: list[str]) -> tuple[Vectors, int]:
        """Unit vectors in input order, and how many texts were cut to the window."""
        vectors = np.zeros((len(texts), DIMENSIONS), dtype=np.float32)
        ids = self._tokens.ids(texts)
        inputs = [[CLS, *text_ids[:INPUT_WINDOW], SEP] for text_ids in ids]
        for batch in _passes([len(tokens) for tokens in inputs]):
            output = self._encoder.forward_batch([inputs[index] for index in batch])
            hidden = np.asarray(output.last_hidden_state)
            for row, index in enumerate(batch):
                vectors[index] = hidden[row, : len(inputs[index])].mean(axis=0)
        return unit(vectors), sum(len(text_ids) > INPUT_WINDOW for text_ids in ids)


def usable_cpus() -> int:
    """CPUs that this process may run on (a container's or taskset's share, where the system tells)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _passes(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indexes in groups of like length whose padded size is at most PASS_TOKENS."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and lengths[index] * (len(batch) + 1) > PASS_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
