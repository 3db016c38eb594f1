"""Agents in a closed loop on a simulated cluster: order of turns, sub-agents, and what hints change."""

from dataclasses import replace

import pytest

from conductor.policy import PolicyConfig
from simulator.errors import BadSetting
from simulator.serving.agents import AgentLoop, AgentTenant
from simulator.serving.clock import NS
from simulator.serving.settings import ServingSettings
from traces.agents import Agent, AgentSettings, AgentTurn, make_agents
from worker.policy.cost_profile import MOONCAKE, load_profile

SETTINGS = ServingSettings(prefill_nodes=1, decode_nodes=1, pool_blocks=60)
POLICY = PolicyConfig(admission_mode="none", max_queue_s=1e6, report_timeout_s=0.0)
PARENT = Agent(
    0,
    1.0,
    1024,
    (
        AgentTurn(600, 20, 4.0, 4.0),
        AgentTurn(600, 20, subagent=Agent(1, 0.0, 0, (AgentTurn(700, 10, 2.0, 2.0), AgentTurn(700, 10)))),
        AgentTurn(600, 20),
    ),
)


def loop_of(*tenants: AgentTenant, settings: ServingSettings = SETTINGS) -> AgentLoop:
    return AgentLoop(settings, POLICY, load_profile(MOONCAKE), tenants, block_tokens=512, seed=3)


def test_a_turn_begins_when_answer_and_wait_have_ended_and_continues_the_context() -> None:
    loop = loop_of(AgentTenant("", (PARENT,)))
    outcome = loop.run()[""]
    first, second, child, child_again, last = loop.cluster.works
    assert first.job.arrival_ns == 1 * NS
    assert second.job.arrival_ns == first.end_ns + 4 * NS
    assert child.job.arrival_ns == second.end_ns
    assert child_again.job.arrival_ns == child.end_ns + 2 * NS
    assert last.job.arrival_ns == child_again.end_ns
    assert [work.job.prompt_tokens for work in loop.cluster.works] == [1624, 2244, 2964, 3674, 2864]
    assert child.job.blocks[: len(second.job.blocks)] == second.job.blocks
    assert last.job.blocks[: len(second.job.blocks)] == second.job.blocks
    assert last.job.blocks[-1] not in child_again.job.blocks
    assert outcome.mean_job_s == pytest.approx((last.end_ns - first.job.arrival_ns) / NS - 6)
    assert outcome.turns == 5


def test_runs_repeat_and_differ_by_hints_only() -> None:
    agents = tuple(make_agents(AgentSettings(agents=6, turns=8, seed=1)))
    silent, again, hinted = (
        loop_of(AgentTenant("", agents, hint)) for hint in (None, None, lambda expected_wait_s: expected_wait_s)
    )
    assert silent.run() == again.run()
    hinted.run()
    prompts = [
        sorted((work.job.conversation, work.job.prompt_tokens, work.job.luck) for work in loop.cluster.works)
        for loop in (silent, hinted)
    ]
    assert prompts[0] == prompts[1]


def test_hints_shorten_jobs_if_the_pool_holds_a_fifth_of_the_contexts() -> None:
    agents = tuple(make_agents(AgentSettings(agents=24, turns=12, start_s=10, seed=1)))
    blocks = sum(agent.context_tokens() for agent in agents) // 512 // 5
    settings = replace(SETTINGS, pool_blocks=blocks)
    silent, hinted = (
        loop_of(AgentTenant("", agents, hint, has_priorities=hint is not None), settings=settings).run()[""]
        for hint in (None, lambda expected_wait_s: expected_wait_s)
    )
    assert hinted.mean_job_s < 0.7 * silent.mean_job_s
    assert hinted.reused_share > silent.reused_share


def test_shares_of_retained_blocks_are_checked() -> None:
    with pytest.raises(BadSetting, match="retained_tenant_share"):
        ServingSettings(retained_tenant_share=1.5)
