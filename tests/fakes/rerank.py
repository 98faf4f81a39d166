"""A rerank server in the shapes of Cohere, Jina, vLLM and TEI, with knobs for what goes wrong.

``async with FakeRerank() as fake: … fake.url("cohere"), fake.faults, fake.stats``. It really ranks: by the words that a
passage shares with the question, the rarer among the passages the heavier, more when they stand side by side as in
the question. No model, but better than what it is given unsorted. Shapes: docs.cohere.com/reference/rerank,
api.jina.ai/docs, docs.vllm.ai (pooling, score), huggingface.github.io/text-embeddings-inference.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from aiohttp import web

from tests.fakes import faults
from tests.fakes.faults import Fake, Refusal

PATHS = {"cohere": "/v2/rerank", "jina": "/v1/rerank", "vllm": "/rerank", "tei": "/tei/rerank"}
TEI_BATCH = 32
WINDOW_WORDS = 400


@dataclass
class Faults(faults.Faults):
    drop_row: int = 0
    """Next n answers lack their last row."""
    repeat_row: int = 0
    """Next n answers have the first row twice and the last not at all."""
    nan: int = 0
    """Next n answers have a score that is NaN."""
    endless: int = 0
    """Next n answers never end."""


@dataclass
class Stats(faults.Stats):
    texts: int = 0
    """Scored (answered 200)."""
    largest: int = 0
    """Texts of the largest request."""
    bodies: list[dict[str, Any]] = field(default_factory=list)


class FakeRerank(Fake[Faults, Stats]):
    """api_key None: any will do. model: the only one that Cohere's and Jina's paths know."""

    def __init__(self, *, api_key: str | None = None, model: str = "rerank-v3.5") -> None:
        super().__init__(PATHS.values(), Faults(), Stats(), api_key=api_key)
        self.model = model

    def url(self, flavour: str = "cohere") -> str:
        return self.address + PATHS[flavour]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        key = "texts" if request.path == PATHS["tei"] else "documents"
        body = await request.json()
        self.stats.bodies.append(body)
        texts = self._checked(request.path, body, key)
        self.stats.texts += len(texts)
        self.stats.largest = max(self.stats.largest, len(texts))
        if self.next("endless"):
            return await self._endless(request)
        return self._ranked(body["query"], texts, bare=key == "texts", top_n=body.get("top_n") or len(texts))

    @staticmethod
    def refused(refusal: Refusal) -> dict[str, Any]:
        return {"message": str(refusal)}

    def _checked(self, path: str, body: dict[str, Any], key: str) -> list[str]:
        texts = body.get(key)
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise Refusal(422, f"invalid request: {key} must be a list of texts, here is {str(body)[:200]}")
        if not isinstance(body.get("query"), str) or not body["query"]:
            raise Refusal(400, "invalid request: query is required")
        if path in (PATHS["cohere"], PATHS["jina"]) and body.get("model") != self.model:
            raise Refusal(404, f"model {body.get('model')!r} not found")
        if key == "texts" and len(texts) > TEI_BATCH:
            raise Refusal(422, f"batch size {len(texts)} > maximum allowed batch size {TEI_BATCH}")
        truncates = body.get("truncate") or body.get("truncate_prompt_tokens") == -1
        if path in (PATHS["vllm"], PATHS["tei"]) and not truncates and max(map(_words, texts)) > WINDOW_WORDS:
            raise Refusal(400, f"the input {texts[0][:100]!r} is longer than the model's window")
        return texts

    async def _endless(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        while True:
            await response.write(b" " * 65_536)

    def _ranked(self, query: str, texts: Sequence[str], *, bare: bool, top_n: int) -> web.Response:
        name = "score" if bare else "relevance_score"
        rows: list[dict[str, Any]] = [{"index": n, name: score} for n, score in enumerate(scores(query, texts))]
        rows = sorted(rows, key=lambda row: -row[name])[:top_n]
        if self.next("drop_row"):
            rows.pop()
        if self.next("repeat_row"):
            rows = [rows[0], *rows[:-1]]
        if self.next("nan"):
            rows[0][name] = math.nan
        if self.next("not_json"):
            return self.page()
        answer = rows if bare else {"id": "1", "results": rows, "meta": {"billed_units": {"search_units": 1}}}
        return web.Response(text=json.dumps(answer), content_type="application/json")


def scores(query: str, texts: Sequence[str]) -> list[float]:
    """Between 0 and 1: what share of the question's weight a text has."""
    split = [_split(text) for text in texts]
    query_words = _split(query)
    expected = [*dict.fromkeys(query_words), *dict.fromkeys(pairwise(query_words))]
    held = [{*words, *pairwise(words)} for words in split]
    weight = {part: math.log(1 + len(texts) / (1 + sum(part in item for item in held))) for part in expected}
    whole = sum(weight.values()) or 1.0
    return [sum(weight[part] for part in expected if part in item) / whole for item in held]


def _split(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _words(text: str) -> int:
    return len(_split(text))
