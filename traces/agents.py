"""Synthetic coding agents: turns, tool waits and sub-agents, determined by settings and seed. Pure.

An agent's turn sends its whole context so far as the prompt, and appends the answer and the result of the tool that the
answer called. The next turn begins when the answer and the tool's wait have ended, so the load is a closed loop: the
driver decides when answers end. A tool may be a sub-agent, which continues the parent's context on its own; the
parent's next turn begins when the sub-agent has ended, and appends its report.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from random import Random

from traces.errors import TraceError


class BadAgentSettings(TraceError):
    """A setting of an agent load is out of range, or the settings contradict each other."""


_TURNS_SIGMA = 0.4
_LENGTH_SIGMA = 0.6


@dataclass(frozen=True, slots=True)
class AgentTool:
    """Kind of tool. `mean_wait_s`: mean of its log-normal wait; `weight`: relative frequency."""

    name: str
    mean_wait_s: float
    weight: float


TOOLS: tuple[AgentTool, ...] = (
    AgentTool("read", 1.0, 5.0),
    AgentTool("search", 4.0, 3.0),
    AgentTool("test", 30.0, 2.0),
)
"""Tools of a coding agent: reading files, searching, and running tests."""


@dataclass(frozen=True)
class AgentSettings:
    """Settings of an agent load. Raises BadAgentSettings for invalid values."""

    agents: int = 24
    turns: float = 33.0
    """Mean number of turns of an agent; log-normal."""
    prompt_to_output: float = 130.0
    """Prompt tokens per generated token, over all turns of all agents; gives the length of tool results."""
    output_tokens: float = 250.0
    """Mean length of an answer, log-normal."""
    system_tokens: int = 8_000
    """Instructions and tool definitions, which all agents share."""
    task_tokens: float = 2_000.0
    """Mean length of an agent's first message, log-normal."""
    wait_sigma: float = 1.0
    """Sigma of the log-normal tool waits."""
    subagent_share: float = 0.03
    """Share of turns whose tool is a sub-agent."""
    subagent_turns: float = 6.0
    """Mean number of turns of a sub-agent, log-normal."""
    start_s: float = 60.0
    """Agents begin at uniformly random times in this period."""
    seed: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "seed":
                continue
            least = 0 if each.name in ("subagent_share", "start_s", "wait_sigma") else 1
            if not least <= value < math.inf:
                raise BadAgentSettings(f"{each.name} must be at least {least}, got {value}")
        if self.subagent_share > 1:
            raise BadAgentSettings(f"subagent_share must be from 0 to 1, got {self.subagent_share:g}")
        if self.result_tokens < 1:
            raise BadAgentSettings(
                f"prompt_to_output {self.prompt_to_output:g} leaves no tokens for tools: increase it, or reduce "
                f"system_tokens and task_tokens, which begin each prompt ({self.system_tokens + self.task_tokens:g})"
            )

    @property
    def result_tokens(self) -> float:
        """Mean length of a tool's result, such that all agents together have the ratio `prompt_to_output`."""
        # Turn k (from 0) has a prompt of system + task + k * (output + result) tokens. The mean of k over all turns of
        # agents with n turns is (E[n^2] / E[n] - 1) / 2; for log-normal n, E[n^2] / E[n] is E[n] * exp(sigma^2).
        mean_turn = (self.turns * math.exp(_TURNS_SIGMA**2) - 1) / 2
        grown = self.prompt_to_output * self.output_tokens - self.system_tokens - self.task_tokens
        return grown / mean_turn - self.output_tokens


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """One turn. `new_tokens`: what its prompt appends to the context after the previous answer.

    After the answer, the agent waits `wait_s` for a tool whose waits are `expected_wait_s` on average, or for
    `subagent`. After the last turn both are 0.
    """

    new_tokens: int
    output_tokens: int
    wait_s: float = 0.0
    expected_wait_s: float = 0.0
    subagent: "Agent | None" = None


@dataclass(frozen=True, slots=True)
class Agent:
    """Agent with its turns. `number` is unique among all agents and sub-agents; a sub-agent's `start_s` is 0.

    The context begins with `shared_tokens` that all agents share, or with the parent's context.
    """

    number: int
    start_s: float
    shared_tokens: int
    turns: tuple[AgentTurn, ...]

    def waits_s(self) -> float:
        """Return the time that the agent's turns would take if prompts and answers took none: all its waits."""
        return sum(turn.wait_s + (turn.subagent.waits_s() if turn.subagent else 0.0) for turn in self.turns)

    @property
    def priority(self) -> int:
        """Priority that the agent may announce, lower values first: that which began first, in milliseconds.

        An agent that has ended needs no memory, so the first to begin should be the first to end.
        """
        return round(self.start_s * 1000)

    def num_turns(self) -> int:
        """Return the number of turns, those of sub-agents included."""
        return len(self.turns) + sum(each.num_turns() for each in self.subagents())

    def context_tokens(self) -> int:
        """Return the length of the context after the last turn, without a parent's."""
        return self.shared_tokens + sum(turn.new_tokens + turn.output_tokens for turn in self.turns)

    def longest_context_tokens(self) -> int:
        """Return the length of the longest context, a sub-agent's included, without a parent's."""
        tokens = most = self.shared_tokens
        for turn in self.turns:
            tokens += turn.new_tokens + turn.output_tokens
            most = max(most, tokens + (turn.subagent.longest_context_tokens() if turn.subagent else 0))
        return most

    def subagents(self) -> Iterator["Agent"]:
        """Yield the sub-agents, which have none themselves."""
        return (turn.subagent for turn in self.turns if turn.subagent is not None)


def make_agents(settings: AgentSettings) -> list[Agent]:
    """Return all agents, in order of their number; sub-agents have the numbers after them."""
    rng = Random(f"agents {settings.seed}")
    numbers = iter(range(settings.agents, 1 << 40))
    return [
        _agent(rng, settings, number, numbers, rng.uniform(0, settings.start_s)) for number in range(settings.agents)
    ]


def _agent(rng: Random, settings: AgentSettings, number: int, numbers: Iterator[int], start_s: float) -> Agent:
    count = max(1, round(_lognormal(rng, settings.turns, _TURNS_SIGMA)))
    turns = []
    for turn in range(count):
        mean = settings.result_tokens if turn else settings.task_tokens
        new, output = _length(rng, mean), _length(rng, settings.output_tokens)
        if turn == count - 1:
            turns.append(AgentTurn(new, output))
        elif rng.random() < settings.subagent_share:
            subagent = _subagent(rng, settings, next(numbers))
            turns.append(AgentTurn(new, output, 0.0, _expected_s(settings), subagent))
        else:
            turns.append(AgentTurn(new, output, *_wait(rng, settings)))
    return Agent(number, start_s, settings.system_tokens, tuple(turns))


def _subagent(rng: Random, settings: AgentSettings, number: int) -> Agent:
    count = max(1, round(_lognormal(rng, settings.subagent_turns, _TURNS_SIGMA)))
    turns = []
    for turn in range(count):
        new = _length(rng, settings.result_tokens)
        wait = _wait(rng, settings) if turn < count - 1 else (0.0, 0.0)
        turns.append(AgentTurn(new, _length(rng, settings.output_tokens), *wait))
    return Agent(number, 0.0, 0, tuple(turns))


def _expected_s(settings: AgentSettings) -> float:
    """Return the expected duration of a sub-agent, as its parent knows it: the mean wait per turn."""
    weights = sum(tool.weight for tool in TOOLS)
    return settings.subagent_turns * sum(tool.mean_wait_s * tool.weight for tool in TOOLS) / weights


def _wait(rng: Random, settings: AgentSettings) -> tuple[float, float]:
    """Return (the wait for a random tool, the mean wait for this tool), in seconds."""
    (tool,) = rng.choices(TOOLS, [each.weight for each in TOOLS])
    return _lognormal(rng, tool.mean_wait_s, settings.wait_sigma), tool.mean_wait_s


def _length(rng: Random, mean: float) -> int:
    return max(1, round(_lognormal(rng, mean, _LENGTH_SIGMA)))


def _lognormal(rng: Random, mean: float, sigma: float) -> float:
    return rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
