"""Turns of agents: their records, their requests, and the run of one agent.

`traces.agents` determines the turns. A prompt is the agent's whole context as token ids: random ones for what is read,
and the answers as the server generated them. Contexts depend on the seed and the agent alone, so that two runs with
other hints send the same prompts as long as the answers are the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from loadtest.agent_config import AgentRunConfig
from loadtest.client import CompletionClient, TokenIdCompletions
from loadtest.http import RetryPolicy
from loadtest.plan import PlannedRequest
from loadtest.record import RequestRecord, SendOutcome
from loadtest.server import ServerInfo
from loadtest.tokens import TokenIds
from traces.agents import Agent, AgentTurn

_SHARED = -1  # in place of an agent's number: the beginning of all contexts


@dataclass
class AgentTurnRecord:
    """Record of one turn of `agent`, an agent or sub-agent that works for the agent `job`."""

    job: int
    agent: int
    turn: int
    request: RequestRecord

    @property
    def completed(self) -> bool:
        """True if the answer is complete."""
        return self.request.outcome is SendOutcome.COMPLETED

    def as_json(self) -> dict[str, Any]:
        """Return the record as one line of turns.jsonl."""
        return {"job": self.job, "agent": self.agent, "turn": self.turn, **self.request.as_json()}


@dataclass(frozen=True)
class HintedCompletions(TokenIdCompletions):
    """Dialect of /v1/completions with the hints of one turn."""

    pause_s: float | None = None
    priority: int | None = None

    def body(self, request: PlannedRequest, *, model: str, cache_salt: str) -> dict[str, Any]:
        """Return the body of a seeded request with its hints."""
        body = super().body(request, model=model, cache_salt=cache_salt)
        if self.pause_s is not None:
            body["hints"] = {"pause_s": self.pause_s}
        if self.priority is not None:
            body["priority"] = self.priority
        return body


@dataclass(frozen=True)
class AgentLoad:
    """Context shared by all agents of a run. `salt` separates it from other runs; prompts consist of `token_ids`."""

    config: AgentRunConfig
    session: aiohttp.ClientSession
    server: ServerInfo
    clock: Callable[[], float]
    token_ids: TokenIds
    salt: str
    records: list[AgentTurnRecord] = field(default_factory=list)
    jobs_s: dict[int, float] = field(default_factory=dict)
    """Seconds from start to end without waits, of the agents that completed all turns."""

    def tokens(self, number: int, turn: int, count: int) -> TokenIds:
        """Return the ids that turn `turn` of agent `number` reads."""
        rng = np.random.default_rng((self.config.agents.seed, number + 1, turn))
        return rng.choice(self.token_ids, count)


async def run_agent(load: AgentLoad, agent: Agent) -> None:
    """Run one agent from its start time to its end, or to its first turn that was not completed."""
    scale = load.config.wait_scale
    await asyncio.sleep(max(0.0, agent.start_s * scale - load.clock()))
    began_s = load.clock()
    work = _AgentWork(load, agent.number, agent.priority if load.config.has_priorities else None)
    context = await work.run(agent, load.tokens(_SHARED, 0, agent.shared_tokens), f"{load.salt}-{agent.number}", "")
    if context is not None:
        load.jobs_s[agent.number] = load.clock() - began_s - scale * agent.waits_s()


@dataclass(frozen=True)
class _AgentWork:
    """Turns of one agent and its sub-agents, whose records belong to `job`."""

    load: AgentLoad
    job: int
    priority: int | None

    async def run(self, agent: Agent, context: TokenIds, session_id: str, parent_id: str) -> TokenIds | None:
        """Run all turns after `context`; return the context at their end, None if a turn was not completed."""
        load = self.load
        headers = {"x-session-id": session_id} | ({"x-parent-session-id": parent_id} if parent_id else {})
        for number, turn in enumerate(agent.turns):
            prompt = np.concatenate([context, load.tokens(agent.number, number, turn.new_tokens)])
            is_last = number == len(agent.turns) - 1
            record = await self._ask(agent, number, turn, prompt, headers, is_last)
            if record.outcome is not SendOutcome.COMPLETED:
                return None
            context = np.concatenate([prompt, np.array(record.token_ids, np.int32)])
            if turn.subagent is not None:
                name = f"{load.salt}-{turn.subagent.number}"
                if await self.run(turn.subagent, context, name, session_id) is None:
                    return None
            elif turn.wait_s:
                await asyncio.sleep(turn.wait_s * load.config.wait_scale)
        return context

    async def _ask(
        self, agent: Agent, number: int, turn: AgentTurn, prompt: TokenIds, headers: dict[str, str], is_last: bool
    ) -> RequestRecord:
        load, config = self.load, self.load.config
        announces = config.announces_pauses and not is_last
        request = PlannedRequest(
            index=len(load.records),
            arrival_s=load.clock(),
            prompt=prompt,
            block_ids=(),
            max_tokens=turn.output_tokens,
            temperature=0.0,
            seed=0,
            overlong=False,
        )
        record = RequestRecord(request.index, request.arrival_s, len(prompt), turn.output_tokens, 0.0, 0)
        load.records.append(AgentTurnRecord(self.job, agent.number, number, record))
        client = CompletionClient(
            load.session,
            load.server,
            timeout_s=config.request_timeout_s,
            clock=load.clock,
            dialect=HintedCompletions(
                pause_s=turn.expected_wait_s * config.wait_scale if announces else None, priority=self.priority
            ),
            retry=RetryPolicy(),
            headers=headers,
        )
        await client.send(request, record, cache_salt=load.salt)
        if record.outcome is SendOutcome.COMPLETED and len(record.token_ids) != turn.output_tokens:
            record.outcome = SendOutcome.FAILED
            record.reason = "the server returns no token ids, of which the next turn's prompt must consist"
        return record
