"""Reused KV that arrives layer by layer: the computation begins with the first layer, and no damage is ever used."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from engine import Model, load_model
from engine.random_model import RandomModelSpec, write_random_model
from kvpool.local.server import start_local_pool_server
from messenger import PeerLost
from prefill_node.handoff import PrefillHandoff
from prefill_node.push import Pusher
from worker import kv_loading
from worker.kv_loading import PoolLoad
from worker.shielded_wait import shielded

Start = Callable[..., Awaitable[Any]]
Prompt = Callable[..., list[int]]
Greedy = Callable[[Model, list[int], int], list[int]]
LAYERS, BLOCK = 6, 8


@pytest.fixture(autouse=True)
def one_layer_per_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_loading, "LEAST_READ_NBYTES", 1)
    monkeypatch.setattr(kv_loading, "LEAST_SLICE_NBYTES", 1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = RandomModelSpec(layers=LAYERS, vocab=256, max_len=512, scale=3.0, seed=5)
    return write_random_model(tmp_path_factory.mktemp("deep"), spec)


@pytest.fixture(scope="module")
def deep(path: Path) -> Model:
    return load_model(path, threads=1)


class Reads:
    """Holds the reads of layers until they are let go, and records what was computed and read, in order."""

    def __init__(self, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = asyncio.get_running_loop()
        self.events: list[tuple[str, int]] = []
        self.held: dict[int, asyncio.Event] = {}
        self.failing: dict[int, Exception] = {}
        self.arrived = {layer: asyncio.Event() for layer in range(LAYERS)}
        self.computed = {layer: asyncio.Event() for layer in range(LAYERS)}
        self._lock = threading.Lock()
        read, written = PoolLoad._read, pair.prefill._layer_written

        async def gated(load: Any, piece: Any, pin: Any) -> Any:
            layer = piece.layers[0]
            right = await read(load, piece, pin)
            self.arrived[layer].set()
            if layer in self.held:
                await shielded(asyncio.ensure_future(self.held[layer].wait()))
            if layer in self.failing:
                raise self.failing[layer]
            self._note("read", layer)
            return right

        def on_layer(layer: int, spans: Any) -> None:
            self._note("computed", layer)
            self.loop.call_soon_threadsafe(self.computed[layer].set)
            written(layer, spans)

        monkeypatch.setattr(PoolLoad, "_read", gated)
        pair.prefill.node.engine.on_layer(on_layer)

    def _note(self, what: str, layer: int) -> None:
        with self._lock:
            self.events.append((what, layer))

    def hold(self, *layers: int) -> None:
        for layer in layers:
            self.held[layer] = asyncio.Event()

    def release(self) -> None:
        for event in self.held.values():
            event.set()


async def until_end(pair: Any, reads: Reads, turn: list[int], held: int) -> Any:
    """Run a turn that computes the layers before `held`; then release the reads. Returns the ended request."""
    request = await pair.frontend.submit(pair.submit(turn, "second"))
    async with asyncio.timeout(60):
        if held:
            await reads.computed[held - 1].wait()
        reads.release()
        await request.ended.wait()
    return request


def counter(pair: Any, name: str) -> float:
    return float(pair.prefill.node.counters.snapshot().get(name, 0))


@pytest.fixture
async def history(start_pair: Start, path: Path, prompt: Prompt) -> tuple[Any, list[int]]:
    """A pair of nodes, and a dialogue of 69 tokens (8 blocks and a partial one) that only the pool still has."""
    pair = await start_pair(pool=True, path=path)
    first = await pair.ask(prompt(64), "first", max_tokens=6)
    pair.forget()
    return pair, [*prompt(64), *first.token_ids]


@pytest.mark.parametrize("local", [False, True], ids=["messenger", "shared memory"])
async def test_the_first_layer_is_computed_before_the_last_one_is_read(
    local: bool,
    history: tuple[Any, list[int]],
    deep: Model,
    prompt: Prompt,
    greedy: Greedy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, ids = history
    door = await start_local_pool_server(pair.pool) if local else None
    pair.prefill.node.kv_connector._local_pool._next_try_s = 0.0  # it has looked for one while there was none
    reads = Reads(pair, monkeypatch)
    reads.hold(*range(2, LAYERS))
    turn = [*ids, *prompt(21, seed=1)]
    request = await pair.frontend.submit(pair.submit(turn, "second"))
    async with asyncio.timeout(60):
        await reads.computed[1].wait()
        assert ("computed", 2) not in reads.events
        while pair.prefill.node.engine.step_in_progress:  # a step that waits for layers does not stand still
            await asyncio.sleep(0.001)
        reads.release()
        await request.ended.wait()
    assert request.failures == []
    assert request.token_ids == greedy(deep, turn, 12)
    assert request.cached_tokens == 69
    assert counter(pair, "cached_tokens") == 69
    for layer in range(LAYERS):
        assert reads.events.index(("read", layer)) < reads.events.index(("computed", layer))
    await pair.at_rest()
    if door is not None:
        assert pair.prefill.node.messenger.counters().get("bytes_read_shm", 0) == 0
        await door.close()


async def test_a_turn_takes_the_same_course_without_delays(
    history: tuple[Any, list[int]], deep: Model, prompt: Prompt, greedy: Greedy
) -> None:
    pair, ids = history
    for turn in range(4):
        ids = [*ids, *prompt(1 + 9 * turn, seed=turn)]
        request = await pair.ask(ids, f"turn {turn}", max_tokens=5)
        assert request.token_ids == greedy(deep, ids, 5)
        assert request.cached_tokens > 64
        ids = [*ids, *request.token_ids]
        pair.forget()
    assert counter(pair, "digest_mismatches") == counter(pair, "recomputed_blocks") == 0


@pytest.mark.parametrize("block", [0, 3, 8], ids=["first block", "middle block", "partial block"])
@pytest.mark.parametrize("layer", [0, 2, LAYERS - 1])
async def test_a_flipped_bit_is_found_at_its_layer_and_nothing_computed_after_it_is_used(
    layer: int,
    block: int,
    history: tuple[Any, list[int]],
    deep: Model,
    prompt: Prompt,
    greedy: Greedy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, ids = history
    reads = Reads(pair, monkeypatch)
    damage(pair, ids, block, layer)
    reads.hold(*range(max(1, layer), LAYERS))  # the step has begun when the damage is found
    turn = [*ids, *prompt(21, seed=1)]
    request = await until_end(pair, reads, turn, layer)
    assert request.failures == []
    assert request.token_ids == greedy(deep, turn, 12)
    assert request.cached_tokens == 8 * block
    assert request.messages[0].timing.recomputed_blocks == 9 - block
    await pair.at_rest()
    assert counter(pair, "digest_mismatches") == 1
    assert counter(pair, "recomputed_blocks") == 9 - block
    assert counter(pair, "cached_tokens") == 8 * block
    assert pair.pool.core.counters["quarantined_blocks"] >= 1
    if layer:
        assert [what for what, at in reads.events if at == 0].count("computed") > 1  # the prompt began again
    pair.forget()
    again = await pair.ask(turn, "again")  # whatever was stored is right
    assert again.token_ids == greedy(deep, turn, 12)


def damage(pair: Any, ids: list[int], block: int, layer: int) -> None:
    """Flip a bit in one layer of one block of the pool."""
    keys = pair.submit(ids, "k").chain
    stored = list(pair.pool.core.store.in_dram())
    if block < 8:
        stored = [each for each in stored if each.key[16:] == keys[16 * block : 16 * block + 16]]
    else:
        stored = [each for each in stored if each.key[16:] not in {keys[i : i + 16] for i in range(0, len(keys), 16)}]
    (one,) = stored
    spec = pair.prefill.node.stored.spec
    pair.pool.memory.array[one.offsets[0] + layer * spec.layer_nbytes(0) + 5] ^= 16


@pytest.mark.parametrize("layer", [0, 3])
async def test_a_read_that_fails_is_replaced_by_computing(
    layer: int,
    history: tuple[Any, list[int]],
    deep: Model,
    prompt: Prompt,
    greedy: Greedy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, ids = history
    reads = Reads(pair, monkeypatch)
    reads.hold(*range(max(1, layer), LAYERS))
    reads.failing[layer] = PeerLost("the pool node is gone", peer="pool", transport="shm", address="")
    turn = [*ids, *prompt(21, seed=1)]
    request = await until_end(pair, reads, turn, layer)
    assert request.failures == []
    assert request.token_ids == greedy(deep, turn, 12)
    assert request.cached_tokens == 0
    assert counter(pair, "recomputed_blocks") == 9
    await pair.at_rest()


@pytest.mark.parametrize("cancels", [1, 2])
async def test_a_cancelled_request_keeps_its_slots_until_its_reads_have_ended(
    cancels: int,
    history: tuple[Any, list[int]],
    deep: Model,
    prompt: Prompt,
    greedy: Greedy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, ids = history
    node = pair.prefill.node
    reads = Reads(pair, monkeypatch)
    reads.hold(LAYERS - 1)
    turn = [*ids, *prompt(21, seed=1)]
    await pair.frontend.submit(pair.submit(turn, "doomed"))
    async with asyncio.timeout(60):
        await reads.computed[LAYERS - 2].wait()
        await reads.arrived[LAYERS - 1].wait()
        for name in ("prefill", "decode"):
            await pair.frontend.cancel(name, "doomed", 1)
        while node.engine.num_sequences:  # the step gives up at once, without the layer
            await asyncio.sleep(0.01)
    for _ in range(1, cancels):  # the frontend is gone, too
        node.jobs.cancel("doomed", 1)
        await asyncio.sleep(0.01)
    assert node.slots.pool.num_held == 12
    assert len(node.jobs) == 1
    reads.release()
    await pair.at_rest()
    assert ("computed", LAYERS - 1) not in reads.events
    again = await pair.ask(turn, "again")
    assert again.token_ids == greedy(deep, turn, 12)


@pytest.fixture(scope="module")
def windowed_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(
        tmp_path_factory.mktemp("windows"),
        RandomModelSpec(
            family="qwen2", layers=LAYERS, vocab=256, max_len=512, scale=3.0, seed=3, window=24, full_layers=3
        ),
    )


async def test_layers_of_two_kinds_arrive_in_their_order(
    start_pair: Start, windowed_path: Path, prompt: Prompt, greedy: Greedy
) -> None:
    pair = await start_pair(pool=True, path=windowed_path)
    first = await pair.ask(prompt(64), "first", max_tokens=6)
    pair.forget()
    turn = [*prompt(64), *first.token_ids, *prompt(21, seed=1)]
    second = await pair.ask(turn, "second")
    assert second.token_ids == greedy(load_model(windowed_path, threads=1), turn, 12)
    assert second.cached_tokens == 69
    assert counter(pair, "recomputed_blocks") == 0


async def test_reused_blocks_are_pushed_when_all_of_their_layers_are_loaded(
    start_pair: Start, windowed_path: Path, prompt: Prompt, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await start_pair(pool=True, path=windowed_path)
    first = await pair.ask(prompt(64), "first", max_tokens=6)
    pair.forget()
    reads, reserved = Reads(pair, monkeypatch), asyncio.Event()
    reads.hold(*range(1, LAYERS))
    reserve, push_blocks = PrefillHandoff.reserve, Pusher.push_blocks

    async def watched_reserve(handoff: PrefillHandoff) -> None:
        await reserve(handoff)
        reserved.set()

    def watched_push(pusher: Pusher, blocks: Any, *, on_request: bool) -> None:
        if blocks and not on_request:
            reads._note("pushed", max(blocks))
        push_blocks(pusher, blocks, on_request=on_request)

    monkeypatch.setattr(PrefillHandoff, "reserve", watched_reserve)
    monkeypatch.setattr(Pusher, "push_blocks", watched_push)
    turn = [*prompt(64), *first.token_ids, *prompt(3, seed=1)]  # its end sees reused blocks
    request = await pair.frontend.submit(pair.submit(turn, "second"))
    async with asyncio.timeout(60):
        await reads.computed[0].wait()
        await reserved.wait()
        for _ in range(10):  # whatever goes on after the reservation does so before the other layers are there
            await asyncio.sleep(0)
        reads.release()
        await request.ended.wait()
    assert request.failures == []
    assert request.token_ids == greedy(load_model(windowed_path, threads=1), turn, 12)
    assert request.cached_tokens == 69
    pushed = [i for i, (what, _) in enumerate(reads.events) if what == "pushed"]
    assert pushed
    assert min(pushed) > max(i for i, (what, _) in enumerate(reads.events) if what == "read")


async def test_an_unexpected_failure_of_a_load_fails_the_request_and_frees_everything(
    history: tuple[Any, list[int]], prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, ids = history
    reads = Reads(pair, monkeypatch)
    reads.hold(3)
    reads.failing[3] = ZeroDivisionError("a bug")
    request = await until_end(pair, reads, [*ids, *prompt(21, seed=1)], 3)
    assert len(request.failures) == 1
    await pair.frontend.cancel("decode", "second", 1)
    await pair.at_rest()


@pytest.mark.parametrize("keep_kv", [True, False])
async def test_an_answer_that_is_ended_during_its_load_saves_nothing_that_was_not_verified(
    keep_kv: bool,
    history: tuple[Any, list[int]],
    deep: Model,
    prompt: Prompt,
    greedy: Greedy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, ids = history
    node = pair.prefill.node
    reads = Reads(pair, monkeypatch)
    reads.hold(LAYERS - 1)
    turn = [*ids, *prompt(21, seed=1)]
    submit = pair.submit(turn, "ended")
    submit.placement.ClearField("decode")  # one node runs both phases
    await pair.frontend.submit(submit)
    async with asyncio.timeout(60):
        while not node.engine.num_sequences:
            await asyncio.sleep(0.01)
        await reads.arrived[LAYERS - 1].wait()
        await pair.frontend.cancel("prefill", "ended", 1, keep_kv=keep_kv)
        while node.engine.num_sequences:
            await asyncio.sleep(0.01)
    assert node.slots.pool.num_held
    damage(pair, ids, 3, LAYERS - 1)
    slots = node.stored
    for slot in range(slots.num_slots):  # what the last read has left is not what was stored
        at = slots.offsets(0, [slot])[0] + (LAYERS - 1) * slots.spec.layer_nbytes(0)
        slots.region.array[at] ^= 64
    reads.release()
    await pair.at_rest()
    again = await pair.ask(turn, "again")
    assert again.token_ids == greedy(deep, turn, 12)
