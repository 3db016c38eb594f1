"""Work requests as arrays: read back from memory as the device would, by following their addresses."""

import ctypes
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from messenger.rdma.verbs import abi
from messenger.rdma.work import Work
from messenger.slices import LOCAL, NBYTES, REMOTE, Rows

LOCAL_ADDRESS, REMOTE_ADDRESS, LKEY, RKEY, MAX_SGE = 1 << 40, 1 << 41, 7, 9, 4


def work_of(rows: Rows, **changes: Any) -> Work:
    settings = {"opcode": abi.WR_RDMA_WRITE, "local_address": LOCAL_ADDRESS, "lkey": LKEY}
    settings |= {"remote_address": REMOTE_ADDRESS, "rkey": RKEY, "max_sge": MAX_SGE}
    return Work.moves(rows, **{**settings, **changes})


def at(address: int, dtype: np.dtype[Any]) -> Any:
    return np.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)[0]


def chain(work: Work) -> list[tuple[Any, list[Any]]]:
    """Every request with its slices, from the first one's address on."""
    found, address = [], int(work.requests.ctypes.data)
    while address:
        request = at(address, abi.SEND_WR)
        slices = [at(int(request["sg_list"]) + 16 * index, abi.SGE) for index in range(int(request["num_sge"]))]
        found.append((request, slices))
        address = int(request["next"])
    return found


SIZES = st.lists(st.tuples(st.integers(1, 1 << 20), st.booleans()), min_size=1, max_size=40)


@given(SIZES, st.booleans())
def test_every_slice_is_in_one_request_in_order_and_neighbours_share_requests(
    sizes: list[tuple[int, bool]], signalled: bool
) -> None:
    rows, local, remote = [], 0, 0
    for nbytes, follows in sizes:
        remote += 0 if follows else 100
        rows.append((local, remote, nbytes))
        local, remote = local + nbytes + 64, remote + nbytes
    array = np.array(rows, dtype=np.int64)
    work = work_of(array, signalled=signalled)  # kept: the requests lie in it
    found = chain(work)
    moved = []
    for request, slices in found:
        assert (int(request["opcode"]), int(request["rkey"])) == (abi.WR_RDMA_WRITE, RKEY)
        assert 1 <= len(slices) <= MAX_SGE
        target = int(request["remote_addr"]) - REMOTE_ADDRESS
        for each in slices:
            assert int(each["lkey"]) == LKEY
            moved.append((int(each["addr"]) - LOCAL_ADDRESS, target, int(each["length"])))
            target += int(each["length"])
    assert moved == rows
    ends = array[:-1, REMOTE] + array[:-1, NBYTES]
    num_runs = 1 + int((array[1:, REMOTE] != ends).sum())
    assert len(found) <= num_runs + len(rows) // MAX_SGE
    assert [int(request["send_flags"]) for request, _ in found[:-1]] == [0] * (len(found) - 1)
    assert int(found[-1][0]["send_flags"]) == (abi.SEND_SIGNALED if signalled else 0)


def test_a_run_of_the_remote_memory_is_gathered_by_as_few_requests_as_the_adapter_allows() -> None:
    rows = np.array([(200 * index, 100 * index, 100) for index in range(10)], dtype=np.int64)
    work = work_of(rows)
    assert [len(slices) for _, slices in chain(work)] == [4, 4, 2]
    assert rows[4, LOCAL] + LOCAL_ADDRESS == int(chain(work)[1][1][0]["addr"])


def test_one_slice_is_one_request() -> None:
    work = work_of(np.array([(64, 128, 4096)], dtype=np.int64), opcode=abi.WR_RDMA_READ)
    ((request, (only,)),) = chain(work)
    assert int(request["opcode"]) == abi.WR_RDMA_READ
    assert (int(only["addr"]), int(only["length"])) == (LOCAL_ADDRESS + 64, 4096)
    assert int(request["remote_addr"]) == REMOTE_ADDRESS + 128


def test_a_frame_carries_its_number() -> None:
    work = Work.frame(address=4096, nbytes=100, lkey=1, remote_address=8192, rkey=2, number=(1 << 32) + 5)
    ((request, (only,)),) = chain(work)
    assert (int(request["opcode"]), int(request["imm_data"])) == (abi.WR_RDMA_WRITE_WITH_IMM, 5)
    assert (int(only["addr"]), int(only["length"]), int(only["lkey"])) == (4096, 100, 1)
    assert (int(request["remote_addr"]), int(request["rkey"]), int(request["send_flags"])) == (8192, 2, 0)


def test_a_mark_moves_nothing_and_is_signalled() -> None:
    work = Work.empty_write()
    ((request, slices),) = chain(work)
    assert (slices, int(request["send_flags"])) == ([], abi.SEND_SIGNALED)
