"""Time of agents' jobs with and without hints, on simulated clusters whose pools hold a fifth of the agents' KV.

    python benchmarks/agents.py [--seeds N] [--agents N] [--store]

Coding agents (`traces/agents.py`: about 33 turns, 130 prompt tokens per generated one, log-normal tool waits,
sub-agents) run in a closed loop on a cluster of the bundled 70B profile, placed by the conductor's own policy object.
The same agents run without hints; with the pauses that they announce (the pool retains their KV); with priorities (who
began first is served first); and with both. A job's time is that from its first request to its last token, less its
tool waits. In a second comparison two tenants share the cluster: one gives no hints, the other none or false ones, that
all its agents return at once. Ratios are geometric means over pairs of the same seed, with 95 % confidence intervals.
The last line of output is JSON.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

# Replace this folder on the path by the repository root: scripts here may have the names of packages.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.stored import store  # noqa: E402
from settings.conductor import PolicyConfig  # noqa: E402
from simulator.serving.agents import AgentLoop, AgentOutcome, AgentTenant  # noqa: E402
from simulator.serving.confidence import mean_of, ratio_of  # noqa: E402
from simulator.serving.runs import worker_pool  # noqa: E402
from simulator.serving.settings import ServingSettings  # noqa: E402
from traces.agents import Agent, AgentSettings, make_agents  # noqa: E402
from worker.policy.cost_profile import MOONCAKE, load_profile  # noqa: E402

BLOCK_TOKENS: Final = 512
POOL_SHARE: Final = 0.2
"""Blocks of all pool nodes over those of all agents' contexts at their end."""
POLICIES: Final = ("moonpool", "lru")
"""Eviction policies: the default one first."""
FALSE_PAUSE_S: Final = 0.1
ALL: Final = ""  # the only tenant of a cluster without API keys


@dataclass(frozen=True, slots=True)
class HintKinds:
    """Kinds of hints that the agents of one run give."""

    pauses: bool = False
    priorities: bool = False


HINTS: Final = {
    "none": HintKinds(),
    "pauses": HintKinds(pauses=True),
    "priorities": HintKinds(priorities=True),
    "both": HintKinds(pauses=True, priorities=True),
}


@dataclass(frozen=True, slots=True)
class AgentRun:
    """One run: all agents of one tenant, or, with `is_false` given, half of them by a tenant with or without lies."""

    eviction: str
    seed: int
    agents: int
    nodes: int
    hints: HintKinds = HintKinds()
    is_false: bool | None = None


def main() -> None:
    given = _arguments()
    outcomes: dict[str, Any] = {}
    with worker_pool(given.processes) as pool:
        for eviction in POLICIES:
            outcomes[eviction] = {
                name: _run_seeds(AgentRun(eviction, 0, given.agents, given.nodes, hints), given.seeds, pool)
                for name, hints in HINTS.items()
                if eviction == POLICIES[0] or name in ("none", "both")
            }
        other = {
            is_false: _run_seeds(
                AgentRun(POLICIES[0], 0, given.agents, given.nodes, is_false=is_false), given.seeds, pool
            )
            for is_false in (False, True)
        }
    rows = {
        eviction: {
            name: _row([run[ALL] for run in found], [run[ALL] for run in by_hints["none"]])
            for name, found in by_hints.items()
        }
        for eviction, by_hints in outcomes.items()
    }
    for eviction, by_hints in rows.items():
        for name, row in by_hints.items():
            print(f"{eviction:9} {name:11} {_text(row)}")
    false_hints = {
        tenant: _row([run[tenant] for run in other[True]], [run[tenant] for run in other[False]])
        for tenant in ("honest", "false")
    }
    for tenant, row in false_hints.items():
        print(f"false hints of one tenant, {tenant} tenant: {_text(row)}")
    result = {
        "agent_completion_ratio": rows[POLICIES[0]]["both"]["job_ratio"],
        "agent_completion_ratio_of_pauses": rows[POLICIES[0]]["pauses"]["job_ratio"],
        "false_hints_ratio": false_hints["honest"]["job_ratio"],
        "settings": vars(given),
        "hints": rows,
        "false_hints": false_hints,
    }
    if given.store:
        store("agents", result)
    print(json.dumps(result))


def run_one(run: AgentRun) -> dict[str, AgentOutcome]:
    """Simulate one run; return the outcome by tenant. Deterministic."""
    agents = make_agents(AgentSettings(agents=run.agents, seed=run.seed))
    blocks = round(POOL_SHARE * sum(_contexts(agents)) / BLOCK_TOKENS / run.nodes)
    settings = ServingSettings(
        prefill_nodes=run.nodes,
        decode_nodes=run.nodes,
        capacity_tokens=1_336_320,  # as the profile's, in whole blocks
        max_batch=128,
        pool_blocks=blocks,
        eviction=run.eviction,
    )
    # No objective and no bound of the queue: every request is served.
    policy = PolicyConfig(admission_mode="none", max_queue_s=1e6, report_timeout_s=0.0)
    loop = AgentLoop(
        settings, policy, load_profile(MOONCAKE), _tenants(agents, run), block_tokens=BLOCK_TOKENS, seed=run.seed
    )
    return dict(loop.run())


def _tenants(agents: Sequence[Agent], run: AgentRun) -> tuple[AgentTenant, ...]:
    if run.is_false is None:
        pauses = _as_expected if run.hints.pauses else None
        return (AgentTenant(ALL, tuple(agents), pauses, run.hints.priorities),)
    return (
        AgentTenant("honest", tuple(agents[::2])),
        AgentTenant("false", tuple(agents[1::2]), _at_once if run.is_false else None),
    )


def _as_expected(expected_wait_s: float) -> float:
    return expected_wait_s


def _at_once(expected_wait_s: float) -> float:
    return FALSE_PAUSE_S


def _contexts(agents: Sequence[Agent]) -> list[int]:
    """Return the tokens of all contexts that belong to one agent or sub-agent alone."""
    own = [each for agent in agents for each in (agent, *agent.subagents())]
    return [agent.context_tokens() for agent in own]


def _run_seeds(run: AgentRun, seeds: int, pool: ProcessPoolExecutor) -> list[dict[str, AgentOutcome]]:
    return list(pool.map(run_one, [replace(run, seed=seed) for seed in range(seeds)]))


def _row(runs: Sequence[AgentOutcome], without: Sequence[AgentOutcome]) -> dict[str, Any]:
    """Return means over the seeds, and the ratio of mean job times to the paired runs `without` these hints."""
    return {
        "job_s": asdict(mean_of([run.mean_job_s for run in runs])),
        "ttft_s": asdict(mean_of([run.mean_ttft_s for run in runs])),
        "reused_share": asdict(mean_of([run.reused_share for run in runs])),
        "job_ratio": asdict(ratio_of([run.mean_job_s for run in runs], [run.mean_job_s for run in without])),
        "reused_difference": asdict(
            mean_of([run.reused_share - other.reused_share for run, other in zip(runs, without, strict=True)])
        ),
    }


def _text(row: dict[str, Any]) -> str:
    ratio = row["job_ratio"]
    return (
        f"job {row['job_s']['mean']:7.1f} s, ratio {ratio['mean']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}), "
        f"TTFT {row['ttft_s']['mean']:5.2f} s, reused {row['reused_share']['mean']:.1%}"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--agents", type=int, default=40)
    parser.add_argument("--nodes", type=int, default=2, help="prefill nodes, and as many decode nodes")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--store", action="store_true", help="store the result in benchmarks/results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
