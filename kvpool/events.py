"""Block events of a pool node, as data and in their wire form, and the checksum that a directory verifies them with.

Numbering: outside of a snapshot each BlockRun is one event, so a message of n runs that ends at `seq` holds the events
`seq - n + 1 .. seq`; a message without runs is a heartbeat. Within a message all `removed` precede all `stored`. All
messages of a snapshot carry the `seq` at which it was taken, and its runs have no numbers of their own.

Contents sum: the sum modulo 2^64, over all blocks of a node, of splitmix64 (Steele et al., OOPSLA 2014) of the block's
short key, namespace and tier. It does not depend on order, and each change costs one addition or subtraction. It
detects errors, not forgery.
"""

import enum
from dataclasses import dataclass

import numpy as np

from jit.fast_dataclass import fast_dataclass
from kvpool.address import KEY_NBYTES, Namespace, short_keys_from_bytes
from kvpool.errors import AddressError
from moonpool_proto.v1 import pool_pb2


class Tier(enum.IntEnum):
    """Tier of a pool node that holds a block, from fast to slow. The values are those of the wire."""

    DRAM = 1
    SSD = 2


_GAMMA, _MULTIPLIER1, _MULTIPLIER2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_M1, _M2 = np.uint64(_MULTIPLIER1), np.uint64(_MULTIPLIER2)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)
_FEW = 8  # blocks up to which Python integers are faster than arrays
_MASK = 2**64 - 1


def fold_of(kv_namespace: Namespace) -> int:
    """Return the number that the short keys of a namespace are XORed with to tell apart equal chains in two namespaces.

    Raises AddressError unless the namespace has 16 bytes.
    """
    if len(kv_namespace) != KEY_NBYTES:
        raise AddressError(f"a namespace of {len(kv_namespace)} bytes: expected {KEY_NBYTES}")
    return int.from_bytes(kv_namespace[:8], "little")


def contents_sum(kv_namespace: Namespace, chain: bytes, tier: Tier) -> int:
    """Return the contribution of the blocks of `chain` (16 bytes each) to the contents sum."""
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


@fast_dataclass
@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks of one namespace; `chain` has 16 bytes per block. They need not be neighbours in any prompt.

    `tier` of stored blocks is the fastest tier that now has them; it may differ from the previous one.
    """

    kv_namespace: bytes
    chain: bytes
    tier: Tier = Tier.DRAM


@dataclass(frozen=True, slots=True)
class PoolEvents:
    """One message of a pool node's event stream; numbering as in the module's docstring."""

    incarnation: int
    seq: int
    snapshot_begin: bool = False
    snapshot_end: bool = False
    stored: tuple[BlockRun, ...] = ()
    removed: tuple[BlockRun, ...] = ()
    contents_sum: int | None = None  # of all blocks held as of `seq`; None: not reported

    @property
    def first_seq(self) -> int:
        """Number of the first event in the message (`seq + 1` for a heartbeat). Undefined within a snapshot."""
        return self.seq - len(self.stored) - len(self.removed) + 1

    def to_proto(self) -> pool_pb2.PoolEvents:
        return pool_pb2.PoolEvents(
            incarnation=self.incarnation,
            seq=self.seq,
            snapshot_begin=self.snapshot_begin,
            snapshot_end=self.snapshot_end,
            stored=[
                pool_pb2.BlockRun(
                    kv_namespace=run.kv_namespace, chain=run.chain, tier=pool_pb2.Tier.ValueType(run.tier)
                )
                for run in self.stored
            ],
            removed=[pool_pb2.BlockRun(kv_namespace=run.kv_namespace, chain=run.chain) for run in self.removed],
            contents_sum=self.contents_sum,
        )

    @classmethod
    def from_proto(cls, message: pool_pb2.PoolEvents) -> "PoolEvents":
        return cls(
            message.incarnation,
            message.seq,
            message.snapshot_begin,
            message.snapshot_end,
            tuple(BlockRun(run.kv_namespace, run.chain, _tier(run.tier)) for run in message.stored),
            tuple(BlockRun(run.kv_namespace, run.chain) for run in message.removed),
            message.contents_sum if message.HasField("contents_sum") else None,
        )


def _tier(value: int) -> Tier:
    try:
        return Tier(value)
    except ValueError as error:
        raise AddressError(f"stored blocks in tier {value}: expected 1 (DRAM) or 2 (SSD)") from error
