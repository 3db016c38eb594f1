"""Hit rates of the eviction policies on many different workloads, and how much of the gap to the oracle is closed.

    python -m benchmarks.eviction [--sets tuning,held-out,trace] [--workloads NAME ...] [--seed N] [--store]

Each workload is drawn from a seed and runs at three capacities, shares of its distinct blocks; the bundled trace runs
at five. LRU and ARC evict followers first, as the live pool does. The oracle is Belady's algorithm with bypass. The
held-out workloads were fixed before the policy was tuned. Runs in about six minutes on one core.

The last line of output is JSON: `worst_minus_best_classic` is the least difference between the hit rates of Moonpool's
policy and the better of LRU and ARC; `mean_gap_closed` is the mean share of the gap between the better of LRU and ARC
and the oracle that Moonpool's policy closes, over the held-out workloads, where the gap is at least 0.01;
`bundled_trace_10000` is its hit rate on the bundled trace with 10,000 blocks; `us_per_reference` is the CPU time of the
whole simulation per block of a prompt. `--store` writes the result and the picture.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Replace this folder on the path by the repository root: scripts here may have the names of packages.
ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from benchmarks.evicting.drawing import EvictionWorkload, build  # noqa: E402
from benchmarks.evicting.held_out import HELD_OUT  # noqa: E402
from benchmarks.evicting.picture import draw  # noqa: E402
from benchmarks.evicting.tuning import TUNING  # noqa: E402
from benchmarks.stored import PICTURES, store  # noqa: E402
from kvpool.policy.eviction import make_policy  # noqa: E402
from simulator.cache import BELADY, ChainedTrace, chained, simulate_cache  # noqa: E402
from traces import load_conversation  # noqa: E402

SETS = {"tuning": TUNING, "held-out": HELD_OUT}
TRACE_CAPACITIES = (1_000, 3_000, 5_859, 10_000, 30_000)
_LEAST_GAP = 0.01

Cell = dict[str, Any]


def measure(trace: ChainedTrace, name: str, capacity: int) -> Cell:
    """Return the hit rates of all policies on one workload at one capacity."""
    cell: Cell = {"workload": name, "capacity": capacity, "references": trace.num_references}
    for policy in ("lru", "arc", "moonpool", BELADY):
        began = time.process_time()
        cell[policy] = round(simulate_cache(trace, policy, capacity, leaf_first=True).hit_rate, 4)
        cell[f"{policy}_us"] = round(1e6 * (time.process_time() - began) / trace.num_references, 2)
    best = max(cell["lru"], cell["arc"])
    cell["minus_best_classic"] = round(cell["moonpool"] - best, 4)
    gap = cell[BELADY] - best
    cell["gap_closed"] = round(cell["minus_best_classic"] / gap, 3) if gap >= _LEAST_GAP else None
    return cell


def cells_of(workloads: dict[str, EvictionWorkload], seed: int) -> Iterator[Cell]:
    """Measure the workloads at their capacities."""
    for name, workload in workloads.items():
        trace = build(name, workload, seed)
        for share in workload.capacities:
            yield {"share": share} | measure(trace, name, max(8, int(share * trace.num_blocks)))


def trace_cells() -> Iterator[Cell]:
    """Measure the bundled trace."""
    trace = chained(load_conversation())
    for capacity in TRACE_CAPACITIES:
        yield {"share": round(capacity / trace.num_blocks, 3)} | measure(trace, "conversation", capacity)


def result_of(sets: dict[str, list[Cell]], seed: int) -> dict[str, Any]:
    """Return the result with its summary."""
    cells = [cell for of_set in sets.values() for cell in of_set]
    references = sum(cell["references"] for cell in cells)
    result: dict[str, Any] = {"benchmark": "eviction", "seed": seed, "cpus": os.cpu_count()}
    result["worst_minus_best_classic"] = min(cell["minus_best_classic"] for cell in cells)
    for name, of_set in sets.items():
        closed = [cell["gap_closed"] for cell in of_set if cell["gap_closed"] is not None]
        suffix = "" if name == "held-out" else "_" + name
        result[f"mean_gap_closed{suffix}"] = round(sum(closed) / len(closed), 3) if closed else None
    on_trace = {cell["capacity"]: cell["moonpool"] for cell in sets.get("trace", [])}
    result["bundled_trace_10000"] = on_trace.get(10_000)
    for policy, key in (("moonpool", "us_per_reference"), ("lru", "us_per_reference_lru")):
        result[key] = round(sum(cell[f"{policy}_us"] * cell["references"] for cell in cells) / references, 2)
    result["cells"] = sets
    return result


def line(cell: Cell) -> str:
    rates = "  ".join(f"{policy} {cell[policy]:.4f}" for policy in ("lru", "arc", "moonpool", BELADY))
    closed = "" if cell["gap_closed"] is None else f"gap closed {100 * cell['gap_closed']:5.1f} %"
    return f"{cell['workload']:18}{cell['capacity']:7,}  {rates}  {cell['minus_best_classic']:+.4f}  {closed}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sets", default="tuning,held-out,trace", help="comma-separated [tuning,held-out,trace]")
    parser.add_argument("--workloads", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--store", action="store_true", help="write the result and the picture")
    options = parser.parse_args(arguments)
    make_policy("moonpool", 1)  # compiles the kernels, or loads them, before anything is timed
    sets: dict[str, list[Cell]] = {}
    for name in options.sets.split(","):
        if name not in (*SETS, "trace"):
            parser.error(f"unknown set {name!r}: expected tuning, held-out or trace")
        chosen = {key: each for key, each in SETS.get(name, {}).items() if key in (options.workloads or [key])}
        sets[name] = []
        for cell in trace_cells() if name == "trace" else cells_of(chosen, options.seed):
            sets[name].append(cell)
            print(line(cell), f"{cell['moonpool_us']:.1f} us", flush=True)
    result = result_of(sets, options.seed)
    if options.store:
        store("eviction", result)
        draw(result, PICTURES / "eviction.svg")
    del result["cells"]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
