"""Directory contents of a large cluster, including the conversation trace's prompts, and the cost of changes."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conducting.chains import Keys, mixed, name, stored
from conductor.directory import Directory
from kvpool import PoolEvents
from kvpool.events import Tier
from traces.reader import load_conversation

__all__ = ["TRACE_BLOCK", "Longest", "fill", "measure_directory", "prompts_of_trace", "resident_nbytes"]

TRACE_BLOCK = 512
CHAIN = 1000  # blocks per chain that fills the pools in addition to the trace's prompts


def prompts_of_trace(block_tokens: int) -> tuple[list[tuple[Keys, int, int]], list[int]]:
    """Return the conversation trace's prompts and their dialogues.

    A prompt is (keys of full blocks, prompt tokens, output tokens). A dialogue is identified by its second block, since
    the first is shared by all.
    """
    per_id = TRACE_BLOCK // block_tokens
    table = mixed(1 << 44, (1 << 18) * per_id).reshape(1 << 18, per_id)
    prompts, dialogues = [], []
    for row in load_conversation().rows:
        keys = table[list(row.hash_ids)].reshape(-1)[: row.input_length // block_tokens]
        prompts.append((keys, row.input_length, row.output_length))
        dialogues.append(row.hash_ids[min(1, len(row.hash_ids) - 1)])
    return prompts, dialogues


class Longest:
    """CPU milliseconds of the longest call, and total CPU seconds, by kind of call."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self.seconds: dict[str, float] = {}

    def time(self, kind: str, call: Callable[[], Any]) -> Any:
        began = time.thread_time()
        result = call()
        took = time.thread_time() - began
        self.ms[kind] = max(self.ms.get(kind, 0.0), 1000 * took)
        self.seconds[kind] = self.seconds.get(kind, 0.0) + took
        return result


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def fill(directory: Directory, blocks: int, nodes: int, block_tokens: int, longest: Longest) -> int:
    """Add the trace's prompts (each dialogue at one node) and chains up to `blocks`; return the number of keys."""
    prompts, dialogues = prompts_of_trace(block_tokens)
    by_node: dict[int, list[Keys]] = {node: [] for node in range(nodes)}
    for (keys, _, _), dialogue in zip(prompts, dialogues, strict=True):
        by_node[dialogue * 7919 % nodes].append(keys)
    count = len(np.unique(np.concatenate([keys for keys, _, _ in prompts])))
    number = 0
    for node, chains in by_node.items():
        want = (blocks - count) // (nodes - node)
        while want > 0:
            chains.append(mixed(number * CHAIN + 1, min(CHAIN, want)))
            number, want, count = number + 1, want - CHAIN, count + min(CHAIN, want)
        for i, keys in enumerate(chains):
            tier = Tier.SSD if i % 4 == 3 else Tier.DRAM
            message = PoolEvents(1, 0, i == 0, i == len(chains) - 1, stored=stored(keys, tier))
            assert longest.time("snapshot_part", partial(directory.apply, name(node), message))
    return count


def measure_directory(directory: Directory, longest: Longest) -> dict[str, Any]:
    """Measure the cost of events, large events, dumps and lost nodes."""
    events = 20_000
    for i in range(events):
        run = stored(mixed((1 << 41) + i // 2 * 16, 16))
        message = PoolEvents(1, i + 1, stored=run) if i % 2 == 0 else PoolEvents(1, i + 1, removed=run)
        assert longest.time("event", partial(directory.apply, name(0), message))
    burst = PoolEvents(1, events + 1, stored=stored(mixed(1 << 42, 100_000)))
    assert longest.time("event_of_100k_blocks", lambda: directory.apply(name(0), burst))
    for node in range(1, 11):
        longest.time("drop_node", partial(directory.drop_node, name(node)))
    while longest.time("purge_slice", directory.purge):
        pass
    parts = directory.dump(frozenset(node.number for node in directory.begin_dump()))
    while longest.time("dump_slice", lambda: next(parts, None)) is not None:
        pass
    assert directory.validate() == []
    return {
        "events_per_s": events / longest.seconds["event"],
        "purge_total_ms": 1000 * longest.seconds["purge_slice"],
        "dump_total_ms": 1000 * longest.seconds["dump_slice"],
        "longest_stall_ms": max(longest.ms.values()),
        "longest_ms": longest.ms,
    }
