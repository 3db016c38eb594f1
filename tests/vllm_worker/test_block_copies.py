"""Copies between slots and vLLM's blocks on a CPU, in any order of values that a processor's kernels may use."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from messenger.staging import StagingError
from vllm_worker.block_copies import new_block_copies
from vllm_worker.block_layout import LayoutMismatch, SlotLayout
from vllm_worker.host_copies import HostBlockCopies
from vllm_worker.kv_jobs import BlocksToCopy, LayerToCopy

LAYOUT = SlotLayout(num_slots=6, num_layers=3, kv_heads=4, block_tokens=8, head_dim=2, value_nbytes=4)
BLOCKS = 5
SIZE = 2 * LAYOUT.block_tokens * LAYOUT.head_dim


class Rank:
    """One rank with heads [1, 3) of the slots, whose kernels keep a head's values in a random order."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(5)
        self.positions = torch.randperm(SIZE, generator=rng)
        self.memory = np.zeros(LAYOUT.nbytes + 64, np.uint8)  # a shared memory may be rounded up
        self.slots = torch.from_numpy(self.memory[: LAYOUT.nbytes]).view(torch.float32).view(LAYOUT.shape)
        shape = (BLOCKS, 2, LAYOUT.block_tokens, 2 * LAYOUT.head_dim)
        self.layers = [torch.randn(shape, generator=rng) for _ in range(LAYOUT.num_layers)]
        self.copies = new_block_copies(self.memory, LAYOUT, self.layers, range(1, 3), self.positions)
        self.events: list[Any] = []

    def block(self, layer: int, block: int) -> torch.Tensor:
        """A block of vLLM as [heads, 2, tokens, head_dim], worked out value by value."""
        raw = self.layers[layer][block]
        flat = raw.reshape(2, SIZE)
        found = [[flat[head, position] for position in self.positions.tolist()] for head in range(2)]
        return torch.tensor(found).view(2, 2, LAYOUT.block_tokens, LAYOUT.head_dim)

    def ended(self, *event: Any) -> None:
        self.events.append(event)


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.copies.close()


def test_saved_blocks_are_in_the_slots_of_this_ranks_heads(rank: Rank) -> None:
    copy = BlocksToCopy(1, "r", [(4, 0), (2, 5)])
    rank.copies.save(copy, rank.ended)
    rank.copies.order_compute()
    assert rank.events == [(copy, None)]
    for layer in range(3):
        assert torch.equal(rank.slots[0, layer, 1:3], rank.block(layer, 4))
        assert torch.equal(rank.slots[5, layer, 1:3], rank.block(layer, 2))
    rank.slots[[0, 5], :, 1:3] = 0
    assert not rank.slots.any()  # other slots and heads are untouched


def test_one_layer_is_saved_by_itself(rank: Rank) -> None:
    copies = [LayerToCopy(1, 0, 8, [(3, 1)]), LayerToCopy(2, 0, 8, [(0, 2)])]
    rank.copies.save_layer(1, copies, rank.ended)
    rank.copies.order_compute()
    assert rank.events == [(1, None)]
    assert torch.equal(rank.slots[1, 1, 1:3], rank.block(1, 3))
    assert torch.equal(rank.slots[2, 1, 1:3], rank.block(1, 0))
    assert not rank.slots[:, [0, 2]].any()


def test_what_is_loaded_into_one_block_is_what_was_saved_from_another(rank: Rank) -> None:
    before = [layer.clone() for layer in rank.layers]
    rank.copies.save(BlocksToCopy(1, "r", [(4, 0), (2, 5)]), rank.ended)
    rank.copies.load(BlocksToCopy(2, "q", [(1, 0), (0, 5)]), rank.ended)
    rank.copies.order_compute()
    for layer, old in zip(rank.layers, before, strict=True):
        assert torch.equal(layer[1], old[4])
        assert torch.equal(layer[0], old[2])
        assert torch.equal(layer[2:], old[2:])


def test_a_copy_that_fails_is_reported_and_the_next_one_runs(rank: Rank) -> None:
    rank.copies.load(BlocksToCopy(1, "r", [(99, 0)]), rank.ended)
    rank.copies.save(BlocksToCopy(2, "q", []), rank.ended)
    rank.copies.order_compute()
    (_, error), second = rank.events
    assert isinstance(error, IndexError)
    assert second[1] is None


def test_the_engines_thread_does_not_wait(rank: Rank) -> None:
    entered, release = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        entered.set()
        release.wait()

    rank.copies.save(BlocksToCopy(1, "r", []), hold)
    rank.copies.save_layer(0, [LayerToCopy(1, 0, 8, [(3, 1)])], rank.ended)
    rank.copies.load(BlocksToCopy(2, "q", [(1, 0)]), rank.ended)
    assert entered.wait(10)
    assert rank.events == []
    release.set()
    rank.copies.order_compute()
    assert len(rank.events) == 2


def test_kv_of_another_shape_is_refused() -> None:
    memory = np.zeros(LAYOUT.nbytes, np.uint8)
    good = torch.zeros((BLOCKS, 2, 8, 4))
    order = torch.arange(SIZE)
    for layers, positions, what in (
        ([good] * 2, order, "2 layers, the slots have 3"),
        ([torch.zeros((BLOCKS, 2, 8, 6))] * 3, order, r"\(5, 2, 8, 6\), expected \(blocks, 2, 8, 4\)"),
        ([good.double()] * 3, order, r"values of 8 bytes \(torch.float64\), the slots have values of 4"),
        ([good] * 3, torch.zeros(SIZE, dtype=torch.long), "place of its own"),
    ):
        with pytest.raises(LayoutMismatch, match=what):
            HostBlockCopies(memory, LAYOUT, layers, range(1, 3), positions)
    with pytest.raises(LayoutMismatch, match="bytes, and vLLM's KV takes"):
        HostBlockCopies(memory[1:], LAYOUT, [good] * 3, range(1, 3), order)


def test_a_device_that_is_no_nvidia_gpu_is_refused_by_name() -> None:
    layers = [torch.zeros((BLOCKS, 2, 8, 4), device="meta")] * 3
    with pytest.raises(StagingError, match="a device of type 'meta'; it can be copied from and to CPUs and NVIDIA"):
        new_block_copies(np.zeros(LAYOUT.nbytes, np.uint8), LAYOUT, layers, range(1, 3), None)
