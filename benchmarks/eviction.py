"""Hit rates of the eviction policies on several different workloads, to avoid tuning for a single trace.

Each workload is drawn from a seed and exceeds the pool's capacity. The last line of output is JSON with the hit rates.

    python benchmarks/eviction.py
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Replace this folder on the path by the repository root: scripts here may have the names of packages.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from simulator.cache import ChainedTrace, chained, simulate_cache  # noqa: E402
from traces import Trace, TraceRow  # noqa: E402

POLICIES = ("lru", "arc", "moonpool")
BLOCK_TOKENS = 512
_Request = tuple[float, list[int]]  # (time in seconds, block ids)


class Ids:
    """Generator of unused block ids."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))


def documents(rng: random.Random, ids: Ids) -> Iterator[_Request]:
    """Yield new questions about 400 documents, chosen by Zipf's law."""
    texts = [ids.take(rng.randint(4, 40)) for _ in range(400)]
    weights = [1 / (rank + 1) for rank in range(len(texts))]
    for number in range(6000):
        yield number * 0.5, rng.choices(texts, weights)[0] + ids.take(1)


def dialogues(
    rng: random.Random, ids: Ids, pause_s: float, turns: int, number: int, spacing_s: float
) -> list[_Request]:
    """Return conversations that start `spacing_s` apart and grow by a few blocks per turn."""
    requests = []
    for start in range(number):
        when, prompt = start * spacing_s, ids.take(rng.randint(2, 16))
        for _ in range(1 + int(rng.expovariate(1 / turns))):
            requests.append((when, list(prompt)))
            prompt += ids.take(rng.randint(1, 4))
            when += rng.lognormvariate(0, 0.8) * pause_s
    return requests


def chats(rng: random.Random, ids: Ids) -> Iterator[_Request]:
    """Yield chats of six turns on average, half a minute apart."""
    yield from dialogues(rng, ids, 30, 6, 1200, 1.5)


def agents(rng: random.Random, ids: Ids) -> Iterator[_Request]:
    """Yield agents that call a tool every two seconds, thirty times on average."""
    yield from dialogues(rng, ids, 2, 30, 300, 5)


def chats_and_batch(rng: random.Random, ids: Ids) -> Iterator[_Request]:
    """Yield chats and long prompts that are never repeated."""
    yield from dialogues(rng, ids, 30, 6, 800, 2)
    for number in range(1600):
        yield float(number), ids.take(rng.randint(20, 60))


def recent(rng: random.Random, ids: Ids) -> Iterator[_Request]:
    """Yield prompts that are repeated soon or never, the best case for LRU."""
    last: list[list[int]] = []
    for number in range(6000):
        if last and rng.random() < 0.7:
            prompt = last[-1 - min(int(rng.expovariate(1 / 25)), len(last) - 1)]
        else:
            prompt = ids.take(rng.randint(4, 24))
        last.append(prompt)
        yield number * 0.5, prompt


def loop(rng: random.Random, ids: Ids) -> Iterator[_Request]:
    """Yield the same 200 prompts in the same order repeatedly, the worst case for LRU."""
    texts = [ids.take(rng.randint(10, 20)) for _ in range(200)]
    for number in range(4000):
        yield number * 0.5, texts[number % len(texts)]


WORKLOADS: dict[str, tuple[Callable[[random.Random, Ids], Iterator[_Request]], int]] = {
    "documents": (documents, 2000),
    "chats": (chats, 500),
    "agents": (agents, 300),
    "chats_and_batch": (chats_and_batch, 1500),
    "recent": (recent, 400),
    "loop": (loop, 2000),
}
"""(workload, capacity of the pool in blocks) by name."""


def build(name: str, seed: int) -> ChainedTrace:
    """Return the workload's requests in order of time."""
    requests = sorted(WORKLOADS[name][0](random.Random(seed), Ids()), key=lambda request: request[0])
    rows = (
        TraceRow(number, int(when * 1000), BLOCK_TOKENS * len(ids), 1, tuple(ids))
        for number, (when, ids) in enumerate(requests)
    )
    return chained(Trace(name, tuple(rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    seed = parser.parse_args().seed
    results: dict[str, dict[str, float]] = {}
    for name, (_, capacity) in WORKLOADS.items():
        trace = build(name, seed)
        runs = [simulate_cache(trace, policy, capacity, leaf_first=True) for policy in POLICIES]
        results[name] = {run.policy: round(run.hit_rate, 4) for run in runs}
        us = 1e6 * runs[-1].seconds / trace.num_references
        print(f"{name:16}", *(f"{run.policy} {run.hit_rate:.4f}" for run in runs), f"({us:.1f} us a block)", flush=True)
    print(json.dumps({"benchmark": "eviction", "seed": seed, "hit_rate": results}))


if __name__ == "__main__":
    main()
