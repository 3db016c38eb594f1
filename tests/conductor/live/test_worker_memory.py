"""Blocks in workers' own memory, as a conductor learns them from the workers and places requests by them."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from conductor.decision_log.event_log import recorded_runs, replay
from conductor.policy.events import PoolMatch, PoolMatches, RequestArrived
from moonpool_proto.v1 import common_pb2
from moonpool_proto.v1.pool_pb2_grpc import add_OwnBlocksServicer_to_server
from rpc.control import start_server
from worker.own_blocks import OwnBlocks

NAMESPACE = bytes(range(16))
WINDOWS = bytes(range(16, 32))
CHAIN = np.random.default_rng(2).integers(0, 256, (10, 16), dtype=np.uint8)


@pytest.fixture
async def worker(tmp_path):
    """Factory of prefill nodes that report the blocks which their `blocks` are given."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(client, node_id, incarnation=1, *, reports=True, windows=False):
            blocks = OwnBlocks(NAMESPACE, incarnation, window_namespace=WINDOWS if windows else b"")
            server = await start_server(
                f"unix:{tmp_path}/{node_id}", lambda s: add_OwnBlocksServicer_to_server(blocks, s)
            )
            stack.push_async_callback(server.stop, 0.1)
            stack.callback(blocks.close)
            reporting = client.worker(node_id, common_pb2.ROLE_PREFILL, incarnation=incarnation, pool="")
            reporting.node.target = server.target
            reporting.node.reports_blocks = reports
            if windows:
                reporting.node.window_namespace, reporting.node.window_blocks = WINDOWS, 3
            await reporting.join()

            async def stop():
                reporting.leave()
                blocks.close()
                await server.stop(0.1)

            return SimpleNamespace(blocks=blocks, stop=stop, report=reporting.report)

        yield start


async def known(client, node_id, count):
    async def is_so():
        state = (await client.json("State"))["worker_memory"].get(node_id)
        return state is not None and (state["state"], state["blocks"]) == ("exact", count)

    await client.until(is_so)


async def place(client, name):
    reply = await client.schedule(name, prompt=11 * 16, chain=CHAIN.tobytes())
    await client.complete(name)
    return reply.placement.prefill.node_id, reply.placement.reuse_blocks, len(reply.placement.holders)


def hold(blocks, count):
    for key in CHAIN[:count]:
        blocks.add(key.tobytes())


async def test_a_request_is_placed_where_its_prefix_is_until_the_blocks_or_the_worker_are_gone(conductor, worker):
    _, client = await conductor()
    await client.join("decode-0", common_pb2.ROLE_DECODE)
    await worker(client, "prefill-0")
    holder = await worker(client, "prefill-1")
    assert await place(client, "before") == ("prefill-0", 0, 0)
    hold(holder.blocks, 8)
    await known(client, "prefill-1", 8)
    assert await place(client, "held") == ("prefill-1", 8, 0)
    samples = {(s.name, s.labels["node"]): s.value for s in (await client.cluster()).samples if "node" in s.labels}
    assert samples["worker_directory_blocks", "prefill-1"] == 8
    assert samples["worker_directory_exact", "prefill-1"] == 1
    for key in CHAIN[3:8]:
        holder.blocks.discard(key.tobytes())
    await known(client, "prefill-1", 3)
    assert await place(client, "evicted") == ("prefill-1", 3, 0)
    await holder.stop()
    await client.until_joined("decode-0", "prefill-0")
    assert await place(client, "left") == ("prefill-0", 0, 0)
    assert "prefill-1" not in (await client.json("State"))["worker_memory"]
    holder = await worker(client, "prefill-1", 2)
    await known(client, "prefill-1", 0)
    assert await place(client, "restarted") == ("prefill-0", 0, 0)
    assert (await client.json("Validate"))["ok"]


async def test_a_draining_worker_is_not_followed_until_it_takes_work_again(conductor, worker, caplog):
    _, client = await conductor()
    await client.join("decode-0", common_pb2.ROLE_DECODE)
    holder = await worker(client, "prefill-0")
    hold(holder.blocks, 5)
    await known(client, "prefill-0", 5)
    await holder.report(draining=True)

    async def forgotten():
        return (await client.json("State"))["worker_memory"] == {}

    await client.until(forgotten)
    await holder.report()
    await known(client, "prefill-0", 5)
    assert "interrupted" not in caplog.text


async def test_every_conductor_learns_the_blocks_and_one_that_starts_later_too(conductor, worker, tmp_path):
    _, client = await conductor()
    await client.join("decode-0", common_pb2.ROLE_DECODE)
    holder = await worker(client, "prefill-1")
    hold(holder.blocks, 5)
    await known(client, "prefill-1", 5)
    (tmp_path / "other").mkdir()
    _, second = await conductor(listen=f"unix:{tmp_path}/other/c.sock")
    await second.join("decode-0", common_pb2.ROLE_DECODE)
    again = second.worker("prefill-1", common_pb2.ROLE_PREFILL, pool="")
    again.node.target, again.node.reports_blocks = f"unix:{tmp_path}/prefill-1", True
    await again.join()
    await known(second, "prefill-1", 5)
    assert await place(second, "r") == ("prefill-1", 5, 0)


async def test_a_prefix_counts_as_far_as_the_worker_has_its_window(conductor, worker):
    _, client = await conductor()
    decode = client.worker("decode-0", common_pb2.ROLE_DECODE)
    decode.node.window_namespace, decode.node.window_blocks = WINDOWS, 3
    await decode.join()
    await worker(client, "prefill-0", windows=True)
    holder = await worker(client, "prefill-1", windows=True)
    hold(holder.blocks, 8)
    for key in CHAIN[4:8]:
        holder.blocks.add_window(key.tobytes())
    await known(client, "prefill-1", 12)
    assert await place(client, "held") == ("prefill-1", 8, 0)
    holder.blocks.discard_window(CHAIN[7].tobytes())
    await known(client, "prefill-1", 11)
    assert await place(client, "shorter") == ("prefill-1", 7, 0)
    holder.blocks.discard_window(CHAIN[5].tobytes())
    await known(client, "prefill-1", 10)
    assert await place(client, "lost") == ("prefill-0", 0, 0)


async def test_a_worker_of_a_version_that_reports_no_blocks_works_as_before(conductor, worker):
    _, client = await conductor()
    await client.join("decode-0", common_pb2.ROLE_DECODE)
    older = await worker(client, "prefill-0", reports=False)
    hold(older.blocks, 8)
    assert await place(client, "r") == ("prefill-0", 0, 0)
    assert (await client.json("State"))["worker_memory"] == {}


async def test_what_the_policy_saw_is_logged_and_replays(conductor, worker, tmp_path):
    running, client = await conductor(decision_log=tmp_path / "log")
    await client.join("decode-0", common_pb2.ROLE_DECODE)
    await worker(client, "prefill-0")
    holder = await worker(client, "prefill-1")
    hold(holder.blocks, 8)
    await known(client, "prefill-1", 8)
    assert await place(client, "held") == ("prefill-1", 8, 0)

    async def written():
        return bool((await client.explain("held")).get("records"))

    await client.until(written)
    decision = (await client.explain("held"))["records"][0]["attempts"][0]["decision"]
    assert (decision["reuse_blocks"], decision["local_blocks"]) == (8, 8)
    assert decision["considered"]["prefill"][0]["local_blocks"] == 8
    await client.close()
    await running.stop()
    steps = [step for run in recorded_runs(tmp_path / "log") for step in replay(run)]
    seen = [step.event.in_workers for step in steps if isinstance(step.event, RequestArrived)]
    assert seen == [PoolMatches.of(PoolMatch("prefill-1", 8))]
    assert [step.made for step in steps] == [step.logged for step in steps]
