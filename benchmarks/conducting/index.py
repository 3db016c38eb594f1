"""Longest-prefix matching: the directory, a plain dict and Dynamo's RadixTree with equal contents, in alternation."""

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.conducting.chains import NAMESPACE, Keys, dynamo, mixed, name, settle, stored
from conductor.directory import Directory
from kvpool import PoolEvents

__all__ = ["measure_index"]

INDEX_WORKERS, INDEX_SEQUENCES = 16, 2000
INDEX_LENGTHS = {"16": (16, INDEX_SEQUENCES), "128": (128, INDEX_SEQUENCES), "1000": (1000, 200)}
HOT_BLOCKS, HOT_NODES = 32, 900


class DictIndex:
    """Straightforward implementation: a dict from key to set of nodes."""

    def __init__(self) -> None:
        self._holders: dict[int, set[int]] = {}

    def store(self, node: int, keys: Sequence[int]) -> None:
        for key in keys:
            self._holders.setdefault(key, set()).add(node)

    def match(self, keys: Sequence[int]) -> dict[int, int]:
        depths: dict[int, int] = {}
        alive: set[int] = set()
        for depth, key in enumerate(keys):
            holders = self._holders.get(key, set())
            now = alive & holders if depth else set(holders)
            depths |= dict.fromkeys(alive - now, depth)
            alive = now
            if not alive:
                return depths
        return depths | dict.fromkeys(alive, len(keys))


def index_contents(kind: str) -> tuple[Iterator[tuple[int, Keys]], list[Keys]]:
    """Return (node, chain) of all contents, and the prompts to match."""
    if kind == "hot":  # a prefix held by nearly all of many nodes, followed by keys that no node holds
        hot = mixed(1 << 40, HOT_BLOCKS)
        prompts = [np.concatenate([hot, mixed((1 << 43) + 1000 * i, 96)]) for i in range(200)]
        return ((node, hot) for node in range(HOT_NODES)), prompts
    length, count = INDEX_LENGTHS[kind]
    chains = [mixed(i * length + 1, length) for i in range(count)]
    held = [(i % INDEX_WORKERS, keys) for i, keys in enumerate(chains)]
    held += [((i + 1) % INDEX_WORKERS, keys[: length // 2]) for i, keys in enumerate(chains) if i % 5 == 0]
    return iter(held), [chains[i] for i in np.random.default_rng(1).permutation(count).tolist()]


def measure_index(rounds: int, peer_path: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for kind in (*INDEX_LENGTHS, "hot"):
        peer = dynamo(peer_path, "RadixTree")
        ours, plain, tree = Directory(), DictIndex(), peer() if peer is not None else None
        held, arrays = index_contents(kind)
        by_node: dict[int, list[Keys]] = {}
        for number, (node, keys) in enumerate(held):
            by_node.setdefault(node, []).append(keys)
            plain.store(node, keys.tolist())
            if tree is not None:
                blocks = [{"block_hash": key, "tokens_hash": key} for key in keys.tolist()]
                event = {"event_id": number, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}
                tree.apply_event(node, json.dumps(event).encode())
        for node, chains in by_node.items():
            for i, keys in enumerate(chains):
                assert ours.apply(name(node), PoolEvents(1, 0, i == 0, i == len(chains) - 1, stored=stored(keys)))
        lists = [keys.tolist() for keys in arrays]
        for array, keys in zip(arrays[:40], lists[:40], strict=True):
            want = {name(node): depth for node, depth in plain.match(keys).items()}
            assert {node: found.blocks for node, found in ours.match(NAMESPACE, array).items()} == want
            if tree is not None:
                scores = tree.find_matches(keys).scores
                assert {name(worker): depth for (worker, _), depth in scores.items()} == want
        repeats = max(1, 400 // len(arrays))
        calls: dict[str, tuple[Callable[[Any], Any], Sequence[Any]]] = {
            "ours": (partial(ours.match, NAMESPACE), arrays),
            "dict": (plain.match, lists),
        }
        if tree is not None:
            calls["dynamo"] = (tree.find_matches, lists)
        found: dict[str, list[float]] = {who: [] for who in calls}
        settle()
        for _ in range(rounds):
            for who, (call, prompts) in calls.items():
                began = time.process_time()
                for _ in range(repeats):
                    for prompt in prompts:
                        call(prompt)
                found[who].append(repeats * len(prompts) / (time.process_time() - began))
        gc.unfreeze()
        result[f"index_matches_per_s_{kind}"] = statistics.median(found["ours"])
        for who in list(calls)[1:]:
            ratios = [a / b for a, b in zip(found["ours"], found[who], strict=True)]
            result[f"index_vs_{who}_{kind}"] = statistics.median(ratios)
    return result
