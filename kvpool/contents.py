"""One number for all that a pool node holds, kept up with every change: by it a directory proves that it is right.

The sum modulo 2^64, over a node's blocks, of splitmix64 (Steele et al., OOPSLA 2014) of the block's short key, its
namespace and its tier: independent of order, and one addition or subtraction
per change. It is proof against errors, not against forgery.
"""

import numpy as np

from kvpool.address import KEY_NBYTES, Namespace, short_keys_from_bytes
from kvpool.errors import AddressError
from kvpool.tiers import Tier

__all__ = ["contents_sum", "fold_of"]

_GAMMA, _MULTIPLIER1, _MULTIPLIER2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_M1, _M2 = np.uint64(_MULTIPLIER1), np.uint64(_MULTIPLIER2)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)
_FEW = 8  # blocks that plain numbers are quicker with than arrays
_MASK = 2**64 - 1


def fold_of(kv_namespace: Namespace) -> int:
    """What a block's short key is XORed with, so that equal chains in two namespaces are two blocks."""
    if len(kv_namespace) != KEY_NBYTES:
        raise AddressError(f"a namespace of {len(kv_namespace)} bytes: expected {KEY_NBYTES}")
    return int.from_bytes(kv_namespace[:8], "little")


def contents_sum(kv_namespace: Namespace, chain: bytes, tier: Tier) -> int:
    """What the blocks of `chain` (16 bytes each) add to the number."""
    if len(chain) <= _FEW * KEY_NBYTES and len(chain) % KEY_NBYTES == 0:
        return _sum_of_few(fold_of(kv_namespace), chain, _GAMMA * int(tier))
    keys = short_keys_from_bytes(chain) ^ np.uint64(fold_of(kv_namespace))
    x = keys + np.uint64(_GAMMA * int(tier) % 2**64)
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    return int((x ^ (x >> _S31)).sum(dtype=np.uint64))


def _sum_of_few(fold: int, chain: bytes, shift: int) -> int:
    total = 0
    for at in range(0, len(chain), KEY_NBYTES):
        x = ((int.from_bytes(chain[at : at + 8], "little") ^ fold) + shift) & _MASK
        x = ((x ^ (x >> 30)) * _MULTIPLIER1) & _MASK
        x = ((x ^ (x >> 27)) * _MULTIPLIER2) & _MASK
        total += x ^ (x >> 31)
    return total & _MASK
