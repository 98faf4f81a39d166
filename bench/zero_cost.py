"""An OpenAI-compatible, deterministic embedding server that costs next to nothing, so that the pipeline is measured.

    python -m bench.zero_cost --port 0 --latency-ms 50      # prints its address; GET /stats counts requests and inputs
    python -m bench.zero_cost --words 384                   # with the vectors of bench.load_corpus instead

A text's vector is two halves of unit vectors that were made beforehand, both of one topic and chosen by the text's
checksum: answering is joining bytes. So 262,144 vectors are distinct and lie about topics, as those of texts do: a row
costs pgvector's graph 1.8 ms. (One of 4,096 random ones would flatter it, since it holds what is equal once: 1 ms.
Nothing but random ones would be harder than any text: 6.8 ms.) With --words, a text's vector is that of its words
(bench.load_corpus.WordVectors), so that no two are equal, and a question lies near the texts that answer it.
The latency is the whole time from a request's head to its answer, this server's own work within. It counts no
tokens and keeps no limits; for those there is tests/fakes/openai.py. ``POST /faults`` takes some of the fields of
Faults ({} changes nothing).
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt
from aiohttp import web
from pydantic_core import from_json

from bench.load_corpus import Corpus, WordVectors

DIMENSIONS = 1_536
TOPICS, OF_TOPIC = 64, 64
LATENT = 64
"""Dimensions in which topics and texts differ, apart from NOISE (standard deviation; theirs is about 10)."""
WITHIN_TOPIC, NOISE = 0.7, 2.4
MODEL = "zero-cost"
MAX_BODY = 64 * 1024 * 1024


@dataclass
class Stats:
    requests: int = 0
    inputs: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Faults:
    throttle: int = 0
    """The next n requests get 429 with a Retry-After of a second."""
    inputs_left: int | None = None
    """Requests with more texts than remain get 503; None: no fault."""


def _make_vectors() -> npt.NDArray[np.float32]:
    """Make the vectors, topic after topic; each half of a row has a length of √½."""
    dice = np.random.default_rng(1)
    topics = np.repeat(dice.standard_normal((TOPICS, LATENT)), OF_TOPIC, axis=0)
    latent = topics + WITHIN_TOPIC * dice.standard_normal(topics.shape)
    rows = latent @ dice.standard_normal((LATENT, DIMENSIONS)) + NOISE * dice.standard_normal((len(latent), DIMENSIONS))
    halves = rows.reshape(len(rows), 2, -1)
    halves /= np.linalg.norm(halves, axis=2, keepdims=True) * np.sqrt(2)
    return rows.astype(np.float32)


class ZeroCost:
    def __init__(self, latency_seconds: float, words: WordVectors | None = None) -> None:
        """words: makes the vectors, instead of joining halves."""
        self._words = words
        rows = _make_vectors()
        halves = np.split(rows, 2, axis=1)  # of 3,072 bytes: their base64 can be joined
        self._first, self._second = ([base64.b64encode(half.tobytes()) for half in part] for part in halves)
        # Clients that request floats take longer to parse them, so a few rows are enough.
        self._floats = [b"%b}" % json.dumps(row.tolist()).encode() for row in rows[:64]]
        self._latency = latency_seconds
        self.stats = Stats()
        self.faults = Faults()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY)
        app.add_routes(
            [
                web.post("/v1/embeddings", self._embeddings),
                web.get("/stats", self._stats),
                web.post("/faults", self._set_faults),
            ]
        )
        return app

    async def _embeddings(self, request: web.Request) -> web.Response:
        began = time.monotonic()
        body = from_json(await request.read())
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        self.stats.requests += 1
        if (refused := self._refused(len(texts))) is not None:
            return refused
        self.stats.inputs += len(texts)
        self.stats.bytes += sum(map(len, texts))
        answer = self._answer(texts, body.get("encoding_format"))
        await asyncio.sleep(began + self._latency - time.monotonic())
        return web.Response(body=answer, content_type="application/json")

    def _answer(self, texts: Sequence[str], encoding_format: object) -> bytes:
        if self._words is not None:
            return _word_answer(self._words, texts, encoding_format)
        pieces = [b'{"object":"list","model":"%b","data":[' % MODEL.encode()]
        for index, text in enumerate(texts):
            pieces.append(b'%b{"object":"embedding","index":%d,"embedding":' % (b"," if index else b"", index))
            drawn = crc32(text.encode())
            if encoding_format != "base64":
                pieces.append(self._floats[drawn % len(self._floats)])
                continue
            drawn, topic = divmod(drawn, TOPICS)
            drawn, first = divmod(drawn, OF_TOPIC)
            start = topic * OF_TOPIC
            pieces += (b'"', self._first[start + first], self._second[start + drawn % OF_TOPIC], b'"}')
        pieces.append(b'],"usage":{"prompt_tokens":0,"total_tokens":0}}')
        return b"".join(pieces)

    def _refused(self, texts: int) -> web.Response | None:
        left = self.faults.inputs_left
        if self.faults.throttle:
            self.faults = replace(self.faults, throttle=self.faults.throttle - 1)
            return _error(429, "Rate limit reached", {"retry-after": "1"})
        if left is not None and texts > left:
            return _error(503, "The server is overloaded", {})
        self.faults = replace(self.faults, inputs_left=None if left is None else left - texts)
        return None

    async def _set_faults(self, request: web.Request) -> web.Response:
        changes = await request.json()
        if unknown := changes.keys() - {knob.name for knob in fields(Faults)}:
            return web.json_response({"error": f"no such fault: {sorted(unknown)}"}, status=400)
        self.faults = replace(self.faults, **changes)
        return web.json_response(asdict(self.faults))

    async def _stats(self, _: web.Request) -> web.Response:
        return web.json_response(asdict(self.stats))


def _word_answer(words: WordVectors, texts: Sequence[str], encoding_format: object) -> bytes:
    embeddings = [
        b'"%b"' % base64.b64encode(vector.tobytes())
        if encoding_format == "base64"
        else json.dumps(vector.tolist()).encode()
        for vector in words.vectors(texts)
    ]
    data = b",".join(b'{"object":"embedding","index":%d,"embedding":%b}' % pair for pair in enumerate(embeddings))
    usage = b'"usage":{"prompt_tokens":0,"total_tokens":0}'
    return b'{"object":"list","model":"%b","data":[%b],%b}' % (words.model.encode(), data, usage)


def _error(status: int, message: str, headers: dict[str, str]) -> web.Response:
    error = {"message": message, "type": "server_error" if status > 499 else "requests", "code": None}
    return web.json_response({"error": error}, status=status, headers=headers)


async def serve(port: int, latency_seconds: float, dimensions: int | None) -> None:
    """dimensions: of word vectors; None: joined halves of DIMENSIONS."""
    words = None if dimensions is None else WordVectors(dimensions, Corpus())
    runner = web.AppRunner(ZeroCost(latency_seconds, words).app(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    host, bound = runner.addresses[0][:2]
    print(f"http://{host}:{bound}", flush=True)
    await asyncio.Event().wait()


@contextmanager
def zero_cost(latency_ms: float = 0.0, words: int | None = None) -> Iterator[str]:
    """Run the server in a separate process while the block runs. Yields its address. words: the dimensions of word
    vectors; None: joined halves."""
    vectors = () if words is None else ("--words", str(words))
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.zero_cost", "--latency-ms", str(latency_ms), *vectors],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
        env=dict(os.environ),
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        if not address:
            raise SystemExit("the embedding server did not start: see its output above")
        yield address
    finally:
        process.terminate()
        process.wait(10)
        if process.stdout is not None:
            process.stdout.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--words", type=int, metavar="DIMENSIONS", help="vectors of bench.load_corpus")
    options = parser.parse_args()
    asyncio.run(serve(options.port, options.latency_ms / 1_000, options.words))
