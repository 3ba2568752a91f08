"""A shuffle of any number of samples without a table: each position is computed by itself."""

import math

import numpy as np
from numpy.typing import NDArray

from rollcall.train.numerics.randomness import derive

ROUNDS = 8  # with 6, permutations of 4 and 5 samples are measurably uneven; with 8, none are


class Permutation:
    """A permutation of 0 … size - 1 that depends only on a seed, in constant memory.

    A Feistel network mixes the two digits of a number, and mixes a result outside the range again
    until it is inside. Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002.
    """

    def __init__(self, size: int, seed: int, *purpose: str | int) -> None:
        """Permute `size` numbers, at least 1 and below 2^60, for a purpose as in `derive`."""
        self.size = size
        self._side = np.uint64(math.isqrt(size - 1) + 1)
        self._keys = [np.uint64(derive(seed, *purpose, number)) for number in range(ROUNDS)]

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Map positions (n,) to the numbers at them (n,)."""
        numbers = self._mix(positions.astype(np.uint64))
        outside = np.flatnonzero(numbers >= self.size)
        while len(outside):
            numbers[outside] = self._mix(numbers[outside])
            outside = outside[numbers[outside] >= self.size]
        return numbers.astype(np.int64)

    def _mix(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = np.divmod(numbers, self._side)
        for key in self._keys:
            # The hash loses one bit, so that the sum does not overflow.
            left, right = right, (left + (_hash(right + key) >> np.uint64(1))) % self._side
        mixed: NDArray[np.uint64] = left * self._side + right
        return mixed


def _hash(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014); products wrap around."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
