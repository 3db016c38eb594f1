"""Command `replay`: flags to configuration, report to the terminal."""

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
from traces import BLOCK_TOKENS, CONVERSATION, SAMPLING_SEED, TraceError

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INVALID = 3
EXIT_INTERRUPTED = 130

app = typer.Typer(no_args_is_help=True, add_completion=False)

_BUNDLED_BLOCK = 8  # tokens per block of a trace, so that prompts fit into the bundled model's context
_SENDING, _SELECTING, _REPORT = "Sending", "Choosing requests", "Objectives and verification"


@app.command("replay", cls=options.EarlierFlags)
def replay(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help=f"A Mooncake trace: JSONL, plain or .xz .zst .gz; '{CONVERSATION}' is the bundled trace (12,031 "
            "requests in an hour). Other formats: `trace convert`.",
        ),
    ],
    url: Annotated[str, options.url(_SENDING)] = options.DEFAULT_URL,
    out: Annotated[
        Path, typer.Option(help="Folder for report.json, report.html and requests.jsonl.", rich_help_panel=_REPORT)
    ] = Path("out/replay"),
    speed: Annotated[
        float, typer.Option(help="Factor by which arrivals are accelerated.", rich_help_panel=_SENDING)
    ] = 1.0,
    sample_families: Annotated[
        float,
        typer.Option(
            help="Fraction of the prefix families to replay; requests that share a prefix stay together.",
            rich_help_panel=_SELECTING,
        ),
    ] = 1.0,
    sample_seed: Annotated[
        int, typer.Option(help="Random seed of the choice of families.", rich_help_panel=_SELECTING)
    ] = SAMPLING_SEED,
    limit: Annotated[int, typer.Option(help="Maximum number of requests; 0: all.", rich_help_panel=_SELECTING)] = 0,
    duration: Annotated[
        float,
        typer.Option(
            help="Replay only the first seconds of the trace, in trace time; 0: all.", rich_help_panel=_SELECTING
        ),
    ] = 0.0,
    tokens_per_block: Annotated[
        int | None,
        typer.Option(
            help="Tokens to send per 512-token block of the trace; scales prompts and outputs. Default: 512 with "
            "--model-path, 8 for the bundled model.",
            rich_help_panel=_SELECTING,
        ),
    ] = None,
    max_model_len: Annotated[
        int,
        typer.Option(
            help="Maximum prompt + output tokens; longer prompts are truncated at the end. 0: the server's.",
            rich_help_panel=_SELECTING,
        ),
    ] = 0,
    verify: Annotated[bool, options.verify(_REPORT)] = False,
    verify_sample: Annotated[int, options.verify_sample(_REPORT)] = 100,
    verify_tolerance: Annotated[float, options.verify_tolerance(_REPORT)] = 1e-3,
    verify_device: Annotated[str, options.verify_device(_REPORT)] = "cpu",
    model_path: Annotated[Path | None, options.model_path(_SENDING)] = None,
    model: Annotated[str, options.model(_SENDING)] = "",
    api_key: Annotated[str, options.api_key(_SENDING)] = "",
    api_key_file: Annotated[str | None, options.api_key_file(_SENDING)] = None,
    seed: Annotated[int, typer.Option(help="Random seed of texts and sampling.", rich_help_panel=_SENDING)] = 0,
    sampled_fraction: Annotated[
        float,
        typer.Option(
            help="Fraction of requests sampled at --temperature; the others are greedy.", rich_help_panel=_SENDING
        ),
    ] = 0.5,
    temperature: Annotated[
        float, typer.Option(help="Temperature of the sampled requests.", rich_help_panel=_SENDING)
    ] = 0.8,
    request_timeout: Annotated[
        float, typer.Option(help="Timeout of a request in seconds.", rich_help_panel=_SENDING)
    ] = 300.0,
    on_429: Annotated[
        str,
        typer.Option(
            "--on-429",
            help="Rejections (HTTP 429): count them, or retry after the time in Retry-After.",
            rich_help_panel=_SENDING,
        ),
    ] = "count",
    senders: Annotated[
        int,
        typer.Option(help="Sender processes; 0: chosen from the load and the CPU cores.", rich_help_panel=_SENDING),
    ] = 0,
    max_send_lag: Annotated[
        float,
        typer.Option(
            help="The run is INVALID if over 1 % of the requests are sent later than this many seconds.",
            rich_help_panel=_REPORT,
        ),
    ] = MAX_SEND_LAG_S,
    reuse_earlier: Annotated[
        bool,
        typer.Option("--reuse-earlier", help="Allow reuse of KV left by earlier replays.", rich_help_panel=_SENDING),
    ] = False,
    ttft_slo: Annotated[
        float,
        typer.Option(
            *("--ttft-slo", "--slo-ttft"),
            help="TTFT objective in seconds; 0: 10 times the unloaded TTFT.",
            rich_help_panel=_REPORT,
        ),
    ] = 0.0,
    tbt_slo: Annotated[
        float,
        typer.Option(
            *("--tbt-slo", "--slo-tbt"),
            help="TBT objective in seconds; 0: 5 times the unloaded TBT.",
            rich_help_panel=_REPORT,
        ),
    ] = 0.0,
    unloaded: Annotated[
        bool,
        typer.Option(
            "--unloaded/--no-unloaded", help="Measure single requests without load first.", rich_help_panel=_REPORT
        ),
    ] = True,
) -> None:
    """Replay a request trace against a running server and report latency, reuse and errors.

    Requests are sent at the trace's times (open loop), with generated English text whose prompts share prefixes exactly
    where the trace's do. Ctrl-C writes the report so far.

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
            api_key=api_key_file or api_key,
            speed=speed,
            sample_families=sample_families,
            sample_seed=sample_seed,
            limit=limit,
            duration_s=duration,
            tokens_per_block=tokens_per_block or (_BUNDLED_BLOCK if model_path is None else BLOCK_TOKENS),
            max_model_len=max_model_len,
            seed=seed,
            sampled_fraction=sampled_fraction,
            temperature=temperature,
            request_timeout_s=request_timeout,
            on_429=on_429,
            senders=senders,
            max_send_lag_s=max_send_lag,
            slo_ttft_s=ttft_slo,
            slo_tbt_s=tbt_slo,
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


def bundled_model(*, flag: str = "--model-path") -> Path:
    """Return the folder of the model that ships with Moonpool. Raises ReplayError, naming `flag`, if there is none."""
    spec = find_spec("moonpool")
    if spec is None or not spec.submodule_search_locations:
        raise ReplayError(f"there is no bundled model; give the folder of the served model with {flag}")
    return Path(next(iter(spec.submodule_search_locations))) / "data" / "model"
