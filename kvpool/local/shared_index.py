"""Writer of the shared index: the blocks in DRAM, their slots and their digests.

There is one writer, in the pool node's event loop, and any number of readers in processes that have mapped the index;
`kvpool.local.index_layout` describes their synchronisation.

Lifetime of a block's entry: written after the block's bytes are complete, erased before its slots may be written again.
Lifetime of an index: when it is full, its entries are copied to a larger one, and only then is it marked as MOVED.
Readers keep their mapping until they find the mark.
"""

import struct
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvpool.local import index_layout
from kvpool.policy import Block
from messenger import SharedMemory

_FIRST_ENTRIES, _FIRST_LAYERS = 1024, 32


class SharedIndex:
    """Index of one incarnation of a pool node. `memory` is the current one; it changes when the index grows."""

    def __init__(self, incarnation: int, num_entries: int = _FIRST_ENTRIES) -> None:
        self._incarnation = incarnation
        from kvpool.local.index_kernels import index_kernels

        self._kernels = index_kernels()
        self._entry_of: dict[bytes, int] = {}  # block key -> its entry
        self._create(num_entries, index_layout.entry_words(1, _FIRST_LAYERS))

    def __len__(self) -> int:
        return len(self._entry_of)

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def apply(self, changes: Iterable[tuple[bool, Block]]) -> None:
        """Add (True) or remove (False) blocks, in order. Must precede any write to slots of the removed blocks."""
        last = {block.key: (added, block) for added, block in changes}
        for key in last:
            self._remove(key)
        for key, (added, block) in last.items():
            if added:
                self._add(key, _record(block))

    def close(self) -> None:
        """Mark the index as closed, which readers see at their next look-up, and release it."""
        self._words[index_layout.AT_STATE] = index_layout.CLOSED
        self.memory.close()

    def validate(self, blocks: Iterable[Block]) -> list[str]:
        """Return descriptions of all differences from `blocks`, those in DRAM; empty if there are none."""
        expected = {block.key: _record(block) for block in blocks}
        problems = []
        if self._entry_of.keys() != expected.keys():
            problems.append(f"the shared index has {len(self._entry_of)} blocks, expected {len(expected)}")
        for key in self._entry_of.keys() & expected.keys():
            at = self._at(self._entry_of[key]) + index_layout.ENTRY_KEY
            if not np.array_equal(self._words[at : at + len(expected[key])], expected[key]):
                problems.append(f"the shared index has a wrong entry for block {key[16:].hex()}")
        if len(self._free) + len(self._entry_of) != self._num_entries:
            problems.append("the shared index has lost entries")
        return problems

    def _add(self, key: bytes, record: NDArray[np.uint64]) -> None:
        if not self._free or len(record) + index_layout.ENTRY_KEY > self._entry_words:
            self._grow(len(record) + index_layout.ENTRY_KEY)
        entry = self._free.pop()
        self._kernels.write(self._words, self._num_buckets, self._entry_words, entry, record)
        self._entry_of[key] = entry

    def _remove(self, key: bytes) -> None:
        entry = self._entry_of.pop(key, None)
        if entry is not None:
            self._kernels.erase(self._words, self._num_buckets, self._entry_words, entry)
            self._free.append(entry)

    def _grow(self, record_words: int) -> None:
        """Replace the index by one with twice the entries, or with larger entries of `record_words`."""
        old, words, at_of = self.memory, self._words, {key: self._at(entry) for key, entry in self._entry_of.items()}
        record_words = max(record_words, self._entry_words)
        num_entries = self._num_entries * (1 if self._free else 2)
        old_words = self._entry_words
        self._create(num_entries, -(-record_words // 8) * 8)
        self._entry_of = {}
        for key, at in at_of.items():
            self._add(key, words[at + index_layout.ENTRY_KEY : at + old_words].copy())
        words[index_layout.AT_STATE] = index_layout.MOVED
        old.close()

    def _create(self, num_entries: int, entry_words: int) -> None:
        self._num_entries, self._entry_words = num_entries, entry_words
        self._num_buckets = 1 << (2 * num_entries - 1).bit_length()  # at most half full
        num_words = index_layout.index_words(self._num_buckets, num_entries, entry_words)
        self.memory = SharedMemory.create(8 * num_words, "moonpool-index")
        self._words: NDArray[np.uint64] = self.memory.array.view(np.uint64)
        self._words[index_layout.AT_INCARNATION] = self._incarnation
        self._words[index_layout.AT_BUCKETS] = self._num_buckets
        self._words[index_layout.AT_ENTRIES] = num_entries
        self._words[index_layout.AT_ENTRY_WORDS] = entry_words
        self._words[index_layout.AT_FORMAT] = index_layout.FORMAT
        self._words[index_layout.AT_MAGIC] = index_layout.MAGIC
        self._free = list(range(num_entries - 1, -1, -1))

    def _at(self, entry: int) -> int:
        return index_layout.HEADER_WORDS + self._num_buckets + entry * self._entry_words


def _record(block: Block) -> NDArray[np.uint64]:
    """Return the words of a block's entry, from its key on, uint64 [words]."""
    digests, offsets = b"".join(block.digests), block.offsets
    groups, layers = len(offsets), len(digests) // 8
    shape = block.num_tokens << index_layout.SHAPE_TOKENS_SHIFT | groups << index_layout.SHAPE_GROUPS_SHIFT | layers
    numbers = struct.pack(f"<{1 + groups}Q", shape, *offsets)
    return np.frombuffer(block.key + numbers + digests, np.uint64)
