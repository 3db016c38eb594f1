"""Gets from the arena: look blocks up in the mapped index, copy them, and check that they stayed in place meanwhile."""

import functools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.helper_threads import HelperThreads
from kvpool.local import block_copy, index_layout
from kvpool.local.block_copy import SHARED_NBYTES, MappedBytes, SpecLayout, copy_blocks, matches, not_copied

if TYPE_CHECKING:
    from kvpool.local.index_kernels import IndexKernels

_STEP_NBYTES = 32 << 20  # copied between look-up and check: a block evicted in between counts as a miss


class MappedIndex(NamedTuple):
    """A mapped index, uint64 [words], and its shape, int64 (buckets, entries, entry_words)."""

    words: NDArray[np.uint64]
    shape: NDArray[np.int64]


class BlockTarget(NamedTuple):
    """Memory to copy blocks into, and their byte offsets there, int64 [groups, n]."""

    memory: MappedBytes
    offsets: NDArray[np.int64]


def match_blocks(index: MappedIndex, name: NDArray[np.uint64], keys: NDArray[np.uint64]) -> tuple[int, int]:
    """Return (number of leading blocks of `keys` uint64 [n, 2] in the index, reason for ending there)."""
    count, why = _kernels().match(index.words, index.shape, name, keys)
    return int(count), int(why)


class BlockReader:
    """Reader of the blocks in an arena, for any number of threads. `helpers` share large copies."""

    def __init__(self, arena: MappedBytes, helpers: HelperThreads | None) -> None:
        self._arena, self._helpers = arena, helpers

    def get(
        self,
        index: MappedIndex,
        name: NDArray[np.uint64],
        keys: NDArray[np.uint64],
        layout: SpecLayout,
        target: BlockTarget,
        first_block: int = 0,
        *,
        verify: bool = True,
    ) -> tuple[int, int]:
        """Copy blocks of `keys` uint64 [n, 2] from `first_block` on, as `LocalPoolClient.get`.

        Returns (number of leading blocks copied and valid, reason for ending there: FOUND, MISSING, CORRUPT or STALE).
        """
        done, step = first_block, max(1, _STEP_NBYTES // max(1, layout.block_nbytes))
        while done < len(keys):
            part = keys[: min(done + step, len(keys))]
            done, why = self._get_some(index, name, part, layout, target, done, verify)
            if why != index_layout.FOUND:
                return done, why
        return done, index_layout.FOUND

    def _get_some(
        self,
        index: MappedIndex,
        name: NDArray[np.uint64],
        keys: NDArray[np.uint64],
        layout: SpecLayout,
        target: BlockTarget,
        first: int,
        verify: bool,
    ) -> tuple[int, int]:
        kernels, n = _kernels(), len(keys)
        arena, memory, words = self._arena, target.memory, (index.words, index.shape)
        if self._helpers is None or (n - first) * layout.block_nbytes < SHARED_NBYTES:
            destination = memory.both, target.offsets
            end, why = kernels.get(words, name, keys, layout.groups, arena.both, destination, first, verify)
            if end < 0:
                raise not_copied(why, arena, memory, layout)
            return int(end), int(why)
        places, num_tokens = np.empty((n, 2), np.uint64), np.empty(n, np.uint32)
        offsets, expected = np.empty((len(layout.groups), n), np.int64), np.empty((n, layout.num_layers), np.uint64)
        found = offsets, num_tokens, expected
        end, why = kernels.locate(words, name, keys, layout.groups, len(arena.array), first, places, found)
        if end == first:
            return int(end), int(why)
        starts = np.ascontiguousarray(offsets[:, first:end])
        targets = np.ascontiguousarray(target.offsets[:, first:end])
        tokens = num_tokens[first:end]
        digests = copy_blocks(arena, starts, memory, targets, layout, tokens, self._helpers, with_digests=verify)
        still, changed = kernels.confirm(index.words, places, first, end)
        if verify:
            wrong = np.flatnonzero(~matches(digests, expected[first:end]))
            if len(wrong) and first + wrong[0] < still:
                return int(first + wrong[0]), index_layout.CORRUPT
        return (int(end), int(why)) if still == end else (int(still), int(changed))


def warm_up() -> None:
    """Compile the kernels of gets, or load them from the cache."""
    _kernels()
    block_copy.warm_up()


@functools.cache
def _kernels() -> "IndexKernels":
    # Imported late: numba takes half a second to import, and only processes with a local pool need it.
    from kvpool.local.index_kernels import index_kernels

    return index_kernels()
