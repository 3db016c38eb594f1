"""Writer of the shared index: the blocks in DRAM, their slots and their digests.

There is one writer, in the pool node's event loop, and any number of readers in processes that have mapped the index;
`kvpool.local.index_layout` describes their synchronisation.

Lifetime of a block's entry: written after the block's bytes are complete, erased before its slots may be written again.
Lifetime of an index: when it is full, its entries are copied to a larger one, and only then is it marked as MOVED.
Readers keep their mapping until they find the mark.
"""

import functools
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

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
        last = {block.key: block if added else None for added, block in changes}
        self._remove([key for key in last if key in self._entry_of])
        self._add({key: _record(block) for key, block in last.items() if block is not None})

    def close(self) -> None:
        """Mark the index as closed, which readers see at their next look-up, and release it."""
        self._words[index_layout.AT_STATE] = index_layout.CLOSED
        self.memory.close()

    def validate(self, blocks: Iterable[Block]) -> list[str]:
        """Return descriptions of all differences from `blocks`, those in DRAM; empty if there are none."""
        expected = {block.key: np.frombuffer(_record(block), np.uint64) for block in blocks}
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

    def _add(self, records: Mapping[bytes, bytes]) -> None:
        """Add entries by their blocks' keys, those of one length at a time."""
        by_length: defaultdict[int, list[bytes]] = defaultdict(list)
        for key, record in records.items():
            by_length[len(record)].append(key)
        for nbytes, keys in by_length.items():
            record_words = nbytes // 8
            if len(self._free) < len(keys) or record_words + index_layout.ENTRY_KEY > self._entry_words:
                self._grow(len(keys), record_words + index_layout.ENTRY_KEY)
            entries = self._free[-len(keys) :]
            del self._free[-len(keys) :]
            words = np.frombuffer(b"".join([records[key] for key in keys]), np.uint64).reshape(-1, record_words)
            self._kernels.write(self._words, self._num_buckets, self._entry_words, np.array(entries, np.int64), words)
            self._entry_of.update(zip(keys, entries, strict=True))

    def _remove(self, keys: Sequence[bytes]) -> None:
        if keys:
            entries = [self._entry_of.pop(key) for key in keys]
            self._kernels.erase(self._words, self._num_buckets, self._entry_words, np.array(entries, np.int64))
            self._free += entries

    def _grow(self, num_more: int, entry_words: int) -> None:
        """Replace the index by one with room for more entries, or with larger ones of at least `entry_words`."""
        old, words, at_of = self.memory, self._words, {key: self._at(entry) for key, entry in self._entry_of.items()}
        num_entries, old_words = self._num_entries, self._entry_words
        while num_entries < len(at_of) + num_more:
            num_entries *= 2
        self._create(num_entries, -(-max(entry_words, old_words) // 8) * 8)
        self._entry_of = {}
        self._add({key: words[at + index_layout.ENTRY_KEY : at + old_words].tobytes() for key, at in at_of.items()})
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


def _record(block: Block) -> bytes:
    """Return the words of a block's entry, from its key on."""
    offsets, digests = block.offsets, block.digests[0] if len(block.digests) == 1 else b"".join(block.digests)
    groups, layers = len(offsets), len(digests) // 8
    shape = block.num_tokens << index_layout.SHAPE_TOKENS_SHIFT | groups << index_layout.SHAPE_GROUPS_SHIFT | layers
    return block.key + _numbers(1 + groups).pack(shape, *offsets) + digests


@functools.cache
def _numbers(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}Q")
