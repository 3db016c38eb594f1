"""GPU memory on a verbs device that has no GPU beside it: what a driver refuses, the next way, and bytes that arrive.

Only the GPU's driver is stood in for, by one whose memory is a memfd of this host: device pointers are its addresses,
which soft-RoCE registers as nvidia-peermem would have an adapter do, and the memfd's descriptor is what it exports
(soft-RoCE imports no dmabuf, whatever it is of).
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from messenger import GpuMemory, GpuMemoryUnsupported, SharedMemory
from messenger.rdma import gpu_memory
from messenger.rdma.gpu_memory import Allocation, PageSpan

pytestmark = pytest.mark.transports("rdma")

NBYTES, OFFSET = 64 << 10, 0x1200


class HostsGpu:
    """Stand-in for CudaDriver that answers about memory of this host."""

    def __init__(self, *, exports: bool, flushes: bool = False) -> None:
        self.memory = SharedMemory.create(2 * NBYTES, "gpu")
        self.exports, self.flushes = exports, flushes
        self.exported: list[PageSpan] = []
        self.num_flushes = 0

    @property
    def address(self) -> int:
        return int(self.memory.array.ctypes.data)

    @property
    def bytes(self) -> Any:
        """Return the counts of what is registered."""
        return self.memory.array[OFFSET : OFFSET + NBYTES]

    def allocation(self, memory: GpuMemory) -> Allocation:
        return Allocation(self.address, self.memory.nbytes, gpu=0)

    def exports_dmabuf(self, gpu: int) -> bool:
        return self.exports

    def needs_flush(self, gpu: int) -> bool:
        return self.flushes

    def flush(self, gpu: int) -> None:
        self.num_flushes += 1

    def keep_in_order(self, memory: GpuMemory, gpu: int) -> None:
        """There are no streams."""

    def export(self, span: PageSpan, gpu: int) -> int:
        self.exported.append(span)
        return os.dup(self.memory.fd)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., HostsGpu]]:
    """`gpu(exports=..., peer_memory=...)`: the machine has one from now on."""
    made: list[HostsGpu] = []

    def put_in(*, peer_memory: bool, **traits: bool) -> HostsGpu:
        made.append(HostsGpu(**traits))
        monkeypatch.setattr(gpu_memory, "CudaDriver", lambda: made[0])
        monkeypatch.setattr(gpu_memory, "has_peer_memory", lambda: peer_memory)
        return made[0]

    yield put_in
    for one in made:
        one.memory.close()


def registered(node: Any, gpu: HostsGpu) -> Any:
    return node.messenger.register(GpuMemory(gpu.address + OFFSET, NBYTES))


def test_a_dmabuf_that_the_adapter_refuses_is_named_where_there_is_no_other_way(make_node: Any, gpu: Any) -> None:
    node, card = make_node("a"), gpu(exports=True, peer_memory=False)
    regions = node.messenger.counters()["regions_open"]
    with pytest.raises(GpuMemoryUnsupported, match=r"cannot be registered for rdma; by dmabuf: .*not supported"):
        registered(node, card)
    assert card.exported
    assert node.messenger.counters()["regions_open"] == regions


def test_a_dmabuf_that_the_adapter_refuses_gives_place_to_peer_memory(make_node: Any, gpu: Any) -> None:
    node, card = make_node("a"), gpu(exports=True, peer_memory=True)
    region = registered(node, card)
    assert card.exported
    assert region.nbytes == NBYTES
    node.messenger.deregister(region)


def test_bytes_go_from_gpu_memory_to_gpu_memory(make_node: Any, gpu: Any) -> None:
    a, b = make_node("a"), make_node("b")
    card = gpu(exports=False, peer_memory=True, flushes=True)
    source = registered(a, card)
    card.bytes[:] = np.random.default_rng(1).integers(0, 256, NBYTES, dtype=np.uint8)
    before = card.bytes.copy()
    target = registered(b, card)  # of the same bytes, elsewhere
    half = NBYTES // 2
    key = b.messenger.grant(target, half, half, read=True, write=True)
    peer = a.messenger.connect(b.endpoint)
    peer.write_notify(key, source, [[0, half, half]], b"there", b"").result()
    assert (card.bytes[half:] == before[:half]).all()
    assert b.notes == [("a", b"there", b"")]
    assert card.num_flushes == 1  # the owner's, before it told of it
    card.bytes[half:] = 7
    peer.read(key, source, [[8, half, 100]]).result()
    assert (card.bytes[8:108] == 7).all()
    assert (card.bytes[108:half] == before[108:half]).all()
    assert card.num_flushes == 2  # the caller's, before it was told


def test_gpu_memory_is_revoked_as_any_other(make_node: Any, gpu: Any) -> None:
    a, b = make_node("a"), make_node("b")
    card = gpu(exports=False, peer_memory=True)
    target = registered(b, card)
    key = b.messenger.grant(target, 0, NBYTES, read=True, write=True)
    peer = a.messenger.connect(b.endpoint)
    peer.write(key, a.region, [[0, 0, 100]]).result()
    b.messenger.deregister(target)
    card.bytes[:] = 7
    assert "unknown or revoked" in str(peer.write(key, a.region, [[0, 0, 100]]).exception())
    assert (card.bytes == 7).all()
