"""The directory at full size: memory per block, matches and events per second, and how long anything takes at once.

By default ten million blocks on a thousand nodes: chains of 1,000 blocks, most with one holder, a fifth half
replicated, and a hot prefix that most nodes hold. Then a smaller one against peers with equal contents, in turns: a
plain dict, and Dynamo's RadixTree where `ai-dynamo-runtime` can be imported (--peer-path adds a folder to look in).
Times are CPU time, against Dynamo, whose work is done in a thread of its own, that of all threads. The last line is
JSON.
"""

import argparse
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path[0] = str(Path(__file__).resolve().parents[1])

from kvpool import BlockRun, Directory, PoolEvents  # noqa: E402
from kvpool.tiers import Tier  # noqa: E402

NAMESPACE = bytes(16)
CHAIN_BLOCKS = 1000
HOT_BLOCKS = 32
KINDS = {16: "16", 128: "128", 1000: "1000", 0: "hot"}
ROUNDS = 7


def chain_of(number: int, length: int = CHAIN_BLOCKS) -> NDArray[np.uint64]:
    """Keys of a chain: splitmix64 of a counter, never twice the same."""
    x = (np.arange(length, dtype=np.uint64) + np.uint64(number * CHAIN_BLOCKS + 1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def run_of(keys: NDArray[np.uint64], tier: Tier = Tier.DRAM) -> BlockRun:
    """As a pool node tells of them."""
    full = np.zeros((len(keys), 2), np.uint64)
    full[:, 0] = keys
    return BlockRun(NAMESPACE, full.tobytes(), tier)


def contents(blocks: int, nodes: int) -> Iterator[tuple[int, list[NDArray[np.uint64]]]]:
    """(node, chains it holds): its own, half of every fifth of the next one's, the hot prefix on nine of ten nodes."""
    per_node = max(1, blocks // nodes // CHAIN_BLOCKS)
    hot = chain_of(1 << 40, HOT_BLOCKS)
    for node in range(nodes):
        own = [chain_of(node * per_node + i) for i in range(per_node)]
        neighbour = (node + 1) % nodes * per_node
        own += [chain_of(neighbour + i)[: CHAIN_BLOCKS // 2] for i in range(0, per_node, 5)]
        yield node, [*own, *([hot] if node % 10 else [])]


def name(node: int) -> str:
    return f"pool-{node:04}"


class Stalls:
    """The longest that one call took, by kind, in milliseconds."""

    def __init__(self) -> None:
        self.cpu: dict[str, float] = {}
        self.seconds: dict[str, float] = {}

    def time(self, kind: str, call: Callable[[], Any]) -> Any:
        began = time.thread_time()
        result = call()
        took = time.thread_time() - began
        self.cpu[kind] = max(self.cpu.get(kind, 0.0), 1000 * took)
        self.seconds[kind] = self.seconds.get(kind, 0.0) + took
        return result


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def fill(directory: Directory, blocks: int, nodes: int, stalls: Stalls) -> int:
    """A snapshot per node, chain by chain. Returns how many replicas were stored."""
    count = 0
    for node, chains in contents(blocks, nodes):
        for i, keys in enumerate(chains):
            tier = Tier.SSD if i % 4 == 3 else Tier.DRAM
            message = PoolEvents(1, 0, i == 0, i == len(chains) - 1, stored=(run_of(keys, tier),))
            assert stalls.time("snapshot_part", lambda m=message, n=node: directory.apply(name(n), m))
            count += len(keys)
    return count


def queries_of(blocks: int, nodes: int, length: int, count: int) -> list[NDArray[np.uint64]]:
    """Prompts that one or two nodes hold; of `length` 0: the hot prefix and 96 blocks that nobody has."""
    if not length:
        return [np.concatenate([chain_of(1 << 40, HOT_BLOCKS), chain_of((1 << 43) + i, 96)]) for i in range(count)]
    num_chains = nodes * max(1, blocks // nodes // CHAIN_BLOCKS)
    numbers = np.random.default_rng(length).integers(0, num_chains, count).tolist()
    return [np.ascontiguousarray(chain_of(number)[:length]) for number in numbers]


def per_second(match: Callable[[Any], Any], queries: Sequence[Any], clock: Callable[[], float]) -> float:
    began = clock()
    for query in queries:
        match(query)
    return len(queries) / (clock() - began)


def measure_alone(blocks: int, nodes: int) -> dict[str, Any]:
    """Everything at full size."""
    stalls = Stalls()
    directory = Directory()
    gc.collect()
    before = resident_nbytes()
    replicas = fill(directory, blocks, nodes, stalls)
    gc.collect()
    grown = resident_nbytes() - before
    num_keys = nodes * max(1, blocks // nodes // CHAIN_BLOCKS) * CHAIN_BLOCKS + HOT_BLOCKS
    result: dict[str, Any] = {
        "blocks": num_keys,
        "nodes": nodes,
        "replicas": replicas,
        "bytes_per_block": grown / num_keys,
        "snapshot_blocks_per_s": replicas / stalls.seconds["snapshot_part"],
    }
    for length, kind in KINDS.items():
        queries = queries_of(blocks, nodes, length, 20_000 if 0 < length < 1000 else 2_000)
        found = [
            per_second(lambda keys: directory.match(NAMESPACE, keys), queries, time.thread_time) for _ in range(ROUNDS)
        ]
        result[f"matches_per_s_{kind}"] = statistics.median(found)
    events = 20_000
    for i in range(events):
        run = run_of(chain_of((1 << 41) + i // 2, 16))
        stored, removed = ((run,), ()) if i % 2 == 0 else ((), (run,))
        message = PoolEvents(1, i + 1, stored=stored, removed=removed)
        assert stalls.time("event", lambda m=message: directory.apply(name(0), m))
    result["events_per_s"] = events / stalls.seconds["event"]
    big = run_of(chain_of(1 << 42, 65_536))
    assert stalls.time("largest_event", lambda: directory.apply(name(0), PoolEvents(1, events + 1, stored=(big,))))
    for node in range(1, 11):
        stalls.time("drop_node", lambda n=node: directory.drop_node(name(n)))
    slices = 1
    while stalls.time("purge_slice", directory.purge):
        slices += 1
    dumped = directory.begin_dump()
    parts = directory.dump(frozenset(node.number for node in dumped))
    while stalls.time("dump_slice", lambda: next(parts, None)) is not None:
        pass
    result |= {
        "purge_total_ms": 1000 * stalls.seconds["purge_slice"],
        "purge_slices": slices,
        "dump_total_ms": 1000 * stalls.seconds["dump_slice"],
        "longest_stall_ms": max(stalls.cpu.values()),
        "longest_ms": stalls.cpu,
    }
    began = time.thread_time()
    assert directory.validate() == []
    return result | {"validate_ms": 1000 * (time.thread_time() - began)}


class DictIndex:
    """What one writes first: key -> set of nodes."""

    def __init__(self) -> None:
        self._holders: dict[int, set[int]] = {}

    def store(self, node: int, keys: Sequence[int]) -> None:
        for key in keys:
            self._holders.setdefault(key, set()).add(node)

    def match(self, keys: Sequence[int]) -> dict[int, int]:
        depths: dict[int, int] = {}
        alive: set[int] = set()
        for depth, key in enumerate(keys):
            holders = self._holders.get(key)
            if holders is None:
                break
            now = alive & holders if depth else set(holders)
            for node in alive - now:
                depths[node] = depth
            alive = now
            if not alive:
                break
        else:
            depth = len(keys)
        return depths | dict.fromkeys(alive, depth)


def dynamo_index(peer_path: str) -> Any:
    """Dynamo's RadixTree, empty; None where it cannot be had."""
    if peer_path:
        sys.path.append(peer_path)
    try:
        return importlib.import_module("dynamo._core").RadixTree()
    except ImportError:
        return None


def dynamo_event(number: int, keys: Sequence[int]) -> bytes:
    blocks = [{"block_hash": key, "tokens_hash": key} for key in keys]
    return json.dumps({"event_id": number, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}).encode()


def measure_peers(blocks: int, nodes: int, peer_path: str) -> dict[str, Any]:
    """The same contents and prompts for all, measured in turns."""
    ours, plain, tree = Directory(), DictIndex(), dynamo_index(peer_path)
    fill(ours, blocks, nodes, Stalls())
    number = 0
    for node, chains in contents(blocks, nodes):
        for keys in chains:
            number += 1
            plain.store(node, keys.tolist())
            if tree is not None:
                tree.apply_event(node, dynamo_event(number, keys.tolist()))
    result: dict[str, Any] = {"peer_blocks": blocks, "dynamo": tree is not None}
    for length, kind in KINDS.items():
        arrays = queries_of(blocks, nodes, length, 3000 if 0 < length < 1000 else 500)
        lists = [keys.tolist() for keys in arrays]
        for keys, numbers in zip(arrays[:50], lists[:50], strict=True):
            want = {name(node): depth for node, depth in plain.match(numbers).items()}
            assert {node: match.blocks for node, match in ours.match(NAMESPACE, keys).items()} == want
            if tree is not None:
                scores = {name(worker): depth for (worker, _), depth in tree.find_matches(numbers).scores.items()}
                assert scores == want
        found: dict[str, list[float]] = {"ours": [], "dict": [], "dynamo": []}
        for _ in range(ROUNDS):
            found["ours"].append(per_second(lambda keys: ours.match(NAMESPACE, keys), arrays, time.thread_time))
            found["dict"].append(per_second(plain.match, lists, time.thread_time))
            if tree is not None:
                own = per_second(lambda keys: ours.match(NAMESPACE, keys), arrays, time.process_time)
                theirs = per_second(lambda keys: tree.find_matches(keys).scores, lists, time.process_time)
                found["dynamo"].append(own / theirs)
        ratios = [a / b for a, b in zip(found["ours"], found["dict"], strict=True)]
        result[f"index_vs_dict_{kind}"] = statistics.median(ratios)
        if tree is not None:
            result[f"index_vs_dynamo_{kind}"] = statistics.median(found["dynamo"])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10_000_000)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--peer-blocks", type=int, default=1_000_000, help="blocks of the comparison; 0: none")
    parser.add_argument("--peer-path", default="", help="folder where ai-dynamo-runtime is installed")
    args = parser.parse_args()
    result = measure_alone(args.blocks, args.nodes)
    if args.peer_blocks:
        result |= measure_peers(args.peer_blocks, args.nodes, args.peer_path)
    for key, value in result.items():
        print(f"{key:24} {value:,.2f}" if isinstance(value, float) else f"{key:24} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
