"""Copies between slots and vLLM's blocks on a device that executes everything late and in adversarial order."""

from __future__ import annotations

import dataclasses
import logging
import queue
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from messenger.staging import StagingError
from tests.messenger.staging.device import Device
from tests.vllm_worker.vllm_blocks import (
    HEADS,
    INTEGERS,
    LAYOUT,
    NUM_BLOCKS,
    ORDERS,
    VllmBlocks,
    random_values,
    slots_of,
)
from vllm_worker.block_layout import LayoutMismatch, SlotLayout, require_plain_blocks
from vllm_worker.device_copies import DeviceBlockCopies, rounds
from vllm_worker.host_copies import HostBlockCopies
from vllm_worker.kv_jobs import BlocksToCopy, LayerToCopy, Pairs

TIMEOUT_S = 20
WHOLE = range(LAYOUT.num_layers)


class Rank:
    """One rank on a device. Its calls are made on a thread that must not wait, and what they report is collected."""

    def __init__(
        self,
        order: str = "LBNHC",
        pieces: int = 1,
        *,
        seed: int = 0,
        layout: SlotLayout = LAYOUT,
        heads: range = HEADS,
        memory: np.ndarray | None = None,
        room: int = 3,
        can_pin: bool = True,
    ) -> None:
        """`room`: layers of a block that half of the buffer holds."""
        self.layout, self.heads = layout, heads
        self.blocks = VllmBlocks.allocate(order, pieces, layout=layout, heads=heads)
        self.memory = np.zeros(layout.nbytes + 64, np.uint8) if memory is None else memory  # it may be rounded up
        self.slots = slots_of(self.memory, layout)
        self.device = Device(2 * room * len(heads) * layout.head_nbytes, seed)
        self.device.can_pin = can_pin
        self.device.engine_thread = threading.get_ident()
        buffer = torch.from_numpy(self.device.memory)
        self.copies = DeviceBlockCopies(self.memory, layout, self.blocks.layers, heads, self.device, buffer)
        self.ends: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def own(self, slot: int, layer: int) -> torch.Tensor:
        """The rank's part of a slot's layer: [heads, 2, tokens, head_dim]."""
        return self.slots[slot, layer, self.heads.start : self.heads.stop]

    def ended(self, what: Any, error: Exception | None) -> None:
        self.ends.put((what, error))

    def next_end(self) -> tuple[Any, Exception | None]:
        return self.ends.get(timeout=TIMEOUT_S)

    def save(self, pairs: Pairs) -> None:
        copy = BlocksToCopy(1, "r", pairs, keeps_blocks=True)
        self.copies.save(copy, self.ended)
        assert self.next_end() == (copy, None)

    def load(self, pairs: Pairs) -> None:
        copy = BlocksToCopy(2, "q", pairs)
        self.copies.load(copy, self.ended)
        assert self.next_end() == (copy, None)

    def close(self) -> None:
        self.device.computed()
        self.copies.close()
        assert not self.device.pinned
        assert not self.device.has_blocked_engine


PAIRS = [(4, 0), (2, 5), (6, 1), (0, 2)]


@pytest.mark.parametrize("room", [1, 3, 1000])
@pytest.mark.parametrize(("order", "pieces"), ORDERS)
def test_saved_blocks_are_in_the_slots_of_this_ranks_heads(order: str, pieces: int, room: int) -> None:
    rank = Rank(order, pieces, room=room)
    rank.save(PAIRS)
    for layer in WHOLE:
        for block, slot in PAIRS:
            assert torch.equal(rank.own(slot, layer), rank.blocks.read(layer, block))
            rank.own(slot, layer)[:] = 0
    assert not rank.memory.any(), "other slots and heads are untouched"
    rank.close()


@pytest.mark.parametrize("room", [1, 3, 1000])
@pytest.mark.parametrize(("order", "pieces"), ORDERS)
def test_loaded_blocks_are_those_of_the_slots_and_others_are_untouched(order: str, pieces: int, room: int) -> None:
    rank = Rank(order, pieces, room=room)
    rank.slots[:] = random_values(LAYOUT.shape, rank.slots.dtype, seed=2)
    before = [[rank.blocks.read(layer, block) for block in range(NUM_BLOCKS)] for layer in WHOLE]
    rank.load(PAIRS)
    for layer in WHOLE:
        for block, slot in PAIRS:
            before[layer][block] = rank.own(slot, layer)
        for block in range(NUM_BLOCKS):
            assert torch.equal(rank.blocks.read(layer, block), before[layer][block])
    rank.close()


@pytest.mark.parametrize("value_nbytes", INTEGERS)
@pytest.mark.parametrize(("order", "pieces"), ORDERS)
def test_bytes_in_the_slots_are_those_of_a_rank_on_a_cpu(order: str, pieces: int, value_nbytes: int) -> None:
    for head_dim in (4, 3):
        layout = dataclasses.replace(LAYOUT, value_nbytes=value_nbytes, head_dim=head_dim)
        rank = Rank(order, pieces, layout=layout)
        size = 2 * layout.block_tokens * head_dim
        positions = torch.randperm(size, generator=torch.Generator().manual_seed(3))
        shape = (NUM_BLOCKS, len(HEADS), layout.block_tokens, 2 * head_dim)
        on_cpu = [torch.zeros(shape, dtype=INTEGERS[value_nbytes]) for _ in WHOLE]
        for layer, values in enumerate(on_cpu):
            for block in range(NUM_BLOCKS):
                values[block].view(len(HEADS), size)[:, positions] = rank.blocks.read(layer, block).flatten(1)
        memory = np.zeros_like(rank.memory)
        host = HostBlockCopies(memory, layout, on_cpu, HEADS, positions)
        host.save(BlocksToCopy(1, "r", PAIRS, keeps_blocks=True), rank.ended)
        host.close()
        assert rank.next_end()[1] is None
        rank.save(PAIRS)
        assert (rank.memory == memory).all()
        rank.close()


def test_two_ranks_fill_one_slot() -> None:
    memory = np.zeros(LAYOUT.nbytes, np.uint8)
    ranks = [Rank(heads=heads, memory=memory, seed=i) for i, heads in enumerate((range(2), range(2, 4)))]
    for rank in ranks:
        rank.save([(3, 4)])
    for layer in WHOLE:
        expected = torch.cat([rank.blocks.read(layer, 3) for rank in ranks])
        assert torch.equal(ranks[0].slots[4, layer], expected)
    for rank in ranks:
        rank.close()


@given(st.lists(st.integers(0, 5), unique=True), st.integers(0, 9), st.integers(1, 8))
def test_rounds_have_every_block_of_every_layer_once_and_fit(layers: list[int], count: int, capacity: int) -> None:
    found = list(rounds(layers, count, capacity))
    sizes = [sum(end - start for _, start, end in pieces) for pieces in found]
    assert sizes == [capacity] * (len(sizes) - 1) + sizes[-1:]
    assert all(0 < size <= capacity for size in sizes)
    covered = [(layer, i) for pieces in found for layer, start, end in pieces for i in range(start, end)]
    assert covered == [(layer, i) for layer in layers for i in range(count)]


class Engine:
    """vLLM's steps around a rank's copies: what it computes, loads, saves, preempts and ends, with all that is wrong.

    Blocks and slots are used again as soon as the interface permits it.
    """

    def __init__(self, rank: Rank, rng: random.Random) -> None:
        self.rank, self.rng = rank, rng
        self.wrong: list[str] = []
        self.num_checks = 0
        self._seed = rng.randrange(1 << 30)

    def values(self) -> torch.Tensor:
        self._seed += 1
        return random_values(tuple(self.rank.own(0, 0).shape), self.rank.slots.dtype, self._seed)

    def compute(self, work: Callable[[], object]) -> None:
        self.rank.device.compute.launch(work)
        self.rank.device.poke(self.rng.randrange(3))

    def write(self, block: int, layer: int, values: torch.Tensor) -> None:
        self.compute(lambda: self.rank.blocks.write(layer, block, values))

    def check(self, found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        self.num_checks += 1
        if not torch.equal(found, expected):
            self.wrong.append(what)

    def step(self) -> None:
        """Load one request, compute and save another one layer by layer, preempt or end it, use everything again."""
        rank, rng, device = self.rank, self.rng, self.rank.device
        blocks = rng.sample(range(NUM_BLOCKS), 4)
        loaded, computed = blocks[:2], blocks[2:]
        sources, targets = [0, 1], [2, 3]
        received = {(slot, layer): self.values() for slot in sources for layer in WHOLE}
        written = {(block, layer): self.values() for block in computed for layer in WHOLE}
        for (slot, layer), values in received.items():
            rank.own(slot, layer)[:] = values
        load = BlocksToCopy(1, "loads", list(zip(loaded, sources, strict=True)))
        saved = [LayerToCopy(2, 0, 16, list(zip(computed, targets, strict=True)))]

        def layer_saved(layer: int, error: Exception | None) -> None:
            for block, slot in saved[0].pairs:
                self.check(rank.own(slot, layer), written[block, layer], f"layer {layer} of {block} was saved wrongly")
            rank.ended(("layer", layer), error)

        def job_ended(copy: BlocksToCopy, error: Exception | None) -> None:
            for layer in WHOLE:
                for block, slot in copy.pairs:
                    self.check(rank.own(slot, layer), written[block, layer], f"{block} was saved wrongly at the end")
            for slot in targets:
                rank.slots[slot] = 0  # the worker uses them for another sequence
            rank.ended(copy, error)

        device.hurried = rng.choice([None, *device.streams])  # of which one may be far ahead
        with device.lock:  # no thread drives the device meanwhile; pokes do
            for block in loaded:  # a step in progress still writes blocks of a request that has ended
                for layer in WHOLE:
                    self.write(block, layer, self.values())
            rank.copies.load(load, rank.ended)
            for layer in WHOLE:
                for block in computed:
                    self.write(block, layer, written[block, layer])
                rank.copies.save_layer(layer, saved, layer_saved)
                device.poke(rng.randrange(4))
            end = BlocksToCopy(2, "saves", saved[0].pairs, keeps_blocks=True)
            is_preempted = rng.random() < 0.5
            if is_preempted:
                end = dataclasses.replace(end, pairs=[])
                rank.copies.order_compute()
                for block in computed:
                    for layer in WHOLE:
                        self.write(block, layer, self.values())
            rank.copies.save(end, job_ended)
        ends = [rank.next_end() for _ in range(len(WHOLE) + 2)]
        assert [error for _, error in ends] == [None] * len(ends)
        assert [what for what, _ in ends if what is not load] == [*(("layer", layer) for layer in WHOLE), end]
        for block, slot in load.pairs:
            for layer in WHOLE:
                self.compute(
                    lambda block=block, slot=slot, layer=layer: self.check(
                        rank.blocks.read(layer, block), received[slot, layer], f"{block} was loaded wrongly"
                    )
                )
        rank.device.computed()


def wrong_bytes(seed: int, *, forgetful: int | None = None) -> list[str]:
    """Return what went wrong in a few steps, optionally with one stream that waits for nothing."""
    rng = random.Random(seed)
    rank = Rank(*rng.choice(ORDERS), seed=seed, room=rng.choice([1, 2, 5, 100]))
    if forgetful is not None:
        rank.device.streams[forgetful].forgets_waits = True
    engine = Engine(rank, rng)
    for _ in range(3):
        engine.step()
    assert engine.num_checks >= 3 * len(WHOLE) * 4
    rank.close()
    return engine.wrong


@settings(max_examples=40)
@given(st.integers(0, 2**32))
def test_bytes_arrive_whatever_the_order_in_which_streams_are_executed(seed: int) -> None:
    assert wrong_bytes(seed) == []


@pytest.mark.parametrize("stream", [0, 1, 2], ids=["compute", "out", "in"])
def test_every_stream_that_does_not_wait_shows_as_wrong_bytes(stream: int) -> None:
    assert sum(bool(wrong_bytes(seed, forgetful=stream)) for seed in range(20)) >= 3


def test_computation_after_order_compute_sees_loads_and_overwrites_only_what_was_saved() -> None:
    def run(seed: int) -> None:
        rank = Rank(seed=seed)
        received, overwritten = random_values((2, *rank.own(0, 0).shape), rank.slots.dtype, seed)
        before, seen = rank.blocks.read(1, 3), list[torch.Tensor]()
        rank.own(0, 1)[:] = received
        with rank.device.lock:
            rank.copies.save_layer(1, [LayerToCopy(1, 0, 8, [(3, 2)])], rank.ended)
            rank.copies.load(BlocksToCopy(2, "q", [(5, 0)]), rank.ended)
            rank.copies.order_compute()
            rank.device.compute.launch(lambda: rank.blocks.write(1, 3, overwritten))
            rank.device.compute.launch(lambda: seen.append(rank.blocks.read(1, 5)))
            rank.device.computed()
        assert torch.equal(seen[0], received)
        assert torch.equal(rank.own(2, 1), before)
        rank.close()

    for seed in range(10):
        run(seed)


def test_the_end_of_a_request_that_was_aborted_during_its_load_follows_the_load() -> None:
    rank = Rank()
    rank.slots[:] = random_values(LAYOUT.shape, rank.slots.dtype, seed=1)
    expected = rank.own(4, 0).clone()
    load, end = BlocksToCopy(1, "r", [(1, 4), (2, 5)]), BlocksToCopy(1, "r", [])
    other = BlocksToCopy(2, "q", [(3, 1)], keeps_blocks=True)
    entered, release = threading.Event(), threading.Event()

    def hold(*_: object) -> None:  # keeps the thread of loads from its next one
        entered.set()
        release.wait(TIMEOUT_S)

    def reuse(what: BlocksToCopy, error: Exception | None) -> None:
        rank.slots[4:] = 0
        rank.ended(what, error)

    rank.copies.load(BlocksToCopy(0, "first", [(0, 0)]), hold)
    assert entered.wait(TIMEOUT_S)
    rank.device.hurried = rank.device.streams[1]  # saves are ahead of loads
    rank.copies.load(load, rank.ended)
    rank.copies.save(end, reuse)
    rank.copies.save(other, rank.ended)
    assert rank.next_end() == (other, None)
    release.set()
    assert [rank.next_end()[0] for _ in range(2)] == [load, end]
    assert torch.equal(rank.blocks.read(0, 1), expected)
    rank.close()


def test_no_call_of_the_engine_waits_polls_or_moves_bytes() -> None:
    rank = Rank()
    with rank.device.lock:
        rank.copies.load(BlocksToCopy(1, "r", [(0, 0), (5, 1)]), rank.ended)
        for layer in WHOLE:
            rank.copies.save_layer(layer, [LayerToCopy(2, 0, 8, [(1, 2)])], rank.ended)
        rank.copies.order_compute()
        rank.copies.save(BlocksToCopy(2, "q", [(1, 2)], keeps_blocks=True), rank.ended)
        assert not rank.device.has_blocked_engine
        assert "query" not in rank.device.calls
        assert rank.ends.empty()
        assert not rank.memory.any()
    assert [rank.next_end()[1] for _ in range(5)] == [None] * 5
    rank.close()


def test_blocks_of_a_layer_are_copied_in_one_call_and_adjacent_slots_in_one_copy() -> None:
    rank = Rank(heads=range(4), room=100)
    rank.copies.save_layer(1, [LayerToCopy(1, 0, 8, [(3, 1)]), LayerToCopy(2, 0, 8, [(0, 3), (5, 2)])], rank.ended)
    assert rank.next_end() == (1, None)
    ((copy,),) = rank.device.copied
    assert (copy.rows, copy.host_pitch, copy.nbytes) == (3, LAYOUT.slot_nbytes, LAYOUT.layer_nbytes)
    rank.save(PAIRS)
    assert len(rank.device.copied) == 2, "one call for all layers"
    rank.close()


@pytest.mark.parametrize("direction", ["load", "save"])
@pytest.mark.parametrize("when", ["refuses_copies", "loses_copies"])
def test_a_copy_that_fails_is_reported(direction: str, when: str) -> None:
    rank = Rank()
    setattr(rank.device, when, True)
    copy = BlocksToCopy(1, "r", [(1, 4)], keeps_blocks=True)
    getattr(rank.copies, direction)(copy, rank.ended)
    what, error = rank.next_end()
    assert what is copy
    assert isinstance(error, StagingError)
    setattr(rank.device, when, False)
    if when == "refuses_copies":
        rank.save([(1, 4)])
    rank.close()


def test_a_copy_of_which_a_part_was_refused_ends_after_its_other_parts() -> None:
    rank = Rank(room=100)
    rank.slots[:] = random_values(LAYOUT.shape, rank.slots.dtype, seed=1)
    rank.device.refuses_after = 2
    rank.copies.save(BlocksToCopy(1, "r", PAIRS, keeps_blocks=True), rank.ended)
    _, error = rank.next_end()
    assert "refused the copy" in str(error)
    assert not rank.device.streams[1].queue, "nothing of the copy is in progress"
    rank.close()


@pytest.mark.parametrize("pair", [(NUM_BLOCKS, 0), (-1, 0), (0, LAYOUT.num_slots), (0, -1)])
def test_blocks_and_slots_that_do_not_exist_are_refused_before_a_kernel_sees_them(pair: tuple[int, int]) -> None:
    rank = Rank()
    rank.copies.load(BlocksToCopy(1, "r", [(1, 1), pair]), rank.ended)
    _, error = rank.next_end()
    assert isinstance(error, StagingError)
    assert f"vLLM has {NUM_BLOCKS} blocks and the worker {LAYOUT.num_slots} slots" in str(error)
    assert rank.device.copied == []
    rank.close()


def test_slots_that_cannot_be_locked_are_used_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        rank = Rank(can_pin=False)
    assert "not page-locked, so copies block the engine: no memory may be locked" in caplog.text
    rank.save([(2, 3)])
    assert torch.equal(rank.own(3, 2), rank.blocks.read(2, 2))
    rank.close()


def test_kv_of_another_shape_is_refused_with_both_shapes() -> None:
    def make(layers: list[torch.Tensor], buffer_nbytes: int = 1 << 16) -> None:
        device = Device(buffer_nbytes)
        memory = np.zeros(LAYOUT.nbytes, np.uint8)
        DeviceBlockCopies(memory, LAYOUT, layers, HEADS, device, torch.from_numpy(device.memory))

    def zeros(*shape: int, dtype: torch.dtype = torch.int16) -> list[torch.Tensor]:
        return [torch.zeros(shape, dtype=dtype)] * LAYOUT.num_layers

    expected = r"expected \(blocks, 2, 8, 8\)"
    for layers, what in (
        (zeros(5, 2, 8, 8)[:2], "KV of 2 layers, the slots have 3"),
        (zeros(5, 2, 8, 8, dtype=torch.int32), r"values of 4 bytes \(torch.int32\), the slots have values of 2"),
        ([*zeros(5, 2, 8, 8)[1:], *zeros(5, 2, 8, 8, dtype=torch.int8)[:1]], r"values of 1 bytes \(torch.int8\)"),
        (zeros(2, 5, 8, 2, 4), rf"shape \(2, 5, 8, 2, 4\), {expected}"),  # keys and values apart, of earlier versions
        (zeros(5, 8, 2, 8), expected),
        (zeros(5, 2, 8, 12), expected),
        (zeros(5, 2, 3, 8), expected),
        (zeros(5, 2, 4, 8), expected),  # an odd number of halves
        (zeros(5, 2, 16, 8), expected),
        (zeros(5, 2, 0, 8), expected),
        ([each.transpose(2, 3) for each in zeros(5, 2, 8, 8)], "adjacent keys and values"),
    ):
        with pytest.raises(LayoutMismatch, match=what):
            make(layers)
    with pytest.raises(LayoutMismatch, match="half of the buffer"):
        make(zeros(5, 2, 8, 8), 2 * len(HEADS) * LAYOUT.head_nbytes - 1)


@dataclasses.dataclass
class Spec:
    num_kv_heads: int = 2
    num_states: int = 8
    block_size: int = 8
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    tokens_per_state: int = 1


@dataclasses.dataclass
class Group:
    kv_cache_spec: Any


def test_blocks_that_a_backend_packs_in_its_own_order_are_refused_though_their_shape_fits() -> None:
    plain = Spec()
    require_plain_blocks([Group(plain)])
    for spec in (
        Spec(num_head_slots=2, state_content_bytes=32),
        Spec(state_content_bytes=40),
        Spec(tokens_per_state=4),
    ):
        with pytest.raises(LayoutMismatch, match="order of its own, expected \\(2 heads, 8 tokens, key and value\\)"):
            require_plain_blocks([Group(spec)])
    uniform = dataclasses.make_dataclass("Uniform", ["kv_cache_specs"])({"a": plain, "b": Spec(num_head_slots=2)})
    with pytest.raises(LayoutMismatch):
        require_plain_blocks([Group(uniform)])
    with pytest.raises(LayoutMismatch, match="2 groups"):
        require_plain_blocks([Group(plain), Group(plain)])
