"""What a pool node's client hands out: descriptions, put tickets, leases; and their wire forms. No calls."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvpool.errors import SpecError
from kvpool.policy.records import SlotStatus
from kvpool.spec import KvSpec
from messenger import Endpoint, RemoteKey
from moonpool_proto.v1 import worker_pb2

__all__ = ["Lease", "PoolDescription", "PutTicket", "SlotStatus"]


@dataclass(frozen=True)
class PoolDescription:
    """Who a pool node is, where its messenger listens, and the size of the region it serves."""

    node_id: str
    incarnation: int
    endpoint: Endpoint
    arena_bytes: int


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
class Lease:
    """Blocks that may be read until the lease ends; what was read is right if its digests are those given here.

    `key` gives the right to read the whole region. A lease read from a PullRange is the sender's: it has no id and no
    chain, and only its sender can renew it or give it back.
    """

    lease_id: str
    key: RemoteKey
    endpoint: Endpoint
    offsets: NDArray[np.int64]  # [groups, num_blocks], from the start of the pool's region
    digests: list[NDArray[np.uint64]]  # per group [num_blocks, layers]
    chain: NDArray[np.uint8] = field(default_factory=lambda: np.empty((0, 16), np.uint8))  # [num_blocks, 16]

    @property
    def num_blocks(self) -> int:
        return int(self.offsets.shape[1])

    def head(self, n: int) -> "Lease":
        """The same lease, seen as its first `n` blocks."""
        digests = [each[:n] for each in self.digests]
        return Lease(self.lease_id, self.key, self.endpoint, self.offsets[:, :n], digests, self.chain[:n])

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
        return cls("", RemoteKey.unpack(message.key.packed), Endpoint.from_proto(message.endpoint), offsets, digests)


def pull_blocks(offsets: NDArray[np.int64], digests: list[NDArray[np.uint64]]) -> list[worker_pb2.PullBlock]:
    """The wire form of blocks: offsets [groups, n], or [0, n] where there are none to tell, and digests per group."""
    columns = offsets.T.tolist()
    rows = [np.ascontiguousarray(each, "<u8") for each in digests]
    return [
        worker_pb2.PullBlock(offsets=column, digests=[each[i].tobytes() for each in rows])
        for i, column in enumerate(columns)
    ]


def from_pull_blocks(
    blocks: list[worker_pb2.PullBlock], num_layers: list[int] | None
) -> tuple[NDArray[np.int64], list[NDArray[np.uint64]]]:
    """(offsets [groups, n], digests per group [n, layers]). The layers per group are the first block's where None.

    Raises SpecError when a block has other groups or layers.
    """
    if num_layers is None:
        num_layers = [len(digest) // 8 for digest in blocks[0].digests] if blocks else []
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
