"""Command `dialogues`: flags to configuration, report as a table and a line of JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loadtest import options
from loadtest.cli import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, bundled_model
from loadtest.dialogue_config import DialogueConfig
from loadtest.dialogue_report import last_line, print_dialogues
from loadtest.dialogue_runner import run
from loadtest.errors import ReplayError
from loadtest.report import finite

app = typer.Typer(add_completion=False)

_TALK, _SERVER, _REPORT = "Dialogues", "Server", "Report and verification"


@app.command("dialogues")
def dialogues(
    url: Annotated[str, options.url(_SERVER)] = options.DEFAULT_URL,
    out: Annotated[
        Path, typer.Option(help="Folder for dialogues.json, dialogues.html and turns.jsonl.", rich_help_panel=_REPORT)
    ] = Path("out/dialogues"),
    dialogues: Annotated[int, typer.Option(help="Number of concurrent dialogues.", rich_help_panel=_TALK)] = 4,
    total: Annotated[
        int, typer.Option(help="Total number of dialogues; 0: the value of --dialogues.", rich_help_panel=_TALK)
    ] = 0,
    turns: Annotated[int, typer.Option(help="Turns per dialogue.", rich_help_panel=_TALK)] = 20,
    think_time: Annotated[
        float,
        typer.Option(help="Mean time between an answer and the next question, in seconds.", rich_help_panel=_TALK),
    ] = 1.0,
    system_tokens: Annotated[
        int,
        typer.Option(
            help="Tokens of the system message shared by all dialogues; 0: no system message.", rich_help_panel=_TALK
        ),
    ] = 32,
    turn_tokens: Annotated[int, typer.Option(help="Mean length of a question in tokens.", rich_help_panel=_TALK)] = 24,
    answer_tokens: Annotated[int, typer.Option(help="Mean of the requests' max_tokens.", rich_help_panel=_TALK)] = 32,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.", rich_help_panel=_TALK)] = 1.0,
    truncation: Annotated[
        str,
        typer.Option(
            help="Dialogues that exceed the context: auto lets the server drop the oldest turns, disabled ends them.",
            rich_help_panel=_TALK,
        ),
    ] = "disabled",
    seed: Annotated[
        int, typer.Option(help="Random seed of texts, lengths, think times and sampling.", rich_help_panel=_TALK)
    ] = 0,
    verify: Annotated[bool, options.verify(_REPORT)] = False,
    verify_sample: Annotated[int, options.verify_sample(_REPORT)] = 100,
    verify_tolerance: Annotated[float, options.verify_tolerance(_REPORT)] = 1e-3,
    verify_device: Annotated[str, options.verify_device(_REPORT)] = "cpu",
    model_path: Annotated[Path | None, options.model_path(_SERVER)] = None,
    model: Annotated[str, options.model(_SERVER)] = "",
    api_key: Annotated[str, options.api_key(_SERVER)] = "",
    api_key_file: Annotated[str | None, options.api_key_file(_SERVER)] = None,
    request_timeout: Annotated[
        float, typer.Option(help="Timeout of a turn in seconds.", rich_help_panel=_SERVER)
    ] = 300.0,
) -> None:
    """Run multi-turn chats against a server and report how much of the history was reused.

    The load is a closed loop: each question is sent a think time after the previous answer, with the server's actual
    answers as history. The last line of output is JSON. Ctrl-C writes the report so far.

    Example: moonpool dialogues --dialogues 8 --turns 50 --think-time 0.5 --verify --out out/dialogues
    """
    console = Console()
    try:
        config = DialogueConfig(
            url=url,
            out=out,
            model_path=model_path or bundled_model(),
            model=model,
            api_key=api_key_file or api_key,
            dialogues=dialogues,
            turns=turns,
            total=total,
            think_time_s=think_time,
            system_tokens=system_tokens,
            turn_tokens=turn_tokens,
            answer_tokens=answer_tokens,
            temperature=temperature,
            truncation=truncation,
            seed=seed,
            request_timeout_s=request_timeout,
            verify=verify,
            verify_sample=verify_sample,
            verify_tolerance=verify_tolerance,
            verify_device=verify_device,
        )
        report = run(config, console)
    except ReplayError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_BAD_INPUT) from error
    print_dialogues(report, console)
    print(json.dumps(finite(last_line(report.figures)), allow_nan=False), flush=True)
    if report.figures["interrupted"]:
        raise typer.Exit(EXIT_INTERRUPTED)
    raise typer.Exit(0 if report.ok else EXIT_FAILED)
