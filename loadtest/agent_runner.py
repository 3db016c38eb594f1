"""Run of agents, from plan to report."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

import uvloop
from rich.console import Console

from loadtest.agent_config import AgentRunConfig
from loadtest.agent_report import AgentReport, summarise_agents
from loadtest.agent_turns import AgentLoad, run_agent
from loadtest.errors import ServerUnusable
from loadtest.http import open_session
from loadtest.model_folder import local_model_folder
from loadtest.progress import ProgressDisplay, background, interrupts, run_until
from loadtest.report import check_writable
from loadtest.server import ServerInfo, check_tokenizer, discover
from loadtest.tokens import ModelTokens, load_model_tokens, ordinary_ids
from loadtest.validity import clock_from
from loadtest.verify import paced_notice
from traces.agents import Agent, make_agents

_ASK_DEADLINE_S = 15.0
_REFRESH_S = 0.25


def run(config: AgentRunConfig, console: Console | None = None) -> AgentReport:
    """Run the agents, write the report's files and return the report.

    Ctrl-C ends the agents and gives the report so far. Raises ReplayError. `console` None disables output.
    """
    config = replace(config, model_path=local_model_folder(config.model_path, flag="--model-path", weights=False))
    tokens = load_model_tokens(config.model_path)
    agents = make_agents(config.agents)
    with ProgressDisplay(console) as display, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        load, notices, interrupted = runner.run(_live(config, tokens, agents, display))
    figures = {
        "interrupted": interrupted,
        "settings": _settings(config, load.server),
        **summarise_agents(agents, load),
        "notices": notices,
    }
    report = AgentReport(config.out, figures, load.records)
    report.write()
    return report


async def _live(
    config: AgentRunConfig, tokens: ModelTokens, agents: Sequence[Agent], display: ProgressDisplay
) -> tuple[AgentLoad, list[str], bool]:
    """Return the finished load, notices for the report, and True if it was interrupted."""
    stop = asyncio.Event()
    with interrupts(stop):
        async with open_session(api_key=config.api_key) as session:
            server = await discover(session, config.base_url, model=config.model, deadline_s=_ASK_DEADLINE_S)
            notice = await check_tokenizer(session, server, tokens, deadline_s=_ASK_DEADLINE_S)
            _check_context(agents, server.max_model_len or tokens.max_model_len or 0)
            check_writable(config.out)
            load = AgentLoad(
                config=config,
                session=session,
                server=server,
                clock=clock_from(time.monotonic()),
                token_ids=ordinary_ids(tokens),
                salt=f"agents-{secrets.token_hex(8)}",
            )
            async with background(_show(load, agents, display)):
                await run_until(stop, _all(load, agents))
            _tell(load, agents, display)
    return load, [*paced_notice(server.stand_ins), *([notice] if notice else [])], stop.is_set()


def _check_context(agents: Sequence[Agent], max_model_len: int) -> None:
    """Raise ServerUnusable if a context would exceed the model's, before any request is sent."""
    longest = max(agent.longest_context_tokens() for agent in agents)
    if 0 < max_model_len < longest:
        raise ServerUnusable(
            f"the agents' longest context has {longest:,} tokens, but the served model has at most {max_model_len:,}: "
            "reduce --turns, --prompt-to-output, --output-tokens, --system-tokens or --task-tokens"
        )


async def _all(load: AgentLoad, agents: Sequence[Agent]) -> None:
    async with asyncio.TaskGroup() as group:
        for agent in agents:
            group.create_task(run_agent(load, agent))


async def _show(load: AgentLoad, agents: Sequence[Agent], display: ProgressDisplay) -> None:
    while True:
        _tell(load, agents, display)
        await asyncio.sleep(_REFRESH_S)


def _tell(load: AgentLoad, agents: Sequence[Agent], display: ProgressDisplay) -> None:
    planned = sum(agent.num_turns() for agent in agents)
    done = sum(record.completed for record in load.records)
    detail = f"{len(load.records) - done} in flight or failed, {len(load.jobs_s)} of {len(agents)} agents ended"
    display.show("agents", done, planned, detail)


def _settings(config: AgentRunConfig, server: ServerInfo) -> dict[str, object]:
    """Return the configuration for the report, without the API key."""
    kept = {name: value for name, value in vars(config).items() if name not in ("api_key", "out", "agents")}
    agents = {name: getattr(config.agents, name) for name in type(config.agents).__dataclass_fields__}
    return {
        **kept,
        "agents": agents,
        "model": server.model,
        "model_path": str(config.model_path),
        "stand_ins": server.stand_ins,
    }
