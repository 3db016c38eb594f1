"""CPU cost of posting slices to an RDMA adapter: decision, construction, posting, completion; and of registration.

Steps without an adapter can be measured on any machine. pyverbs' request objects are measured for comparison if pyverbs
can be imported; posting, completion and registration require a verbs device (two looped-back queue pairs):

    python benchmarks/rdma_posting.py
    python -m tools.rdma_vm run -- python3 benchmarks/rdma_posting.py

Soft-RoCE does the adapter's work on the CPU within the posting call, so its figure for posting is an upper bound.
Prints medians over rounds; the last line of output is JSON.
"""

import ctypes
import importlib.util
import json
import mmap
import platform
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path[0] = str(Path(__file__).resolve().parents[1])

from messenger.counters import Counters  # noqa: E402
from messenger.frames import Ack, Notify, decode_body, decode_prefix, encode  # noqa: E402
from messenger.rdma.policy.facts import Rail  # noqa: E402
from messenger.rdma.policy.posting import Limits, Post, RailSpec  # noqa: E402
from messenger.rdma.policy.rail_choice import RailRequest, choose  # noqa: E402
from messenger.rdma.policy.rails import Rails  # noqa: E402
from messenger.rdma.topology import rdma_ports  # noqa: E402
from messenger.rdma.verbs import abi  # noqa: E402
from messenger.rdma.work import Singles, Work  # noqa: E402
from messenger.slices import Rows  # noqa: E402

ROUNDS = 15
SLICE_NBYTES = 16 << 10
NUM_SLICES = 2000
MAX_SGE = 30
_ACCESS = abi.ACCESS_LOCAL_WRITE | abi.ACCESS_REMOTE_WRITE


def main() -> None:
    result: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }
    result["decide"] = {
        f"{rails}_rails_{parts}_parts": decide(rails, num_parts=parts) for rails in (1, 8) for parts in (1, 32)
    }
    result["build"] = {"scattered": build(together=False), "one_run_remote": build(together=True)}
    result["frames"] = frames()
    result["gil"] = gil()
    if importlib.util.find_spec("pyverbs") is not None:
        result["pyverbs"] = pyverbs_objects()
    rails = choose(rdma_ports(), RailRequest()).rails
    if rails:
        result["device"] = device(rails[0])
    for name, figures in result.items():
        print(f"{name}: {figures}")
    print(json.dumps(result))


def decide(num_rails: int, *, num_parts: int) -> dict[str, float]:
    """Measure submitting, distributing and completing parts of 512 slices (8 MiB), in microseconds per part."""
    rows = scattered(512, SLICE_NBYTES)
    rails = Rails([RailSpec(str(index), 400) for index in range(num_rails)], Limits(), 0)
    posts: list[int] = []

    def one() -> None:
        for _ in range(num_parts):
            rails.submit(rows, announce=True)
        under_way = rails.due(0)
        num_posts = 0
        while under_way:
            num_posts += sum(isinstance(each, Post) for each in under_way)
            for each in under_way:
                rails.completed(each.number, each.rail, 1_000)
            under_way = rails.due(1_000)
        posts.append(num_posts)

    us = seconds(one, 20) * 1e6
    return {
        "us_per_part": round(us / num_parts, 1),
        "posts_per_part": posts[-1] / num_parts,
        "us_per_post": round(us / posts[-1], 1),
    }


def frames() -> dict[str, float]:
    """Measure encoding and decoding of a part's notification and its acknowledgement, in microseconds for both."""
    note, ack = Notify(1, bytes(16), bytes(64)), Ack(1, 0)

    def one() -> None:
        for message in (note, ack):
            frame = encode(message)
            kind, length = decode_prefix(frame)
            decode_body(kind, memoryview(frame)[-length:])

    return {"us_per_part": round(seconds(one, 200) * 1e6, 1)}


def build(*, together: bool) -> dict[str, float]:
    """Measure building work requests as arrays, in nanoseconds per slice by batch size.

    A single request is built in preallocated memory.
    """
    singles = Singles(1)

    def one() -> None:
        singles.fill(1, (4096, SLICE_NBYTES, 1), opcode=abi.WR_RDMA_WRITE, flags=0, remote_address=8192, rkey=2)

    found = {"ns_per_slice_of_1": round(seconds(one, 200) * 1e9, 1)}
    for count in (64, NUM_SLICES):
        rows = in_one_run(count, SLICE_NBYTES) if together else scattered(count, SLICE_NBYTES)
        found[f"ns_per_slice_of_{count}"] = round(seconds(lambda rows=rows: work_of(rows), 40) / count * 1e9, 1)  # type: ignore[misc]
    found["requests_of_2000"] = len(
        work_of(in_one_run(NUM_SLICES, 1) if together else scattered(NUM_SLICES, 1)).requests
    )
    return found


def gil() -> dict[str, float]:
    """Measure the wall time of calls that release the GIL, like posting and waiting, alone and beside a busy thread.

    A short call ends before the other thread wakes up; after a sleeping call, this thread must wait for the GIL.
    """
    libc = ctypes.CDLL(None)
    short = ctypes.CFUNCTYPE(ctypes.c_int)(("getppid", libc))
    sleep = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint)(("usleep", libc))
    calls: dict[str, Callable[[], object]] = {"short": short, "sleeping": lambda: sleep(100)}

    def wall_us(call: Callable[[], object]) -> float:
        rounds = []
        for _ in range(ROUNDS):
            start_s = time.perf_counter()
            for _ in range(20):
                call()
            rounds.append((time.perf_counter() - start_s) / 20 * 1e6)
        return round(median(rounds), 2)

    result = {f"us_{name}_alone": wall_us(call) for name, call in calls.items()}
    ended = threading.Event()
    busy = threading.Thread(target=lambda: [sum(range(100)) for _ in iter(ended.is_set, True)])
    busy.start()
    try:
        return result | {f"us_{name}_beside_a_busy_thread": wall_us(call) for name, call in calls.items()}
    finally:
        ended.set()
        busy.join()


def pyverbs_objects() -> dict[str, float]:
    """Measure creating and freeing pyverbs' objects, an SGE and a SendWR per slice."""
    from pyverbs.wr import SGE, SendWR

    def one() -> None:
        for index in range(200):
            request = SendWR(wr_id=index, opcode=abi.WR_RDMA_WRITE, num_sge=1, sg=[SGE(4096 * index, SLICE_NBYTES, 7)])
            request.set_wr_rdma(9, 8192 * index)
            request.close()

    return {"ns_per_slice": round(seconds(one, 5) / 200 * 1e9)}


def device(rail: Rail) -> dict[str, Any]:
    """Measure posting, completion and registration on two looped-back queue pairs of the rail."""
    from messenger.rdma.verbs.completions import CompletionQueue
    from messenger.rdma.verbs.device import Device
    from messenger.rdma.verbs.queue_pair import QueuePair

    opened = Device(rail.device, Counters(), silence_s=10.0)
    queue = CompletionQueue(opened, 4096)
    near, far = QueuePair(opened, queue), QueuePair(opened, queue)
    near.connect(rail, rail, far.local, rail.mtu or 1024)
    far.connect(rail, rail, near.local, rail.mtu or 1024)
    memory = np.frombuffer(mmap.mmap(-1, 8 << 20), dtype=np.uint8)
    address = int(memory.ctypes.data)
    registered = opened.register_memory(address, memory.nbytes, _ACCESS)

    def posted(count: int, nbytes: int, *, together: bool) -> dict[str, float]:
        """Measure posting a chain of `count` slices, the last signalled: time of the call, and until completion."""
        rows = in_one_run(count, nbytes) if together else scattered(count, nbytes)
        calls, wholes, requests = [], [], 0
        for _ in range(ROUNDS):
            work = Work.moves(
                rows, opcode=abi.WR_RDMA_WRITE, local_address=address, lkey=int(registered.lkey),
                remote_address=address, rkey=int(registered.rkey), max_sge=opened.limits.max_sge,
            )  # fmt: skip
            requests = len(work.requests)
            start_s = time.perf_counter()
            last = near.post(work)
            near.ring()
            calls.append(time.perf_counter() - start_s)
            while near.done < last:
                for number, status, _ in queue.poll():
                    assert status == abi.WC_SUCCESS, abi.status_name(status)
                    near.done = number
            wholes.append(time.perf_counter() - start_s)
        return {
            "requests": requests,
            "post_ns_per_slice": round(median(calls) / count * 1e9),
            "whole_ns_per_slice": round(median(wholes) / count * 1e9),
        }

    result = {
        "max_sge": opened.limits.max_sge,
        "one_of_64_bytes": posted(1, 64, together=False),
        "250_of_64_bytes_scattered": posted(250, 64, together=False),
        "250_of_64_bytes_in_one_run": posted(250, 64, together=True),
        "250_of_16_KiB_scattered": posted(250, SLICE_NBYTES, together=False),
        "empty_poll_ns": round(seconds(lambda: queue.poll(), 500) * 1e9),
        "register_us": {f"{mib}_MiB": registering(opened, mib) for mib in (1, 16, 128)},
    }
    for pair in (near, far):
        pair.fail()
        pair.close()
    registered.close()
    queue.close()
    opened.close()
    return result


def registering(opened: Any, mib: int) -> float:
    """Return the microseconds to register memory whose pages are allocated."""
    memory = np.frombuffer(mmap.mmap(-1, mib << 20), dtype=np.uint8)
    memory[::4096] = 1

    def one() -> None:
        opened.register_memory(int(memory.ctypes.data), memory.nbytes, _ACCESS).close()

    return round(seconds(one, 1) * 1e6)


def work_of(rows: Rows) -> Work:
    return Work.moves(
        rows, opcode=abi.WR_RDMA_WRITE, local_address=4096, lkey=1, remote_address=8192, rkey=2, max_sge=MAX_SGE
    )


def scattered(count: int, nbytes: int) -> Rows:
    """Return slices with gaps on both sides, which need one request each."""
    starts = np.arange(count, dtype=np.int64) * 2 * nbytes % (4 << 20)
    return np.stack([starts, starts, np.full(count, nbytes)], axis=1)


def in_one_run(count: int, nbytes: int) -> Rows:
    """Return slices that are gathered into one run of remote memory, so that a request can hold several."""
    starts = np.arange(count, dtype=np.int64) * nbytes
    return np.stack([starts * 2, starts, np.full(count, nbytes)], axis=1)


def seconds(call: Callable[[], object], times: int) -> float:
    """Return this thread's CPU seconds per call, as the median over rounds of `times` calls."""
    rounds = []
    for _ in range(ROUNDS):
        start_s = time.thread_time()
        for _ in range(times):
            call()
        rounds.append((time.thread_time() - start_s) / times)
    return median(rounds)


if __name__ == "__main__":
    main()
