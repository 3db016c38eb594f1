"""Notification that follows pushed KV: blocks of one layer, their digests, and the proof that the sender may push them.

Layout, little-endian and without padding: epoch u64, token of the reservation's key u64, layer u32, number of blocks
n u32; then the block indices u32 [n], their valid tokens u32 [n] and their digests u64 [n]. Pure.
"""

from __future__ import annotations

import hmac
import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

KV_TAG = b"kv"

_HEADER = struct.Struct("<Q8sII")
_TOKEN = struct.Struct("<Q")
_BLOCK_NBYTES = 4 + 4 + 8


class BadNotification(Exception):
    """The bytes are not a notification of pushed KV."""


class PushedBlocks(NamedTuple):
    """Blocks of one layer that were pushed."""

    layer: int
    blocks: NDArray[np.int64]  # [n], indices of the prompt's blocks
    valid: NDArray[np.int32]  # [n], tokens
    digests: NDArray[np.uint64]  # [n]


class KvNotification(NamedTuple):
    """Notification whose body has not been read yet: its size is checked, and nothing else."""

    epoch: int
    token: bytes
    layer: int
    body: memoryview

    @classmethod
    def unpack(cls, payload: bytes) -> KvNotification:
        """Return the notification. Raises BadNotification unless the payload has exactly the announced length."""
        if len(payload) < _HEADER.size:
            raise BadNotification(f"a notification of KV has at least {_HEADER.size} bytes, got {len(payload)}")
        epoch, token, layer, count = _HEADER.unpack_from(payload)
        if len(payload) != _HEADER.size + _BLOCK_NBYTES * count:
            raise BadNotification(f"a notification of {count} blocks has the wrong length, {len(payload)} bytes")
        return cls(epoch, token, layer, memoryview(payload)[_HEADER.size :])

    def proves(self, token: int) -> bool:
        """Return True if the sender knows the key's token; takes the same time for every wrong token."""
        return hmac.compare_digest(self.token, _TOKEN.pack(token))

    def pushed(self) -> PushedBlocks:
        """Return the blocks; every content of the body is a valid array."""
        count = len(self.body) // _BLOCK_NBYTES
        blocks, valid = np.frombuffer(self.body, "<u4", 2 * count).reshape(2, count)
        digests = np.frombuffer(self.body, "<u8", count, offset=8 * count)
        # Counts of tokens beyond int32 become negative, which no block has.
        return PushedBlocks(self.layer, blocks.astype(np.int64), valid.astype(np.int32), digests)


def pack_notification(epoch: int, token: int, pushed: PushedBlocks) -> bytes:
    """Return the payload that `KvNotification.unpack` reads."""
    return b"".join(
        (
            _HEADER.pack(epoch, _TOKEN.pack(token), pushed.layer, len(pushed.blocks)),
            pushed.blocks.astype("<u4").tobytes(),
            pushed.valid.astype("<u4").tobytes(),
            pushed.digests.astype("<u8").tobytes(),
        )
    )
