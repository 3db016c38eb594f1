"""Contents of real pool nodes, as the conductor sees and copies them."""

import asyncio
import contextlib

import grpc
import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict

from kvpool import KvGroup, KvSpec, layer_digests, parent_keys
from kvpool.client import PoolClient
from messenger import Messenger, MessengerConfig, SharedMemory
from moonpool_proto.v1 import common_pb2, conductor_pb2
from settings.keys import assemble

SPEC = KvSpec((KvGroup("full", 0, (0, 1), 1, 8, "float32"),), block_tokens=16)
NAMESPACE = bytes(range(16))


async def store(pool_target, chain, fill, namespace=NAMESPACE):
    """Put whole blocks into a real pool node through a real messenger."""
    client = PoolClient(pool_target, owner="test", owner_incarnation=1)
    messenger = Messenger(assemble(MessengerConfig, transport="tcp"), node_id="test", incarnation=1)
    messenger.start()
    nbytes = SPEC.slot_nbytes(0)
    memory = SharedMemory.create(len(chain) * nbytes, "blocks")
    region = messenger.register(memory)
    try:
        memory.array[:] = fill
        slots = memory.array.reshape(len(chain), nbytes)
        ticket = await client.allocate(namespace, SPEC, chain, parent_keys(chain), ttl_s=10)
        slices = np.stack(
            [np.arange(len(chain)) * nbytes, ticket.offsets[0], np.full(len(chain), nbytes)], axis=1
        ).astype(np.int64)
        peer = messenger.connect(ticket.endpoint)
        await asyncio.wrap_future(peer.write(ticket.key, region, slices, deadline_s=10))
        digests = layer_digests(slots, SPEC, 0, np.full(len(chain), 16, np.int32))
        assert await client.seal(ticket, [digests]) == len(chain)
    finally:
        messenger.close()
        memory.close()
        await client.close()


async def test_a_stored_prefix_is_reused_and_kept_by_the_node_that_had_to_fetch_it_while_it_is_used(
    conductor, start_pool
):
    _, client = await conductor(replica_idle_s=2.0, tick_s=0.1)
    pools = [await start_pool(name) for name in ("pool-0", "pool-1")]
    await client.join("prefill-0", common_pb2.ROLE_PREFILL, pool="pool-0")
    await client.join("prefill-1", common_pb2.ROLE_PREFILL, pool="pool-1")
    await client.join("decode-0", common_pb2.ROLE_DECODE)
    await client.until_joined("pool-0", "pool-1", "prefill-0", "prefill-1", "decode-0")
    chain = np.random.default_rng(1).integers(0, 256, (10, 16), dtype=np.uint8)
    await store(pools[0].target, chain, fill=7)

    async def blocks():
        known = (await client.json("State"))["pools"]
        return [known[name]["blocks"] for name in ("pool-0", "pool-1") if known[name]["state"] == "exact"]

    async def stored():
        return await blocks() == [10, 0]

    await client.until(stored)
    near = (await client.schedule("near", chain=chain.tobytes())).placement
    assert (near.prefill.node_id, near.reuse_blocks) == ("prefill-0", 10)
    far = (await client.schedule("far", chain=chain.tobytes(), exclude_nodes=["prefill-0"])).placement
    assert (far.prefill.node_id, far.reuse_blocks) == ("prefill-1", 10)
    assert MessageToDict(far.holders[0], preserving_proto_field_name=True)["num_blocks"] == 10
    assert far.holders[0].pool.target == pools[0].target

    assert (near.keep_fetched, far.keep_fetched) == (False, True)
    await store(pools[1].target, chain, fill=7)  # as prefill-1 does then

    async def kept():
        return await blocks() == [10, 10] and (await client.json("Validate"))["counts"]["copy_tasks"] == 0

    await client.until(kept)
    assert "copied_bytes" not in (await client.json("State"))["counters"]
    again = (await client.schedule("again", chain=chain.tobytes(), exclude_nodes=["prefill-0"])).placement
    assert again.holders[0].pool.node_id == "pool-1"

    async def replicas():
        async with contextlib.AsyncExitStack() as stack:
            clients = [PoolClient(pool.target, owner="test", owner_incarnation=1) for pool in pools]
            for each in clients:
                stack.push_async_callback(each.close)
            found = [await each.inspect(chain[0].tobytes(), kv_namespace=NAMESPACE) for each in clients]
        return [[block["replicas"] for block in each] for each in found]

    async def both_told():
        return await replicas() == [[1], [1]]

    async def given_up():
        # The last copy goes last: pool-0 keeps its own, and knows that it is alone.
        return await blocks() == [10, 0] and await replicas() == [[0], []]

    await client.until(both_told)
    await client.until(given_up)
    state = await client.json("State")
    assert state["counters"]["shrinks"] == 1
    assert state["replication"]["spent_s"] == 0
    for pool in pools:
        await pool.stop()
    await client.until_joined("prefill-0", "prefill-1", "decode-0")
    lost = (await client.schedule("lost", chain=chain.tobytes())).placement
    assert lost.reuse_blocks == 0


async def test_pool_nodes_with_a_prompts_blocks_are_told_to_those_who_schedule_nothing(conductor, start_pool):
    _, client = await conductor()
    pools = [await start_pool(name) for name in ("pool-0", "pool-1", "pool-2")]
    await client.until_joined("pool-0", "pool-1", "pool-2")
    chain = np.random.default_rng(1).integers(0, 256, (10, 16), dtype=np.uint8)
    await store(pools[0].target, chain[:4], fill=7)
    await store(pools[1].target, chain, fill=7)

    async def located(namespace, chain):
        asked = conductor_pb2.LocateRequest(kv_namespace=namespace, chain=chain)
        reply = await client.stub.Locate(asked, timeout=10)
        return [(held.pool.target, held.first_block, held.num_blocks, held.ssd_blocks) for held in reply.holders]

    async def all_known():
        return len(await located(NAMESPACE, chain.tobytes())) == 2

    await client.until(all_known)
    found = await located(NAMESPACE, chain.tobytes())
    assert found == [(pools[1].target, 0, 10, 0), (pools[0].target, 0, 4, 0)]
    assert await located(NAMESPACE, chain[:3].tobytes()) == [(pool.target, 0, 3, 0) for pool in pools[:2]]
    assert await located(bytes(reversed(NAMESPACE)), chain.tobytes()) == []
    assert await located(NAMESPACE, b"") == []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await located(NAMESPACE, chain.tobytes()[:-1])
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_prefix_of_one_model_is_none_for_another_with_the_same_chain_but_is_for_its_copy(conductor, start_pool):
    """Two models with one tokenizer have equal chains; a model served under a second name has equal KV too."""
    _, client = await conductor()
    pool = await start_pool("pool-0")
    other = bytes(reversed(NAMESPACE))
    for model, namespace in (("m", NAMESPACE), ("other", other), ("second-name", NAMESPACE)):
        await client.join(f"{model}-p", common_pb2.ROLE_PREFILL, model=model, namespace=namespace)
        await client.join(f"{model}-d", common_pb2.ROLE_DECODE, model=model, namespace=namespace)
    chain = np.random.default_rng(2).integers(0, 256, (10, 16), dtype=np.uint8)
    await store(pool.target, chain, fill=7)

    async def known():
        pools = (await client.json("State"))["pools"]
        return "pool-0" in pools and pools["pool-0"]["blocks"] == 10

    async def reused():
        replies = [
            await client.schedule(model, model=model, chain=chain.tobytes()) for model in ("m", "other", "second-name")
        ]
        assert [reply.placement.prefill.node_id for reply in replies] == ["m-p", "other-p", "second-name-p"]
        return [reply.placement.reuse_blocks for reply in replies]

    await client.until(known)
    assert await reused() == [10, 0, 10]
    await store(pool.target, chain[:4], fill=8, namespace=other)

    async def both_known():
        return (await client.json("State"))["pools"]["pool-0"]["blocks"] == 14

    await client.until(both_known)
    assert await reused() == [10, 4, 10]
