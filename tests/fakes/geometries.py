"""OpenAI-compatible servers that serve the bundled model under other names, with the geometry of other models.

Which texts are alike stays the bundled model's knowledge; where the cosines lie does not:

- ``as-it-is``: the model itself; unrelated texts around 0.1.
- ``crowded``: every vector shares a direction, as with models trained at a low temperature; unrelated texts from 0.70.
- ``narrow``: a few directions dominate, and all vectors lie in a cone, so that also the order of neighbours changes.
- ``sparse``: half of every vector is its own noise; even the same statement in other words is around 0.35.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, MutableMapping

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from pipeline.embedding.port import Embedder
from tests.fakes.openai import FakeOpenAI

Vector = NDArray[np.float32]
SIZE = 384
"""The dimensions of the bundled model."""


def _unit(vector: NDArray[np.floating]) -> Vector:
    return (vector / np.linalg.norm(vector)).astype(np.float32)


_ROTATION = np.linalg.qr(np.random.default_rng(1).standard_normal((SIZE, SIZE)))[0]
_SCALES = np.exp(-np.arange(SIZE) / 120)
_CONE = _unit(np.random.default_rng(2).standard_normal(SIZE))


def _as_it_is(vector: Vector, _text: str) -> Vector:
    return vector


def _crowded(vector: Vector, _text: str) -> Vector:
    return _unit(np.concatenate([np.sqrt(0.3) * vector, np.full(128, np.sqrt(0.7 / 128))]))


def _narrow(vector: Vector, _text: str) -> Vector:
    return _unit(_unit(vector @ _ROTATION * _SCALES) + 0.8 * _CONE)


def _sparse(vector: Vector, text: str) -> Vector:
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])
    noise = _unit(np.random.default_rng(seed).standard_normal(128))
    return _unit(np.concatenate([vector, noise]))


GEOMETRIES: Mapping[str, Callable[[Vector, str], Vector]] = {
    "as-it-is": _as_it_is,
    "crowded": _crowded,
    "narrow": _narrow,
    "sparse": _sparse,
}


class FakeGeometry(FakeOpenAI):
    """A server of the model ``geometry``. vectors: the bundled model's vectors by text, which servers may share, so
    that each text is embedded once."""

    def __init__(self, geometry: str, bundled: Embedder, vectors: MutableMapping[str, Vector]) -> None:
        self._geometry = GEOMETRIES[geometry]
        self._bundled = bundled
        self._vectors = vectors
        dimensions = len(self._geometry(np.eye(SIZE, dtype=np.float32)[0], ""))
        super().__init__(model=geometry, dimensions=dimensions, takes_dimensions=False)

    def vector(self, text: str, dimensions: int | None = None) -> Vector:
        return self._geometry(self._vectors[text], text)[:dimensions]

    async def answer(self, request: web.Request) -> web.Response:
        texts = (await request.json())["input"]
        missing = list(dict.fromkeys(text for text in texts if text not in self._vectors))
        if missing:
            embedded = await self._bundled.embed_documents(missing)
            self._vectors.update(zip(missing, embedded.vectors, strict=True))
        return await super().answer(request)
