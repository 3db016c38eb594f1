"""The command `replay`: flags in, table out."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loadtest import options
from loadtest.config import MAX_SEND_LAG_S, ReplayConfig
from loadtest.errors import ReplayError
from loadtest.report import print_report
from loadtest.runner import run
from traces import CONVERSATION, SAMPLING_SEED, TraceError

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INVALID = 3
EXIT_INTERRUPTED = 130

app = typer.Typer(no_args_is_help=True, add_completion=False)

_SENDING, _SELECTING, _REPORT = "Sending", "Choosing requests", "Objectives and verification"


@app.command("replay")
def replay(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help=f"A Mooncake trace: JSONL, plain or .xz .zst .gz; '{CONVERSATION}' is the bundled one (12,031 "
            "requests in an hour).",
        ),
    ],
    url: Annotated[
        str, typer.Option(help="Address of the server.", rich_help_panel=_SENDING)
    ] = "http://127.0.0.1:8000",
    out: Annotated[
        Path, typer.Option(help="Folder for report.json, report.html and requests.jsonl.", rich_help_panel=_REPORT)
    ] = Path("out/replay"),
    speed: Annotated[
        float, typer.Option(help="Arrivals this many times closer together.", rich_help_panel=_SENDING)
    ] = 1.0,
    sample_families: Annotated[
        float,
        typer.Option(
            help="Keep this fraction of the prefix families: conversations that share their beginning stay together.",
            rich_help_panel=_SELECTING,
        ),
    ] = 1.0,
    sample_seed: Annotated[
        int, typer.Option(help="Which families are kept.", rich_help_panel=_SELECTING)
    ] = SAMPLING_SEED,
    limit: Annotated[int, typer.Option(help="At most so many requests; 0: all.", rich_help_panel=_SELECTING)] = 0,
    duration: Annotated[
        float,
        typer.Option(
            help="Only the trace's first so many seconds, of its own time; 0: all.", rich_help_panel=_SELECTING
        ),
    ] = 0.0,
    tokens_per_block: Annotated[
        int,
        typer.Option(help="Tokens per 512-token block: scales prompts and outputs.", rich_help_panel=_SELECTING),
    ] = 8,
    max_model_len: Annotated[
        int,
        typer.Option(
            help="Longest prompt + output; longer prompts keep their head. 0: ask.", rich_help_panel=_SELECTING
        ),
    ] = 0,
    verify: Annotated[bool, options.verify(_REPORT)] = False,
    verify_sample: Annotated[int, options.verify_sample(_REPORT)] = 100,
    verify_tolerance: Annotated[float, options.verify_tolerance(_REPORT)] = 1e-3,
    verify_device: Annotated[str, options.verify_device(_REPORT)] = "cpu",
    model_path: Annotated[Path | None, options.model_path(_SENDING)] = None,
    model: Annotated[str, options.model(_SENDING)] = "",
    api_key: Annotated[str, options.api_key(_SENDING)] = "",
    seed: Annotated[int, typer.Option(help="Of texts and of sampling.", rich_help_panel=_SENDING)] = 0,
    sampled_fraction: Annotated[
        float,
        typer.Option(help="Fraction of requests drawn at --temperature; the rest is greedy.", rich_help_panel=_SENDING),
    ] = 0.5,
    temperature: Annotated[float, typer.Option(help="Of the drawn requests.", rich_help_panel=_SENDING)] = 0.8,
    request_timeout: Annotated[
        float, typer.Option(help="Seconds after which a request has failed.", rich_help_panel=_SENDING)
    ] = 300.0,
    on_429: Annotated[
        str,
        typer.Option(
            "--on-429",
            help="What to do about a rejection: count it, or retry after what Retry-After says.",
            rich_help_panel=_SENDING,
        ),
    ] = "count",
    senders: Annotated[
        int, typer.Option(help="Processes that send; 0: by the load and the cores.", rich_help_panel=_SENDING)
    ] = 0,
    max_send_lag: Annotated[
        float,
        typer.Option(
            help="The run is INVALID if over 1 % of the requests left so many seconds late.", rich_help_panel=_REPORT
        ),
    ] = MAX_SEND_LAG_S,
    reuse_earlier: Annotated[
        bool,
        typer.Option("--reuse-earlier", help="Let KV left by earlier replays be reused.", rich_help_panel=_SENDING),
    ] = False,
    slo_ttft: Annotated[
        float, typer.Option(help="TTFT objective in seconds; 0: 10x unloaded.", rich_help_panel=_REPORT)
    ] = 0.0,
    slo_tbt: Annotated[
        float, typer.Option(help="TBT objective in seconds; 0: 5x unloaded.", rich_help_panel=_REPORT)
    ] = 0.0,
    unloaded: Annotated[
        bool, typer.Option("--unloaded/--no-unloaded", help="Measure lone requests first.", rich_help_panel=_REPORT)
    ] = True,
) -> None:
    """Replay a real trace against a running server, and report what it saw.

    Requests leave at the trace's own times (an open loop), with English text made so that prompts share beginnings
    exactly where the trace's did. Ctrl-C gives the report so far.

    Example: moonpool replay conversation --sample-families 0.1 --speed 15 --verify --out out/replay
    """
    console = Console()
    try:
        config = ReplayConfig(
            trace=trace,
            url=url,
            out=out,
            model_path=model_path or bundled_model(),
            model=model,
            api_key=api_key,
            speed=speed,
            sample_families=sample_families,
            sample_seed=sample_seed,
            limit=limit,
            duration_s=duration,
            tokens_per_block=tokens_per_block,
            max_model_len=max_model_len,
            seed=seed,
            sampled_fraction=sampled_fraction,
            temperature=temperature,
            request_timeout_s=request_timeout,
            on_429=on_429,
            senders=senders,
            max_send_lag_s=max_send_lag,
            slo_ttft_s=slo_ttft,
            slo_tbt_s=slo_tbt,
            measure_unloaded=unloaded,
            reuse_earlier=reuse_earlier,
            verify=verify,
            verify_sample=verify_sample,
            verify_tolerance=verify_tolerance,
            verify_device=verify_device,
        )
        report = run(config, console)
    except (ReplayError, TraceError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_BAD_INPUT) from error
    print_report(report, console)
    if report.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if not report.ok:
        raise typer.Exit(EXIT_FAILED)
    raise typer.Exit(0 if report.figures["valid"] else EXIT_INVALID)


def bundled_model() -> Path:
    """Folder of the model that comes with the application."""
    spec = find_spec("moonpool")
    if spec is None or not spec.submodule_search_locations:
        raise ReplayError("there is no bundled model; give the folder of the served model with --model-path")
    return Path(next(iter(spec.submodule_search_locations))) / "data" / "model"
