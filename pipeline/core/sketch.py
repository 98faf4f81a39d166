"""Sketches of vectors: one bit for each dimension, by which most rows of an exact scan need not be read whole. Pure.

A vector is rotated at random, and its sketch holds the signs. Two vectors then differ in a share of the bits that
follows from their angle alone, whatever the model: θ / π on average, as each rotated axis is the normal of a random
plane (Charikar's signatures). Without the rotation, the signs of a model with few dimensions that matter say little.
All vectors of some models point into much the same direction, and so differ in few bits: without it, they differ in as
many as those of any other model (docs/adr/0123-centred-sketches.md).
The reasons and measurements are in docs/adr/0121-sketches.md.
"""

from __future__ import annotations

from functools import cache
from hashlib import shake_128
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.core.model import SKETCH_BLOCK

ROUNDS = 3
"""How often the dimensions of each block are mixed and distributed anew. After two rounds, each depends on all."""
DEVIATIONS = 2.0
"""A row is read whole if its sketch differs from the question's in at most so many standard deviations more bits than
that of the last row that is wanted. Measured on 10,000 and 60,000 rows of 384 and 1,536 dimensions: all of the nearest
ten and .992 to .998 of the nearest 74 are among them, with 6 to 11 % and 1.5 % of the rows read."""


def sketches(vectors: NDArray[np.float32], bits: int, centre: NDArray[np.float32] | None = None) -> NDArray[np.bool_]:
    """Return the sketches of vectors, shape (n, dimensions), as rows: shape (n, bits). bits:
    ``Generation.sketch_bits``. centre: what is subtracted from each vector, which then has unit length; without it,
    lengths do not matter."""
    rows = np.asarray(vectors, dtype=np.float32)
    rows = np.pad(rows if centre is None else rows - centre, ((0, 0), (0, bits - rows.shape[1])))
    signs, orders, mixers = rotation(bits)
    for sign, order in zip(signs, orders, strict=True):
        rows = ((rows[:, order] * sign).reshape(-1, SKETCH_BLOCK) @ mixers).reshape(len(rows), bits)
    return rows > 0


class Rotation(NamedTuple):
    """In each round, the values are taken in this order and multiplied by these signs, and each block by the mixers."""

    signs: NDArray[np.float32]
    """Shape (ROUNDS, bits)."""
    orders: NDArray[np.intp]
    """Shape (ROUNDS, bits), from 0 on."""
    mixers: NDArray[np.float32]
    """A Hadamard matrix, which is symmetric: shape (SKETCH_BLOCK, SKETCH_BLOCK)."""


@cache
def _hadamard() -> NDArray[np.float32]:
    matrix = np.ones((1, 1), dtype=np.float32)
    while len(matrix) < SKETCH_BLOCK:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


@cache
def rotation(bits: int) -> Rotation:
    """Return the rotation of vectors of so many dimensions. It follows from a hash, so that it is the same in every
    process and every version of numpy: stored sketches depend on it."""
    drawn = np.frombuffer(shake_128(b"penstock sketch %d" % bits).digest(8 * ROUNDS * bits), dtype="<u8")
    drawn = drawn.reshape(ROUNDS, bits)
    signs = np.where(drawn & 1, np.float32(1), np.float32(-1))
    return Rotation(signs, np.argsort(drawn, axis=1, kind="stable"), _hadamard())
