"""Staging on a real GPU: bytes against a reference, order of streams, and calls that do not block."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kvpool import KvGroup, KvSpec, layer_digests_at
from messenger import SharedMemory
from messenger.staging import MirrorStaging, Ranges
from messenger.staging.cuda import CudaRuntime
from worker.device_digests import DeviceDigests

LAYER, NUM_LAYERS, NUM_SLOTS = 16 << 10, 8, 256
SLOT = LAYER * NUM_LAYERS
NBYTES = SLOT * NUM_SLOTS  # 32 MiB
BUSY_S = 0.3


class Rig:
    def __init__(self, device: str, *, batches: bool) -> None:
        self.memory = torch.zeros(NBYTES, dtype=torch.uint8, device=device)
        self.shared = SharedMemory.create(NBYTES, "gpu-proof", "auto")
        self.mirror = self.shared.array
        self.runtime = CudaRuntime(self.memory, batches=batches)
        self.staging = MirrorStaging(self.runtime, self.mirror)

    def on_device(self, slot: int, layer: int) -> torch.Tensor:
        return self.memory[slot * SLOT + layer * LAYER :][:LAYER]

    def in_mirror(self, slot: int, layer: int) -> np.ndarray:
        return self.mirror[slot * SLOT + layer * LAYER :][:LAYER]

    def close(self) -> None:
        self.staging.close()
        torch.cuda.synchronize()
        self.shared.close()


@pytest.fixture
def new_rig(cuda: str) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def new(*, batches: bool = True) -> Rig:
        made.append(Rig(cuda, batches=batches))
        return made[-1]

    yield new
    for rig in made:
        rig.close()


def ranges(slots: list[int], layer: int | None = None) -> list[Ranges]:
    base = np.array(slots, np.int64) * SLOT
    return [Ranges.same(base, SLOT)] if layer is None else [Ranges.same(base + layer * LAYER, LAYER)]


def keep_busy() -> None:
    """Queue work of about BUSY_S on the compute stream."""
    torch.cuda._sleep(int(BUSY_S * 1.5e9))  # cycles


SHAPES = {
    "adjacent": list(range(10, 90)),
    "spaced": list(range(3, 200, 7)),
    "scattered": random.Random(1).sample(range(NUM_SLOTS), 100),
    "one": [17],
}


@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("layer", [None, 0, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_copies_move_exactly_their_bytes(
    new_rig: Callable[..., Rig], batches: bool, layer: int | None, shape: str
) -> None:
    rig, slots = new_rig(batches=batches), SHAPES[shape]
    if batches and not rig.runtime.has_batches:
        pytest.skip("the driver has no batched copies")
    values = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8)
    chosen = np.zeros(NBYTES, bool)
    for part in ranges(slots, layer):
        for at in part.host.tolist():
            chosen[at : at + part.nbytes] = True
    rig.memory.copy_(values)
    rig.staging.to_host(ranges(slots, layer)).wait()
    assert (rig.mirror == np.where(chosen, values.numpy(), 0)).all()
    rig.mirror[:] = ~values.numpy()
    rig.staging.to_device(ranges(slots, layer)).wait()
    assert (rig.memory.cpu().numpy() == np.where(chosen, ~values.numpy(), values.numpy())).all()
    if batches:
        assert rig.runtime.has_batches, "the driver refused batches"


def test_the_mirror_in_shared_memory_is_page_locked(
    new_rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = new_rig()
    assert "not page-locked" not in caplog.text
    assert torch.from_numpy(rig.mirror).is_pinned()


def test_a_thread_that_has_never_used_the_gpu_can_copy(new_rig: Callable[..., Rig]) -> None:
    rig = new_rig()
    rig.mirror[:] = 9
    for copy in (rig.staging.to_device, rig.staging.to_host):
        with ThreadPoolExecutor(1) as threads:
            threads.submit(lambda copy=copy: copy(ranges(SHAPES["scattered"])).wait()).result()
    assert all((rig.on_device(slot, 0) == 9).all() for slot in SHAPES["scattered"])


@pytest.mark.parametrize("slots", [SHAPES["adjacent"], SHAPES["scattered"]], ids=["adjacent", "scattered"])
def test_a_copy_waits_for_the_computation_before_it_and_its_caller_for_nothing(
    new_rig: Callable[..., Rig], slots: list[int]
) -> None:
    rig = new_rig()
    rig.staging.to_host(ranges(slots)).wait()  # warmed up
    keep_busy()
    rig.memory.fill_(7)
    began = time.perf_counter()
    ticket = rig.staging.to_host(ranges(slots))
    ended = rig.staging.all_ended()
    took = time.perf_counter() - began
    assert not ticket.is_done
    assert not ended.is_done
    assert took < BUSY_S / 3, f"to_host blocked for {took:.3f} s"
    ticket.wait()
    assert all((rig.in_mirror(slot, layer) == 7).all() for slot in slots for layer in range(NUM_LAYERS))
    ended.wait()


def test_loads_do_not_wait_for_computation_and_computation_waits_for_loads(new_rig: Callable[..., Rig]) -> None:
    rig, slots = new_rig(), SHAPES["scattered"]
    rig.mirror[:] = 1
    keep_busy()
    busy = torch.cuda.Event()
    busy.record()
    tickets = [rig.staging.to_device(ranges(slots, layer)) for layer in range(NUM_LAYERS)]
    for ticket in tickets:
        ticket.wait()
    assert not busy.query(), "loads are done while the compute stream is busy"
    rig.mirror[:] = 2
    sums = []
    for layer in range(NUM_LAYERS):
        rig.staging.to_device(ranges(slots, layer)).order_compute()
        sums.append(torch.stack([rig.on_device(slot, layer) for slot in slots]).long().sum())
    assert [int(each) for each in sums] == [2 * LAYER * len(slots)] * NUM_LAYERS


def test_many_random_steps_end_with_the_right_bytes(new_rig: Callable[..., Rig]) -> None:
    rig, rng = new_rig(), random.Random(3)
    for turn in range(1, 60):
        slots = rng.sample(range(NUM_SLOTS), 120)
        loaded, computed = slots[:60], slots[60:]
        tickets = []
        for layer in range(NUM_LAYERS):
            for slot in loaded:
                rig.in_mirror(slot, layer)[:] = (turn + layer) % 251
            tickets.append(rig.staging.to_device(ranges(loaded, layer)))
        sent, found = [], []
        for layer in range(NUM_LAYERS):
            tickets[layer].order_compute()
            value = torch.stack([rig.on_device(slot, layer) for slot in loaded])
            found.append((value != (turn + layer) % 251).any())
            if rng.random() < 0.2:
                torch.cuda._sleep(rng.randrange(3_000_000))
            for slot in computed:
                rig.on_device(slot, layer).fill_((turn * 3 + layer) % 251)
            sent.append(rig.staging.to_host(ranges(computed, layer)))
        for layer, ticket in enumerate(sent):
            ticket.wait()
            assert all((rig.in_mirror(slot, layer) == (turn * 3 + layer) % 251).all() for slot in computed)
        assert not any(bool(each) for each in found)
        rig.staging.all_ended().wait()


@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 128), ("bfloat16", 64), ("float16", 3)])
def test_digests_on_the_gpu_are_those_of_the_pool(cuda: str, dtype: str, head_dim: int) -> None:
    spec = KvSpec((KvGroup("full", 0, tuple(range(6)), kv_heads=4, head_dim=head_dim, dtype=dtype),), 16)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    memory = rng.integers(0, 256, 300 * spec.slot_nbytes(0), np.uint8)
    offsets = rng.permutation(300)[:200] * spec.slot_nbytes(0)
    valid = rng.integers(0, 17, 200).astype(np.int32)
    digests = DeviceDigests(torch.from_numpy(memory).to(cuda), spec)
    for layers in (None, slice(2, 5)):
        want = layer_digests_at(memory, offsets, spec, 0, valid, layers)
        assert (digests.of(0, offsets, valid, layers) == want).all()
