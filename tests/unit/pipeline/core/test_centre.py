from __future__ import annotations

import numpy as np
import pytest

from pipeline.core.centre import CENTRE_TEXTS, centre_of


def unit(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), dtype=np.float32)


def test_the_centre_of_alike_vectors_is_near_to_their_common_direction() -> None:
    drawn = np.random.default_rng(1).standard_normal((len(CENTRE_TEXTS), 384))
    common = unit(np.ones((1, 384)))[0]
    centre = centre_of(unit(drawn / np.sqrt(384) + common))
    assert centre @ common / np.linalg.norm(centre) > 0.97
    assert np.linalg.norm(centre) == pytest.approx(np.sqrt(0.5), rel=0.05)


def test_vectors_that_are_not_alike_have_no_centre() -> None:
    drawn = unit(np.random.default_rng(2).standard_normal((len(CENTRE_TEXTS), 384)))
    for vectors in (drawn, drawn[:1], drawn[:0]):
        assert (centre_of(vectors) == np.zeros(384)).all()
