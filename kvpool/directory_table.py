"""One namespace's part of the directory: short key -> set of nodes, as arrays. It knows node numbers, not nodes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["DirectoryTable", "warm_up"]

_MIN_CAPACITY = 1024
_NODES_PER_WORD = 64


class DirectoryTable:
    """Open addressing keyed by uint64; per key one bit per node number, in as many words as the numbers need."""

    def __init__(self) -> None:
        self.num_alive = 0  # keys that some node holds
        self._num_used = 0  # places taken, dead keys included
        self._allocate(_MIN_CAPACITY, 1)

    def add(self, node: int, keys: NDArray[np.uint64]) -> int:
        """Node `node` holds `keys` too. Returns how many it did not hold before."""
        self._reserve(len(keys), node // _NODES_PER_WORD + 1)
        set_bit, _, _, _ = _kernels()
        new_used, new_alive, added = set_bit(self._keys, self._used, self._masks, keys, *_word_and_bit(node))
        self._num_used += new_used
        self.num_alive += new_alive
        return int(added)

    def remove(self, node: int, keys: NDArray[np.uint64]) -> int:
        """Node `node` holds `keys` no more. Returns how many it held."""
        word, bit = _word_and_bit(node)
        if word >= self._masks.shape[1]:
            return 0
        _, clear_bit, _, _ = _kernels()
        _, new_dead, removed = clear_bit(self._keys, self._used, self._masks, keys, word, bit)
        self.num_alive -= new_dead
        return int(removed)

    def remove_all(self, node: int) -> int:
        """Node `node` holds nothing any more. Returns how many keys it held."""
        word, bit = _word_and_bit(node)
        if word >= self._masks.shape[1]:
            return 0
        held = (self._masks[:, word] & bit) != 0
        self._masks[held, word] &= ~bit
        self.num_alive = int(np.count_nonzero(self._masks.any(axis=1)))
        return int(np.count_nonzero(held))

    def match(self, keys: NDArray[np.uint64], num_nodes: int) -> NDArray[np.int64]:
        """For each node number below `num_nodes`: how many leading `keys` it holds, int64 [num_nodes]."""
        lengths = np.zeros(num_nodes, np.int64)
        _kernels()[2](self._keys, self._used, self._masks, keys, lengths)
        return lengths

    def count(self, node: int, keys: NDArray[np.uint64]) -> int:
        """How many of `keys` node `node` holds."""
        word, bit = _word_and_bit(node)
        if word >= self._masks.shape[1]:
            return 0
        return int(_kernels()[3](self._keys, self._used, self._masks, keys, word, bit))

    def num_held(self, node: int) -> int:
        """How many keys node `node` holds, counted afresh."""
        word, bit = _word_and_bit(node)
        return 0 if word >= self._masks.shape[1] else int(np.count_nonzero(self._masks[:, word] & bit))

    def validate(self) -> list[str]:
        """What does not fit together, in words; empty when all does."""
        problems = []
        alive = self._masks.any(axis=1)
        if int(np.count_nonzero(alive)) != self.num_alive:
            problems.append(f"{np.count_nonzero(alive)} keys are alive, {self.num_alive} are counted")
        if int(np.count_nonzero(self._used)) != self._num_used:
            problems.append(f"{np.count_nonzero(self._used)} places are used, {self._num_used} are counted")
        if np.any(alive & (self._used == 0)):
            problems.append("an unused place has holders")
        return problems

    def _allocate(self, capacity: int, words: int) -> None:
        self._keys = np.zeros(capacity, np.uint64)
        self._used = np.zeros(capacity, np.uint8)
        self._masks = np.zeros((capacity, words), np.uint64)

    def _reserve(self, num_new: int, words: int) -> None:
        """Room for `num_new` more keys below a load of 0.6; dead keys go whenever the table is built anew."""
        words = max(words, self._masks.shape[1])
        if (self._num_used + num_new) * 10 <= len(self._keys) * 6 and words == self._masks.shape[1]:
            return
        alive = self._masks.any(axis=1)
        keys, masks = self._keys[alive], self._masks[alive]
        capacity = _MIN_CAPACITY
        while capacity * 3 < (len(keys) + num_new) * 10:
            capacity *= 2
        self._allocate(capacity, words)
        self._num_used = len(keys)
        set_bit, _, _, _ = _kernels()
        for word in range(masks.shape[1]):
            for b in range(_NODES_PER_WORD):
                bit = np.uint64(1 << b)
                held = (masks[:, word] & bit) != 0
                if held.any():
                    set_bit(self._keys, self._used, self._masks, keys[held], word, bit)


def warm_up() -> None:
    """Compile, or load from the cache, what tables run on: up to a second, which no event or match should take."""
    _kernels()


def _word_and_bit(node: int) -> tuple[int, np.uint64]:
    return node // _NODES_PER_WORD, np.uint64(1 << (node % _NODES_PER_WORD))


def _kernels() -> tuple[Any, Any, Any, Any]:
    # numba takes half a second to import, and a process that only computes addresses never needs it.
    from kvpool.directory_kernels import directory_kernels

    return directory_kernels()
