"""Data that a pool client returns: descriptions, put tickets, leases, tails; and their wire forms."""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import SpecError
from kvpool.policy.records import SlotStatus
from kvpool.spec import KvSpec
from messenger import Endpoint, RemoteKey
from moonpool_proto.v1 import pool_pb2, worker_pb2


@dataclass(frozen=True)
class PoolDescription:
    """Identity of a pool node, its messenger's address and the size of the region it serves."""

    node_id: str
    incarnation: int
    endpoint: Endpoint
    arena_bytes: int
    ssd_bytes: int = 0  # 0: no SSD tier
    local_socket: str = ""  # unix socket of the LocalPoolServer; empty: none


@dataclass(frozen=True, eq=False)
class PutTicket:
    """Permission to write the NEW blocks of a put, which must then be sealed or aborted.

    `key` permits writing to one window that spans all slots of the put and possibly slots of others: write only at
    `offsets`. It is revoked when the put is sealed, aborted or expires. None if no block is NEW.
    """

    put_id: str
    key: RemoteKey | None
    endpoint: Endpoint
    status: list[SlotStatus]  # per requested block
    new_blocks: list[int]  # indices of the NEW blocks
    offsets: NDArray[np.int64]  # [groups, n_new], from the start of the pool's region


@dataclass(frozen=True, eq=False)
class Tail:
    """Partial block right after a leased run, leased with it; reusable if `key` equals the prompt's own tail key."""

    key: bytes  # 16 bytes, `tail_key` of its tokens
    num_tokens: int
    offsets: NDArray[np.int64]  # [groups], from the start of the pool's region
    digests: list[NDArray[np.uint64]]  # per group [layers], over the first `num_tokens` tokens


@dataclass(frozen=True, eq=False)
class Lease:
    """Blocks that may be read until the lease ends. Data read is valid if its digests equal those given here.

    `key` permits reading the whole region. A lease decoded from a PullRange belongs to its sender: it has no id, chain
    or tails, and only the sender can renew or release it. A lease may consist of tails only.
    """

    lease_id: str
    key: RemoteKey
    endpoint: Endpoint
    offsets: NDArray[np.int64]  # [groups, num_blocks], from the start of the pool's region
    digests: list[NDArray[np.uint64]]  # per group [num_blocks, layers]
    chain: NDArray[np.uint8] = field(default_factory=lambda: np.empty((0, 16), np.uint8))  # [num_blocks, 16]
    spec: KvSpec | None = None  # as stored at the pool node
    ssd_blocks: int = 0  # number of blocks that were loaded from SSD for this lease
    tails: tuple[Tail, ...] = ()  # after the last block; most recently used first
    first_block: int = 0  # index of the first block in the chain that was requested

    @property
    def num_blocks(self) -> int:
        return int(self.offsets.shape[1])

    def head(self, n: int) -> "Lease":
        """Return a view of the lease with its first `n` blocks; it has no tails unless it has all blocks."""
        tails = self.tails if n >= self.num_blocks else ()
        digests = [each[:n] for each in self.digests]
        return replace(self, offsets=self.offsets[:, :n], digests=digests, chain=self.chain[:n], tails=tails)

    def to_pull_range(self, first_block: int) -> worker_pb2.PullRange:
        """Encode the lease for another process that reads under it.

        `first_block` is the index, in the prompt, of the lease's first block.
        """
        return worker_pb2.PullRange(
            endpoint=self.endpoint.to_proto(),
            key=worker_pb2.RemoteKey(packed=self.key.pack()),
            first_block=first_block,
            blocks=pull_blocks(self.offsets, self.digests),
        )

    @classmethod
    def from_pull_range(cls, message: worker_pb2.PullRange, spec: KvSpec) -> "Lease":
        """Decode a lease. Raises SpecError if the blocks do not match the spec, InvalidArgument for a malformed key."""
        offsets, digests = from_pull_blocks(list(message.blocks), [spec.num_layers(g) for g in range(spec.num_groups)])
        key, endpoint = RemoteKey.unpack(message.key.packed), Endpoint.from_proto(message.endpoint)
        return cls("", key, endpoint, offsets, digests, spec=spec)

    @classmethod
    def from_pin_reply(cls, reply: pool_pb2.PinReply, chain: NDArray[np.uint8]) -> "Lease":
        """Decode the lease that a reply granted for the requested `chain` [n, 16].

        Raises SpecError, also for blocks that were not requested, and InvalidArgument as `from_pull_range`.
        """
        end = reply.first_block + len(reply.blocks)
        if end > len(chain):
            raise SpecError(
                f"a pool node leased blocks {reply.first_block} to {end - 1} of {len(chain)} requested ones"
            )
        spec = KvSpec.from_proto(reply.spec)
        num_layers = [spec.num_layers(g) for g in range(spec.num_groups)]
        offsets, digests = from_pull_blocks(list(reply.blocks), num_layers)
        tail_offsets, tail_digests = from_pull_blocks([tail.block for tail in reply.tails], num_layers)
        tails = tuple(
            Tail(tail.key, tail.num_tokens, tail_offsets[:, i], [each[i] for each in tail_digests])
            for i, tail in enumerate(reply.tails)
        )
        return cls(
            reply.lease_id,
            RemoteKey.unpack(reply.key.packed),
            Endpoint.from_proto(reply.endpoint),
            offsets,
            digests,
            chain[reply.first_block : end],
            spec,
            reply.ssd_blocks,
            tails,
            reply.first_block,
        )


@dataclass(frozen=True)
class Flushed:
    """Result of a flush: blocks removed, and blocks kept because they were in use."""

    removed: int
    kept: int


@dataclass(frozen=True)
class Verified:
    """Progress of a verification, in copies of blocks; a block in both tiers has two."""

    checked: int
    total: int
    corrupt: int  # removed from the pool


def pull_blocks(offsets: NDArray[np.int64], digests: list[NDArray[np.uint64]]) -> list[worker_pb2.PullBlock]:
    """Encode blocks: offsets [groups, n], or [0, n] if there are none, and digests per group."""
    columns = offsets.T.tolist()
    rows = [np.ascontiguousarray(each, "<u8") for each in digests]
    return [
        worker_pb2.PullBlock(offsets=column, digests=[each[i].tobytes() for each in rows])
        for i, column in enumerate(columns)
    ]


def from_pull_blocks(
    blocks: list[worker_pb2.PullBlock], num_layers: list[int]
) -> tuple[NDArray[np.int64], list[NDArray[np.uint64]]]:
    """Return (offsets int64 [groups, n], digests uint64 per group [n, layers]).

    `num_layers` is given per group. Raises SpecError if groups or layers do not match.
    """
    want = [8 * n for n in num_layers]
    for i, block in enumerate(blocks):
        if len(block.offsets) != len(want) or [len(digest) for digest in block.digests] != want:
            raise SpecError(f"block {i} of a pool node's answer does not have digests of {num_layers} layers per group")
    offsets = np.array([block.offsets for block in blocks], np.int64).reshape(len(blocks), len(want))
    digests = [
        np.frombuffer(b"".join(block.digests[g] for block in blocks), "<u8").reshape(len(blocks), n).astype(np.uint64)
        for g, n in enumerate(num_layers)
    ]
    return np.ascontiguousarray(offsets.T), digests
