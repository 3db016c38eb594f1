"""Cost of several conductors: CPU time of the whole path per request, and what is lost to their stale states.

    python -m benchmarks.many_conductors stale [--seeds N] [--requests N] [--processes N] [--store]
    python -m benchmarks.many_conductors cpu [--requests N] [--rounds N] [--store]

`stale`: the same arrivals on the same simulated cluster (8 prefill and 8 decode nodes, the bundled 70B profile) with 1,
2 and 4 conductors. Requests go to them in turn, each conductor has its own policy object, and learns of the others'
requests only from the nodes' reports. Hits are reused over prompt tokens, goodput is of requests within both
objectives; ratios to one conductor are geometric means of pairs with the same seed, with 95 % intervals.

`cpu`: short requests against paced workers whose steps take no time, through as many frontends as conductors, each of
which prefers another conductor. CPU time (user and system, of /proc) per request, by role, without what the processes
need at rest, which is reported separately. The last line of output is JSON.
"""

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.frontend.load import many
from benchmarks.frontend.processes import Served, another_frontend, cluster, frontend_preferring, long_folder
from benchmarks.simulated import simulated_spec
from benchmarks.stored import store
from simulator.serving.confidence import mean_of, ratio_of
from simulator.serving.hot_prefixes import HotPrefixes
from simulator.serving.runs import RunSpec, ServingRun, run_all, worker_pool

CONDUCTORS: Final = (1, 2, 4)
QUERIES_PER_S: Final = 20_000
METRICS: Final[dict[str, Callable[[ServingRun], float]]] = {
    "hits": lambda run: run.outcome.reused_share,
    "goodput": lambda run: run.outcome.goodput,
    "ttft_mean_s": lambda run: run.outcome.ttft_mean_s,
}
PROMPT_TOKENS, ANSWER_TOKENS, AT_ONCE = 64, 8, 16
AT_REST_S = 8.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    stale = parts.add_parser("stale", help="what stale states cost, in simulation")
    stale.add_argument("--trace", default="conversation")
    stale.add_argument("--seeds", type=int, default=8)
    stale.add_argument("--requests", type=int, default=500, help="approximate number per run")
    stale.add_argument("--hot-requests", type=int, default=900, help="likewise, behind popular prefixes")
    stale.add_argument("--prefill", type=int, default=8)
    stale.add_argument("--decode", type=int, default=8)
    stale.add_argument("--processes", type=int, default=2)
    stale.set_defaults(ttft=30.0, tbt=0.1)
    cpu = parts.add_parser("cpu", help="CPU time per request, live")
    cpu.add_argument("--requests", type=int, default=600, help="per round")
    cpu.add_argument("--rounds", type=int, default=4)
    for part in (stale, cpu):
        part.add_argument("--store", action="store_true", help="write the result")
    args = parser.parse_args()
    result = measure_stale(args) if args.part == "stale" else measure_cpu(args)
    if args.store:
        store(f"many-conductors-{args.part}", result)
    print(json.dumps(result))


def measure_stale(args: argparse.Namespace) -> dict[str, Any]:
    """Simulate every scenario with each number of conductors."""
    found = {}
    with worker_pool(args.processes) as pool:
        for name, spec in scenarios(args).items():
            specs = [
                replace(spec, seed=seed, settings=replace(spec.settings, conductors=number))
                for seed in range(args.seeds)
                for number in CONDUCTORS
            ]
            runs = run_all(specs, pool)
            found[name] = compared({number: runs[at :: len(CONDUCTORS)] for at, number in enumerate(CONDUCTORS)})
            show(name, found[name])
    worst = {
        metric: min(each[str(CONDUCTORS[-1])][f"{metric}_ratio"]["low"] for each in found.values())
        for metric in ("hits", "goodput")
    }
    return {"worst_low": worst, "settings": vars(args), "scenarios": found}


def scenarios(args: argparse.Namespace) -> dict[str, RunSpec]:
    """Return the runs to compare, by name."""
    calm = simulated_spec(args, "none")
    calm = replace(calm, policy=replace(calm.policy, max_queue_s=1e6))
    loaded = simulated_spec(args, "predicted-uniform")
    skewed = HotPrefixes(prefix_tokens=32768, skew=1.2)
    return {
        "conversations, 6/s": replace(calm, rate_per_s=6.0),
        "conversations, 12/s, rejecting": replace(loaded, rate_per_s=12.0),
        "skewed prefixes, 15/s": replace(calm, hot=skewed, rate_per_s=15.0, requests=args.hot_requests),
    }


def compared(runs: dict[int, list[ServingRun]]) -> dict[str, Any]:
    """Return the means of each number of conductors, and their ratios to those of one."""
    rows: dict[str, Any] = {}
    for number, these in runs.items():
        row = {name: asdict(mean_of([of(run) for run in these])) for name, of in METRICS.items()}
        for name, of in METRICS.items():
            row[f"{name}_ratio"] = asdict(ratio_of([of(run) for run in these], [of(run) for run in runs[1]]))
        rows[str(number)] = row
    return rows


def show(title: str, rows: dict[str, Any]) -> None:
    print(title)
    for number, row in rows.items():
        ratios = ", ".join(
            f"{name} {row[name]['mean']:.4g}, ratio {row[f'{name}_ratio']['mean']:.4f} "
            f"({row[f'{name}_ratio']['low']:.4f} to {row[f'{name}_ratio']['high']:.4f})"
            for name in METRICS
        )
        print(f"  {number} conductors: {ratios}", flush=True)


def measure_cpu(args: argparse.Namespace) -> dict[str, Any]:
    """Serve short requests with each number of conductors and frontends."""
    found = {}
    for number in CONDUCTORS:
        with tempfile.TemporaryDirectory() as name:
            rounds, at_rest = serve(Path(name), number, args.requests, args.rounds)
        per_role = {role: asdict(mean_of([each[role] for each in rounds])) for role in rounds[0]}
        cores = {role: QUERIES_PER_S * each["mean"] / 1e3 for role, each in per_role.items()}
        found[str(number)] = {
            "cpu_ms_per_request": per_role,
            "cores_for_20000_per_s": cores,
            "cores_at_rest": at_rest,
        }
        print(number, json.dumps(found[str(number)]), flush=True)
    return {"settings": vars(args), "prompt_tokens": PROMPT_TOKENS, "answer_tokens": ANSWER_TOKENS, "conductors": found}


def serve(work: Path, conductors: int, requests: int, rounds: int) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Return the CPU milliseconds per request by role of each round, and the cores that the roles need at rest.

    A first round warms the processes up.
    """
    folder = long_folder(work / "short", 2048)
    flags = ["--engine", "paced", "--paced-profile", "instant", "--paced-kv-bytes", "256", "--frontends", "1"]
    flags += ["--prefill-nodes", "2", "--decode-nodes", "2", "--conductors", str(conductors)]
    with cluster(folder, work, *flags) as served, contextlib.ExitStack() as stack:
        others = [
            preferred for preferred in range(conductors) if frontend_preferring(preferred, conductors) != "frontend"
        ]
        urls, pids = [served.url], dict(served.pids)
        for preferred in others:
            name = frontend_preferring(preferred, conductors)
            url, pid = stack.enter_context(another_frontend(folder, work, name))
            urls.append(url)
            pids[name] = pid
        everyone = replace(served, pids=pids)
        load(everyone, urls, requests, 0)
        before = by_role(everyone.cpu_s())
        time.sleep(AT_REST_S)
        after = by_role(everyone.cpu_s())
        at_rest = {role: (after[role] - before[role]) / AT_REST_S for role in before}
        found = []
        for seed in range(1, rounds + 1):
            used, took_s = load(everyone, urls, requests, seed)
            found.append({role: 1e3 * (used[role] - at_rest[role] * took_s) / requests for role in used})
        return found, at_rest


def by_role(cpu_s: dict[str, float]) -> dict[str, float]:
    """Return the sums over the processes of each role, and of all."""
    sums: dict[str, float] = {}
    for name, seconds in cpu_s.items():
        role = next(role for role in ("conductor", "pool", "prefill", "decode", "frontend") if name.startswith(role))
        sums[role] = sums.get(role, 0.0) + seconds
    return sums | {"all": sum(sums.values())}


def load(served: Served, urls: Sequence[str], requests: int, seed: int) -> tuple[dict[str, float], float]:
    """Send short requests through all frontends in turn; return CPU seconds by role, and the time taken."""
    rng = random.Random(seed)
    bodies = [
        {
            "model": served.model,
            "prompt": rng.choices(range(5, 2000), k=PROMPT_TOKENS),
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        for _ in range(requests)
    ]
    before, began_s = by_role(served.cpu_s()), time.monotonic()

    async def send() -> None:
        shares = [many(url, bodies[at :: len(urls)], AT_ONCE // len(urls)) for at, url in enumerate(urls)]
        answers = [answer for share in await asyncio.gather(*shares) for answer in share]
        if not all(answer.is_whole for answer in answers):
            raise SystemExit(f"{sum(not answer.is_whole for answer in answers)} answers are incomplete")

    asyncio.run(send())
    took_s, after = time.monotonic() - began_s, by_role(served.cpu_s())
    return {role: after[role] - before[role] for role in before}, took_s


if __name__ == "__main__":
    main()
