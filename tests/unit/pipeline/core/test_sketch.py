from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest

from pipeline.core.sketch import sketches

DIGEST = "5042cb67423ecd16a20cf712512e80443c97c8d070c1f021648874862daa5eb4"


def test_sketches_are_the_same_in_every_version() -> None:
    """Stored sketches would not compare with those of a question otherwise."""
    vectors = np.sin(np.arange(3 * 300, dtype=np.float64).reshape(3, 300) ** 1.5).astype(np.float32)
    stored = sketches(vectors, 384)
    assert stored.shape == (3, 384)
    assert sha256(np.packbits(stored).tobytes()).hexdigest() == DIGEST


@pytest.mark.parametrize("dimensions", [3, 100, 384, 1_536])
@pytest.mark.parametrize("even", [True, False], ids=["even", "few dimensions matter"])
def test_the_share_of_different_bits_follows_from_the_angle(dimensions: int, even: bool) -> None:
    bits = -(-dimensions // 128) * 128
    drawn = np.random.default_rng(1)
    scale = np.ones(dimensions) if even else np.arange(1, dimensions + 1) ** -0.45
    one, away = (drawn.standard_normal((200, dimensions)) * scale for _ in range(2))
    other = one + drawn.uniform(0, 2, (200, 1)) * away
    cosines = (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)
    expected = np.arccos(cosines) / np.pi
    apart = (sketches(one.astype(np.float32), bits) != sketches(other.astype(np.float32), bits)).mean(1)
    deviations = (apart - expected) / np.sqrt(np.maximum(expected * (1 - expected), 1 / bits) / bits)
    if dimensions >= 100:  # shorter vectors have fewer planes than bits
        assert abs(deviations.mean()) < 0.3
        assert deviations.std() < 1.2
    assert np.corrcoef(apart, expected)[0, 1] > 0.9


def test_a_sketch_depends_on_the_direction_alone_and_not_on_the_other_rows() -> None:
    vectors = np.random.default_rng(2).standard_normal((10, 96)).astype(np.float32)
    together = sketches(vectors, 128)
    assert (together == sketches(vectors * 7, 128)).all()
    for row, vector in zip(together, vectors, strict=True):
        assert (row == sketches(vector[None], 128)[0]).all()


def test_without_their_centre_alike_vectors_have_other_bits() -> None:
    drawn = np.random.default_rng(3).standard_normal((200, 384)) + 3
    alike = (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)

    def apart(rows: np.ndarray) -> float:
        return float((rows != np.roll(rows, 1, axis=0)).mean())

    assert apart(sketches(alike, 384)) < 0.2
    assert 0.45 < apart(sketches(alike, 384, alike.mean(axis=0))) < 0.55
