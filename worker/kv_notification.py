"""Notification that follows pushed KV: blocks of consecutive layers, their digests, and the proof that the sender may
push them.

Layout, little-endian and without padding: epoch u64, token of the reservation's key u64, first layer u16, number of
further layers m u16, number of blocks n u32; then the block indices u32 [n], their valid tokens u32 [n] and their
digests u64 [m + 1, n]. With m = 0 these are the bytes that nodes understand which know of no further layers. Pure.
"""

from __future__ import annotations

import hmac
import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

KV_TAG = b"kv"

_HEADER = struct.Struct("<Q8sHHI")
_TOKEN = struct.Struct("<Q")
_BLOCK_NBYTES, _DIGEST_NBYTES = 4 + 4, 8


class BadNotification(Exception):
    """The bytes are not a notification of pushed KV."""


class PushedBlocks(NamedTuple):
    """Blocks of consecutive layers that were pushed."""

    layers: range
    blocks: NDArray[np.int64]  # [n], indices of the prompt's blocks
    valid: NDArray[np.int32]  # [n], tokens
    digests: NDArray[np.uint64]  # [layers, n]


class KvNotification(NamedTuple):
    """Notification whose body has not been read yet: its size is checked, and nothing else."""

    epoch: int
    token: bytes
    layers: range
    num_blocks: int
    body: memoryview

    @classmethod
    def unpack(cls, payload: bytes) -> KvNotification:
        """Return the notification. Raises BadNotification unless the payload has exactly the announced length."""
        if len(payload) < _HEADER.size:
            raise BadNotification(f"a notification of KV has at least {_HEADER.size} bytes, got {len(payload)}")
        epoch, token, first, further, count = _HEADER.unpack_from(payload)
        layers = range(first, first + further + 1)
        if len(payload) != _HEADER.size + count * (_BLOCK_NBYTES + _DIGEST_NBYTES * len(layers)):
            raise BadNotification(
                f"a notification of {count} blocks of {len(layers)} layers has the wrong length, {len(payload)} bytes"
            )
        return cls(epoch, token, layers, count, memoryview(payload)[_HEADER.size :])

    def proves(self, token: int) -> bool:
        """Return True if the sender knows the key's token; takes the same time for every wrong token."""
        return hmac.compare_digest(self.token, _TOKEN.pack(token))

    def pushed(self) -> PushedBlocks:
        """Return the blocks; every content of the body is a valid array."""
        count = self.num_blocks
        blocks, valid = np.frombuffer(self.body, "<u4", 2 * count).reshape(2, count)
        digests = np.frombuffer(self.body, "<u8", offset=_BLOCK_NBYTES * count).reshape(len(self.layers), count)
        # Counts of tokens beyond int32 become negative, which no block has.
        return PushedBlocks(self.layers, blocks.astype(np.int64), valid.astype(np.int32), digests)


def pack_notification(epoch: int, token: int, pushed: PushedBlocks) -> bytes:
    """Return the payload that `KvNotification.unpack` reads."""
    return b"".join(
        (
            _HEADER.pack(epoch, _TOKEN.pack(token), pushed.layers.start, len(pushed.layers) - 1, len(pushed.blocks)),
            pushed.blocks.astype("<u4").tobytes(),
            pushed.valid.astype("<u4").tobytes(),
            pushed.digests.astype("<u8").tobytes(),
        )
    )
