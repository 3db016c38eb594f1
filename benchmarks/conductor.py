"""Benchmark of the conductor: longest-prefix matching, complete decisions, and its directory at full size.

*Index*: the holders of a chain, compared with a plain dict and Dynamo's Rust RadixTree with equal contents (16 workers,
2,000 sequences); each returns what its router needs. *Live index*: events and look-ups mixed, compared with the
concurrent index of Dynamo's selection service, the strongest that its wheel offers without a server. *Decisions*: four
workers and prompts of 2,048 tokens, from block keys to a booked decision, compared with Dynamo's selector, which books
nothing. *Scale*: 1,000 workers with a pool node each, ten million blocks, the conversation trace's prompts; a decision
is a complete Schedule from the serialised message to the serialised reply, without gRPC, and the Complete of an earlier
request.

Moonpool and its peers alternate within each round; a ratio is the median of the rounds' ratios. Times are CPU times
(for Dynamo, of all threads) unless marked by `_wall`. Both are longer on a machine with other work: its load average is
reported, and `decision_p10_us` is affected least. Dynamo is included if `ai-dynamo-runtime` can be imported;
--peer-path adds a folder to search (pyzmq carries its events). The last line of output is JSON.

    python benchmarks/conductor.py [--blocks 10000000] [--nodes 1000] [--live 4000] [--peer-path DIR] [--store]
"""

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

# Replace this folder on the path by the repository root: scripts here may have the names of packages.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.conducting.bench import Bench  # noqa: E402
from benchmarks.conducting.chains import chain_bytes, dynamo, mixed, name, settle, stored  # noqa: E402
from benchmarks.conducting.contents import (  # noqa: E402
    TRACE_BLOCK,
    Longest,
    fill,
    measure_directory,
    prompts_of_trace,
    resident_nbytes,
)
from benchmarks.conducting.index import measure_index  # noqa: E402
from benchmarks.conducting.live_index import measure_live_index  # noqa: E402
from benchmarks.stored import store  # noqa: E402
from kvpool import PoolEvents  # noqa: E402

PROMPT_TOKENS, PROMPT_BLOCK = 2048, 16


async def measure_selector(rounds: int, per_round: int, live: int, peer_path: str) -> dict[str, Any]:
    """Measure decisions with four workers, one of which holds half of each prompt. Dynamo's index is empty."""
    bench = Bench(4, PROMPT_BLOCK, live)
    num_blocks = PROMPT_TOKENS // PROMPT_BLOCK
    prompts = [mixed(i * num_blocks + 1, num_blocks) for i in range(256)]
    for node in range(4):
        for i, keys in enumerate(held := prompts[node::4]):
            run = stored(keys[: num_blocks // 2])
            assert bench.pools.directory.apply(name(node), PoolEvents(1, 0, i == 0, i == len(held) - 1, stored=run))
    peer = dynamo(peer_path, "SelectionService")
    service = peer() if peer is not None else None
    hashes = (mixed(1, num_blocks) >> np.uint64(1)).tolist()
    asked: dict[str, dict[str, Any]] = {
        "tokens": {"model_name": "m", "token_ids": list(range(PROMPT_TOKENS))},
        "hashes": {
            "model_name": "m",
            "isl_tokens": PROMPT_TOKENS,
            "block_hashes": hashes,
            "sequence_hashes": hashes,
        },
    }
    for number in range(4 if service is not None else 0):
        assert service is not None
        worker = {
            "worker_id": number,
            "model_name": "m",
            "block_size": PROMPT_BLOCK,
            "endpoint": "http://127.0.0.1:1",
            "kv_events_endpoint": f"tcp://127.0.0.1:{1 + number}",  # no publisher exists, so the index stays empty
            "total_kv_blocks": 1 << 16,
        }
        record = await service.upsert_worker(worker)
        assert record["lifecycle"] == "schedulable", record
    found: dict[str, list[tuple[float, float]]] = {"decide": [], "schedule": [], "tokens": [], "hashes": []}

    async def theirs(kind: str) -> None:
        assert service is not None
        for _ in range(per_round):
            await service.select(asked[kind])

    async def decide() -> None:
        for request, keys in requests:
            bench.decide(request, keys)

    async def schedule() -> None:
        for request, _ in requests:
            bench.schedule(request.SerializeToString())

    settle()
    for _ in range(rounds + 1):
        for who in found:
            requests = [
                (bench.request(chain_bytes(prompts[i % 256]), PROMPT_TOKENS, 128), prompts[i % 256])
                for i in range(per_round if who in ("decide", "schedule") else 0)
            ]
            if who in asked and service is None:
                continue
            wall, cpu = time.perf_counter(), time.process_time()
            await (theirs(who) if who in asked else decide() if who == "decide" else schedule())
            found[who].append((per_round / (time.process_time() - cpu), per_round / (time.perf_counter() - wall)))
    gc.unfreeze()
    await bench.pools.close()
    if service is not None:
        service.shutdown()
    result: dict[str, Any] = {}
    for who, pairs in found.items():
        if pairs:
            result[f"selector_{who}_per_s"] = statistics.median(cpu for cpu, _ in pairs[1:])
    for kind in asked:
        for at, clock in enumerate(("", "_wall")):
            ratios = [a[at] / b[at] for a, b in zip(found["decide"][1:], found[kind][1:], strict=False)]
            if ratios:
                result[f"decisions_vs_dynamo_selector_{kind}{clock}"] = statistics.median(ratios)
    if service is not None:
        # Dynamo's router receives tokens and hashes them; Moonpool's frontend sends hashes.
        result["decisions_vs_dynamo_selector"] = result["decisions_vs_dynamo_selector_tokens"]
    return result


async def measure_scale(block_tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    bench = Bench(args.nodes, block_tokens, args.live)
    longest, directory = Longest(), bench.pools.directory
    gc.collect()
    before = resident_nbytes()
    keys = fill(directory, args.blocks, args.nodes, block_tokens, longest)
    gc.collect()
    result: dict[str, Any] = {"blocks": keys, "bytes_per_block": (resident_nbytes() - before) / keys}
    result["snapshot_blocks_per_s"] = sum(map(directory.num_blocks, directory.nodes)) / longest.seconds["snapshot_part"]
    prompts, _ = prompts_of_trace(block_tokens)
    took: list[float] = []
    passed: list[float] = []
    settle()
    for i in range(args.live + args.decisions):
        keys_i, prompt, output = prompts[i % len(prompts)]
        message = bench.request(chain_bytes(keys_i), prompt, output).SerializeToString()
        wall, began = time.perf_counter(), time.thread_time()
        bench.schedule(message)
        took.append(time.thread_time() - began)
        passed.append(time.perf_counter() - wall)
    gc.unfreeze()
    for times, clock in ((took, ""), (passed, "_wall")):
        times[:] = sorted(times[args.live :])
        result[f"decisions_per_s{clock}"] = len(times) / sum(times)
        for share in (10, 50, 99):
            result[f"decision_p{share}_us{clock}"] = 1e6 * times[len(times) * share // 100]
    result["decision_longest_us"] = 1e6 * took[-1]
    result |= measure_directory(directory, longest)
    await bench.pools.close()
    return result


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--blocks",
        type=int,
        default=10_000_000,
        help="blocks in the directory at scale; 0: skip the measurement at scale",
    )
    parser.add_argument("--nodes", type=int, default=1000, help="workers, each with a pool node")
    parser.add_argument("--live", type=int, default=4000, help="requests in the ledger at any time, at scale")
    parser.add_argument("--decisions", type=int, default=12_000, help="measured decisions at scale")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--per-round", type=int, default=2000, help="decisions per round in the comparison with Dynamo's selector"
    )
    parser.add_argument("--block-tokens", type=int, nargs="*", default=[TRACE_BLOCK, 16], help="block sizes at scale")
    parser.add_argument("--peer-path", default="", help="folder where ai-dynamo-runtime is installed")
    parser.add_argument("--store", action="store_true", help="write the result")
    args = parser.parse_args()
    result: dict[str, Any] = {"cores": os.cpu_count(), "load_average_before": os.getloadavg()[0]}
    if args.rounds:
        result |= measure_index(args.rounds, args.peer_path)
        result |= await measure_live_index(args.rounds, args.peer_path)
        result |= await measure_selector(args.rounds, args.per_round, 64, args.peer_path)
    result |= {"nodes": args.nodes, "live_requests": args.live}
    for block_tokens in args.block_tokens if args.blocks else []:
        found = await measure_scale(block_tokens, args)
        result |= {key if block_tokens == TRACE_BLOCK else f"{key}_at_{block_tokens}": found[key] for key in found}
        gc.collect()
    result["load_average_after"] = os.getloadavg()[0]
    for key, value in result.items():
        print(f"{key:40} {value:,.2f}" if isinstance(value, float) else f"{key:40} {value}")
    if args.store:
        store("conductor", result)
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main())
