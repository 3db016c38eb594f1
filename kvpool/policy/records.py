"""The plain records that the pool node's policy keeps and returns. No behaviour beyond small derived values."""

import enum
from dataclasses import dataclass, field

from kvpool.spec import KvSpec

__all__ = [
    "Allocation",
    "Block",
    "BlockKey",
    "Lease",
    "LeaseGrant",
    "Load",
    "LoadOutcome",
    "Put",
    "SlotStatus",
    "SsdBlock",
    "Write",
    "block_key",
]

BlockKey = bytes  # namespace (16) + chain key (16): the full address of a block, over all its groups


class SlotStatus(enum.IntEnum):
    """What became of one block of an Allocate; the values are the wire's."""

    NEW = 1  # slots were given: write them, then seal
    EXISTS = 2  # sealed already, or being written by another put
    NO_SPACE = 3  # nothing (more) could be evicted for it


def block_key(kv_namespace: bytes, chain_key: bytes) -> BlockKey:
    return kv_namespace + chain_key


@dataclass(slots=True, eq=False)
class Block:
    """One block and its slots, one per group. Not yet sealed while `put_id` is set."""

    key: BlockKey
    parent: BlockKey
    spec: KvSpec
    offsets: tuple[int, ...]  # per group, in the arena
    put_id: str = ""
    digests: tuple[bytes, ...] = ()  # per group: uint64 little-endian per layer
    num_leases: int = 0
    last_use: int = 0
    removed: bool = False  # out of the index; its slots are kept for the leases it still has
    num_tokens: int = 0  # of a partial block; 0 = full
    ssd_offset: int | None = None  # of its extent on SSD, all groups one after the other; None: not there

    @property
    def kv_namespace(self) -> bytes:
        return self.key[:16]

    @property
    def chain_key(self) -> bytes:
        return self.key[16:]

    @property
    def sealed(self) -> bool:
        return not self.put_id


@dataclass(slots=True)
class Put:
    """Slots being written by their owner; nothing of them is visible."""

    put_id: str
    owner: str
    owner_incarnation: int
    blocks: list[Block]
    expires_ns: int


@dataclass(slots=True)
class Lease:
    """Blocks an owner may read until `expires_ns`; their slots are kept until `kept_until_ns`."""

    lease_id: str
    owner: str
    owner_incarnation: int
    blocks: list[Block]
    expires_ns: int
    kept_until_ns: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """Answer to an Allocate: a status per block, and the NEW blocks in order. `put_id` is empty when none is new."""

    put_id: str
    status: tuple[SlotStatus, ...]
    new_blocks: tuple[Block, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """Answer to a Pin: a lease on the longest leading run of blocks in DRAM and on tails after it; never of nothing."""

    lease_id: str
    blocks: tuple[Block, ...]
    expires_ns: int
    tails: tuple[Block, ...] = ()  # partial blocks right after the last of `blocks`; most recently used first


class LoadOutcome(enum.Enum):
    """How the reading of a block from SSD ended."""

    OK = "ok"
    IO_ERROR = "io_error"  # nothing is known of the bytes: they may be read again
    CORRUPT = "corrupt"  # they do not have the block's digests


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """To be read from SSD into DRAM now. Both places are kept for it until `PoolCore.loaded`."""

    block: Block
    ssd_offset: int  # all groups one after the other
    offsets: tuple[int, ...]  # per group, in the arena


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """To be written from DRAM to SSD now. Both places are kept for it until `PoolCore.written`."""

    block: Block
    offsets: tuple[int, ...]  # per group, in the arena
    ssd_offset: int  # all groups one after the other


@dataclass(frozen=True, slots=True)
class SsdBlock:
    """A block that the SSD store has found at its start."""

    offset: int
    kv_namespace: bytes
    chain_key: bytes
    parent: bytes  # chain key of the block before it; zeros for a prompt's first
    spec: KvSpec
    digests: tuple[bytes, ...]  # per group: uint64 little-endian per layer
    num_tokens: int = 0  # of a partial block; 0 = full
