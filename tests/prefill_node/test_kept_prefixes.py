"""Blocks read from another host's pool are stored in the own host's pool if the placement says so."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from engine import Model
from kvpool import PoolNodeConfig
from kvpool.node import PoolNode
from kvpool.remote_copy import copy_blocks
from kvpool.service import PoolService
from messenger import MessengerConfig
from moonpool_proto.v1.conductor_pb2 import NodeRef
from moonpool_proto.v1.pool_pb2_grpc import add_PoolServicer_to_server
from rpc.control import start_server
from settings.keys import assemble

Start = Callable[..., Awaitable[Any]]


@pytest.fixture
async def far(tmp_path: Path) -> AsyncIterator[tuple[PoolNode, NodeRef]]:
    """A second pool node, and its reference."""
    config = assemble(
        PoolNodeConfig,
        node_id="far",
        listen=f"unix:{tmp_path}/far.sock",
        pool_bytes=64 << 20,
        messenger=assemble(MessengerConfig, shm_dir=tmp_path),
    )
    node = PoolNode(config, 1)
    await node.start()
    server = await start_server(config.listen.listen, lambda s: add_PoolServicer_to_server(PoolService(node), s))
    yield node, NodeRef(node_id="far", target=server.target)
    await server.stop(0.1)
    await node.close()


@pytest.mark.parametrize("keeps", [True, False])
async def test_a_fetched_prefix_is_stored_on_the_own_host_only_if_it_is_to_be_kept(
    keeps: bool,
    far: tuple[PoolNode, NodeRef],
    start_pair: Start,
    model: Model,
    prompt: Callable[..., list[int]],
    greedy: Callable[[Model, list[int], int], list[int]],
) -> None:
    pair = await start_pair(pool=True)
    await pair.ask(prompt(64), "first")
    submit = pair.submit(prompt(64), "second")
    chain = [submit.chain[at : at + 16] for at in range(0, len(submit.chain), 16)]
    node, namespace = pair.prefill.node, pair.prefill.node.namespace
    assert (await copy_blocks(far[0], namespace, chain[:7], node.config.pool_target, 10)).num_blocks == 7
    await pair.pool.flush(None, dram_only=False)
    pair.forget()
    submit.placement.holders.add(first_block=0, num_blocks=7).pool.CopyFrom(far[1])
    submit.placement.keep_fetched = keeps
    second = await pair.frontend.submit(submit)
    await second.ended.wait()
    await pair.at_rest()
    assert (second.failures, second.cached_tokens) == ([], 56)
    assert second.token_ids == greedy(model, prompt(64), 12)
    assert len(pair.pool.core.store.leading_run(namespace, chain)) == (8 if keeps else 0)
    pair.forget()
    third = await pair.ask(prompt(64), "third")  # without a holder: only the own host's pool can have it
    assert third.cached_tokens == (56 if keeps else 0)
