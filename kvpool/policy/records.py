"""Data types of the pool node's policy core. No behaviour beyond small derived values."""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from jit.fast_dataclass import fast_dataclass
from kvpool.events import Tier
from kvpool.policy.eviction import Resident, RetainingPolicy, Use
from kvpool.spec import KvSpec

BlockKey = bytes  # namespace (16) + chain key (16): the full address of a block, over all its groups
DRAM: Final = 0  # indices of the tiers in pairs
SSD: Final = 1
_NO_PARENT = bytes(16)


class SlotStatus(enum.IntEnum):
    """Result of an Allocate for one block; the values are those of the wire."""

    NEW = 1  # slots were allocated: write them, then seal
    EXISTS = 2  # sealed already, or being written by another put
    NO_SPACE = 3  # nothing (more) could be evicted for it


def block_key(kv_namespace: bytes, chain_key: bytes) -> BlockKey:
    return kv_namespace + chain_key


class PrefixNode:
    """Node of the prefix tree: the position of a block, kept without a block as long as it has followers.

    Copies in transit into a tier count as followers there, so that no copy leaves a tier before its followers.
    """

    __slots__ = (
        "block",
        "depth",
        "first",
        "following_dram",
        "following_ssd",
        "is_root",
        "key",
        "next",
        "num_following",
        "parent",
        "previous",
        "tails",
    )

    def __init__(self, key: BlockKey) -> None:
        self.key = key
        self.is_root = key[16:] == _NO_PARENT  # its followers are first blocks of prompts
        self.depth = -1  # blocks before it in its chain, as far as known; -1: root, or no block here
        self.block: Block | None = None
        self.parent: PrefixNode | None = None  # set while `block` is
        self.num_following = 0  # blocks that follow it
        self.following_dram = 0  # of them, those with a copy in DRAM, or on its way there
        self.following_ssd = 0
        self.tails: list[Block] | None = None  # of them, the partial ones, if there are any
        self.first: PrefixNode | None = None  # of the nodes that follow it, linked by `next` and `previous`
        self.next: PrefixNode | None = None
        self.previous: PrefixNode | None = None

    def following(self, tier: int) -> int:
        """Return the number of following blocks with a copy in this tier, or on its way there."""
        return self.following_dram if tier == DRAM else self.following_ssd

    def children(self) -> Iterator["PrefixNode"]:
        """Yield the nodes of the blocks that follow."""
        prefix_node = self.first
        while prefix_node is not None:
            yield prefix_node
            prefix_node = prefix_node.next


@dataclass(slots=True, eq=False)
class Partition:
    """Copies that can use each other's slots."""

    owner: bytes  # namespace with a quota, which alone uses it; empty: shared by all others
    sizes: tuple[int, ...]
    policy: RetainingPolicy
    num_namespaces: int = 0
    num_copies: int = 0


@dataclass(slots=True, eq=False)
class NamespaceState:
    """State of a namespace, whose blocks are of one spec. Pairs are by tier: DRAM, SSD."""

    kv_namespace: bytes
    spec: KvSpec
    sizes: tuple[tuple[int, ...], tuple[int, ...]]  # of a copy's slots: per group in DRAM, one extent on SSD
    nbytes: tuple[int, int]  # of a copy
    partitions: tuple[Partition, Partition]
    digests_nbytes: tuple[int, ...]  # per group
    quotas_nbytes: tuple[int | None, int | None] = (None, None)  # most bytes it may take; None: no limit
    used_nbytes: list[int] = field(default_factory=lambda: [0, 0])
    num_blocks: int = 0  # in the index
    num_copies: int = 0  # that hold slots

    def copies_in(self, tier: int) -> int:
        """Return the number of copies that hold slots of a tier."""
        return self.used_nbytes[tier] // self.nbytes[tier]


@dataclass(slots=True, eq=False)
class BlockCopy(Resident):
    """Copy of a block in one tier, with what the tier's policy records of it."""

    block: "Block" = field(kw_only=True)
    tier: int = field(kw_only=True)
    offsets: tuple[int, ...] = ()  # DRAM: per group, in the arena; SSD: of its extent
    ready: bool = False  # False: being written
    holds: int = 0  # number of leases, reads and writes; while positive, its slots are not reused
    gone: bool = False  # no longer in the tier; its slots are kept until `holds` is 0
    last_use: int = 0  # uses of all blocks of the tier so far, at the last use of this one
    promoted: bool = False  # loaded from SSD and not used since

    @property
    def other(self) -> "BlockCopy | None":
        """The block's copy in the other tier."""
        return self.block.ssd if self.tier == DRAM else self.block.dram


@dataclass(slots=True, eq=False)
class Block:
    """One block. While `put_id` is set, it is unsealed and visible to that put only."""

    prefix_node: PrefixNode
    namespace: NamespaceState
    put_id: str = ""
    num_tokens: int = 0  # of a partial block; 0 = full
    cost_s: float = 0.0  # seconds that computing it took; 0 = unknown
    digests: tuple[bytes, ...] = ()  # per group: uint64 little-endian per layer
    dram: BlockCopy | None = None
    ssd: BlockCopy | None = None
    removed: bool = False  # no longer in the index
    logged_tier: Tier | None = None  # tier in the last logged event; None: not stored
    replicas: int = 0  # on other nodes, as last reported
    num_uses: int = 0  # after the one that stored it
    num_read_errors: int = 0  # in a row
    num_write_errors: int = 0

    @property
    def key(self) -> BlockKey:
        return self.prefix_node.key

    @property
    def kv_namespace(self) -> bytes:
        return self.prefix_node.key[:16]

    @property
    def chain_key(self) -> bytes:
        return self.prefix_node.key[16:]

    @property
    def parent(self) -> BlockKey:
        """Address of the block before it; the chain key is zeros for a prompt's first block."""
        assert self.prefix_node.parent is not None
        return self.prefix_node.parent.key

    @property
    def copies(self) -> tuple[BlockCopy | None, BlockCopy | None]:
        """Copies in DRAM and on SSD; None where there is none."""
        return self.dram, self.ssd

    @property
    def spec(self) -> KvSpec:
        return self.namespace.spec

    @property
    def sealed(self) -> bool:
        return not self.put_id

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offsets of its slots in the arena, one per group; empty unless it is in DRAM or being written there."""
        copy = self.dram
        return copy.offsets if copy is not None and (copy.ready or self.put_id) else ()

    @property
    def ssd_offset(self) -> int | None:
        """Offset of its extent on SSD; None unless it is durable there."""
        copy = self.ssd
        return copy.offsets[0] if copy is not None and copy.ready else None

    @property
    def num_leases(self) -> int:
        dram, ssd = self.dram, self.ssd
        if dram is None or not dram.ready:
            return 0
        return dram.holds - (ssd is not None and not ssd.ready)


def is_evictable(copy: BlockCopy) -> bool:
    """Return True if the copy may be evicted: complete, without holds, and without followers in its tier.

    The last copy of a block must have no followers in any tier, because they could no longer be matched.
    """
    if not copy.ready or copy.holds or copy.gone:
        return False
    block = copy.block
    prefix_node = block.prefix_node
    if copy.tier == DRAM:
        return not prefix_node.following_dram and (block.ssd is not None or not prefix_node.num_following)
    return not prefix_node.following_ssd and (block.dram is not None or not prefix_node.num_following)


@fast_dataclass
@dataclass(frozen=True, slots=True)
class PutRequest:
    """Request of a client to store blocks, in the order of their chain."""

    kv_namespace: bytes
    spec: KvSpec
    chain: Sequence[bytes]  # chain keys, or tail keys of partial blocks
    parents: Sequence[bytes]  # per block the chain key of the block before it; 16 zero bytes for a prompt's first
    num_tokens: Sequence[int] = ()  # per block if any is partial; 0 = full
    compute_s: float = 0.0  # time that computing all the blocks took; 0 = unknown


@dataclass(slots=True)
class PutRecord:
    """Unsealed blocks whose slots their owner is writing; invisible to readers."""

    put_id: str
    owner: str
    owner_incarnation: int
    blocks: list[Block]
    expires_ns: int
    request_blocks: int  # from the prompt's first to the put's last


@dataclass(slots=True)
class LeaseRecord:
    """Copies in DRAM that an owner may read until `expires_ns`; their slots are kept until `kept_until_ns`."""

    lease_id: str
    owner: str
    owner_incarnation: int
    copies: list[BlockCopy]
    expires_ns: int
    kept_until_ns: int


@fast_dataclass
@dataclass(frozen=True, slots=True)
class MissingRun:
    """Missing blocks that follow each other, for `EvictionPolicy.expect`."""

    namespace: NamespaceState
    before: PrefixNode
    keys: Sequence[BlockKey]
    last_tokens: int  # of the last block; 0 = full


@fast_dataclass
@dataclass(frozen=True, slots=True)
class NewBlocks:
    """Blocks that a put added, in order, with slots and without bytes, and a status per block of its request."""

    status: list[SlotStatus]
    blocks: list[Block]
    use: Use
    runs: list["MissingRun"]  # of which the eviction policy has yet to know

    @property
    def offsets(self) -> list[tuple[int, ...]]:
        """Offsets of the blocks' slots in the arena, one per group."""
        return [copy.offsets for block in self.blocks if (copy := block.dram) is not None]


@fast_dataclass
@dataclass(frozen=True, slots=True)
class PutAllocation:
    """Result of an Allocate: a status per block, and the NEW blocks in order. `put_id` is empty if none is NEW."""

    put_id: str
    status: tuple[SlotStatus, ...]
    new_blocks: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """Result of a Pin: a lease on the longest leading run in DRAM and on tails after it; never empty."""

    lease_id: str
    blocks: tuple[Block, ...]
    expires_ns: int
    tails: tuple[Block, ...] = ()  # partial blocks right after the last of `blocks`; most recently used first
    num_from_ssd: int = 0  # of `blocks`, those that came from SSD since they were last used


class LoadOutcome(enum.Enum):
    """Result of reading a block from SSD."""

    OK = "ok"
    IO_ERROR = "io_error"  # the bytes could not be read; they may be read again
    CORRUPT = "corrupt"  # the bytes do not match the block's digests


@dataclass(frozen=True, slots=True, eq=False)
class TierLoad:
    """Load to execute, from SSD to DRAM. Both copies are held until `PoolCore.loaded`."""

    block: Block
    ssd_offset: int  # of the extent: all groups, one after the other
    offsets: tuple[int, ...]  # per group, in the arena


@dataclass(frozen=True, slots=True, eq=False)
class TierWrite:
    """Write to execute, from DRAM to SSD. Both copies are held until `PoolCore.written`."""

    block: Block
    offsets: tuple[int, ...]  # per group, in the arena
    ssd_offset: int  # of the extent: all groups, one after the other


@dataclass(frozen=True, slots=True)
class SsdBlock:
    """Block that the SSD store recovered when it was opened."""

    offset: int
    kv_namespace: bytes
    chain_key: bytes
    parent: bytes  # chain key of the block before it; zeros for a prompt's first
    spec: KvSpec
    digests: tuple[bytes, ...]  # per group: uint64 little-endian per layer
    num_tokens: int = 0  # of a partial block; 0 = full
    compute_s: float = 0.0  # time that computing it took; 0 = unknown
