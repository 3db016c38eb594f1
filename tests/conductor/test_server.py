"""The conductor as a process part: real gRPC over unix sockets, real pool nodes, its decision log replayed."""

import asyncio
import contextlib
import gc
import json

import grpc
import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict

from conductor.decision_log import DecisionLogConfig, lives, replay, search
from conductor.policy.decisions import Place
from conductor.server import ConductorConfig, serve_conductor
from kvpool import KvGroup, KvSpec, layer_digests, parent_keys
from kvpool.client import PoolClient
from kvpool.config import PoolNodeConfig
from kvpool.server import serve_pool_node
from messenger import Messenger, MessengerConfig, SharedMemory
from messenger.control import AddressInUse, open_channel
from moonpool_proto.v1 import common_pb2, conductor_pb2, conductor_pb2_grpc

SPEC = KvSpec((KvGroup("full", 0, (0, 1), 1, 8, "float32"),), block_tokens=16)
NAMESPACE = bytes(range(16))


class Service:
    """A coroutine `serve(stop, on_ready)` run as a task, with the target it told."""

    def __init__(self, serve):
        self._stop = asyncio.Event()
        self._ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(serve(self._stop, self._ready.set_result))

    async def start(self):
        await asyncio.wait([self._ready, self._task], return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            self._task.result()
        return self._ready.result()

    async def stop(self):
        self._stop.set()
        await asyncio.wait_for(self._task, 20)


class Worker:
    """The Join stream of a worker, without the worker."""

    def __init__(self, stub, node):
        self._call = stub.Join()
        self.node = node

    async def join(self, **report):
        await self._call.write(conductor_pb2.NodeReport(node=self.node, **report))
        command = await asyncio.wait_for(self._call.read(), 10)
        assert command.HasField("accepted"), command
        return self

    async def refusal(self):
        await self._call.write(conductor_pb2.NodeReport(node=self.node))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(self._call.read(), 10)
        return caught.value

    async def report(self, **report):
        await self._call.write(conductor_pb2.NodeReport(**report))

    async def command(self):
        return await self._call.read()

    async def ended(self):
        """Why the conductor ended the stream."""
        return await asyncio.wait_for(self._call.code(), 10)

    def leave(self):
        self._call.cancel()


class Client:
    """A frontend's and an operator's view."""

    def __init__(self, target):
        self.channel = open_channel(target)
        self.stub = conductor_pb2_grpc.ConductorStub(self.channel)
        self.workers = []

    async def join(self, node_id, role, *, pool="pool-0", **fields):
        worker = self.worker(node_id, role, pool=pool, **fields)
        await worker.join()
        return worker

    def worker(self, node_id, role, *, pool="pool-0", incarnation=1, spec=SPEC, namespace=NAMESPACE, model="m"):
        node = conductor_pb2.Node(
            node_id=node_id,
            role=role,
            incarnation=incarnation,
            target=f"unix:/nowhere/{node_id}.sock",
            pool_node_id=pool,
            model=model,
            kv_namespace=namespace,
            spec=spec.to_proto(),
            capacity_tokens=4096,
            max_model_len=4096,
            max_batch=8,
            kv_bytes_per_token=spec.bytes_per_token,
        )
        self.workers.append(Worker(self.stub, node))
        return self.workers[-1]

    async def schedule(self, request_id="r", *, model="m", prompt=256, new=32, **fields):
        request = conductor_pb2.ScheduleRequest(
            request_id=request_id, frontend_id="f", model=model, prompt_tokens=prompt, max_new_tokens=new, **fields
        )
        return await self.stub.Schedule(request, timeout=10)

    async def complete(self, request_id="r", outcome="finished"):
        await self.stub.Complete(conductor_pb2.CompleteRequest(request_id=request_id, outcome=outcome), timeout=10)

    async def cluster(self):
        return await self.stub.Cluster(conductor_pb2.ClusterRequest(), timeout=10)

    async def drain(self, node_id):
        await self.stub.DrainNode(conductor_pb2.DrainNodeRequest(node_id=node_id), timeout=10)

    async def json(self, name):
        return json.loads((await getattr(self.stub, name)(common_pb2.JsonRequest(), timeout=10)).json)

    async def explain(self, request_id):
        return json.loads((await self.stub.Explain(conductor_pb2.ExplainRequest(request_id=request_id))).json)

    async def until(self, condition):
        """Poll the conductor until `await condition()` holds."""
        async with asyncio.timeout(20):
            while not await condition():
                await asyncio.sleep(0.01)

    async def until_joined(self, *node_ids):
        async def joined():
            return {status.node.node_id for status in (await self.cluster()).nodes} == set(node_ids)

        await self.until(joined)

    async def close(self):
        for worker in self.workers:
            worker.leave()
        await self.channel.close()


@pytest.fixture
async def conductor(tmp_path):
    """Factory of (Service, Client); all are stopped at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def factory(**config):
            config = ConductorConfig(
                listen=f"unix:{tmp_path}/c.sock", **{"tick_s": 0.05, "report_timeout_s": 60.0, **config}
            )
            service = Service(lambda stop, ready: serve_conductor(config, stop, ready))
            target = await service.start()
            client = Client(target)
            stack.push_async_callback(service.stop)
            stack.push_async_callback(client.close)
            return service, client

        yield factory


async def join_pair(client):
    prefill = await client.join("prefill-0", common_pb2.ROLE_PREFILL)
    decode = await client.join("decode-0", common_pb2.ROLE_DECODE)
    return prefill, decode


async def test_a_request_is_placed_on_joined_nodes_and_completed(conductor):
    _, client = await conductor()
    assert not (await client.cluster()).ready_models
    await join_pair(client)
    assert (await client.cluster()).ready_models == ["m"]
    placement = (await client.schedule()).placement
    assert placement.prefill.node_id == "prefill-0"
    assert placement.decode.target == "unix:/nowhere/decode-0.sock"
    assert not (await client.json("Validate"))["ok"]
    await client.complete()
    assert await client.json("Validate") == {
        "ok": True,
        "problems": [],
        "counts": {"requests": 0, "committed_tokens": 0, "prefills": 0, "sends": 0, "copies": 0, "copy_tasks": 0},
    }


async def test_an_ended_stream_is_a_lost_node(conductor):
    _, client = await conductor()
    _, decode = await join_pair(client)
    decode.leave()
    await client.until_joined("prefill-0")
    rejection = (await client.schedule()).rejection
    assert (rejection.reason, rejection.retry_after_s) == ("no_nodes", 1.0)


async def test_a_report_that_cannot_be_taken_in_is_told_and_costs_the_node_its_stream_alone(conductor, caplog):
    _, client = await conductor()
    _, decode = await join_pair(client)
    other = conductor_pb2.Node()
    other.CopyFrom(decode.node)
    other.capacity_tokens += 1
    await decode.report(node=other)
    await decode.ended()
    (record,) = [one for one in caplog.records if one.exc_info is not None]
    assert (record.name, "decode-0" in record.getMessage()) == ("conductor.service", True)
    await client.join("decode-0", common_pb2.ROLE_DECODE)
    assert (await client.schedule("r2")).placement.decode.node_id == "decode-0"


async def test_a_node_that_stops_reporting_is_suspect_until_it_reports(conductor):
    _, client = await conductor(report_timeout_s=1.0)
    prefill, _ = await join_pair(client)
    await client.join("decode-1", common_pb2.ROLE_DECODE)

    async def suspects():
        await prefill.report()
        return {status.node.node_id for status in (await client.cluster()).nodes if status.suspect}

    async def both():
        return await suspects() == {"decode-0", "decode-1"}

    await client.until(both)
    assert not (await client.cluster()).ready_models
    rejection = (await client.schedule()).rejection
    assert (rejection.reason, "decode-0, decode-1 silent" in rejection.message) == ("no_nodes", True)
    await client.workers[-1].report()

    async def one():
        return await suspects() == {"decode-0"}

    await client.until(one)
    assert (await client.schedule()).placement.decode.node_id == "decode-1"


async def test_a_node_that_comes_back_replaces_its_former_incarnation(conductor):
    _, client = await conductor()
    _, old = await join_pair(client)
    await client.schedule()
    await client.join("decode-0", common_pb2.ROLE_DECODE, incarnation=2)
    assert await old.ended() == grpc.StatusCode.ABORTED
    assert (await client.json("Validate"))["counts"]["committed_tokens"] == 0
    assert (await client.schedule("s")).placement.decode.incarnation == 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"namespace": bytes(16)}, "another provenance"),
        ({"spec": KvSpec(SPEC.groups, block_tokens=8)}, "block_tokens 8, not 16"),
        ({"spec": KvSpec((KvGroup("full", 0, (0, 1), 1, 8, "float16"),), 16)}, "another KV spec"),
    ],
)
async def test_a_worker_with_other_kv_of_the_same_model_is_refused(conductor, fields, said):
    _, client = await conductor()
    await join_pair(client)
    error = await client.worker("decode-1", common_pb2.ROLE_DECODE, **fields).refusal()
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert said in error.details()
    assert "decode-1" in error.details()
    await client.until_joined("prefill-0", "decode-0")


async def test_another_model_may_have_other_kv(conductor):
    _, client = await conductor()
    await join_pair(client)
    await client.join("other-0", common_pb2.ROLE_AGGREGATED, model="other", namespace=bytes(16))
    await client.until_joined("prefill-0", "decode-0", "other-0")


async def test_a_stream_that_names_no_node_is_refused(conductor):
    _, client = await conductor()
    call = client.stub.Join()
    await call.write(conductor_pb2.NodeReport(num_running=1))
    with pytest.raises(grpc.aio.AioRpcError, match="must name the node"):
        await call.read()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"chain": b"x" * 17}, "multiple of 16"),
        ({"chain": bytes(17 * 16), "prompt": 256}, "more than 256 prompt tokens"),
        ({"prompt": 0}, "must be positive"),
        ({"new": 0}, "must be positive"),
        ({"request_id": ""}, "request_id"),
    ],
)
async def test_a_malformed_request_is_refused_and_disturbs_nothing(conductor, fields, said):
    _, client = await conductor()
    await join_pair(client)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.schedule(**fields)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert said in caught.value.details()
    assert (await client.schedule("good")).HasField("placement")


async def test_the_cluster_shows_the_last_report(conductor):
    _, client = await conductor()
    worker = await client.join("a", common_pb2.ROLE_AGGREGATED)
    await worker.report(num_running=3, free_tokens=17, counters={"generation_tokens": 5.0})

    async def seen():
        report = (await client.cluster()).nodes[0].report
        return (report.num_running, report.free_tokens, dict(report.counters)) == (3, 17, {"generation_tokens": 5.0})

    await client.until(seen)


async def test_a_restarted_conductor_learns_the_ledger_from_what_workers_hold(conductor, tmp_path):
    service, client = await conductor()
    await join_pair(client)
    await client.schedule()
    await client.close()
    await service.stop()
    _, client = await conductor()
    held = conductor_pb2.Held(request_id="r", committed_tokens=288)
    await client.worker("decode-0", common_pb2.ROLE_DECODE).join(held=[held])
    assert (await client.json("Validate"))["counts"]["committed_tokens"] == 288
    await client.complete()
    assert (await client.json("Validate"))["ok"]


async def test_requests_of_a_frontend_that_never_completes_are_released(conductor):
    _, client = await conductor(orphan_timeout_s=0.3)
    await join_pair(client)
    await client.schedule()

    async def released():
        return (await client.json("Validate"))["ok"]

    await client.until(released)
    assert (await client.json("State"))["counters"]["orphans"] == 1


async def store(pool_target, chain, fill, namespace=NAMESPACE):
    """Put whole blocks into a real pool node through a real messenger."""
    client = PoolClient(pool_target, owner="test", owner_incarnation=1)
    messenger = Messenger(MessengerConfig(transport="tcp"), node_id="test", incarnation=1)
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


async def test_a_stored_prefix_is_reused_and_a_hot_one_copied_to_the_node_that_had_to_fetch_it(conductor, tmp_path):
    _, client = await conductor(replica_idle_s=2.0, tick_s=0.1)
    async with contextlib.AsyncExitStack() as stack:
        for name in ("pool-0", "pool-1"):
            config = PoolNodeConfig(
                name,
                f"unix:{tmp_path}/{name}.sock",
                conductor_targets=(f"unix:{tmp_path}/c.sock",),
                arena_bytes=4 << 20,
                messenger=MessengerConfig(transport="tcp"),
            )
            service = Service(lambda stop, ready, config=config: serve_pool_node(config, stop, ready))
            await service.start()
            stack.push_async_callback(service.stop)
        await client.join("prefill-0", common_pb2.ROLE_PREFILL, pool="pool-0")
        await client.join("prefill-1", common_pb2.ROLE_PREFILL, pool="pool-1")
        await client.join("decode-0", common_pb2.ROLE_DECODE)
        await client.until_joined("pool-0", "pool-1", "prefill-0", "prefill-1", "decode-0")
        chain = np.random.default_rng(1).integers(0, 256, (10, 16), dtype=np.uint8)
        await store(f"unix:{tmp_path}/pool-0.sock", chain, fill=7)

        async def blocks():
            pools = (await client.json("State"))["pools"]
            return [pools[name]["blocks"] for name in ("pool-0", "pool-1") if pools[name]["state"] == "exact"]

        async def stored():
            return await blocks() == [10, 0]

        await client.until(stored)
        near = (await client.schedule("near", chain=chain.tobytes())).placement
        assert (near.prefill.node_id, near.reuse_blocks) == ("prefill-0", 10)
        far = (await client.schedule("far", chain=chain.tobytes(), exclude_nodes=["prefill-0"])).placement
        assert (far.prefill.node_id, far.reuse_blocks) == ("prefill-1", 10)
        assert MessageToDict(far.holders[0], preserving_proto_field_name=True)["num_blocks"] == 10
        assert far.holders[0].pool.target == f"unix:{tmp_path}/pool-0.sock"

        async def copied():
            return await blocks() == [10, 10] and (await client.json("Validate"))["counts"]["copy_tasks"] == 0

        await client.until(copied)
        assert (await client.json("State"))["counters"]["copied_bytes"] == 10 * SPEC.slot_nbytes(0)
        again = (await client.schedule("again", chain=chain.tobytes(), exclude_nodes=["prefill-0"])).placement
        assert again.holders[0].pool.node_id == "pool-1"

        async def replicas():
            names = ("pool-0", "pool-1")
            async with contextlib.AsyncExitStack() as clients:
                pools = [
                    PoolClient(f"unix:{tmp_path}/{name}.sock", owner="test", owner_incarnation=1) for name in names
                ]
                for pool in pools:
                    clients.push_async_callback(pool.close)
                found = [await pool.inspect(chain[0].tobytes(), kv_namespace=NAMESPACE) for pool in pools]
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
        assert state["replication"]["spent_s"] > 0
    await client.until_joined("prefill-0", "prefill-1", "decode-0")
    lost = (await client.schedule("lost", chain=chain.tobytes())).placement
    assert lost.reuse_blocks == 0


async def test_a_prefix_of_one_model_is_none_for_another_with_the_same_chain_but_is_for_its_copy(conductor, tmp_path):
    """Two models with one tokenizer have equal chains; a model served under a second name has equal KV too."""
    _, client = await conductor()
    config = PoolNodeConfig(
        "pool-0", f"unix:{tmp_path}/pool-0.sock", conductor_targets=(f"unix:{tmp_path}/c.sock",), arena_bytes=4 << 20
    )
    pool = Service(lambda stop, ready: serve_pool_node(config, stop, ready))
    await pool.start()
    other = bytes(reversed(NAMESPACE))
    for model, namespace in (("m", NAMESPACE), ("other", other), ("second-name", NAMESPACE)):
        await client.join(f"{model}-p", common_pb2.ROLE_PREFILL, model=model, namespace=namespace)
        await client.join(f"{model}-d", common_pb2.ROLE_DECODE, model=model, namespace=namespace)
    chain = np.random.default_rng(2).integers(0, 256, (10, 16), dtype=np.uint8)
    await store(config.listen, chain, fill=7)

    async def known():
        pools = (await client.json("State"))["pools"]
        return "pool-0" in pools and pools["pool-0"]["blocks"] == 10

    async def reused():
        replies = [
            await client.schedule(model, model=model, chain=chain.tobytes()) for model in ("m", "other", "second-name")
        ]
        assert [reply.placement.prefill.node_id for reply in replies] == ["m-p", "other-p", "second-name-p"]
        return [reply.placement.reuse_blocks for reply in replies]

    try:
        await client.until(known)
        assert await reused() == [10, 0, 10]
        await store(config.listen, chain[:4], fill=8, namespace=other)

        async def both_known():
            return (await client.json("State"))["pools"]["pool-0"]["blocks"] == 14

        await client.until(both_known)
        assert await reused() == [10, 4, 10]
    finally:
        await pool.stop()


async def test_the_log_of_a_live_run_replays_to_the_same_decisions(conductor, tmp_path):
    folder = tmp_path / "log"
    service, client = await conductor(decision_log=DecisionLogConfig(folder, block_tokens=64), ttft_objective_s=0.4)
    prefill, decode = await join_pair(client)
    await client.join("prefill-1", common_pb2.ROLE_PREFILL)
    chain = np.arange(16 * 16, dtype=np.uint8).reshape(16, 16)
    sample = conductor_pb2.PrefillSample(new_tokens=256, seconds=0.1)
    for i in range(12):
        await client.schedule(f"r{i}", chain=chain.tobytes())
        phase = conductor_pb2.Progress(request_id=f"r{i}", phase=conductor_pb2.PHASE_PREFILL_STARTED)
        await prefill.report(progress=[phase], prefills=[sample])
        if i % 3 == 0:
            await client.complete(f"r{i}")
    decode.leave()
    await client.until_joined("prefill-0", "prefill-1")
    await client.schedule("late")
    told = await client.explain("r3")
    assert (told["log"], told["records"][0]["outcome"]) == (str(folder), "finished")
    await client.close()
    await service.stop()
    (life,) = lives(folder)
    steps = list(replay(life))
    assert all(step.logged == step.made for step in steps)
    decisions = [decision for step in steps for decision in step.logged]
    assert {type(decision).__name__ for decision in decisions} == {"Place", "Reject"}
    assert next(len(decision.considered.prefill) for decision in decisions if isinstance(decision, Place)) == 2
    first, second = (search(folder, name).records[0]["hash_ids"] for name in ("r0", "r1"))
    assert first == second
    assert len(first) == 4


async def test_a_node_is_asked_to_drain_on_its_stream_and_is_not_said_to_be_lost(conductor, caplog):
    _, client = await conductor()
    prefill, decode = await join_pair(client)
    await client.drain("decode-0")
    command = await asyncio.wait_for(decode.command(), 10)
    assert command.HasField("drain")
    await decode.report(draining=True)

    async def draining():
        return [s.node.node_id for s in (await client.cluster()).nodes if s.report.draining] == ["decode-0"]

    await client.until(draining)
    await prefill.report()
    decode.leave()
    await client.until_joined("prefill-0")
    assert "is lost" not in caplog.text
    prefill.leave()
    await client.until_joined()
    assert "node prefill-0 is lost" in caplog.text


async def test_a_node_that_leaves_while_a_command_is_written_to_it_is_taken_off(conductor):
    _, client = await conductor()
    gc.disable()
    try:
        for index in range(40):
            prefill, decode = await join_pair(client)
            asked = asyncio.ensure_future(client.drain("decode-0"))
            for _ in range(index % 8):
                await asyncio.sleep(0)
            decode.leave()
            prefill.leave()
            await asyncio.gather(asked, return_exceptions=True)
            await client.until_joined()
    finally:
        gc.enable()


async def test_draining_an_unknown_node_is_refused_and_names_those_there_are(conductor):
    _, client = await conductor()
    await join_pair(client)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.drain("decode-7")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == "no node 'decode-7' has joined; joined are: decode-0, prefill-0"


async def test_a_pool_node_leaves_on_request_only_when_no_worker_needs_it(conductor, tmp_path):
    _, client = await conductor()
    config = PoolNodeConfig(
        "pool-0",
        f"unix:{tmp_path}/pool-0.sock",
        conductor_targets=(f"unix:{tmp_path}/c.sock",),
        arena_bytes=4 << 20,
        messenger=MessengerConfig(transport="tcp"),
    )
    ready = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve_pool_node(config, asyncio.Event(), ready.set_result))
    await ready
    decode = await client.join("decode-0", common_pb2.ROLE_DECODE)
    await client.until_joined("decode-0", "pool-0")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.drain("pool-0")
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "decode-0" in caught.value.details()
    decode.leave()
    await client.until_joined("pool-0")
    await client.drain("pool-0")
    assert await asyncio.wait_for(serving, 20) is True
    await client.until_joined()


async def test_a_listen_target_in_use_is_a_clear_error(conductor, tmp_path):
    await conductor()
    config = ConductorConfig(listen=f"unix:{tmp_path}/c.sock")
    with pytest.raises(AddressInUse):
        await serve_conductor(config, asyncio.Event(), lambda target: None)
