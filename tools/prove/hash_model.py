"""A model whose next token is a hash of all KV that it reads, and its reference, which has no memory to read from.

Layer l of token t at position p holds words derived from the hash of (model, l, p, t, what layer l - 1 read up to p).
What a layer reads is the sum, over the positions that the token sees, of hashes of (position, all words found there).
So a block that is stale, torn, another model's or another position's changes every logit after it, and nothing else
does: no node, slot, epoch or attempt enters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
Hashes = NDArray[np.uint64]

_GAMMA, _M1, _M2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32, _S40 = (np.uint64(n) for n in (27, 30, 31, 32, 40))
_SPREAD = np.float32(12.0)


def mixed(values: Hashes) -> Hashes:
    """Return the hash of each value: the finaliser of splitmix64 (Steele et al., OOPSLA 2014)."""
    x = values + _GAMMA
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    hashed: Hashes = x ^ (x >> _S31)
    return hashed


@dataclass(frozen=True)
class HashModel:
    """Layers, each with the number of tokens that it sees (0: all); words of a token in a layer; vocabulary."""

    name: str
    windows: tuple[int, ...]
    words: int
    vocab_size: int

    @cached_property
    def salt(self) -> np.uint64:
        """Hash of the model's name."""
        salt = np.uint64(0)
        for byte in self.name.encode():
            salt = mixed(np.array([salt ^ np.uint64(byte)]))[0]
        return salt

    @cached_property
    def weights(self) -> Hashes:
        """Weights [words] of a token's words in the hash of what is read."""
        return mixed(np.arange(1, self.words + 1, dtype=np.uint64))

    def layer_words(self, layer: int, start: int, ids: NDArray[np.int32], seen: Hashes) -> Words:
        """Return the words [n, words] of `layer` of tokens from position `start` on, which saw `seen` [n] below."""
        positions = np.arange(start, start + len(ids), dtype=np.uint64)
        heads = mixed(mixed(positions ^ (np.uint64(layer) << _S40) ^ self.salt) ^ ids.astype(np.uint64)) ^ seen
        words = mixed(heads[:, None] + np.arange(self.words, dtype=np.uint64)[None, :] * _GAMMA)
        found: Words = (words >> _S32).astype(np.uint32)
        return found

    def read(self, start: int, words: Words) -> Hashes:
        """Return the hash [n] of what is read at each position from `start` on; `words` is [n, words]."""
        positions = np.arange(start, start + len(words), dtype=np.uint64)
        sums = (words.astype(np.uint64) * self.weights[None, :]).sum(axis=1, dtype=np.uint64)
        return mixed(mixed(sums) ^ positions)

    def seen(self, layer: int, hashes: Hashes, first: int, start: int) -> Hashes:
        """Return what tokens from position `start` on see of a layer, whose `hashes` begin at position `first`."""
        window = self.windows[layer]
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashes, dtype=np.uint64)])
        ends = np.arange(start, first + len(hashes)) + 1 - first
        begins = np.maximum(0, ends - window) if window else np.zeros_like(ends)
        found: Hashes = sums[ends] - sums[begins]
        return found

    def logits(self, seen: np.uint64) -> NDArray[np.float32]:
        """Return the logits, float32 [V], of the token that saw `seen` in the last layer."""
        hashes = mixed(seen + np.arange(self.vocab_size, dtype=np.uint64) * _GAMMA)
        return (hashes >> _S40).astype(np.float32) * (_SPREAD / np.float32(1 << 24))


class ReferenceSequence:
    """The model's logits for one sequence, without slots: the same sums, over arrays of its own.

    `begins(position)`: the first token that the one at a position sees; it also sees the first `sinks` ones, except in
    layers with windows.
    """

    def __init__(
        self, model: HashModel, ids: Sequence[int], begins: Callable[[int], int] = lambda _: 0, sinks: int = 0
    ) -> None:
        self._model = model
        self._begins, self._sinks = begins, sinks
        self._hashes: list[Hashes] = [np.zeros(0, np.uint64) for _ in model.windows]
        self._last = np.uint64(0)
        self._extend(np.asarray(ids, np.int32))

    def append(self, token: int) -> None:
        """Add a token."""
        self._extend(np.asarray([token], np.int32))

    def logits(self) -> NDArray[np.float32]:
        """Return the logits of the next token, float32 [V]."""
        return self._model.logits(self._last)

    def hashes(self, layer: int) -> Hashes:
        """Return the hash of what is read of a layer at each position."""
        return self._hashes[layer]

    def _extend(self, ids: NDArray[np.int32]) -> None:
        model, start = self._model, len(self._hashes[0])
        seen = np.zeros(len(ids), np.uint64)
        for layer in range(len(model.windows)):
            words = model.layer_words(layer, start, ids, seen)
            self._hashes[layer] = np.concatenate([self._hashes[layer], model.read(start, words)])
            seen = self._seen(layer, start)
        self._last = seen[-1]

    def _seen(self, layer: int, start: int) -> Hashes:
        hashes, window = self._hashes[layer], self._model.windows[layer]
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashes, dtype=np.uint64)])
        ends = np.arange(start, len(hashes)) + 1
        slid = np.array([self._begins(position) for position in range(start, len(hashes))])
        if window:
            found: Hashes = sums[ends] - sums[np.maximum(slid, ends - window)]
        else:
            found = sums[ends] - sums[slid] + np.where(slid > 0, sums[self._sinks], np.uint64(0))
        return found
