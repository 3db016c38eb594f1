"""Time of agents' jobs with and without hints, live: paced engines of the bundled 70B profile, pools for a fifth.

    python -m benchmarks.agents_live [--pairs N] [--agents N] [--turns N] [--add] [--store]

The live side of `benchmarks/agents.py`: the same kind of coding agents run in a closed loop (as by `moonpool bench
agents`) on two prefill and two decode nodes, once with the pauses and priorities that they announce and once without,
in fresh clusters. Prompts and answers have a sixteenth of the simulation's tokens; the profile takes sixteen times as
long for a token of a prompt, so that prefills take their real time, and its own time for a step of decode; tools take a
quarter of their time. The pools together hold `--memory` of the KV of all contexts at their end, and the prefill nodes'
own slots `slots_share` of it. A job's time is that from its first request to its last token, less its tool waits.
Ratios are geometric means of pairs, with 95 % confidence intervals. The last line of output is JSON.

`cluster_cores` and `load_cores`: CPU time per second of the cluster's processes and of this one. `late_share`: share by
which the engines' steps took longer than the profile's time. `pool`: prompts that could not be retained, and those
that yielded to others.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.frontend.overload_load import scaled_profile
from benchmarks.frontend.overload_run import summed_metric
from benchmarks.frontend.processes import cluster, long_folder
from benchmarks.stored import latest, store
from loadtest.agent_config import AgentHints, AgentRunConfig
from loadtest.agent_runner import run
from simulator.serving.confidence import mean_of, ratio_of
from traces.agents import Agent, AgentSettings, make_agents
from worker.policy.cost_profile import save_profile

SCALE: Final = 16  # tokens of the simulation per token here
BLOCK_TOKENS: Final = 32
KV_BYTES: Final = 256  # per token, about
NODES: Final = 2  # of each kind, and hosts
WAIT_SCALE: Final = 0.25  # factor on tool waits, so that fewer agents load the nodes
_MAX_BATCH: Final = 32
_VARIANTS: Final[dict[str, AgentHints]] = {"with": "all", "without": "none"}
_RETAINED: Final = ("retained_refused", "retained_preempted")
_SHOWN: Final = ("mean_job_s", "share_cached", "ttft_p50_s", "ttft_p90_s")


def main() -> None:
    args = _arguments()
    pairs: list[dict[str, Any]] = latest("agents-live")[0]["pairs"] if args.add else []
    result: dict[str, Any] = {}
    for seed in range(len(pairs), len(pairs) + args.pairs):
        settings = settings_of(args.agents, args.turns, seed)
        # Which one is first alternates with the seed.
        order = list(_VARIANTS)[:: 1 if seed % 2 else -1]
        found = {variant: _run(settings, _VARIANTS[variant], args.memory) for variant in order}
        pairs.append({"seed": seed, **{variant: found[variant] for variant in _VARIANTS}})
        result = result_of(pairs, args)
        if args.store:
            store("agents-live", result)
    print(json.dumps(result))


def settings_of(agents: int, turns: float, seed: int) -> AgentSettings:
    """Return the default agents with a `SCALE`-th of the tokens."""
    full = AgentSettings()
    return replace(
        full,
        agents=agents,
        turns=turns,
        output_tokens=full.output_tokens / SCALE,
        system_tokens=full.system_tokens // SCALE,
        task_tokens=full.task_tokens / SCALE,
        seed=seed,
    )


def context_tokens(agents: Sequence[Agent]) -> int:
    """Return the tokens of all contexts at their end; sub-agents count what they add to their parents'."""
    return sum(each.context_tokens() for agent in agents for each in (agent, *agent.subagents()))


def result_of(pairs: Sequence[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Return the benchmark's result from its pairs, each with its seed and the figures of both runs."""
    return {
        "agent_completion_ratio_live": asdict(
            ratio_of(*([pair[variant]["mean_job_s"] for pair in pairs] for variant in ("with", "without")))
        ),
        "ratios": [pair["with"]["mean_job_s"] / pair["without"]["mean_job_s"] for pair in pairs],
        "variants": {
            variant: {name: asdict(mean_of([pair[variant][name] for pair in pairs])) for name in _SHOWN}
            for variant in _VARIANTS
        },
        "memory": args.memory,
        "scale": SCALE,
        "wait_scale": WAIT_SCALE,
        "pairs": list(pairs),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--agents", type=int, default=48)
    parser.add_argument("--turns", type=float, default=8.0, help="mean number of turns of an agent")
    parser.add_argument("--memory", type=float, default=0.2, help="share of the contexts' KV that the pools hold")
    parser.add_argument("--add", action="store_true", help="add the pairs to those of the latest stored result")
    parser.add_argument("--store", action="store_true", help="store the result after every pair")
    return parser.parse_args()


def _run(settings: AgentSettings, hints: AgentHints, memory: float) -> dict[str, Any]:
    agents = make_agents(settings)
    longest = max(agent.longest_context_tokens() for agent in agents) + BLOCK_TOKENS
    slots_tokens = -(-longest // BLOCK_TOKENS) * BLOCK_TOKENS
    all_tokens = context_tokens(agents)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        folder = long_folder(work / "agents", slots_tokens)
        save_profile(scaled_profile(SCALE, max_len=slots_tokens, max_batch=_MAX_BATCH), work / "profile.json")
        flags = ["--engine", "paced", "--paced-profile", str(work / "profile.json"), "--paced-kv-bytes", str(KV_BYTES)]
        flags += ["--paced-answer-tokens", "0", "--prefill-nodes", str(NODES), "--decode-nodes", str(NODES)]
        flags += ["--pool-nodes", str(NODES), "--pool-bytes", str(round(memory * all_tokens / NODES) * KV_BYTES)]
        flags += ["--block-tokens", str(BLOCK_TOKENS), "--capacity-tokens", str(2 * slots_tokens)]
        flags += ["--max-batch", str(_MAX_BATCH), "--cost-profile", f"agents={work / 'profile.json'}"]
        flags += ["--admission-mode", "none", "--max-queue", "600"]
        with cluster(folder, work, *flags) as served:
            before_s, own_s = sum(served.cpu_s().values()), time.process_time()
            report = run(AgentRunConfig(served.url, work / "out", folder, settings, hints=hints, wait_scale=WAIT_SCALE))
            own_s = time.process_time() - own_s
            used_s = sum(served.cpu_s().values()) - before_s
            planned_s, late_s, evicted, wrong = (
                summed_metric(served, name)
                for name in (
                    *("paced_planned_seconds_total", "paced_late_seconds_total"),
                    *("pool_evicted_blocks_total", "paced_wrong_blocks_total"),
                )
            )
            retained = {name: summed_metric(served, f"pool_{name}_total") for name in _RETAINED}
    f = report.figures
    took_s = max(turn.request.end_s for turn in report.turns)
    found = {
        "agents": f["agents"],
        "ended": f["ended"],
        "turns": f["turns"],
        "failed": f["failed"],
        "lost_turns": f["lost_turns"],
        "mean_job_s": f["mean_job_s"],
        "jobs_s": f["jobs_s"],
        "share_cached": f["share_cached"],
        "reused_by_tier": f["reused_by_tier"],
        "ttft_p50_s": f["ttft_s"]["p50"],
        "ttft_p90_s": f["ttft_s"]["p90"],
        "seconds": took_s,
        "wrong_blocks": wrong,
        "evicted_blocks": evicted,
        "context_tokens": all_tokens,
        "slots_share": NODES * 2 * slots_tokens / all_tokens,
        "cluster_cores": used_s / took_s,
        "load_cores": own_s / took_s,
        "late_share": late_s / planned_s,
        "pool": retained,
    }
    print(hints, json.dumps(found), flush=True)
    return found


if __name__ == "__main__":
    main()
