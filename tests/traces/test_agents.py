"""Synthetic agents: deterministic, with the requested ratio of prompts to answers, and what their waits add up to."""

from statistics import fmean

import pytest

from traces.agents import Agent, AgentSettings, AgentTurn, BadAgentSettings, make_agents


def test_agents_depend_on_the_seed_alone() -> None:
    assert make_agents(AgentSettings(agents=5)) == make_agents(AgentSettings(agents=5))
    assert make_agents(AgentSettings(agents=5)) != make_agents(AgentSettings(agents=5, seed=1))


def test_turns_and_the_ratio_of_prompts_to_answers_are_those_requested() -> None:
    agents = make_agents(AgentSettings(agents=600, subagent_share=0.0))
    prompts = answers = 0
    for agent in agents:
        context = agent.shared_tokens
        for turn in agent.turns:
            context += turn.new_tokens
            prompts += context
            answers += turn.output_tokens
            context += turn.output_tokens
        assert context == agent.context_tokens()
    assert fmean(len(agent.turns) for agent in agents) == pytest.approx(33, rel=0.06)
    assert prompts / answers == pytest.approx(130, rel=0.06)


def test_numbers_are_unique_and_the_last_turn_waits_for_nothing() -> None:
    agents = make_agents(AgentSettings(agents=40, subagent_share=0.2))
    every = [each for agent in agents for each in (agent, *agent.subagents())]
    assert len({agent.number for agent in every}) == len(every) > 100
    assert all(agent.turns[-1].wait_s == 0 and agent.turns[-1].subagent is None for agent in every)
    waits = [turn for agent in every for turn in agent.turns[:-1] if turn.subagent is None]
    assert fmean(turn.wait_s for turn in waits) == pytest.approx(fmean(turn.expected_wait_s for turn in waits), rel=0.1)


def test_waits_include_those_of_subagents() -> None:
    child = Agent(1, 0.0, 0, (AgentTurn(10, 5, 2.5), AgentTurn(10, 5)))
    parent = Agent(0, 0.0, 100, (AgentTurn(10, 5, 1.0), AgentTurn(10, 5, subagent=child), AgentTurn(10, 5)))
    assert parent.waits_s() == 3.5


@pytest.mark.parametrize(
    ("setting", "value"),
    [("agents", 0), ("turns", float("nan")), ("subagent_share", 1.5), ("prompt_to_output", 20.0), ("wait_sigma", -1)],
)
def test_bad_settings_are_named(setting: str, value: float) -> None:
    with pytest.raises(BadAgentSettings, match=setting):
        AgentSettings(**{setting: value})  # type: ignore[arg-type]
