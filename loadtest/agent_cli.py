"""Command `bench agents`: flags to configuration, report as a table and a line of JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console

from loadtest import options
from loadtest.agent_config import AgentHints, AgentRunConfig
from loadtest.agent_report import last_line, print_agents
from loadtest.agent_runner import run
from loadtest.cli import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, bundled_model
from loadtest.errors import ReplayError, SettingInvalid
from loadtest.report import finite
from traces.agents import AgentSettings, BadAgentSettings

app = typer.Typer(add_completion=False)

_LOAD, _SERVER, _REPORT = "Agents", "Server", "Report"


@app.command("agents")
def agents(
    url: Annotated[str, options.url(_SERVER)] = options.DEFAULT_URL,
    out: Annotated[Path, typer.Option(help="Folder for agents.json and turns.jsonl.", rich_help_panel=_REPORT)] = Path(
        "out/agents"
    ),
    agents: Annotated[int, typer.Option(help="Number of agents.", rich_help_panel=_LOAD)] = 4,
    turns: Annotated[float, typer.Option(help="Mean number of turns of an agent.", rich_help_panel=_LOAD)] = 8.0,
    prompt_to_output: Annotated[
        float, typer.Option(help="Prompt tokens per generated token, over all turns.", rich_help_panel=_LOAD)
    ] = 30.0,
    output_tokens: Annotated[float, typer.Option(help="Mean length of an answer.", rich_help_panel=_LOAD)] = 16.0,
    system_tokens: Annotated[
        int, typer.Option(help="Tokens of the instructions shared by all agents.", rich_help_panel=_LOAD)
    ] = 64,
    task_tokens: Annotated[
        float, typer.Option(help="Mean tokens of an agent's first message.", rich_help_panel=_LOAD)
    ] = 32.0,
    subagent_share: Annotated[
        float, typer.Option(help="Share of turns whose tool is a sub-agent.", rich_help_panel=_LOAD)
    ] = 0.03,
    subagent_turns: Annotated[
        float, typer.Option(help="Mean number of turns of a sub-agent.", rich_help_panel=_LOAD)
    ] = 3.0,
    start: Annotated[
        float, typer.Option(help="Seconds in which the agents begin, at random times.", rich_help_panel=_LOAD)
    ] = 10.0,
    wait_scale: Annotated[
        float,
        typer.Option(help="Factor on tool waits (means 1, 4 and 30 s) and on --start; 0: none.", rich_help_panel=_LOAD),
    ] = 0.1,
    hints: Annotated[
        str,
        typer.Option(
            help=f"What agents announce: {', '.join(get_args(AgentHints))}. Pauses: the mean wait of each turn's "
            "tool; priorities: agents that began earlier precede.",
            rich_help_panel=_LOAD,
        ),
    ] = "none",
    seed: Annotated[int, typer.Option(help="Random seed of lengths, waits and prompts.", rich_help_panel=_LOAD)] = 0,
    model_path: Annotated[Path | None, options.model_path(_SERVER)] = None,
    model: Annotated[str, options.model(_SERVER)] = "",
    api_key: Annotated[str, options.api_key(_SERVER)] = "",
    api_key_file: Annotated[str | None, options.api_key_file(_SERVER)] = None,
    request_timeout: Annotated[
        float, typer.Option(help="Timeout of a turn in seconds.", rich_help_panel=_SERVER)
    ] = 900.0,
) -> None:
    """Run coding agents in a closed loop against a server and report how long their jobs took.

    A turn sends the agent's whole context; the next one begins when the answer and the tool's wait have ended. The
    defaults fit the bundled model's context. The last line of output is JSON. Ctrl-C writes the report so far.

    Example: moonpool bench agents --agents 8 --turns 6 --hints all --out out/agents
    """
    console = Console()
    try:
        config = AgentRunConfig(
            url=url,
            out=out,
            model_path=model_path or bundled_model(),
            model=model,
            api_key=api_key_file or api_key,
            agents=_settings(
                agents=agents,
                turns=turns,
                prompt_to_output=prompt_to_output,
                output_tokens=output_tokens,
                system_tokens=system_tokens,
                task_tokens=task_tokens,
                subagent_share=subagent_share,
                subagent_turns=subagent_turns,
                start_s=start,
                seed=seed,
            ),
            hints=hints,  # type: ignore[arg-type]  # checked by the configuration
            wait_scale=wait_scale,
            request_timeout_s=request_timeout,
        )
        report = run(config, console)
    except ReplayError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_BAD_INPUT) from error
    print_agents(report, console)
    print(json.dumps(finite(last_line(report.figures)), allow_nan=False), flush=True)
    if report.figures["interrupted"]:
        raise typer.Exit(EXIT_INTERRUPTED)
    raise typer.Exit(0 if report.ok else EXIT_FAILED)


def _settings(**values: float) -> AgentSettings:
    """Return the load's settings. Raises SettingInvalid, which names the flag."""
    try:
        return AgentSettings(**values)  # type: ignore[arg-type]
    except BadAgentSettings as error:
        name, _, rest = str(error).partition(" ")
        raise SettingInvalid(f"--{name.removesuffix('_s').replace('_', '-')} {rest}") from error
