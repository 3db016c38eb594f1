"""Copies of hot prefixes on and off, live: paced engines on several hosts with slow links between them.

    python -m benchmarks.copies_live [--pairs N] [--popularities skewed shifting] [--add] [--store]

Four hosts have a pool node and a prefill node each, two more a decode node. KV between hosts crosses the
messenger over TCP, and a proxy before every node's listener forwards `LINK_BYTES_PER_S` in each direction, so that
links are as scarce, relative to computation, as in the simulation of `benchmarks/scheduling.py`, whose generator draws
the requests: questions behind popular prefixes. Every prefix is requested once before the counted requests. A pair is
the same requests at the same times in two fresh clusters, with copies and without (`--max-copies 0`). Ratios are
geometric means of pairs, with 95 % confidence intervals. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, Final

from benchmarks.frontend.overload_load import TOKENS_PER_BLOCK, write_rows
from benchmarks.frontend.overload_outcome import OverloadObjectives
from benchmarks.frontend.overload_run import replayed, summed_metric
from benchmarks.frontend.processes import BUNDLED
from benchmarks.frontend.slow_hosts import SlowHosts, slow_hosts
from benchmarks.stored import latest, store
from simulator.serving.clock import NS
from simulator.serving.confidence import mean_of, ratio_of
from simulator.serving.hot_prefixes import HotPrefixes, draw_hot_workload
from traces import BLOCK_TOKENS, TraceRow
from worker.paced.profiles import profile_of
from worker.policy.cost_profile import CostProfile, DecodeCost, PrefillCost, Range, TransferCost, save_profile

HOSTS: Final = 4
DECODE_NODES: Final = 2
LINK_BYTES_PER_S: Final = 3.5e6
_KV_BYTES: Final = 2048  # per token
_PREFILL_TOKENS, _DECODE_TOKENS = 4096, 8192  # memory of a worker; that of prefill nodes holds few of the prefixes
_MAX_LEN: Final = 2048
_SCALE: Final = BLOCK_TOKENS // TOKENS_PER_BLOCK  # tokens of a drawn request per token of the replay
_WARM_EVERY_S, _WARM_PAUSE_S = 0.7, 3.0
_POPULAR: Final = HotPrefixes(
    num_prefixes=16,
    prefix_tokens=1024 * _SCALE,
    question_tokens=64 * _SCALE,
    answer_tokens=16 * _SCALE,
    skew=1.2,
)
POPULARITIES: Final = {"skewed": _POPULAR, "shifting": replace(_POPULAR, shift_s=15.0)}
_VARIANTS: Final = {"with": (), "without": ("--max-copies", "0")}
_OBJECTIVES: Final = OverloadObjectives(ttft_s=20.0, tbt_s=1.0)  # of the replay's report only; nothing is rejected
_RATIOS: Final = ("ttft_mean_s", "ttft_p90_s", "tbt_mean_s")


def main() -> None:
    args = _arguments()
    pairs: dict[str, list[dict[str, Any]]] = latest("copies-live")[0]["pairs"] if args.add else {}
    result: dict[str, Any] = {}
    for popularity in args.popularities:
        done = pairs.setdefault(popularity, [])
        for seed in range(len(done), len(done) + args.pairs):
            done.append(_pair(POPULARITIES[popularity], seed, args.rate, args.seconds))
            result = _result(pairs, args)
            if args.store:
                store("copies-live", result)
    print(json.dumps(result))


def _result(pairs: dict[str, list[dict[str, Any]]], args: argparse.Namespace) -> dict[str, Any]:
    return {
        **summary(pairs),
        "hosts": HOSTS,
        "decode_nodes": DECODE_NODES,
        "link_bytes_per_s": LINK_BYTES_PER_S,
        "kv_bytes_per_token": _KV_BYTES,
        "rate_per_s": args.rate,
        "seconds": args.seconds,
        "popular": {name: asdict(POPULARITIES[name]) for name in pairs},
        "pairs": pairs,
    }


def summary(pairs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the means of each variant and the ratios of "without" to "with", by popularity."""
    found: dict[str, Any] = {}
    for popularity, done in pairs.items():
        means = {
            variant: {name: asdict(mean_of([pair[variant][name] for pair in done])) for name in done[0][variant]}
            for variant in _VARIANTS
        }
        gains = {
            name: asdict(ratio_of(*([pair[variant][name] for pair in done] for variant in ("without", "with"))))
            for name in _RATIOS
        }
        found[popularity] = {"pairs": len(done), "variants": means, "without_over_with": gains}
    gain = {
        f"replication_gain_live{'' if name == 'skewed' else f'_{name}'}": each["without_over_with"]["ttft_mean_s"]
        for name, each in found.items()
    }
    return {**gain, "popularities": found}


def hot_rows(popular: HotPrefixes, seed: int, rate_per_s: float, seconds: float) -> tuple[list[TraceRow], float]:
    """Return one request for every prefix and then the drawn ones, and the time of the first of the latter."""
    drawn = draw_hot_workload(
        popular, seed=seed, rate_per_s=rate_per_s, requests=round(rate_per_s * seconds), block_tokens=BLOCK_TOKENS
    )
    numbers: dict[int, int] = {}

    def row(at_s: float, blocks: Sequence[int], prompt_tokens: int) -> TraceRow:
        ids = [numbers.setdefault(block, len(numbers)) for block in blocks]
        if prompt_tokens > len(blocks) * BLOCK_TOKENS:
            ids.append(numbers.setdefault(-1 - len(numbers), len(numbers)))  # partial, and so nobody else's
        return TraceRow(0, round(1e3 * at_s), prompt_tokens, popular.answer_tokens, tuple(ids))

    warm = [
        row(_WARM_EVERY_S * number, blocks, len(blocks) * BLOCK_TOKENS + BLOCK_TOKENS)
        for number, (_, blocks) in enumerate(drawn.before)
    ]
    from_s = _WARM_EVERY_S * len(warm) + _WARM_PAUSE_S
    return [*warm, *(row(from_s + job.arrival_ns / NS, job.blocks, job.prompt_tokens) for job in drawn.jobs)], from_s


def live_profile() -> CostProfile:
    """Return costs of about 2 s for a prefix and 0.25 s for a question, so that one machine simulates all nodes."""
    prompts, contexts = Range(1, _MAX_LEN), Range(1, 16 * _MAX_LEN)
    link = TransferCost(0.005, 1 / LINK_BYTES_PER_S, Range(1, 1e9))
    memory = TransferCost(0.005, 1e-9, Range(1, 1e9))
    return replace(
        profile_of("instant"),
        name="copies",
        prefill=PrefillCost(0.12, 0.002, 0.0, new_tokens=prompts, prompt_tokens=prompts),
        decode=DecodeCost(0.03, 0.001, 0.0, batch=Range(1, 16), context_tokens=contexts),
        transfers={"fetch": link, "push": link, "load": memory},
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4, help="number of pairs of runs per popularity")
    parser.add_argument("--popularities", nargs="+", default=list(POPULARITIES), choices=list(POPULARITIES))
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=40.0, help="duration of the counted arrivals")
    parser.add_argument("--add", action="store_true", help="add the pairs to those of the latest stored result")
    parser.add_argument("--store", action="store_true", help="store the result after every pair")
    return parser.parse_args()


def _pair(popular: HotPrefixes, seed: int, rate_per_s: float, seconds: float) -> dict[str, Any]:
    """Run both variants on the same requests; which is first alternates with the seed."""
    rows, from_s = hot_rows(popular, seed, rate_per_s, seconds)
    order = list(_VARIANTS) if seed % 2 else list(reversed(_VARIANTS))
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        write_rows(rows, work / "trace.jsonl")
        save_profile(live_profile(), work / "profile.json")
        found = {}
        for variant in order:
            found[variant] = _run(work, work / variant, _VARIANTS[variant], from_s)
            print(variant, json.dumps(found[variant]), flush=True)
    return {"seed": seed, **{variant: found[variant] for variant in _VARIANTS}}


def _run(work: Path, folder: Path, flags: Sequence[str], from_s: float) -> dict[str, float]:
    block_tokens = ["--block-tokens", str(TOKENS_PER_BLOCK)]
    profile = str(work / "profile.json")
    worker = [*block_tokens, "--engine", "paced", "--paced-profile", profile, "--paced-kv-bytes", str(_KV_BYTES)]
    plan = SlowHosts(
        HOSTS,
        DECODE_NODES,
        LINK_BYTES_PER_S,
        BUNDLED,
        conductor=["--admission-mode", "none", "--max-queue", "600", "--cost-profile", f"moonpool={profile}", *flags],
        pool=["--pool-bytes", "128MiB"],
        prefill=[*worker, "--capacity-tokens", str(_PREFILL_TOKENS)],
        decode=[*worker, "--capacity-tokens", str(_DECODE_TOKENS), "--max-batch", "16"],
        frontend=block_tokens,
    )
    with slow_hosts(plan, folder) as (served, proxies):
        report, records, cores_used = replayed(
            served, work / "trace.jsonl", folder / "replay", _OBJECTIVES, verified=10
        )
        planned, late, copied = (
            summed_metric(served, name)
            for name in ("paced_planned_seconds_total", "paced_late_seconds_total", "pool_copied_bytes_total")
        )
        carried = {name: proxy.carried_bytes for name, proxy in proxies.items()}
    counted = [each for each in records if each["due_s"] >= from_s and each["outcome"] == "completed"]
    ttfts = [each["ttft_s"] for each in counted]
    return {
        "requests": len(counted),
        "failed": report["failed"],
        "wrong_tokens": report["wrong_tokens"],
        "ttft_mean_s": fmean(ttfts),
        "ttft_p50_s": quantiles(ttfts, n=10)[4],
        "ttft_p90_s": quantiles(ttfts, n=10)[8],
        "tbt_mean_s": fmean(each["tbt_worst10_s"] for each in counted),
        "hit_rate": sum(each["cached_tokens"] for each in counted) / sum(each["prompt_tokens"] for each in counted),
        "copied_mb": copied / 1e6,
        "network_mb": sum(carried.values()) / 1e6,
        "busiest_link_mb": max(carried.values()) / 1e6,
        "busiest_pool_link_mb": max(nbytes for name, nbytes in carried.items() if name.startswith("pool")) / 1e6,
        "late_share": late / planned,
        "cores_used": cores_used,
    }


if __name__ == "__main__":
    main()
