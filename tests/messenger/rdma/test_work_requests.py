"""Work requests as the hardware gets them, from slice lists."""

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from messenger.rdma.verbs import abi
from messenger.rdma.work import Singles, Work


class Sge(ctypes.Structure):
    _fields_ = [("addr", ctypes.c_uint64), ("length", ctypes.c_uint32), ("lkey", ctypes.c_uint32)]


class Request(ctypes.Structure):
    """struct ibv_send_wr up to the rdma part of its union."""

    _fields_ = [
        ("wr_id", ctypes.c_uint64),
        ("next", ctypes.c_void_p),
        ("sg_list", ctypes.POINTER(Sge)),
        ("num_sge", ctypes.c_int),
        ("opcode", ctypes.c_int),
        ("send_flags", ctypes.c_uint),
        ("imm_data", ctypes.c_uint32),
        ("remote_addr", ctypes.c_uint64),
        ("rkey", ctypes.c_uint32),
    ]


def read_chain(work: Work) -> list[Request]:
    """The requests as C follows them, from one `next` to the other."""
    return read_from(int(work.requests.ctypes.data))


def read_from(address: int) -> list[Request]:
    found = []
    while address:
        request = Request.from_address(address)
        found.append(request)
        address = request.next or 0
    return found


def moves(rows: Any, max_sge: int = 30) -> Work:
    return Work.moves(
        np.array(rows, dtype=np.int64), opcode=abi.WR_RDMA_WRITE, local_address=1000, lkey=7, remote_address=500_000,
        rkey=8, max_sge=max_sge,
    )  # fmt: skip


def moved(work: Work) -> list[tuple[int, int, int]]:
    """(local address, remote address, bytes) of every slice."""
    found = []
    for request in read_chain(work):
        remote = request.remote_addr
        for index in range(request.num_sge):
            slice_ = request.sg_list[index]
            assert slice_.lkey == 7
            found.append((slice_.addr, remote, slice_.length))
            remote += slice_.length
        assert (request.opcode, request.rkey) == (abi.WR_RDMA_WRITE, 8)
    return found


row_lists = st.lists(
    st.tuples(st.integers(0, 10_000), st.sampled_from([0, 100, 200, 300, 5000]), st.just(100)), min_size=1, max_size=70
)


@given(row_lists, st.integers(1, 30))
def test_every_slice_is_moved_once_and_in_order(rows: list[tuple[int, int, int]], max_sge: int) -> None:
    work = moves(rows, max_sge)
    assert moved(work) == [(1000 + local, 500_000 + remote, nbytes) for local, remote, nbytes in rows]
    assert all(request.num_sge <= max_sge for request in read_chain(work))


def test_neighbours_in_the_remote_memory_share_a_request() -> None:
    rows = [[9000 - 10 * i, 10 * i, 10] for i in range(70)]
    assert [request.num_sge for request in read_chain(moves(rows, 30))] == [30, 30, 10]


@pytest.mark.parametrize("count", [1, 2, 50])
def test_only_the_last_request_is_signalled(count: int) -> None:
    flags = [request.send_flags for request in read_chain(moves([[0, 1000 * i, 10] for i in range(count)]))]
    assert flags == [0] * (count - 1) + [abi.SEND_SIGNALED]


def test_a_frame_carries_its_number_in_network_order() -> None:
    opcode, number, singles = abi.WR_RDMA_WRITE_WITH_IMM, (5 << 32) + 0x01020304, Singles(4)
    address = singles.fill(9, (64, 100, 7), opcode=opcode, flags=0, imm=number, remote_address=4096, rkey=8)
    (request,) = read_from(address)
    assert (request.wr_id, request.send_flags) == (9, 0)
    assert request.opcode == abi.WR_RDMA_WRITE_WITH_IMM
    assert request.imm_data.to_bytes(4, "little") == b"\x01\x02\x03\x04"
    assert (request.remote_addr, request.rkey, request.num_sge) == (4096, 8, 1)
    assert (request.sg_list[0].addr, request.sg_list[0].length, request.sg_list[0].lkey) == (64, 100, 7)


def test_an_empty_write_has_no_slices() -> None:
    singles = Singles(1)
    singles.fill(1, (64, 100, 7), opcode=abi.WR_RDMA_WRITE_WITH_IMM, flags=0)
    (request,) = read_from(singles.fill(2, None, opcode=abi.WR_RDMA_WRITE, flags=abi.SEND_SIGNALED))
    assert (request.num_sge, request.send_flags, request.opcode) == (0, abi.SEND_SIGNALED, abi.WR_RDMA_WRITE)
