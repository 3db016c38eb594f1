"""What a pool node tells directories: runs of blocks stored and removed, in numbered events. Data and its wire form.

Numbering: outside of a snapshot each BlockRun is one event, so a message of n runs that ends at `seq` holds the events
`seq - n + 1 .. seq`; a message without runs is a heartbeat. Within a message all `removed` come before all `stored`.
All messages of a snapshot carry the `seq` at which it was taken, and its runs carry no number of their own.
"""

from dataclasses import dataclass

from kvpool.errors import AddressError
from kvpool.tiers import Tier
from moonpool_proto.v1 import pool_pb2

__all__ = ["BlockRun", "PoolEvents"]


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks of one namespace: `chain` is 16 bytes per block, not necessarily neighbours in any prompt.

    `tier` of stored blocks: the fastest that they are in now, which for a known block may be another than before.
    """

    kv_namespace: bytes
    chain: bytes
    tier: Tier = Tier.DRAM


@dataclass(frozen=True, slots=True)
class PoolEvents:
    """One message of a pool node's event stream; see the module for the numbering."""

    incarnation: int
    seq: int
    snapshot_begin: bool = False
    snapshot_end: bool = False
    stored: tuple[BlockRun, ...] = ()
    removed: tuple[BlockRun, ...] = ()
    contents_sum: int | None = None  # of all that the node holds as of `seq` (`kvpool.contents`); None: not told

    @property
    def first_seq(self) -> int:
        """Number of the first event in here (`seq + 1` for a heartbeat). Meaningless within a snapshot."""
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
