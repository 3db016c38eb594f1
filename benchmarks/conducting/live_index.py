"""Events and look-ups mixed: the directory and the index that Dynamo's selection service keeps for its workers.

That is the strongest index that can be driven from Dynamo's wheel without a server: its concurrent tree, fed by threads
of its own from the workers' ZMQ streams in vLLM's format, and read by `SelectionService.overlap_scores`. Besides it the
wheel exports `RadixTree`, `KvRouter`, which needs a distributed runtime, and `run_kv_indexer`, an HTTP server.
"""

import asyncio
import gc
import importlib
import importlib.util
import multiprocessing
import statistics
import struct
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgpack
import numpy as np

from benchmarks.conducting.chains import NAMESPACE, Keys, dynamo, mixed, name, settle, stored
from conductor.directory import Directory
from kvpool import PoolEvents
from moonpool_proto.v1 import pool_pb2

__all__ = ["measure_live_index"]

WORKERS, BLOCK, LENGTH = 16, 16, 128
EVENTS, LOOK_UPS = 400, 4  # events of one chain each per round, look-ups per event
_DEADLINE_S = 30.0


class OurIndex:
    """The directory, fed with serialised events."""

    def __init__(self) -> None:
        self._directory = Directory()
        self._numbers = [0] * WORKERS
        for worker in range(WORKERS):
            assert self._directory.apply(name(worker), PoolEvents(1, 0, snapshot_begin=True, snapshot_end=True))

    def events(self, chains: Sequence[tuple[int, Keys]]) -> list[tuple[int, bytes]]:
        """Serialise one event per chain, with its worker."""
        found = []
        for worker, keys in chains:
            self._numbers[worker] += 1
            event = PoolEvents(1, self._numbers[worker], stored=stored(keys))
            found.append((worker, event.to_proto().SerializeToString()))
        return found

    def apply(self, worker: int, event: bytes) -> None:
        """Apply a serialised event."""
        message = PoolEvents.from_proto(pool_pb2.PoolEvents.FromString(event))
        assert self._directory.apply(name(worker), message)

    def match(self, keys: Keys) -> int:
        """Return the longest match of a chain."""
        return max((found.blocks for found in self._directory.match(NAMESPACE, keys).values()), default=0)


def publish(orders: Connection) -> None:
    """Publish events as 16 vLLM workers would: first send the ports, then each batch of events that is received."""
    zmq = importlib.import_module("zmq")
    context = zmq.Context()
    sockets = [context.socket(zmq.PUB) for _ in range(WORKERS)]
    for socket in sockets:
        socket.set_hwm(0)
    orders.send([socket.bind_to_random_port("tcp://127.0.0.1") for socket in sockets])
    numbers = [0] * WORKERS
    while (chains := orders.recv()) is not None:
        for worker, first in chains:
            event = ["BlockStored", list(range(first, first + LENGTH)), None, tokens_of(first), BLOCK, None]
            payload = msgpack.packb([time.time(), [event], 0])
            sockets[worker].send_multipart([b"", struct.pack(">Q", numbers[worker]), payload])
            numbers[worker] += 1
    context.destroy()


def tokens_of(first: int) -> list[int]:
    """Return the tokens of the chain whose first key has the number `first`; each chain begins with another token."""
    return [(first + i) % (1 << 31) for i in range(LENGTH * BLOCK)]


async def measure_live_index(rounds: int, peer_path: str) -> dict[str, Any]:
    """Apply events and look earlier chains up, in alternation; times are CPU times of all threads of this process.

    Dynamo's include the reception of the events and the hashing of their tokens, ours only their parsing. Look-ups are
    by hashes. Dynamo is left out if it, or `zmq`, cannot be imported.
    """
    service_of, hashes_of = dynamo(peer_path, "SelectionService"), dynamo(peer_path, "compute_block_hash_for_seq")
    if importlib.util.find_spec("zmq") is None:
        service_of = None
    ours = OurIndex()
    service = orders = publisher = None
    if service_of is not None:
        service = service_of()
        spawned = multiprocessing.get_context("spawn")
        orders, theirs = spawned.Pipe()
        publisher = spawned.Process(target=publish, args=(theirs,), daemon=True)
        publisher.start()
        for worker, port in enumerate(orders.recv()):
            await service.upsert_worker(
                {
                    "worker_id": worker,
                    "model_name": "m",
                    "block_size": BLOCK,
                    "endpoint": "http://127.0.0.1:1",
                    "kv_events_endpoint": f"tcp://127.0.0.1:{port}",
                    "total_kv_blocks": 1 << 20,
                }
            )
        await asyncio.sleep(1.0)  # until the subscriptions have reached the publishers
    found: dict[str, list[tuple[float, float]]] = {"ours": [], "dynamo": []}
    settle()
    known: list[int] = [1]
    for turn in range(rounds + 1):
        firsts = [1 + (turn * EVENTS + i) * LENGTH for i in range(EVENTS)]
        chains = [(i % WORKERS, first) for i, first in enumerate(firsts)]
        asked = np.random.default_rng(turn).choice(known, EVENTS * LOOK_UPS).tolist()
        keys = {first: mixed(first, LENGTH) for first in {*asked, *firsts}}
        events = ours.events([(worker, keys[first]) for worker, first in chains])
        wall, cpu, matched = time.perf_counter(), time.process_time(), 0
        for i, (worker, event) in enumerate(events):
            ours.apply(worker, event)
            for first in asked[i * LOOK_UPS : (i + 1) * LOOK_UPS]:
                matched += ours.match(keys[first])
        found["ours"].append((time.process_time() - cpu, time.perf_counter() - wall))
        assert matched == (LENGTH * len(asked) if turn else matched)
        if service is not None:
            assert orders is not None
            bodies = [_body(hashes_of, first) for first in asked]
            wall, cpu, matched = time.perf_counter(), time.process_time(), 0
            orders.send(chains)
            for body in bodies:
                matched += _longest(await service.overlap_scores(body))
            found["dynamo"].append((time.process_time() - cpu, time.perf_counter() - wall))
            assert matched == (LENGTH * len(asked) if turn else matched)
            await _until_applied(service, [_body(hashes_of, first) for first in firsts[-WORKERS:]])
        known += firsts
    gc.unfreeze()
    result: dict[str, Any] = {}
    for who, taken in found.items():
        if taken:
            result[f"live_index_{who}_us"] = 1e6 * statistics.median(cpu for cpu, _ in taken[1:]) / (EVENTS * LOOK_UPS)
    if service is not None and orders is not None and publisher is not None:
        for at, clock in enumerate(("", "_wall")):
            ratios = [b[at] / a[at] for a, b in zip(found["ours"][1:], found["dynamo"][1:], strict=True)]
            result[f"live_index_vs_dynamo{clock}"] = statistics.median(ratios)
        orders.send(None)
        publisher.join()
        service.shutdown()
    return result


def _body(hashes_of: Any, first: int) -> dict[str, Any]:
    hashes = np.array(hashes_of(tokens_of(first), BLOCK), np.uint64).view(np.int64).tolist()
    return {"model_name": "m", "isl_tokens": LENGTH * BLOCK, "block_hashes": hashes, "sequence_hashes": hashes}


def _longest(scores: dict[str, Any]) -> int:
    return max((int(worker["device_blocks"]) for worker in scores["workers"]), default=0)


async def _until_applied(service: Any, bodies: Sequence[dict[str, Any]]) -> None:
    """Wait until the service has applied the events of these chains."""
    deadline_s = time.monotonic() + _DEADLINE_S
    for body in bodies:
        while _longest(await service.overlap_scores(body)) < LENGTH:
            assert time.monotonic() < deadline_s, "Dynamo's index has lost an event"
            await asyncio.sleep(0.01)
