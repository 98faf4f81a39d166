"""A cross-encoder in the service itself: an ONNX file and its tokenizer, offline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.core.errors import Misconfigured, Poison
from pipeline.embedding.local import usable_cpus

if TYPE_CHECKING:
    from onnxruntime import InferenceSession
    from tokenizers import Encoding, Tokenizer

MODEL, TOKENIZER, TOKENIZER_CONFIG = "model.onnx", "tokenizer.json", "tokenizer_config.json"
WINDOW = 512
"""Tokens of a pair, unless the tokenizer's own configuration says fewer: a chunk has 400, and time grows with them."""
LEAST_PASSAGE = 64
"""Tokens of a passage that must find room beside the question, else the score would be of the question alone."""
MISSING_EXTRA = (
    "a local cross-encoder needs the packages onnxruntime and tokenizers: docs/rerank.md describes how to install them"
)
KNOWN_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids"})


class CrossEncoder:
    """A ``port.Reranker``. Safe to share between tasks: their pairs are batched together."""

    def __init__(self, folder: Path, *, threads: int | None = None) -> None:
        """folder: ``model.onnx`` and ``tokenizer.json``. threads: of one batch, default one a CPU that this process may
        use. Slow (it loads the model): call it in a thread. Raises Misconfigured."""
        self.model = folder.name
        self._session = _load(folder / MODEL, threads or usable_cpus())
        self._inputs = {model_input.name for model_input in self._session.get_inputs()}
        if "input_ids" not in self._inputs or self._inputs - KNOWN_INPUTS:
            raise Misconfigured(f"{folder / MODEL} is not a cross-encoder: its inputs are {sorted(self._inputs)}")
        self._tokenizer = _tokenizer(folder / TOKENIZER)
        self._window = min(WINDOW, _max_tokens(folder / TOKENIZER_CONFIG))
        self._padding = (self._tokenizer.padding or {}).get("pad_id", 0)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rerank")
        self._batches = Batches(self._run, len)

    async def rerank(self, query: str, texts: Sequence[str], *, tenant: str = "") -> Sequence[float]:
        """From 0 to 1: the sigmoid of the model's logit."""
        return await self._batches.scores(await asyncio.to_thread(self.pairs, query, texts))

    async def aclose(self) -> None:
        await self._batches.aclose()
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    def pairs(self, query: str, texts: Sequence[str]) -> list[Encoding]:
        """The question whole, and of each passage the beginning that fits beside it. Raises Poison."""
        question = self._tokenizer.encode(query, add_special_tokens=False)
        room = self._window - len(question) - self._tokenizer.num_special_tokens_to_add(True)
        if room < LEAST_PASSAGE:
            raise Poison("too_long", f"the question is too long for the reranker, which reads {self._window} tokens")
        passages = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        for passage in passages:
            passage.truncate(room)
        return [self._tokenizer.post_process(question, passage, True) for passage in passages]

    async def _run(self, pairs: Sequence[Encoding]) -> Sequence[float]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._scores, pairs)

    def _scores(self, pairs: Sequence[Encoding]) -> list[float]:
        longest = max(len(pair) for pair in pairs)
        columns = {
            "input_ids": _column([pair.ids for pair in pairs], longest, self._padding),
            "attention_mask": _column([pair.attention_mask for pair in pairs], longest, 0),
            "token_type_ids": _column([pair.type_ids for pair in pairs], longest, 0),
        }
        try:
            [output, *_] = self._session.run(None, {name: columns[name] for name in self._inputs})
        except Exception as error:  # the runtime's errors have no base of their own
            raise Misconfigured(
                f"the cross-encoder {self.model} failed: {type(error).__name__}", service="rerank"
            ) from error
        return _relevance(np.asarray(output, dtype=np.float64), len(pairs))


def _relevance(output: NDArray[np.float64], pairs: int) -> list[float]:
    """One logit a pair, or two (irrelevant, relevant), of which the difference counts. Raises Misconfigured."""
    logits = output.reshape(pairs, -1) if output.size and output.size % pairs == 0 else output
    if logits.ndim != 2 or logits.shape[1] not in (1, 2) or not np.isfinite(logits).all():
        raise Misconfigured(
            f"the cross-encoder returned {output.shape} for {pairs} pairs, or no numbers: must be one score per pair",
            service="rerank",
        )
    logit = logits[:, -1] - (logits[:, 0] if logits.shape[1] == 2 else 0.0)
    return [float(score) for score in 1.0 / (1.0 + np.exp(-np.clip(logit, -500, 500)))]


def _column(rows: Sequence[Sequence[int]], longest: int, padding: int) -> NDArray[np.int64]:
    column = np.full((len(rows), longest), padding, dtype=np.int64)
    for n, row in enumerate(rows):
        column[n, : len(row)] = row
    return column


def _load(path: Path, threads: int) -> InferenceSession:
    try:
        import onnxruntime
    except ImportError as error:
        raise Misconfigured(MISSING_EXTRA) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors: they are raised
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # the stores need the processors too
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # as above
        raise Misconfigured(
            f"{path} cannot be loaded ({type(error).__name__}): PENSTOCK_RERANK_ONNX_PATH must be a folder with "
            f"{MODEL} and {TOKENIZER}"
        ) from error


def _tokenizer(path: Path) -> Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise Misconfigured(MISSING_EXTRA) from error
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise Misconfigured(f"{path} is not a tokenizer ({type(error).__name__})") from error


def _max_tokens(path: Path) -> int:
    """The model's maximum input in tokens, from its tokenizer's configuration if it has one."""
    try:
        written: Any = json.loads(path.read_text()).get("model_max_length")
    except FileNotFoundError:
        return WINDOW
    except (OSError, ValueError, AttributeError) as error:
        raise Misconfigured(f"{path} cannot be read ({type(error).__name__})") from error
    return int(written) if isinstance(written, int | float) and written > 0 else WINDOW


T = TypeVar("T")

WINDOW_SECONDS = 0.005
"""How long a small batch waits for further pairs; the 50 pairs of one search do not wait."""
MIN_BATCH_PAIRS, MAX_BATCH_PAIRS = 8, 16
"""Pairs of a batch: fewer than LEAST wait for company; MOST bounds what the pairs of one search pad and hold up."""


class _Waiting(NamedTuple, Generic[T]):
    item: T
    score: asyncio.Future[float]


class Batches(Generic[T]):
    """Groups pairs of all callers into batches. Laws: a cancelled caller removes only its own pairs; an error affects
    only the pairs of its batch; all pairs that wait when a round begins are scored in it, whatever arrives later."""

    def __init__(self, work: Callable[[Sequence[T]], Awaitable[Sequence[float]]], size: Callable[[T], int]) -> None:
        """work: scores one batch, in its order. size: the length of a pair; pairs of equal size need no padding."""
        self._work = work
        self._size = size
        self._waiting: list[_Waiting[T]] = []
        self._working: asyncio.Task[None] | None = None

    async def scores(self, items: Sequence[T]) -> list[float]:
        """The scores in the order of the items. Raises the errors of ``work``."""
        loop = asyncio.get_running_loop()
        mine = [_Waiting(item, loop.create_future()) for item in items]
        self._waiting += mine
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._rounds(), name="rerank batches")
        try:
            return await asyncio.gather(*(pair.score for pair in mine))
        finally:
            for pair in mine:
                pair.score.cancel()

    async def aclose(self) -> None:
        """Cancel everything that still waits."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)
        for pair in self._waiting:
            pair.score.cancel()

    async def _rounds(self) -> None:
        while self._waiting:
            if len(self._waiting) < MIN_BATCH_PAIRS:
                await asyncio.sleep(WINDOW_SECONDS)
            left = sorted(self._waiting, key=lambda pair: self._size(pair.item))
            self._waiting = []
            try:
                while left := [pair for pair in left if not pair.score.done()]:
                    await self._score(left[:MAX_BATCH_PAIRS])
            finally:
                for pair in left:
                    pair.score.cancel()

    async def _score(self, batch: Sequence[_Waiting[T]]) -> None:
        try:
            scores = await self._work([pair.item for pair in batch])
        except Exception as error:  # noqa: BLE001  # handed to whoever waits for it
            for pair in batch:
                if not pair.score.done():
                    pair.score.set_exception(error)
            return
        for pair, score in zip(batch, scores, strict=True):
            if not pair.score.done():
                pair.score.set_result(score)
