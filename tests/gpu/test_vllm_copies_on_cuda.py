"""Copies between a worker's slots and vLLM's blocks on a real GPU: bytes, order of streams, calls that do not block."""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from messenger import SharedMemory
from tests.vllm_worker.vllm_blocks import HEADS, LAYOUT, NUM_BLOCKS, ORDERS, VllmBlocks, random_values, slots_of
from vllm_worker.block_copies import new_block_copies
from vllm_worker.block_layout import SlotLayout
from vllm_worker.kv_jobs import BlocksToCopy, LayerToCopy

BUSY_S = 0.3
LARGE = SlotLayout(num_slots=64, num_layers=8, kv_heads=8, block_tokens=32, head_dim=128, value_nbytes=2)  # 64 MiB
TIMEOUT_S = 60


class Rank:
    def __init__(
        self, device: str, order: str, pieces: int, *, layout: SlotLayout = LAYOUT, heads: range = HEADS
    ) -> None:
        self.layout, self.heads = layout, heads
        self.blocks = VllmBlocks.allocate(order, pieces, layout=layout, heads=heads, device=device)
        self.shared = SharedMemory.create(layout.nbytes, "gpu-proof-vllm", "auto")
        self.slots = slots_of(self.shared.array, layout)
        self.copies = new_block_copies(self.shared.array, layout, self.blocks.layers, heads, None)
        self.ends: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def own(self, slot: int, layer: int) -> torch.Tensor:
        return self.slots[slot, layer, self.heads.start : self.heads.stop]

    def ended(self, what: Any, error: Exception | None) -> None:
        self.ends.put((what, error))

    def await_ends(self, count: int) -> None:
        for _ in range(count):
            assert self.ends.get(timeout=TIMEOUT_S)[1] is None

    def close(self) -> None:
        torch.cuda.synchronize()
        self.copies.close()
        self.shared.close()


@pytest.fixture
def new_rank(cuda: str) -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def new(order: str = "LBNHC", pieces: int = 1, **options: Any) -> Rank:
        made.append(Rank(cuda, order, pieces, **options))
        return made[-1]

    yield new
    for rank in made:
        rank.close()


def keep_busy() -> None:
    """Queue work of about BUSY_S on the compute stream."""
    torch.cuda._sleep(int(BUSY_S * 1.5e9))  # cycles


PAIRS = [(4, 0), (2, 5), (6, 1), (0, 2)]


@pytest.mark.parametrize(("order", "pieces"), ORDERS)
def test_saved_and_loaded_blocks_have_the_right_bytes(new_rank: Callable[..., Rank], order: str, pieces: int) -> None:
    rank = new_rank(order, pieces)
    rank.copies.save(BlocksToCopy(1, "r", PAIRS, keeps_blocks=True), rank.ended)
    rank.await_ends(1)
    for layer in range(LAYOUT.num_layers):
        for block, slot in PAIRS:
            assert torch.equal(rank.own(slot, layer), rank.blocks.read(layer, block).cpu())
            rank.own(slot, layer)[:] = 0
    assert not rank.slots.any(), "other slots and heads are untouched"
    rank.slots[:] = random_values(LAYOUT.shape, rank.slots.dtype, seed=2)
    layers = range(LAYOUT.num_layers)
    expected = [[rank.blocks.read(layer, block).cpu() for block in range(NUM_BLOCKS)] for layer in layers]
    rank.copies.load(BlocksToCopy(2, "q", PAIRS), rank.ended)
    rank.await_ends(1)
    for layer in layers:
        for block, slot in PAIRS:
            expected[layer][block] = rank.own(slot, layer)
        for block in range(NUM_BLOCKS):
            assert torch.equal(rank.blocks.read(layer, block).cpu(), expected[layer][block])


def test_the_slots_are_page_locked(new_rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture) -> None:
    rank = new_rank()
    assert "not page-locked" not in caplog.text
    assert torch.from_numpy(rank.shared.array).is_pinned()


def test_saves_and_loads_wait_for_the_computation_before_them_and_their_caller_for_nothing(
    new_rank: Callable[..., Rank],
) -> None:
    rank = new_rank(layout=LARGE, heads=range(8))
    saved = [LayerToCopy(1, 0, 64, [(0, 10), (3, 7)])]
    rank.copies.save_layer(0, saved, rank.ended)
    rank.copies.load(BlocksToCopy(2, "q", [(5, 20)]), rank.ended)
    rank.await_ends(2)  # warmed up
    rank.slots[20] = 3
    keep_busy()
    for layer in rank.blocks.layers:
        layer.fill_(7)
    began = time.perf_counter()
    for layer in range(LARGE.num_layers):
        rank.copies.save_layer(layer, saved, rank.ended)
    rank.copies.load(BlocksToCopy(2, "q", [(5, 20)]), rank.ended)
    rank.copies.order_compute()
    took = time.perf_counter() - began
    seen = torch.stack([layer[5] for layer in rank.blocks.layers])
    for layer in rank.blocks.layers:
        layer.fill_(9)
    assert rank.ends.empty()
    assert took < BUSY_S / 3, f"the calls blocked for {took:.3f} s"
    rank.await_ends(LARGE.num_layers + 1)
    assert (rank.slots[[7, 10]] == 7).all()
    assert (seen == 3).all(), "the load came after what was computed before it"


def test_many_random_steps_end_with_the_right_bytes(new_rank: Callable[..., Rank]) -> None:
    rank, rng = new_rank("LBHNC", layout=LARGE, heads=range(8)), random.Random(3)
    for turn in range(1, 40):
        slots = rng.sample(range(LARGE.num_slots), 4)
        loaded, computed = [(0, slots[0]), (1, slots[1])], [(2, slots[2]), (3, slots[3])]
        for layer in rank.blocks.layers:
            layer[:2] = 0  # a step in progress still writes blocks that are given to the next request
        for _, slot in loaded:
            for index in range(LARGE.num_layers):
                rank.slots[slot, index] = turn + index
        rank.copies.load(BlocksToCopy(1, "loads", loaded), rank.ended)
        saved = [LayerToCopy(2, 0, 64, computed)]
        for index, layer in enumerate(rank.blocks.layers):
            if rng.random() < 0.3:
                torch.cuda._sleep(rng.randrange(3_000_000))
            layer[2:4] = 3 * turn + index
            rank.copies.save_layer(index, saved, rank.ended)
        rank.copies.order_compute()
        found = [(layer[:2] != turn + index).any() for index, layer in enumerate(rank.blocks.layers)]
        for layer in rank.blocks.layers:
            layer[2:4] = -1  # of a preempted request
        rank.await_ends(LARGE.num_layers + 1)
        for _, slot in computed:
            for index in range(LARGE.num_layers):
                assert (rank.slots[slot, index] == 3 * turn + index).all()
        assert not any(bool(each) for each in found)


@pytest.mark.parametrize("direction", ["load", "save"])
def test_large_copies_have_the_right_bytes_and_their_rate_is_printed(
    new_rank: Callable[..., Rank], direction: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = new_rank(layout=LARGE, heads=range(8))
    copy = BlocksToCopy(1, "r", [(block, 3 * block) for block in range(NUM_BLOCKS)], keeps_blocks=True)
    nbytes = NUM_BLOCKS * LARGE.slot_nbytes
    for _ in range(2):  # the first one warms up
        began = time.perf_counter()
        for _ in range(10):
            getattr(rank.copies, direction)(copy, rank.ended)
        rank.await_ends(10)
        took = time.perf_counter() - began
    with capsys.disabled():
        print(f"\nvLLM's blocks, {direction}: {10 * nbytes / took / 1e9:.1f} GB/s")
    for block, slot in copy.pairs:
        assert np.array_equal(rank.own(slot, 5).numpy(), rank.blocks.read(5, block).cpu().numpy())
