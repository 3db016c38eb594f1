"""Copies of blocks between memories and digests of blocks, with checked arguments; compiled, without the GIL."""

import functools
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import SpecError
from kvpool.helper_threads import HelperThreads
from kvpool.spec import GROUP_LAYOUT, KvSpec

_NO_WORDS = np.empty(0, np.uint32)
SHARED_NBYTES = 4 << 20  # copies from here on pay to be shared: waking a helper takes as long as copying some of it
_MAX_HELPERS = 3  # more would hardly be faster: the memory's bandwidth is used up


@dataclass(frozen=True)
class SpecLayout:
    """KvSpec with the derived values that the compiled copies need."""

    spec: KvSpec

    @cached_property
    def num_layers(self) -> int:
        """Number of layers over all groups."""
        return sum(self.spec.num_layers(g) for g in range(self.spec.num_groups))

    @cached_property
    def block_nbytes(self) -> int:
        """Bytes of a block over all groups."""
        return self.spec.block_nbytes

    @cached_property
    def proto_bytes(self) -> bytes:
        """The serialised spec, for PutBlocks."""
        return self.spec.to_proto().SerializeToString()

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """End offset of each group's digests within a block's digests, in bytes."""
        return tuple(8 * end for end in itertools.accumulate(len(group.layers) for group in self.spec.groups))

    @cached_property
    def groups(self) -> NDArray[np.void]:
        """GROUP_LAYOUT [groups], for the compiled copies."""
        rows = [
            (
                self.spec.block_tokens,
                len(group.layers),
                self.spec.layer_nbytes(g),
                group.kv_heads * 2,
                group.token_row_nbytes,
            )
            for g, group in enumerate(self.spec.groups)
        ]
        return np.array(rows, GROUP_LAYOUT)


@dataclass(frozen=True, eq=False)
class MappedBytes:
    """Contiguous bytes, and the same memory as words if it starts at a multiple of 4."""

    array: NDArray[np.uint8]
    words: NDArray[np.uint32]

    @property
    def both(self) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
        """(bytes, words), as the compiled copies take a memory."""
        return self.array, self.words

    @classmethod
    def of(cls, array: NDArray[np.uint8]) -> "MappedBytes":
        """Wrap `array`. Raises SpecError unless it is uint8 [nbytes], contiguous."""
        if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
            raise SpecError(f"memory is {array.dtype} of shape {array.shape}: expected contiguous uint8 [nbytes]")
        if array.ctypes.data % 4:
            return cls(array, _NO_WORDS)
        return cls(array, array[: len(array) // 4 * 4].view(np.uint32))


def copy_blocks(
    source: MappedBytes,
    starts: NDArray[np.int64],
    target: MappedBytes,
    targets: NDArray[np.int64],
    layout: SpecLayout,
    num_tokens: NDArray[np.uint32],
    helpers: HelperThreads | None = None,
    *,
    with_digests: bool = True,
) -> NDArray[np.uint64]:
    """Copy blocks from byte offsets `starts` of `source` to `targets` of `target`, both int64 [groups, n].

    Of each block, the first `num_tokens` uint32 [n] tokens are copied (0: all). Returns the digests of the written
    bytes, uint64 [n, layers of all groups]; without `with_digests`, whole slots are copied, and none are returned.
    Releases the GIL. `helpers` copy a part if there is much. Raises SpecError, before anything is copied, if a slot is
    out of bounds, a block has too many tokens, or shapes do not match.
    """
    n = len(num_tokens)
    if starts.shape != (layout.spec.num_groups, n) or targets.shape != starts.shape:
        raise SpecError(
            f"slots {starts.shape} and {targets.shape} of {n} blocks: expected [{layout.spec.num_groups}, n]"
        )
    digests = np.empty((n, layout.num_layers) if with_digests else (0, 0), np.uint64)
    kernel, results = _kernels()[0], []
    cursor = np.zeros(1, np.int64)

    def run() -> None:
        results.append(kernel(source.both, starts, target.both, targets, layout.groups, num_tokens, digests, cursor))

    if helpers is None or n * layout.block_nbytes < SHARED_NBYTES:
        run()
    else:
        helpers.share(run, _MAX_HELPERS).finish()
    if results[0]:
        raise not_copied(results[0], source, target, layout)
    return digests


def copy_helpers(name: str, at_start: Callable[[], None] = lambda: None) -> HelperThreads:
    """Return as many helpers for `copy_blocks` as pay: none on one core."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return HelperThreads(min(cores - 1, _MAX_HELPERS), name, at_start)


def matches(digests: NDArray[np.uint64], expected: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Compare digests of blocks [n, layers] with the expected ones. Returns bool [n]. Raises SpecError."""
    if expected.shape != digests.shape:
        raise SpecError(f"digests of shape {expected.shape}: expected {list(digests.shape)}")
    result: NDArray[np.bool_] = (digests == expected).all(axis=1)
    return result


def digest_blocks(
    memory: MappedBytes, offsets: NDArray[np.int64], layout: SpecLayout, num_tokens: NDArray[np.uint32]
) -> NDArray[np.uint64]:
    """Return the digests, uint64 [n, layers of all groups], of blocks at byte `offsets` int64 [groups, n] of `memory`.

    The first `num_tokens` uint32 [n] tokens of each block count (0: all). Equals `kvpool.digest.layer_digests_at` of
    each group, in one call. Releases the GIL. Raises SpecError as `copy_blocks`.
    """
    if offsets.shape != (layout.spec.num_groups, len(num_tokens)):
        raise SpecError(f"offsets of shape {offsets.shape}: expected [{layout.spec.num_groups}, {len(num_tokens)}]")
    digests = np.empty((len(num_tokens), layout.num_layers), np.uint64)
    done = _kernels()[1](memory.both, offsets, layout.groups, num_tokens, digests)
    if done:
        raise _not_done(done, f"{len(memory.array)} bytes", layout)
    return digests


def warm_up() -> None:
    """Compile the kernels of copies and digests, or load them from the cache."""
    _kernels()


@functools.cache
def _kernels() -> tuple[Any, Any]:
    """Return the kernels (copy, digest)."""
    # Imported late: numba takes half a second to import, and only processes that copy need it.
    from kvpool.local.copy_kernels import copy_kernel, digest_kernel

    return copy_kernel(), digest_kernel()


def not_copied(why: int, source: MappedBytes, target: MappedBytes, layout: SpecLayout) -> SpecError:
    """Return the error for what the copy kernel returned instead of DONE."""
    return _not_done(why, f"{len(source.array)} bytes to copy from, {len(target.array)} to copy to", layout)


def _not_done(why: int, space: str, layout: SpecLayout) -> SpecError:
    from kvpool.local.copy_kernels import OUT_OF_BOUNDS

    if why == OUT_OF_BOUNDS:
        return SpecError(f"a slot lies beyond memory of {space}")
    return SpecError(f"num_tokens must be at most block_tokens ({layout.spec.block_tokens})")
