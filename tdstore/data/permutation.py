"""A keyed permutation of ``range(n)``: the place of any element in constant time and memory."""

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidArgumentError, OutOfRangeError

Words = NDArray[np.uint64]
SMALL = 4096  # up to here a sorted list of hashes is as cheap, and uniform over all orders
ROUNDS = 8


def mix(words: Words) -> Words:
    """Hash 64-bit words one by one, by the finalizer of splitmix64."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class Permutation:
    """Permute ``range(size)`` by a key, without a list of the elements.

    A Feistel network over pairs ``(left, right)`` of ``range(a) x range(b)``, where ``a * b`` is just above ``size``;
    what falls outside ``range(size)`` goes through the network again until it is inside (cycle walking). The order
    depends only on ``size`` and ``key``, on every machine and with every version of numpy.

    Args:
        size: the number of elements, under 2**62.
        key: integers that choose the order, such as a seed and an epoch, each under 2**64.

    Raises:
        InvalidArgumentError: the size is negative or too large.

    Example:
        >>> sorted(Permutation(5, (0, 1))(np.arange(5)).tolist())
        [0, 1, 2, 3, 4]
    """

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        if not 0 <= size < 2**62:
            raise InvalidArgumentError(f"a permutation of {size} elements: the size must be from 0 to 2**62 - 1")
        self.size = size
        state: Words = np.zeros(1, dtype=np.uint64)
        for part in key:
            state = mix(state ^ mix(np.array([part % 2**64], np.uint64)))
        self._keys: Words = mix(np.arange(1, ROUNDS + 1, dtype=np.uint64) + state[0])
        self._a = np.uint64(int(np.ceil(np.sqrt(max(size, 1)))))
        self._b = np.uint64(-(-max(size, 1) // int(self._a)))
        self._table: NDArray[np.int64] | None = None
        if size <= SMALL:
            hashes = mix(np.arange(size, dtype=np.uint64) ^ self._keys[0])
            self._table = np.argsort(hashes, kind="stable").astype(np.int64)

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the elements at places of the order.

        Args:
            places: int64 of any shape, each in ``range(size)``.

        Returns:
            int64 of the same shape.

        Raises:
            OutOfRangeError: a place is outside ``range(size)``.
        """
        if places.size and not (int(places.min()) >= 0 and int(places.max()) < self.size):
            raise OutOfRangeError(f"places from {places.min()} to {places.max()} of an order of {self.size} elements")
        if self._table is not None:
            return self._table[places]
        flat = self._network(places.reshape(-1).astype(np.uint64))
        outside = np.flatnonzero(flat >= np.uint64(self.size))
        while outside.size:
            walked = self._network(flat[outside])
            flat[outside] = walked
            outside = outside[walked >= np.uint64(self.size)]
        return flat.astype(np.int64).reshape(places.shape)

    def _network(self, words: Words) -> Words:
        left, right = words // self._b, words % self._b
        for number in range(0, ROUNDS, 2):
            left = (left + mix(right ^ self._keys[number]) % self._a) % self._a
            right = (right + mix(left ^ self._keys[number + 1]) % self._b) % self._b
        return left * self._b + right
