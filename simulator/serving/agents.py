"""Closed loop of agents on a simulated cluster: a turn begins when the answer before it and its tool have ended."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from conductor.policy import PolicyConfig
from kvpool.policy.eviction import RetainRequest
from simulator.serving.clock import NS
from simulator.serving.cluster import SimulatedCluster
from simulator.serving.requests import Arrival, SimulatedRequest, SimulatedWorkload
from simulator.serving.settings import ServingSettings
from traces.agents import Agent
from worker.policy.cost_profile import CostProfile

_BLOCKS_OF_ONE = 1 << 32  # size of the block number range of one agent
_LEAST_LIFETIME_S = 60.0


@dataclass(frozen=True, slots=True)
class AgentTenant:
    """Agents of one tenant, and what it announces.

    `hint` returns the pause in seconds that it announces with a turn, from the expected wait; None: it announces none.
    With `has_priorities`, the agents that began first are served and retained first.
    """

    name: str
    agents: tuple[Agent, ...]
    hint: Callable[[float], float] | None = None
    has_priorities: bool = False


@dataclass(frozen=True, slots=True)
class AgentOutcome:
    """Result of one tenant's agents."""

    mean_job_s: float  # from an agent's start to its end, without its tool waits
    reused_share: float  # of the prompt tokens
    mean_ttft_s: float
    turns: int


@dataclass(slots=True)
class _RunningAgent:
    """Agent whose turn `turn` is next or running. `blocks` are those that begin its context, `tokens` its length."""

    agent: Agent
    tenant: AgentTenant
    blocks: tuple[int, ...]
    tokens: int
    ended: Callable[[int], None]  # called with the length of its context
    priority: int = 0
    turn: int = 0


@dataclass(slots=True)
class _Totals:
    job_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    ttft_s: float = 0.0
    turns: int = 0


def _hint(running: _RunningAgent, expected_wait_s: float) -> RetainRequest | None:
    """Return what the tenant announces with this turn; None: nothing, as with an agent's last turn."""
    tenant = running.tenant
    if tenant.hint is None or running.turn == len(running.agent.turns) - 1:
        return None
    pause_s = tenant.hint(expected_wait_s)
    return RetainRequest(
        tenant.name,
        lifetime_ns=round(max(_LEAST_LIFETIME_S, 3 * pause_s) * NS),
        pause_ns=round(pause_s * NS),
        priority=running.priority,
    )


class AgentLoop:
    """Agents of several tenants on one cluster, until all have ended."""

    def __init__(
        self,
        settings: ServingSettings,
        policy: PolicyConfig,
        profile: CostProfile,
        tenants: tuple[AgentTenant, ...],
        *,
        block_tokens: int,
        seed: int,
    ) -> None:
        """Agents' numbers must differ among all tenants. The policy must reject no request."""
        self.cluster = SimulatedCluster(
            settings, policy, profile, SimulatedWorkload((), (), block_tokens, 0.0, 0.0), seed
        )
        self.cluster.on_end = self._turn_ended
        self._block_tokens = block_tokens
        self._seed = seed
        self._num_requests = 0
        self._num_running = 0
        self._running: dict[str, _RunningAgent] = {}  # by the request of their current turn
        self._totals: dict[str, _Totals] = {tenant.name: _Totals() for tenant in tenants}
        for tenant in tenants:
            for agent in tenant.agents:
                self._num_running += 1
                self.cluster.clock.at(round(agent.start_s * NS), self._starter(agent, tenant))

    def run(self) -> Mapping[str, AgentOutcome]:
        """Run until all agents have ended; return the outcome by tenant."""
        self.cluster.run(lambda: self._num_running > 0)
        return {
            name: AgentOutcome(
                sum(each.job_s) / len(each.job_s),
                each.reused_tokens / each.prompt_tokens,
                each.ttft_s / each.turns,
                each.turns,
            )
            for name, each in self._totals.items()
        }

    def _starter(self, agent: Agent, tenant: AgentTenant) -> Callable[[], None]:
        priority = agent.priority if tenant.has_priorities else 0

        def start() -> None:
            shared = tuple(range(agent.shared_tokens // self._block_tokens))
            self._begin_turn(_RunningAgent(agent, tenant, shared, agent.shared_tokens, ended, priority))

        def ended(tokens: int) -> None:
            job_s = self.cluster.clock.now_ns / NS - agent.start_s - agent.waits_s()
            self._totals[tenant.name].job_s.append(job_s)
            self._num_running -= 1

        return start

    def _begin_turn(self, running: _RunningAgent) -> None:
        turn = running.agent.turns[running.turn]
        running.tokens += turn.new_tokens
        first = (running.agent.number + 1) * _BLOCKS_OF_ONE
        whole = running.tokens // self._block_tokens
        running.blocks += tuple(range(first + len(running.blocks), first + whole))
        number, self._num_requests = self._num_requests, self._num_requests + 1
        # Drawn by agent and turn, so that runs which differ by hints have the same prefill times.
        rng = Random(f"{self._seed} {running.agent.number} {running.turn}")
        job = Arrival(
            index=number,
            arrival_ns=self.cluster.clock.now_ns,
            conversation=running.agent.number,
            prompt_tokens=running.tokens,
            output_tokens=turn.output_tokens,
            blocks=running.blocks,
            luck=rng.gauss(0, 1),
            is_sampled=1.0,
            tenant=running.tenant.name,
            priority=running.priority,
            retain=_hint(running, turn.expected_wait_s),
            previous_tokens=running.agent.turns[running.turn - 1].output_tokens if running.turn else 0,
        )
        self._running[job.name] = running
        self.cluster.arrive(job)

    def _turn_ended(self, work: SimulatedRequest) -> None:
        running = self._running.pop(work.job.name)
        turn, totals = running.agent.turns[running.turn], self._totals[running.tenant.name]
        totals.prompt_tokens += work.job.prompt_tokens
        totals.reused_tokens += work.reused_tokens
        totals.ttft_s += work.ttft_s
        totals.turns += 1
        running.tokens += turn.output_tokens
        running.turn += 1
        if running.turn == len(running.agent.turns):
            running.ended(running.tokens)
            return
        if turn.subagent is not None:
            self._begin_turn(
                _RunningAgent(
                    turn.subagent,
                    running.tenant,
                    running.blocks,
                    running.tokens,
                    lambda _: self._begin_turn(running),
                    running.priority,
                )
            )
        else:
            self.cluster.clock.after(round(turn.wait_s * NS), lambda: self._begin_turn(running))
