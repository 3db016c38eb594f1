"""Memories as the compiled copies take them, and checked copies and digests of blocks between memories."""

import functools
import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import SpecError
from kvpool.spec import GROUP_LAYOUT, KvSpec

_NO_WORDS = np.empty(0, np.uint32)
_NOT_TOLD = np.empty((0, 0), np.uint64)


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
        """Serialised spec, as PutBlocks carries it."""
        return self.spec.to_proto().SerializeToString()

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Per group, the end of its digests among a block's digests, in bytes."""
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
    expected: NDArray[np.uint64] | None,
) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
    """Copy slots from `starts` to `targets`, both [groups, n], its first `num_tokens` [n] tokens each (0: all).

    Returns whether each block has the `expected` digests [n, layers of all groups] (None: any will do), and the digests
    of what was written. Runs without the GIL. Raises SpecError, before anything is copied, when a slot lies outside or
    the arrays do not fit.
    """
    n, shape = len(num_tokens), (len(num_tokens), layout.num_layers)
    told = _NOT_TOLD if expected is None else expected
    if starts.shape != (layout.spec.num_groups, n) or targets.shape != starts.shape:
        raise SpecError(
            f"slots {starts.shape} and {targets.shape} of {n} blocks: expected [{layout.spec.num_groups}, n]"
        )
    if expected is not None and expected.shape != shape:
        raise SpecError(f"digests of shape {expected.shape}: expected [{n}, {layout.num_layers}]")
    right, digests = np.empty(n, np.uint8), np.empty(shape, np.uint64)
    done = _kernels()[0](source.both, starts, target.both, targets, layout.groups, num_tokens, told, (digests, right))
    if done:
        raise _not_done(done, f"{len(source.array)} bytes to copy from, {len(target.array)} to copy to", layout)
    return right.view(np.bool_), digests


def digest_blocks(
    memory: MappedBytes, offsets: NDArray[np.int64], layout: SpecLayout, num_tokens: NDArray[np.uint32]
) -> NDArray[np.uint64]:
    """Return digests [n, layers of all groups] of blocks at `offsets` [groups, n], over the first `num_tokens` tokens
    (0: all).

    Same as `kvpool.digest.layer_digests_at` of each group, in one call. Releases the GIL. Raises SpecError.
    """
    if offsets.shape != (layout.spec.num_groups, len(num_tokens)):
        raise SpecError(f"offsets of shape {offsets.shape}: expected [{layout.spec.num_groups}, {len(num_tokens)}]")
    digests = np.empty((len(num_tokens), layout.num_layers), np.uint64)
    done = _kernels()[1](memory.both, offsets, layout.groups, num_tokens, digests)
    if done:
        raise _not_done(done, f"{len(memory.array)} bytes", layout)
    return digests


def warm_up() -> None:
    """Compile, or load from the cache, the kernels that copies and digests run on."""
    _kernels()


@functools.cache
def _kernels() -> tuple[Any, Any]:
    """Copy and digest. Numba takes half a second to import: only who copies waits for it."""
    from kvpool.local.copy_kernels import copy_kernel, digest_kernel

    return copy_kernel(), digest_kernel()


def _not_done(why: int, space: str, layout: SpecLayout) -> SpecError:
    from kvpool.local.copy_kernels import OUT_OF_BOUNDS

    if why == OUT_OF_BOUNDS:
        return SpecError(f"a slot lies beyond memory of {space}")
    return SpecError(f"a block of more than {layout.spec.block_tokens} tokens, which are a full one")
