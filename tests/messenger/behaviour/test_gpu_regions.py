"""GPU memory on transports that move host memory: refused by name on both sides, and nothing else is disturbed.

The memory lies where this process has mapped nothing: to touch it would end the process.
"""

from concurrent.futures import Future
from typing import Any

import pytest

from messenger import GpuMemory, GpuMemoryUnsupported, GpuRegion, MemoryOutOfReach, RemoteAccessError

NBYTES = 1 << 16
ELSEWHERE = GpuMemory(0x10000, NBYTES)


def gpu_region(node: Any) -> GpuRegion:
    """As though rdma had taken the memory, and peers were reached by something else."""
    region: GpuRegion = node.messenger._grants.register_gpu(ELSEWHERE)
    return region


def failure(future: Future[Any]) -> BaseException:
    error = future.exception(30)
    assert error is not None
    return error


@pytest.mark.transports("tcp", "shm")
def test_gpu_memory_is_not_taken_where_nothing_can_reach_it(make_node: Any, transport: str) -> None:
    node = make_node("a")
    with pytest.raises(GpuMemoryUnsupported, match=f"takes the rdma transport, and this messenger has: {transport}"):
        node.messenger.register(ELSEWHERE)


@pytest.mark.transports("tcp", "shm")
@pytest.mark.parametrize("kind", ["write", "read"])
@pytest.mark.parametrize("nbytes", [64, NBYTES])
def test_an_owner_refuses_what_would_touch_gpu_memory(make_node: Any, kind: str, nbytes: int) -> None:
    a, b = make_node("a"), make_node("b")
    b.fill(1)
    key = a.messenger.grant(gpu_region(a), 0, NBYTES, read=True, write=True)
    peer = b.messenger.connect(a.endpoint)
    refusal = failure(getattr(peer, kind)(key, b.region, [[0, 0, nbytes]]))
    assert isinstance(refusal, RemoteAccessError)
    assert "is GPU memory, which only rdma can move" in str(refusal)
    peer.write(a.grant(), b.region, [[0, 0, nbytes]]).result(30)
    assert (a.array[:nbytes] == b.array[:nbytes]).all()


@pytest.mark.transports("tcp", "shm")
@pytest.mark.parametrize("kind", ["write", "read"])
@pytest.mark.parametrize("nbytes", [64, NBYTES])
def test_a_caller_is_told_that_its_gpu_memory_is_out_of_reach(make_node: Any, kind: str, nbytes: int) -> None:
    a, b = make_node("a"), make_node("b")
    a.fill(1)
    key, region = a.grant(), gpu_region(b)
    peer = b.messenger.connect(a.endpoint)
    for _ in range(2):  # at first before there is a connection, then with one
        error = failure(getattr(peer, kind)(key, region, [[0, 0, nbytes]]))
        assert isinstance(error, MemoryOutOfReach)
        assert "is GPU memory" in str(error)
        peer.read(key, b.region, [[0, 0, nbytes]]).result(30)
    assert (a.array[:nbytes] == b.array[:nbytes]).all()


@pytest.mark.transports("tcp", "shm")
def test_what_is_out_of_reach_is_not_notified(make_node: Any) -> None:
    a, b = make_node("a"), make_node("b")
    peer = b.messenger.connect(a.endpoint)
    future = peer.write_notify(a.grant(), gpu_region(b), [[0, 0, 64]], b"lost", b"")
    assert isinstance(failure(future), MemoryOutOfReach)
    peer.notify(b"next", b"").result(30)
    assert a.notes == [("b", b"next", b"")]
