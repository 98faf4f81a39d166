"""The local model: MiniLM on CTranslate2, in the process itself, offline. ``prepare`` once, then ``LocalEmbedder``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from pipeline.core.errors import Misconfigured
from pipeline.embedding.convert import DIMENSIONS, MAX_TOKENS, MISSING_EXTRA, MODEL, TOKENIZER, describe, prepare
from pipeline.embedding.port import Embedded, Vectors
from pipeline.embedding.tokens import word_pieces
from pipeline.embedding.vectors import only_row, triage, unit
from pipeline.observability.metrics import EmbeddingOutcome
from pipeline.observability.tracing import trace_embeddings

__all__ = ["MODEL", "LocalEmbedder", "prepare"]

CLS, SEP = 101, 102
INPUT_WINDOW = MAX_TOKENS - 2


class LocalEmbedder:
    """A ``port.Embedder``. Safe to share between tasks: their passages queue for its threads.

    Each passage goes through the model alone, on one thread, and so has bit for bit the same vector every time. In a
    batch the padding changes sums in the last bit, 8-bit rounding then flips, and the layers amplify it: cosine 0.996
    to the same passage alone. On two cores it is also the faster way (ADR 4).
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        threads: int | None = None,
        document_prefix: str = "",
        query_prefix: str = "",
    ) -> None:
        """model_dir: what ``prepare`` returned. threads: passages at once, default one a CPU that this process may
        use. Raises Misconfigured."""
        description = describe(model_dir)
        try:
            import ctranslate2
        except ImportError as error:
            raise Misconfigured(MISSING_EXTRA) from error
        threads = threads or usable_cpus()
        try:
            self._encoder = ctranslate2.Encoder(
                str(model_dir), compute_type=description.compute_type, inter_threads=threads, intra_threads=1
            )
        except (RuntimeError, ValueError) as error:
            raise Misconfigured(
                f"{model_dir} cannot be loaded ({error}): delete it, and it is converted again"
            ) from error
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="embedding")
        self._tokens = word_pieces(model_dir / TOKENIZER)
        self.model = description.model
        self.revision = description.revision
        self.dimensions = DIMENSIONS
        self.input_window = INPUT_WINDOW
        self.document_prefix = document_prefix
        self.query_prefix = query_prefix
        self.on_truncated: Callable[[int], None] = lambda passages: None
        self.on_request: Callable[[EmbeddingOutcome, float], None] = lambda outcome, seconds: None
        self.on_question: Callable[[int, float], None] = lambda tokens, money: None  # nobody is paid

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return self._tokens.count(texts)

    async def embed_documents(self, texts: Sequence[str]) -> Embedded:
        keep, refused = triage(texts)
        rows, truncated = await self._embed([self.document_prefix + texts[index] for index in keep])
        if truncated:
            self.on_truncated(truncated)
        vectors = np.zeros((len(texts), DIMENSIONS), dtype=np.float32)
        vectors[keep] = rows
        return Embedded(vectors, refused)

    async def embed_query(self, text: str) -> Vectors:
        keep, refused = triage([text])
        rows, _ = await self._embed([self.query_prefix + text for _ in keep])
        return only_row(Embedded(rows, refused))

    async def aclose(self) -> None:
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)
        self._encoder.unload_model()

    async def _embed(self, texts: list[str]) -> tuple[Vectors, int]:
        """Unit vectors in input order, and how many texts were cut to the window."""
        began = perf_counter()
        with trace_embeddings(self.model, len(texts)) as measured:
            ids = await asyncio.to_thread(self._tokens.ids, texts)
            measured.facts["gen_ai.usage.input_tokens"] = sum(min(len(tokens), INPUT_WINDOW) for tokens in ids)
            loop = asyncio.get_running_loop()
            # Cancelling this call also takes its waiting passages out of the queue.
            rows = await asyncio.gather(*(loop.run_in_executor(self._pool, self._mean, tokens) for tokens in ids))
        vectors = np.array(rows, dtype=np.float32).reshape(len(texts), DIMENSIONS)
        self.on_request("answered", perf_counter() - began)
        return unit(vectors), sum(len(tokens) > INPUT_WINDOW for tokens in ids)

    def _mean(self, tokens: list[int]) -> NDArray[np.float32]:
        """One passage's hidden states (tokens, dimensions), averaged; special tokens count, as in training."""
        output = self._encoder.forward_batch([[CLS, *tokens[:INPUT_WINDOW], SEP]])
        hidden: NDArray[np.float32] = np.asarray(output.last_hidden_state)[0]
        return np.asarray(hidden.mean(axis=0), dtype=np.float32)


def usable_cpus() -> int:
    """CPUs that this process may run on (a container's or taskset's share, where the system tells)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
