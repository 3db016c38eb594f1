"""A pool node of a newer version, which says what is not known here."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool import KvGroup, KvSpec, Lease, PoolClient, parent_keys
from kvpool.errors import SpecError
from kvpool.policy.records import SlotStatus
from moonpool_proto.v1 import pool_pb2, pool_pb2_grpc, worker_pb2
from rpc.control import start_server

SPEC = KvSpec((KvGroup("full", 0, (0, 1), 1, 8, "float32"),), block_tokens=16)
UNKNOWN = 99


class Newer(pool_pb2_grpc.PoolServicer):
    async def Describe(self, request: pool_pb2.DescribeRequest, context: Any) -> pool_pb2.DescribeReply:
        return pool_pb2.DescribeReply(node_id="pool-0", incarnation=7)

    async def Allocate(self, request: pool_pb2.AllocateRequest, context: Any) -> pool_pb2.AllocateReply:
        reply = pool_pb2.AllocateReply(put_id="put-7-1", groups=[worker_pb2.BlockSlots()])
        reply.status.extend([UNKNOWN, pool_pb2.SLOT_EXISTS])  # type: ignore[list-item]
        return reply


async def test_a_block_of_which_something_unknown_is_said_is_not_written(tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/p.sock"
    server = await start_server(target, lambda s: pool_pb2_grpc.add_PoolServicer_to_server(Newer(), s))
    client = PoolClient(target, owner="test", owner_incarnation=1)
    try:
        chain = np.arange(32, dtype=np.uint8).reshape(2, 16)
        ticket = await client.allocate(bytes(16), SPEC, chain, parent_keys(chain), ttl_s=60)
        assert ticket.status == [SlotStatus.NO_SPACE, SlotStatus.EXISTS]
        assert ticket.new_blocks == []
    finally:
        await client.close()
        await server.stop(0)


def test_a_lease_of_blocks_that_were_not_requested_is_refused() -> None:
    block = worker_pb2.PullBlock(offsets=[0], digests=[bytes(16)])
    reply = pool_pb2.PinReply(
        lease_id="lease",
        blocks=[block],
        spec=SPEC.to_proto(),
        first_block=2,
        key=worker_pb2.RemoteKey(packed=bytes(16)),
    )
    with pytest.raises(SpecError, match="leased blocks 2 to 2 of 2 requested ones"):
        Lease.from_pin_reply(reply, np.zeros((2, 16), np.uint8))
