"""The benchmark of agents compares the same agents, and its runs differ by hints only."""

from benchmarks import agents
from benchmarks.agents import HINTS, AgentRun
from traces.agents import AgentSettings, make_agents

MADE = make_agents(AgentSettings(agents=4))


def test_hints_are_all_that_differs_between_the_runs_of_a_seed() -> None:
    tenants = {name: agents._tenants(MADE, AgentRun("lru", 0, 4, 1, hints)) for name, hints in HINTS.items()}
    assert all(found[0].agents == tuple(MADE) and len(found) == 1 for found in tenants.values())
    assert {name: (found[0].hint is not None, found[0].has_priorities) for name, found in tenants.items()} == {
        "none": (False, False),
        "pauses": (True, False),
        "priorities": (False, True),
        "both": (True, True),
    }


def test_only_the_false_tenant_lies_and_both_keep_their_agents() -> None:
    honest, false = agents._tenants(MADE, AgentRun("lru", 0, 4, 1, is_false=True))
    silent = agents._tenants(MADE, AgentRun("lru", 0, 4, 1, is_false=False))
    assert (honest.hint, [tenant.hint for tenant in silent]) == (None, [None, None])
    assert false.hint is not None
    assert false.hint(300.0) == agents.FALSE_PAUSE_S
    assert [tenant.agents for tenant in (honest, false)] == [tenant.agents for tenant in silent]
    assert sorted(agent.number for tenant in silent for agent in tenant.agents) == [0, 1, 2, 3]


def test_a_run_repeats_and_ratios_pair_the_seeds() -> None:
    run = AgentRun("lru", 3, 2, 1)
    first, again = (agents.run_one(run)[agents.ALL] for _ in range(2))
    assert first == again
    row = agents._row([first, first], [again, again])
    assert row["job_ratio"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert row["reused_difference"]["mean"] == 0
