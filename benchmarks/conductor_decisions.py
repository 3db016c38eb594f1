"""Scheduling decisions per CPU-second: 2 prefill + 2 decode nodes, prompts of 2,048 tokens in blocks of 16.

Three depths: the policy alone; a whole Schedule (message in, chain matched in the directory, message out); the same
through gRPC over a unix socket. Where `ai-dynamo-runtime` is importable, its selector chooses among 4 empty workers for
prompts of the same length, in turns with ours; it books nothing, where ours fills a ledger. The last line is JSON.

    python benchmarks/conductor_decisions.py [--seconds 2] [--live 64]
"""

import argparse
import asyncio
import importlib.util
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# Scripts here may be named like packages: the repository's root comes first instead of this folder.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from conductor import wire  # noqa: E402
from conductor.config import ConductorConfig  # noqa: E402
from conductor.continuity import Contact, Continuity  # noqa: E402
from conductor.core import Core  # noqa: E402
from conductor.policy.events import NodeJoined, RequestArrived, RequestCompleted  # noqa: E402
from conductor.pools import Pools  # noqa: E402
from conductor.registry import Registry  # noqa: E402
from conductor.service import ConductorService  # noqa: E402
from kvpool import BlockRun, KvGroup, KvSpec, PoolEvents  # noqa: E402
from messenger.control import open_channel, start_server  # noqa: E402
from moonpool_proto.v1 import common_pb2, conductor_pb2  # noqa: E402
from moonpool_proto.v1.conductor_pb2_grpc import ConductorStub, add_ConductorServicer_to_server  # noqa: E402

BLOCK_TOKENS = 16
PROMPT_TOKENS = 2048
NUM_PROMPTS = 256
SPEC = KvSpec((KvGroup("full", 0, tuple(range(8)), 2, 64, "float16"),), BLOCK_TOKENS)
NAMESPACE = bytes(16)
ROUNDS = 5


def node(node_id: str, role: int) -> conductor_pb2.Node:
    """A node that exists on paper."""
    worker = role != common_pb2.ROLE_POOL
    return conductor_pb2.Node(
        node_id=node_id,
        role=role,  # type: ignore[arg-type]
        incarnation=1,
        target=f"unix:/nowhere/{node_id}",
        pool_node_id=f"pool-{node_id[-1]}" if worker else "",
        model="m" if worker else "",
        kv_namespace=NAMESPACE if worker else b"",
        spec=SPEC.to_proto() if worker else None,
        capacity_tokens=1 << 20,
        max_model_len=1 << 17,
        max_batch=256,
        kv_bytes_per_token=SPEC.bytes_per_token,
    )


class Bench:
    """A conductor whose directory holds half of each prompt at one of two pool nodes, and `live` placed requests."""

    def __init__(self, live: int) -> None:
        config = ConductorConfig("none", max_queue_s=1e9, max_copies=0, report_timeout_s=0)
        self.core = Core(config)
        self.pools = Pools(self.core, 1, 1.0)
        self.registry = Registry()
        continuity = Continuity(config, Contact(None, 1), self.pools.following, self.registry)
        self.service = ConductorService(self.core, self.registry, self.pools, continuity, 1)
        for number in range(2):
            for name, role in (
                ("pool", common_pb2.ROLE_POOL),
                ("p", common_pb2.ROLE_PREFILL),
                ("d", common_pb2.ROLE_DECODE),
            ):
                self._join(f"{name}-{number}", role)
        rng = np.random.default_rng(1)
        num_blocks = PROMPT_TOKENS // BLOCK_TOKENS
        self.prompts = [rng.bytes(16 * num_blocks) for _ in range(NUM_PROMPTS)]
        for number in range(2):
            runs = tuple(BlockRun(NAMESPACE, chain[: 8 * num_blocks]) for chain in self.prompts[number::2])
            snapshot = PoolEvents(1, 0, snapshot_begin=True, snapshot_end=True, stored=runs)
            assert self.pools.directory.apply(f"pool-{number}", snapshot)
        self.live = live
        self._numbers = itertools.count()
        keys = np.frombuffer(self.prompts[0], "<u8")[::2].tolist()
        matches = self.pools.match(NAMESPACE, np.array(keys, np.uint64))
        self._arrival = wire.arrived(self.request(0), NAMESPACE, matches, keys, {})

    def request(self, number: int) -> conductor_pb2.ScheduleRequest:
        """The number-th request of 2,048 tokens."""
        return conductor_pb2.ScheduleRequest(
            request_id=f"r{number}",
            frontend_id="f",
            model="m",
            prompt_tokens=PROMPT_TOKENS,
            max_new_tokens=128,
            chain=self.prompts[number % NUM_PROMPTS],
        )

    def decide(self) -> None:
        """One decision of the policy alone; the request placed `live` requests ago completes."""
        number = next(self._numbers)
        event = RequestArrived(f"r{number}", 0, "f", "m", PROMPT_TOKENS, 128, self._arrival.matches, number)
        self.core.handle(event)
        self.core.handle(RequestCompleted(f"r{number - self.live}", 0, "finished"))

    def schedule(self) -> None:
        """One Schedule from the message's bytes to the reply's, without gRPC."""
        number = next(self._numbers)
        request = conductor_pb2.ScheduleRequest.FromString(self.request(number).SerializeToString())
        reply = _run_to_end(self.service.Schedule(request, None))  # type: ignore[arg-type]
        assert reply.placement.reuse_blocks
        reply.SerializeToString()
        self.core.handle(RequestCompleted(f"r{number - self.live}", 0, "finished"))

    def _join(self, node_id: str, role: int) -> None:
        # Not through Join: of a pool node that exists on paper nobody hears, and the directory is filled by hand.
        member = self.registry.admit(node(node_id, role))
        self.core.handle(NodeJoined(wire.node_view(member.node)))
        if role == common_pb2.ROLE_POOL:
            self.pools.add(member.node)


def _run_to_end(coroutine: Any) -> Any:
    """Run a coroutine that awaits nothing."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("Schedule awaited something")


def per_second(work: Callable[[], None], seconds: float) -> float:
    """Calls per CPU-second over `seconds` of it: a busy machine changes little."""
    count, began = 0, time.process_time()
    while (now := time.process_time()) - began < seconds:
        for _ in range(20):
            work()
        count += 20
    return count / (now - began)


async def over_grpc(bench: Bench, seconds: float, concurrency: int) -> tuple[float, float]:
    """(decisions/s, p50 in ms) through a unix socket, client and server in this process."""
    with tempfile.TemporaryDirectory() as directory:
        server = await start_server(
            f"unix:{directory}/c.sock", lambda s: add_ConductorServicer_to_server(bench.service, s)
        )
        latencies: list[float] = []
        began = time.perf_counter()

        async def client() -> None:
            async with open_channel(server.target) as channel:
                stub = ConductorStub(channel)
                while time.perf_counter() - began < seconds:
                    number = next(bench._numbers)
                    asked = time.perf_counter()
                    await stub.Schedule(bench.request(number))
                    latencies.append(time.perf_counter() - asked)
                    bench.core.handle(RequestCompleted(f"r{number - bench.live}", 0, "finished"))

        await asyncio.gather(*(client() for _ in range(concurrency)))
        took = time.perf_counter() - began
        await server.stop(0.1)
    return len(latencies) / took, 1e3 * statistics.median(latencies)


class Dynamo:
    """Dynamo's selector over 4 empty workers, in process: KV overlap and load, nothing booked."""

    def __init__(self, service: Any) -> None:
        self.service = service
        hashes = np.frombuffer(np.random.default_rng(1).bytes(PROMPT_TOKENS // BLOCK_TOKENS * 8), "<u8") >> 1
        self.requests = {
            "tokens": {"model_name": "m", "token_ids": list(range(PROMPT_TOKENS))},
            "hashes": {
                "model_name": "m",
                "isl_tokens": PROMPT_TOKENS,
                "block_hashes": hashes.tolist(),
                "sequence_hashes": hashes.tolist(),
            },
        }

    @classmethod
    async def try_start(cls) -> "Dynamo | None":
        """None where the wheel is not installed."""
        if importlib.util.find_spec("dynamo") is None:
            return None
        from dynamo._core import SelectionService  # type: ignore[import-not-found, unused-ignore]

        service = SelectionService()
        for number in range(4):
            worker = {
                "worker_id": number,
                "model_name": "m",
                "block_size": BLOCK_TOKENS,
                "endpoint": "http://127.0.0.1:1",
                "kv_events_endpoint": f"tcp://127.0.0.1:{1 + number}",  # nobody is there: the index stays empty
                "total_kv_blocks": 1 << 16,
            }
            record = await service.upsert_worker(worker)
            assert record["lifecycle"] == "schedulable", record
        return cls(service)

    async def per_second(self, kind: str, seconds: float) -> float:
        """Selections per CPU-second: from token ids (which it hashes itself) or from hashes, as we get them."""
        count, began = 0, time.process_time()
        while (now := time.process_time()) - began < seconds:
            await self.service.select(self.requests[kind])
            count += 1
        return count / (now - began)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="per measurement and round")
    parser.add_argument("--live", type=int, default=64, help="requests in the ledger at any time")
    args = parser.parse_args()
    bench = Bench(args.live)
    peer = await Dynamo.try_start()
    found: dict[str, list[float]] = {"policy": [], "schedule": [], "tokens": [], "hashes": []}
    per_second(bench.schedule, 0.2)  # compiles the directory's kernels
    for _ in range(ROUNDS):
        found["policy"].append(per_second(bench.decide, args.seconds / ROUNDS))
        found["schedule"].append(per_second(bench.schedule, args.seconds / ROUNDS))
        if peer is not None:
            for kind in peer.requests:
                found[kind].append(await peer.per_second(kind, args.seconds / ROUNDS))
    grpc_per_s, grpc_p50_ms = await over_grpc(bench, args.seconds, concurrency=8)
    await bench.pools.close()
    policy, schedule = statistics.median(found["policy"]), statistics.median(found["schedule"])
    print(f"policy alone       {policy:10,.0f} decisions per CPU-second")
    print(f"whole Schedule     {schedule:10,.0f} decisions per CPU-second")
    print(f"through gRPC       {grpc_per_s:10,.0f} decisions per second, p50 {grpc_p50_ms:.2f} ms at 8 concurrent")
    result: dict[str, float] = {
        "nodes": 4,
        "prompt_tokens": PROMPT_TOKENS,
        "live_requests": args.live,
        "policy_per_s": policy,
        "schedule_per_s": schedule,
        "grpc_per_s": grpc_per_s,
        "grpc_p50_ms": grpc_p50_ms,
    }
    if peer is not None:
        peer.service.shutdown()
        for kind in peer.requests:
            selects = statistics.median(found[kind])
            result[f"dynamo_select_{kind}_per_s"] = selects
            result[f"ratio_to_dynamo_{kind}"] = schedule / selects
            print(f"Dynamo, {kind}     {selects:10,.0f} selections per CPU-second")
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main())
