"""Workers whose KV is on a device, a stand-in that executes copies late and in any order: tokens, slots, errors."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import Model
from kvpool import KvGroup, KvSpec, layer_digests_at
from messenger import GpuMemoryUnsupported, Messenger, MessengerConfig, SharedMemory
from messenger.staging import READY, DirectStaging, MirrorStaging, Ranges, StagingError, Ticket
from prefill_node.push import WrittenLayers
from settings.keys import InvalidSetting, assemble
from settings.worker import KvSettings
from tests.messenger.staging.device import Device
from worker import kv_memory
from worker.config import WorkerConfig
from worker.device_digests import DeviceDigests
from worker.errors import StartupError
from worker.kv_memory import DeviceCache, KvMemory, QuantisedMemory
from worker.node_slots import NodeSlots, SlotCalls
from worker.own_blocks import OwnBlocks
from worker.policy.scheduling_order import WaitQueue
from worker.request import EngineSequence
from worker.transformer import ModelSteps, Transformer

Start = Callable[..., Awaitable[Any]]
Prompt = Callable[..., list[int]]
Greedy = Callable[[Model, list[int], int], list[int]]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[list[Device]]:
    """Give every worker's engine a device; the engine's thread computes at once what its stream then contains.

    With the parameter `direct`, an adapter (in truth tcp) reads and writes the device's memory.
    """
    made: list[Device] = []
    shared: list[SharedMemory] = []
    run, is_direct = ModelSteps.run, getattr(request, "param", "mirror") == "direct"

    def new_memory(
        self: Transformer, messenger: Messenger, *, num_slots: int, block_tokens: int, limits: object
    ) -> KvMemory:
        groups = self.model.kv_groups
        nbytes = kv_memory.PagedCache.required_nbytes(groups, (num_slots,) * len(groups), block_tokens)
        device = Device(nbytes, seed=len(made))
        made.append(device)
        if is_direct:
            shared.append(SharedMemory.create(nbytes, "device"))
            device.memory = shared[-1].array
            register = partial(messenger.register, shared[-1])
            monkeypatch.setattr(messenger, "register", lambda _: register())
        cache = DeviceCache(torch.from_numpy(device.memory), device, is_registered=is_direct)
        return KvMemory(self.model, messenger, num_slots=num_slots, block_tokens=block_tokens, device=cache)

    def run_on_device(self: ModelSteps, decoding: Any, chunks: Any, on_layer: Any, before_layer: Any) -> Any:
        device = next(each for each in made if each.memory.ctypes.data == self._cache.memory.data_ptr())
        device.engine_thread = threading.get_ident()

        def on_layer_of_device(layer: int) -> None:
            on_layer(layer)
            device.computed()

        def before_layer_of_device(layer: int) -> None:
            before_layer(layer)
            device.computed()

        device.computed()
        hooks = on_layer and on_layer_of_device, before_layer and before_layer_of_device
        return run(self, decoding, chunks, *hooks)

    monkeypatch.setattr(Transformer, "new_memory", new_memory)
    monkeypatch.setattr(ModelSteps, "run", run_on_device)
    if is_direct:
        monkeypatch.setattr(KvMemory, "host_region", None)
    yield made
    for memory in shared:
        memory.close()
    assert not any(device.has_blocked_engine for device in made)
    assert not any(device.pinned for device in made), "closed workers unlock their mirrors"


@pytest.mark.parametrize(
    ("devices", "transport", "helpers", "by_layer"),
    [
        ("mirror", "tcp", 0, False),
        ("mirror", "auto", 1, False),
        ("mirror", "tcp", 0, True),
        ("direct", "tcp", 1, False),
        ("direct", "tcp", 0, True),
    ],
    indirect=["devices"],
)
async def test_tokens_are_those_of_one_process(
    devices: list[Device],
    start_pair: Start,
    model: Model,
    prompt: Prompt,
    greedy: Greedy,
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    helpers: int,
    by_layer: bool,
) -> None:
    if by_layer:  # reused KV arrives layer by layer
        monkeypatch.setattr("worker.kv_loading.LEAST_READ_NBYTES", 1)
        monkeypatch.setattr("worker.kv_loading.LEAST_SLICE_NBYTES", 1)
    pair = await start_pair(transport, pool=True, helpers=helpers)
    prompts = [prompt(120), prompt(120)[:60] + prompt(70, seed=1), prompt(9, seed=2), prompt(133, seed=3)]
    for _ in range(2):  # the second time from the pool
        names = [f"{number}-{random.random()}" for number in range(len(prompts))]
        requests = [await pair.frontend.submit(pair.submit(*each)) for each in zip(prompts, names, strict=True)]
        async with asyncio.timeout(60):
            await asyncio.gather(*(request.ended.wait() for request in requests))
        for request, ids in zip(requests, prompts, strict=True):
            assert (request.failures, request.token_ids) == ([], greedy(model, ids, 12))
        await pair.at_rest()
        for node in (pair.prefill.node, pair.decode.node):
            for key in list(node.slots.pool._index):
                node.slots.pool.forget(key)
    assert sum(request.cached_tokens for request in requests) > 200
    is_direct = isinstance(pair.prefill.node.memory.staging, DirectStaging)
    assert all(bool(device.copied) != is_direct for device in devices)


def test_int8_on_a_device_has_the_bytes_that_it_has_on_a_cpu(model: Model, messenger: Messenger) -> None:
    sizes = {"num_slots": 8, "block_tokens": 8}
    exact = KvMemory(model, messenger, **sizes)
    device = Device(exact.nbytes)
    cache = DeviceCache(torch.from_numpy(device.memory), device)
    on_device = KvMemory(model, messenger, **sizes, device=cache)
    stored, theirs = (QuantisedMemory(each, messenger, num_slots=8) for each in (exact, on_device))
    values = torch.randn(exact.cache.flat.shape, generator=torch.Generator().manual_seed(1))
    exact.cache.flat.copy_(values)
    device.compute.launch(lambda: on_device.cache.flat.copy_(values))
    slots = [6, 1, 2]
    stored.to_host_now(slots)
    theirs.to_host_now(slots)
    assert (stored.slot_bytes(0, slots) == theirs.slot_bytes(0, slots)).all()
    for memory, int8 in ((exact, stored), (on_device, theirs)):
        memory.cache.flat.zero_()
        int8.to_device_now(slots)
    assert exact.cache.views[0][slots].any()
    assert (exact.cache.views[0] == on_device.cache.views[0]).all()
    for each in (stored, theirs, on_device, exact):
        each.close()


async def test_pushes_to_several_members_share_one_copy_of_a_layer(
    devices: list[Device], start_pair: Start, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, due_of_layers, callers = await start_pair(helpers=2), list[int](), list[int]()
    to_host, written = MirrorStaging.to_host, WrittenLayers.written

    def count(self: MirrorStaging, parts: list[Ranges]) -> Ticket:
        callers.append(threading.get_ident())
        return to_host(self, parts)

    def record(self: WrittenLayers, layer: int, due: Callable[[], list[Any]], *, at_once: bool) -> None:
        before = callers.count(threading.get_ident())
        written(self, layer, due, at_once=at_once)
        assert callers.count(threading.get_ident()) == before + bool(due())
        due_of_layers.append(len(due()))

    monkeypatch.setattr(MirrorStaging, "to_host", count)
    monkeypatch.setattr(WrittenLayers, "written", record)
    one = await pair.frontend.submit(pair.submit(prompt(250), "r"))
    async with asyncio.timeout(60):
        await one.ended.wait()
    assert not one.failures
    assert max(due_of_layers) == 3, "the head pushes to both helpers and to the decode node"
    await pair.at_rest()


async def test_a_copy_that_is_refused_fails_its_request_and_no_later_one(
    devices: list[Device], start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    pair = await start_pair()
    devices[0].refuses_copies = True
    one = await pair.frontend.submit(pair.submit(prompt(64), "r"))
    async with asyncio.timeout(30):
        await one.ended.wait()
    (failure,) = one.failures
    assert failure.code == "push"
    assert "the driver refused the copy" in failure.message
    await pair.at_rest()
    devices[0].refuses_copies = False
    two = await pair.frontend.submit(pair.submit(prompt(64), "s"))
    async with asyncio.timeout(30):
        await two.ended.wait()
    assert two.token_ids == greedy(model, prompt(64), 12)
    await pair.at_rest()


async def test_a_device_that_fails_in_the_middle_of_a_copy_ends_its_worker(
    devices: list[Device], start_pair: Start, prompt: Prompt
) -> None:
    pair = await start_pair()
    devices[0].loses_copies = True
    one = await pair.frontend.submit(pair.submit(prompt(64), "r"))
    async with asyncio.timeout(30):
        await one.ended.wait()
        assert "illegal address" in await pair.prefill.node.broken
    (failure,) = one.failures
    assert "illegal address" in failure.message
    assert pair.prefill.node.slots.pool.num_held, "nobody may get slots that the device may still write"


class SlowTicket(Ticket):
    """Ticket of a copy that ends when the test lets it."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: StagingError | None = None

    def wait(self) -> None:
        assert self.ended.wait(30)
        if self.error is not None:
            raise self.error


class SlowMemory:
    """Memory of a device that is busy with `ticket`."""

    def __init__(self) -> None:
        self.ticket: Ticket = SlowTicket()

    def all_ended(self) -> Ticket:
        return self.ticket

    def lend(self, slots: object) -> list[Any]:
        return []


@dataclass
class Slots:
    slots: NodeSlots
    memory: SlowMemory
    reasons: list[str]


@pytest.fixture
async def busy() -> Slots:
    config = assemble(
        WorkerConfig, node_id="w", listen="unix:w.sock", conductor_targets=("unix:c.sock",), pool_target="",
        device="cpu", threads=1, capacity_tokens=64, block_tokens=16,
    )  # fmt: skip
    memory, reasons = SlowMemory(), list[str]()
    slots = NodeSlots(
        config,
        (cast(Any, memory),),
        WaitQueue(),
        SlotCalls(extend=EngineSequence.extend, waits=lambda: None, preempt=lambda _: None, broken=reasons.append),
        own_blocks=OwnBlocks(bytes(16), 1),
    )
    return Slots(slots, memory, reasons)


async def test_slots_are_reused_only_after_the_copies_of_the_device_have_ended(busy: Slots) -> None:
    slots, *_ = await busy.slots.take(("a", 1), [], 4)
    waiting = asyncio.ensure_future(busy.slots.take(("b", 1), [], 2))
    busy.slots.give(slots)
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert busy.slots.pool.num_held == 4
    assert isinstance(busy.memory.ticket, SlowTicket)
    busy.memory.ticket.ended.set()
    async with asyncio.timeout(10):
        taken, *_ = await waiting
    busy.memory.ticket = READY
    busy.slots.give(taken)
    assert busy.slots.pool.num_held == 0
    await busy.slots.close()


async def test_fenced_slots_too_are_reused_only_after_the_copies_have_ended(busy: Slots) -> None:
    slots, *_ = await busy.slots.take(("a", 1), [], 4)
    fencing = asyncio.ensure_future(busy.slots.fence(slots, lambda: None))
    await asyncio.sleep(0.05)
    assert not fencing.done()
    assert isinstance(busy.memory.ticket, SlowTicket)
    busy.memory.ticket.ended.set()
    async with asyncio.timeout(10):
        await fencing
    assert busy.slots.pool.num_available == 4


async def test_slots_of_a_failed_device_stay_held_and_the_worker_is_broken(
    busy: Slots, caplog: pytest.LogCaptureFixture
) -> None:
    slots, *_ = await busy.slots.take(("a", 1), [], 4)
    assert isinstance(busy.memory.ticket, SlowTicket)
    busy.memory.ticket.error = StagingError("the device is gone")
    busy.memory.ticket.ended.set()
    busy.slots.give(slots)
    await busy.slots.close()
    assert busy.slots.pool.num_held == 4
    assert busy.reasons == ["the device is gone"]
    assert "slots are not reused" in caplog.text


@given(
    st.integers(0, 2**32),
    st.sampled_from([("float32", 8), ("float16", 4), ("float16", 3), ("int8", 5)]),
    st.sampled_from([None, slice(1, 3), slice(0, 1)]),
)
def test_digests_on_a_device_are_those_of_the_pool(seed: int, row: tuple[str, int], layers: slice | None) -> None:
    dtype, head_dim = row
    spec = KvSpec(
        (
            KvGroup("full", 0, (0, 2, 3), kv_heads=2, head_dim=head_dim, dtype=dtype),  # type: ignore[arg-type]
            KvGroup("window", 16, (1, 4, 5), kv_heads=1, head_dim=head_dim, dtype=dtype),  # type: ignore[arg-type]
        ),
        5,
    )
    rng = np.random.default_rng(seed)
    memory = rng.integers(0, 256, 20 * spec.slot_nbytes(0), np.uint8)
    valid = rng.integers(0, 6, 7).astype(np.int32)
    digests = DeviceDigests(torch.from_numpy(memory), spec)
    for group in range(2):
        offsets = rng.permutation(15)[:7] * spec.slot_nbytes(group)
        want = layer_digests_at(memory, offsets, spec, group, valid, layers)
        assert (digests.of(group, offsets, valid, layers) == want).all()
    assert digests.of(0, np.zeros(0, np.int64), np.zeros(0, np.int32)).shape == (0, 3)


def test_many_digests_are_computed_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KvSpec((KvGroup("full", 0, (0,), kv_heads=1, head_dim=4, dtype="float32"),), 4)
    monkeypatch.setattr("worker.device_digests._SUM_NBYTES", 3 * spec.slot_nbytes(0))
    memory = np.random.default_rng(0).integers(0, 256, 10 * spec.slot_nbytes(0), np.uint8)
    offsets, valid = np.arange(10) * spec.slot_nbytes(0), np.full(10, 4, np.int32)
    want = layer_digests_at(memory, offsets, spec, 0, valid)
    assert (DeviceDigests(torch.from_numpy(memory), spec).of(0, offsets, valid) == want).all()


class CudaModel:
    """A model on a GPU that this machine does not have."""

    def __init__(self, model: Model) -> None:
        self.device, self.kv_groups = torch.device("cuda", 0), model.kv_groups


class GpuMessenger(Messenger):
    """A messenger that claims transports and refuses GPU memory, or registers it."""

    claimed: tuple[str, ...] = ("rdma",)
    refusal = "no adapter imports dmabufs"

    @property
    def transports(self) -> tuple[str, ...]:
        return self.claimed

    def register(self, memory: Any, **_: Any) -> Any:
        if type(memory).__name__ == "GpuMemory":
            raise GpuMemoryUnsupported(self.refusal)
        return super().register(memory)


@pytest.fixture
def messenger() -> Iterator[GpuMessenger]:
    made = GpuMessenger(assemble(MessengerConfig, transport="tcp"), node_id="w", incarnation=1)
    made.start()
    yield made
    made.close()


@pytest.fixture
def cuda(model: Model, monkeypatch: pytest.MonkeyPatch) -> Any:
    def cuda_cache(device: torch.device, nbytes: int) -> DeviceCache:
        stand_in = Device(nbytes)
        return DeviceCache(torch.from_numpy(stand_in.memory), stand_in)

    monkeypatch.setattr(kv_memory, "cuda_cache", cuda_cache)
    return CudaModel(model)


def memory_of(model: Any, messenger: Messenger, **kv: Any) -> KvMemory:
    return KvMemory.of(model, messenger, num_slots=4, block_tokens=8, kv=assemble(KvSettings, **kv))


def test_gpu_memory_that_cannot_be_registered_is_mirrored_and_the_reason_is_named(
    cuda: Any, messenger: GpuMessenger, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        memory = memory_of(cuda, messenger, kv_staging="auto")
    assert isinstance(memory.staging, MirrorStaging)
    assert "because no adapter imports dmabufs" in caplog.text
    assert memory.host_region is not None
    memory.close()


@pytest.mark.parametrize(
    ("claimed", "kv", "reason"),
    [
        (("rdma",), {}, "no adapter imports dmabufs"),
        (("tcp", "rdma", "shm"), {}, "peers may connect by tcp or shm, .*: set transport to rdma"),
    ],
)
def test_direct_transfers_that_are_demanded_and_impossible_keep_the_worker_from_starting(
    cuda: Any, messenger: GpuMessenger, claimed: tuple[str, ...], kv: dict[str, Any], reason: str
) -> None:
    messenger.claimed = claimed
    with pytest.raises(StartupError, match=f"kv_staging direct is impossible: {reason}"):
        memory_of(cuda, messenger, kv_staging="direct", **kv)


def test_int8_is_mirrored_and_the_reason_is_named(
    cuda: Any, messenger: GpuMessenger, caplog: pytest.LogCaptureFixture
) -> None:
    memory = memory_of(cuda, messenger, kv_staging="auto", kv_storage="int8")
    assert "kv_storage int8 converts KV in host memory" in caplog.text
    memory.close()
    with pytest.raises(InvalidSetting, match="--kv-staging direct conflicts with --kv-storage int8"):
        assemble(KvSettings, kv_staging="direct", kv_storage="int8")


def test_the_mirror_is_the_default_and_tries_nothing_else(
    cuda: Any, messenger: GpuMessenger, caplog: pytest.LogCaptureFixture
) -> None:
    memory = memory_of(cuda, messenger)
    assert isinstance(memory.staging, MirrorStaging)
    assert not caplog.text
    memory.close()


def test_direct_transfers_without_a_gpu_are_refused(model: Model, messenger: GpuMessenger) -> None:
    with pytest.raises(StartupError, match="the device is cpu: set mirror"):
        memory_of(model, messenger, kv_staging="direct")
    memory = memory_of(model, messenger, kv_staging="auto")
    assert not memory.staging.is_needed
    memory.close()
