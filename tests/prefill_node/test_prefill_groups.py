"""Prompts that several prefill nodes compute together: the tokens of one process, whatever befalls the group."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from engine import Model, load_model
from engine.random_model import RandomModelSpec, write_random_model
from moonpool_proto.v1.worker_pb2 import BeginShare, Enlist, HelpRequest, Span
from moonpool_proto.v1.worker_pb2_grpc import WorkerStub
from prefill_node import group_head
from prefill_node.group_member import GroupMember
from rpc.control import open_channel

Start = Callable[..., Awaitable[Any]]
Prompt = Callable[..., list[int]]
Greedy = Callable[[Model, list[int], int], list[int]]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no reason for a helper not to be waited for."""
    monkeypatch.setattr(group_head, "ENLIST_S", 60.0)


def counter(face: Any, name: str) -> float:
    return float(face.node.counters.snapshot().get(name, 0))


async def answer(pair: Any, ids: list[int], name: str = "r", **options: Any) -> Any:
    """The request, once it has ended well and all have given everything back."""
    request = await pair.frontend.submit(pair.submit(ids, name, **options))
    await request.ended.wait()
    assert request.failures == []
    await pair.at_rest()
    return request


def damage_layers(face: Any, *, every: bool) -> None:
    """From the second layer that this node pushes on, one or all go with wrong digests."""
    memory = face.node.memory
    real, calls = memory.one_layer_digests, []

    def damaged(layer: int, slots: Any, valid: Any) -> Any:
        digests = real(layer, slots, valid)
        if threading.current_thread().name.startswith("push"):
            calls.append(layer)
        return digests ^ np.uint64(1) if len(calls) == 2 or (every and len(calls) > 2) else digests

    memory.one_layer_digests = damaged


class Gate:
    """Stops an engine once it has written `layer` of a chunk that begins at or after `start`, until it is opened."""

    def __init__(self, face: Any, *, start: int, layer: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.reached = asyncio.Event()
        self.is_open = threading.Event()
        node = face.node
        real = face._layer_written

        def hook(written: int, spans: list[tuple[Any, int, int]]) -> None:
            if written == layer and any(first >= start for _, first, _ in spans):
                self.loop.call_soon_threadsafe(self.reached.set)
                self.is_open.wait(60)
            real(written, spans)

        node.engine.on_layer(hook)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("helpers", [1, 2])
async def test_tokens_are_those_of_one_process(
    transport: str, helpers: int, start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    pair = await start_pair(transport, helpers=helpers)
    for length in (33, 63, 64, 65, 96, 97, 128, 129, 250):  # at the borders of blocks of 8 and chunks of 32
        before = counter(pair.helpers[0], "helped_tokens")
        request = await answer(pair, prompt(length, length), f"r{length}")
        assert request.token_ids == greedy(model, prompt(length, length), 12)
        assert 0 < counter(pair.helpers[0], "helped_tokens") - before < length
    assert counter(pair.prefill, "lost_groups") == 0


async def test_sampled_tokens_are_those_of_a_node_alone(start_pair: Start, prompt: Prompt) -> None:
    pair = await start_pair(helpers=1)

    async def sampled(name: str, seed: int, *, together: bool) -> list[int]:
        message = pair.submit(prompt(150, seed), name)
        message.sampling.temperature, message.sampling.seed, message.sampling.top_p = 1.0, seed, 0.9
        message.sampling.presence_penalty = 0.5
        if not together:
            del message.placement.helpers[:]
        request = await pair.frontend.submit(message)
        await request.ended.wait()
        await pair.at_rest()
        for face in (pair.prefill, pair.decode):
            face.node.slots.pool.release(
                face.node.slots.pool.allocate(face.node.slots.pool.num_available)
            )  # nothing is reused
        return list(request.token_ids)

    for seed in range(3):
        assert await sampled(f"g{seed}", seed, together=True) == await sampled(f"a{seed}", seed, together=False)
    assert counter(pair.prefill, "prefill_groups") == 3


@pytest.mark.parametrize("full_layers", [0, 1])
async def test_layers_with_windows_are_shared_too(
    start_pair: Start, tmp_path: Path, prompt: Prompt, greedy: Greedy, full_layers: int
) -> None:
    path = write_random_model(
        tmp_path / "windowed",
        RandomModelSpec(
            family="qwen2", layers=3, window=24, full_layers=full_layers, vocab=256, max_len=512, scale=3.0
        ),
    )
    pair = await start_pair(helpers=2, path=path)
    request = await answer(pair, prompt(200))
    assert request.token_ids == greedy(load_model(path, threads=1), prompt(200), 12)
    assert all(counter(helper, "helped_tokens") for helper in pair.helpers)


@pytest.mark.parametrize("storage", ["exact", "int8"])
async def test_only_what_is_not_reused_is_shared(
    storage: str, start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    pair = await start_pair(helpers=1, storage=storage, pool=True)
    first = prompt(64)
    await answer(pair, first, "a")
    pair.decode.node.slots.pool.release(pair.decode.node.slots.pool.allocate(pair.decode.node.slots.pool.num_available))
    longer = first + prompt(100, 5)
    request = await answer(pair, longer, "b")
    assert request.cached_tokens == 64
    assert counter(pair.prefill, "prefill_groups") == 2
    assert request.token_ids == greedy(model, longer, 12)
    helped = counter(pair.helpers[0], "helped_tokens")
    assert 32 <= helped - 32 <= 64  # of the second prompt's 100 new tokens


async def test_a_helper_without_room_is_done_without(
    start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    pair = await start_pair(helpers=1, helper_options={"capacity_tokens": 64})
    request = await answer(pair, prompt(200))
    assert request.token_ids == greedy(model, prompt(200), 12)
    assert counter(pair.prefill, "helpers_refused") == 1
    assert counter(pair.prefill, "prefill_groups") == 0


async def test_a_draining_helper_is_done_without_and_another_one_is_not(
    start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    pair = await start_pair(helpers=2)
    pair.helpers[0].node.draining.set()
    request = await answer(pair, prompt(200))
    assert request.token_ids == greedy(model, prompt(200), 12)
    assert counter(pair.helpers[0], "helped_tokens") == 0
    assert counter(pair.helpers[1], "helped_tokens") > 0


async def test_a_helper_that_computes_other_kv_refuses(start_pair: Start, prompt: Prompt) -> None:
    pair = await start_pair(helpers=1)
    pair.helpers[0].node.namespace = bytes(16)
    request = await answer(pair, prompt(200))
    assert len(request.token_ids) == 12
    assert counter(pair.helpers[0], "helped_tokens") == 0


async def test_a_helper_that_cannot_be_reached_is_done_without(
    start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy, tmp_path: Path
) -> None:
    pair = await start_pair()
    message = pair.submit(prompt(200), "r")
    message.placement.helpers.add(node_id="gone", target=f"unix:{tmp_path}/gone.sock")
    request = await pair.frontend.submit(message)
    await request.ended.wait()
    assert request.token_ids == greedy(model, prompt(200), 12)
    await pair.at_rest()


async def test_a_helper_whose_memory_cannot_be_reached_is_done_without(
    start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await start_pair(helpers=1)
    helper, enlisted = pair.helpers[0].node, GroupMember.enlisted

    def without_endpoint(member: GroupMember) -> Any:
        message = enlisted(member)
        if member._node is helper:
            message.endpoint.Clear()
        return message

    monkeypatch.setattr(GroupMember, "enlisted", without_endpoint)
    request = await answer(pair, prompt(250))
    assert request.token_ids == greedy(model, prompt(250), 12)
    assert counter(pair.prefill, "lost_groups") == 1


@pytest.mark.parametrize("damaging", ["prefill", "helper"])
@pytest.mark.parametrize("every", [False, True])
async def test_kv_damaged_between_members_is_computed_by_the_head(
    damaging: str, every: bool, start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    pair = await start_pair(helpers=1)
    if damaging == "prefill":
        # The head's pushes to the decode node would be damaged as well: only what goes to the helper is.
        real = pair.helpers[0].node.memory.pushed_digests
        pair.helpers[0].node.memory.pushed_digests = lambda *pushed: real(*pushed) ^ np.uint64(1)
    else:
        damage_layers(pair.helpers[0], every=every)
    request = await answer(pair, prompt(250))
    assert request.token_ids == greedy(model, prompt(250), 12)
    assert counter(pair.prefill, "lost_groups") == 1
    assert counter(pair.prefill, "digest_mismatches") + counter(pair.helpers[0], "digest_mismatches") > 0
    assert counter(pair.decode, "digest_mismatches") == 0


async def test_a_helper_that_leaves_in_the_middle_costs_no_attempt(
    start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    pair = await start_pair(helpers=1)
    gate = Gate(pair.helpers[0], start=64, layer=0)
    request = await pair.frontend.submit(pair.submit(prompt(250), "r"))
    await gate.reached.wait()
    pair.helpers[0].node.jobs.cancel("r", 1)
    gate.is_open.set()
    await request.ended.wait()
    assert request.failures == []
    assert request.token_ids == greedy(model, prompt(250), 12)
    assert counter(pair.prefill, "lost_groups") == 1
    await pair.at_rest()


async def test_a_silent_helper_is_given_up(start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy) -> None:
    pair = await start_pair(helpers=1, prefill_options={"push_timeout_s": 0.5})
    gate = Gate(pair.helpers[0], start=64, layer=1)
    request = await pair.frontend.submit(pair.submit(prompt(250), "r"))
    await request.ended.wait()  # while the helper's engine still stands
    assert gate.reached.is_set()
    assert request.failures == []
    assert request.token_ids == greedy(model, prompt(250), 12)
    gate.is_open.set()
    await pair.at_rest()


@pytest.mark.parametrize("stopped", ["prefill", "helper"])
async def test_a_cancelled_request_leaves_nothing_with_any_member(
    stopped: str, start_pair: Start, prompt: Prompt
) -> None:
    pair = await start_pair(helpers=2)
    gate = Gate(pair.prefill if stopped == "prefill" else pair.helpers[0], start=64, layer=0)
    await pair.frontend.submit(pair.submit(prompt(250), "r"))
    await gate.reached.wait()
    for node in ("prefill", "decode"):
        await pair.frontend.cancel(node, "r", 1)
    gate.is_open.set()
    await pair.at_rest()


async def test_two_heads_that_help_each_other_both_get_on(
    start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    """Each one's chunks wait for the other's, and both have requests of their own: nobody may wait in a circle."""
    pair = await start_pair(helpers=1)
    other = pair.helpers[0].node
    requests = []
    for i in range(6):
        message = pair.submit(prompt(180 + 9 * i, i), f"r{i}")
        if i % 2:
            message.placement.helpers[0].node_id = "prefill"
            message.placement.helpers[0].target = pair.prefill.node.target
            requests.append(await pair.frontend.submit(message, other.config.node_id))
        else:
            requests.append(await pair.frontend.submit(message))
    for i, request in enumerate(requests):
        await request.ended.wait()
        assert request.failures == []
        assert request.token_ids == greedy(model, prompt(180 + 9 * i, i), 12)
    await pair.at_rest()
    assert counter(pair.prefill, "prefill_groups") + counter(pair.helpers[0], "prefill_groups") > 0
    assert counter(pair.prefill, "lost_groups") + counter(pair.helpers[0], "lost_groups") == 0


async def test_a_head_that_hangs_up_before_it_begins_leaves_nothing(start_pair: Start, prompt: Prompt) -> None:
    pair = await start_pair(helpers=1)
    node = pair.helpers[0].node
    channel = open_channel(node.target)
    call: Any = WorkerStub(channel).Help(timeout=30)
    enlist = Enlist(request=pair.submit(prompt(100), "r"), kv_namespace=node.namespace, num_blocks=12)
    await call.write(HelpRequest(enlist=enlist))
    assert (await call.read()).enlisted.epoch
    assert node.slots.pool.num_held == 12
    call.cancel()
    await pair.at_rest()
    await channel.close()


async def test_a_head_whose_step_waits_for_a_helper_is_cancelled_at_once(start_pair: Start, prompt: Prompt) -> None:
    pair = await start_pair(helpers=1, prefill_options={"push_timeout_s": 600.0})
    gate = Gate(pair.helpers[0], start=64, layer=1)
    await pair.frontend.submit(pair.submit(prompt(250), "r"))
    await gate.reached.wait()
    for node in ("prefill", "decode"):
        await pair.frontend.cancel(node, "r", 1)
    async with asyncio.timeout(60):
        while pair.prefill.node.validate()[0]:
            await asyncio.sleep(0.01)
    gate.is_open.set()
    await pair.at_rest()


@pytest.mark.parametrize("spans", [[], [(8, 8)], [(0, 12)], [(0, 200)], [(32, 64), (0, 16)]])
async def test_chunks_that_make_no_sense_end_the_help(
    spans: list[tuple[int, int]], start_pair: Start, prompt: Prompt
) -> None:
    pair = await start_pair(helpers=1)
    node = pair.helpers[0].node
    channel = open_channel(node.target)
    call: Any = WorkerStub(channel).Help(timeout=60)
    enlist = Enlist(request=pair.submit(prompt(100), "r"), kv_namespace=node.namespace, num_blocks=12)
    await call.write(HelpRequest(enlist=enlist))
    await call.read()
    begin = BeginShare(spans=[Span(start=start, end=end) for start, end in spans])
    await call.write(HelpRequest(begin=begin))
    with pytest.raises(grpc.aio.AioRpcError, match="bad_share"):
        await call.read()
    await pair.at_rest()
    await channel.close()
