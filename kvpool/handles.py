"""What a pool node's client hands out: descriptions, put tickets, leases, tails; and their wire forms. No calls."""

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
    """Who a pool node is, where its messenger listens, and the size of the region it serves."""

    node_id: str
    incarnation: int
    endpoint: Endpoint
    arena_bytes: int
    ssd_bytes: int = 0  # 0: no SSD tier
    local_socket: str = ""  # unix socket where processes of this host get the arena mapped; empty: none


@dataclass(frozen=True, eq=False)
class PutTicket:
    """The first phase of a put: write the NEW blocks' slots under `key`, then seal; or abort.

    `key` gives the right to write to one window that spans all slots of the put, and so may span slots of others too:
    write at `offsets` only. It is revoked when the put is sealed, aborted or expires. None where nothing is new.
    """

    put_id: str
    key: RemoteKey | None
    endpoint: Endpoint
    status: list[SlotStatus]  # per block asked for
    new_blocks: list[int]  # indices of those that are NEW
    offsets: NDArray[np.int64]  # [groups, n_new], from the start of the pool's region


@dataclass(frozen=True, eq=False)
class Tail:
    """A partial block right after a leased run, leased with it: reusable if `key` is the prompt's own tail key."""

    key: bytes  # 16 bytes, `tail_key` of its tokens
    num_tokens: int
    offsets: NDArray[np.int64]  # [groups], from the start of the pool's region
    digests: list[NDArray[np.uint64]]  # per group [layers], over the first `num_tokens` tokens


@dataclass(frozen=True, eq=False)
class Lease:
    """Blocks that may be read until the lease ends; what was read is right if its digests are those given here.

    `key` gives the right to read the whole region. A lease read from a PullRange is the sender's: it has no id, chain
    or tails, and only its sender can renew it or give it back. A lease may be of tails alone.
    """

    lease_id: str
    key: RemoteKey
    endpoint: Endpoint
    offsets: NDArray[np.int64]  # [groups, num_blocks], from the start of the pool's region
    digests: list[NDArray[np.uint64]]  # per group [num_blocks, layers]
    chain: NDArray[np.uint8] = field(default_factory=lambda: np.empty((0, 16), np.uint8))  # [num_blocks, 16]
    spec: KvSpec | None = None  # what the blocks are made of, as the pool node knows it
    ssd_blocks: int = 0  # of the blocks, those that had to come from SSD for this lease
    tails: tuple[Tail, ...] = ()  # after the last block; most recently used first

    @property
    def num_blocks(self) -> int:
        return int(self.offsets.shape[1])

    def head(self, n: int) -> "Lease":
        """The same lease, seen as its first `n` blocks; without tails where those are not all."""
        tails = self.tails if n >= self.num_blocks else ()
        digests = [each[:n] for each in self.digests]
        return replace(self, offsets=self.offsets[:, :n], digests=digests, chain=self.chain[:n], tails=tails)

    def to_pull_range(self, first_block: int) -> worker_pb2.PullRange:
        """For another process to read under this lease; `first_block` is the first one's place in the prompt."""
        return worker_pb2.PullRange(
            endpoint=self.endpoint.to_proto(),
            key=worker_pb2.RemoteKey(packed=self.key.pack()),
            first_block=first_block,
            blocks=pull_blocks(self.offsets, self.digests),
        )

    @classmethod
    def from_pull_range(cls, message: worker_pb2.PullRange, spec: KvSpec) -> "Lease":
        """Raises SpecError when the blocks are not of this spec, InvalidArgument for a malformed key."""
        offsets, digests = from_pull_blocks(list(message.blocks), [spec.num_layers(g) for g in range(spec.num_groups)])
        key, endpoint = RemoteKey.unpack(message.key.packed), Endpoint.from_proto(message.endpoint)
        return cls("", key, endpoint, offsets, digests, spec=spec)

    @classmethod
    def from_pin_reply(cls, reply: pool_pb2.PinReply, chain: NDArray[np.uint8]) -> "Lease":
        """Of a reply that granted one; `chain` [n, 16] is what was asked for. Raises SpecError as `from_pull_range`."""
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
            chain[: len(reply.blocks)],
            spec,
            reply.ssd_blocks,
            tails,
        )


@dataclass(frozen=True)
class Flushed:
    """Blocks that a flush took out, and blocks that it left since they were in use."""

    removed: int
    kept: int


@dataclass(frozen=True)
class Verified:
    """How far a verification is: copies of blocks, a block in DRAM and on SSD having two."""

    checked: int
    total: int
    corrupt: int  # taken out of the pool


def pull_blocks(offsets: NDArray[np.int64], digests: list[NDArray[np.uint64]]) -> list[worker_pb2.PullBlock]:
    """The wire form of blocks: offsets [groups, n], or [0, n] where there are none to tell, and digests per group."""
    columns = offsets.T.tolist()
    rows = [np.ascontiguousarray(each, "<u8") for each in digests]
    return [
        worker_pb2.PullBlock(offsets=column, digests=[each[i].tobytes() for each in rows])
        for i, column in enumerate(columns)
    ]


def from_pull_blocks(
    blocks: list[worker_pb2.PullBlock], num_layers: list[int]
) -> tuple[NDArray[np.int64], list[NDArray[np.uint64]]]:
    """(offsets [groups, n], digests per group [n, layers]). Raises SpecError for a block of other groups or layers."""
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
