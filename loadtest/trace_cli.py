"""Commands `trace convert`, `check` and `stats`: traces of other formats for the replay."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from loadtest import options
from loadtest.cli import EXIT_BAD_INPUT, EXIT_FAILED, bundled_model
from loadtest.errors import ReplayError
from loadtest.model_folder import local_model_folder
from loadtest.progress import ProgressDisplay
from loadtest.report import figures_table
from loadtest.tokens import ModelTokens, load_model_tokens
from traces import CONVERSATION, TraceError, TraceFormatError, TraceRow
from traces.check import TraceCheck, check_trace
from traces.formats import FORMATS, Encode, SourceSettings
from traces.overview import TraceOverview
from traces.reader import bundled_file
from traces.source import AUTO, TraceSource, open_source
from traces.time_order import in_time_order
from traces.writer import write_trace

app = typer.Typer(no_args_is_help=True, add_completion=False)

_SOURCE, _ASSUMED = "Source", "Assumed where the source does not say"

_Input = Annotated[
    str,
    typer.Argument(metavar="INPUT", help=f"The trace, plain or .xz .zst .gz; '{CONVERSATION}' is the bundled trace."),
]
_Format = Annotated[
    str,
    typer.Option("--format", help=f"{AUTO} (by the beginning), {', '.join(FORMATS)}.", rich_help_panel=_SOURCE),
]
_BlockTokens = Annotated[
    int,
    typer.Option(
        "--block-tokens", help="Tokens per hash id of the source; 0: as usual for the format.", rich_help_panel=_SOURCE
    ),
]
_SkipInvalid = Annotated[
    bool,
    typer.Option("--skip-invalid", help="Leave out records with problems and count them.", rich_help_panel=_SOURCE),
]
_ModelPath = Annotated[Path | None, options.model_path(_SOURCE)]
_SessionRate = Annotated[
    float,
    typer.Option(
        "--session-rate", help="Sessions that begin per second (sharegpt, aiperf, weka).", rich_help_panel=_ASSUMED
    ),
]
_ThinkTime = Annotated[
    float,
    typer.Option(
        "--think-time", help="Seconds between an answer and the next turn (sharegpt).", rich_help_panel=_ASSUMED
    ),
]
_OutputRate = Annotated[
    float,
    typer.Option(
        "--output-rate", help="Tokens per second of answers between turns (sharegpt, aiperf).", rich_help_panel=_ASSUMED
    ),
]
_OutputTokens = Annotated[
    int,
    typer.Option("--output-tokens", help="Length of answers without a length (aiperf).", rich_help_panel=_ASSUMED),
]
_Seed = Annotated[int, typer.Option("--seed", help="Random seed of the sessions' times.", rich_help_panel=_ASSUMED)]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("convert")
def convert(
    input: _Input,
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="The new file: JSONL; compressed if it ends with .xz .zst .gz.")
    ],
    format: _Format = AUTO,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUTPUT if it exists.")] = False,
    skip_invalid: _SkipInvalid = False,
    block_tokens: _BlockTokens = 0,
    model_path: _ModelPath = None,
    session_rate: _SessionRate = 1.0,
    think_time: _ThinkTime = 10.0,
    output_rate: _OutputRate = 50.0,
    output_tokens: _OutputTokens = 256,
    seed: _Seed = 0,
) -> None:
    """Convert a trace of another format to the replay's, Mooncake's JSONL with sessions.

    Azure's and BurstGPT's traces contain no prompts: how much of a prompt was seen before is unknown. Their prompts get
    ids of their own, so that a replay reuses nothing; BurstGPT's session ids are kept. OUTPUT appears when it is
    complete; after an error, nothing is written.

    Example: moonpool trace convert AzureLLMInferenceTrace_conv.csv azure.jsonl.zst
    """
    with _errors():
        settings = SourceSettings(
            source_block_tokens=block_tokens,
            encode=_encoder(model_path),
            session_rate=session_rate,
            think_time_s=think_time,
            output_rate=output_rate,
            output_tokens=output_tokens,
            seed=seed,
        )
        left_out: Counter[str] = Counter()
        with _opened(input, format, settings) as source, ProgressDisplay(Console(stderr=True)) as display:
            rows = _ordered(source, left_out if skip_invalid else None, display)
            count = write_trace(rows, output, overwrite=overwrite)
    print(f"{output}: {count:,} requests from {source.name} ({source.format.name})")
    for note in _notes(source, count, left_out):
        print(f"note: {note}")


@app.command("check")
def check(
    input: _Input,
    format: _Format = AUTO,
    most: Annotated[int, typer.Option(help="Problems to list one by one.")] = 20,
    block_tokens: _BlockTokens = 0,
    as_json: _Json = False,
) -> None:
    """Report all problems of a trace: the first ones with their lines, and how many of each kind.

    The exit status is 1 if there is a problem.

    Example: moonpool trace check trace.jsonl
    """
    with _errors():
        # Without a tokenizer: the lengths of texts do not matter.
        settings = SourceSettings(block_tokens=0, source_block_tokens=block_tokens)
        with _opened(input, format, settings) as source, ProgressDisplay(Console(stderr=True)) as display:
            found = check_trace(source, most=most, on_request=_reading(source, display))
    if as_json:
        print(json.dumps(_check_figures(source, found)))
    else:
        _print_check(source, found)
    if found.counts:
        raise typer.Exit(EXIT_FAILED)


@app.command("stats")
def stats(
    input: _Input,
    format: _Format = AUTO,
    as_json: _Json = False,
    skip_invalid: _SkipInvalid = False,
    block_tokens: _BlockTokens = 0,
    model_path: _ModelPath = None,
    session_rate: _SessionRate = 1.0,
    think_time: _ThinkTime = 10.0,
    output_rate: _OutputRate = 50.0,
    output_tokens: _OutputTokens = 256,
    seed: _Seed = 0,
) -> None:
    """Print a trace's lengths, rates, reuse and turns per session.

    Reuse is the share of prompt tokens in full blocks that were seen before, in blocks of the source. It is unknown for
    Azure's and BurstGPT's traces, which contain no prompts.

    Example: moonpool trace stats conversation
    """
    with _errors():
        settings = SourceSettings(
            block_tokens=0,
            source_block_tokens=block_tokens,
            encode=_encoder(model_path),
            session_rate=session_rate,
            think_time_s=think_time,
            output_rate=output_rate,
            output_tokens=output_tokens,
            seed=seed,
        )
        left_out: Counter[str] = Counter()
        with _opened(input, format, settings) as source, ProgressDisplay(Console(stderr=True)) as display:
            overview = TraceOverview(source.format.block_tokens, counts_reuse=source.format.knows_prompts)
            for row in _ordered(source, left_out if skip_invalid else None, display):
                overview.add(row)
    figures = overview.figures()
    notes = _notes(source, figures["requests"], left_out)
    if as_json:
        print(json.dumps({"trace": source.name, "format": source.format.name, **figures, "notes": notes}))
    else:
        _print_figures(source, figures, notes)


@contextmanager
def _errors() -> Iterator[None]:
    """End the command with its exit status after an error in the block."""
    try:
        yield
    except (ReplayError, TraceError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_BAD_INPUT) from error


@contextmanager
def _opened(name: str, format_name: str, settings: SourceSettings) -> Iterator[TraceSource]:
    """Open the bundled trace or a file."""
    if name != CONVERSATION:
        with open_source(Path(name), format_name, settings) as source:
            yield source
        return
    with resources.as_file(bundled_file()) as path, open_source(path, format_name, settings) as source:
        source.name = CONVERSATION
        yield source


def _encoder(model_path: Path | None) -> Encode:
    """Return the tokenizer of the model, which is loaded when the first text comes."""
    loaded: list[ModelTokens] = []

    def encode(texts: list[str]) -> list[list[int]]:
        if not loaded:
            folder = local_model_folder(model_path or bundled_model(), flag="--model-path", weights=False)
            loaded.append(load_model_tokens(folder))
        return loaded[0].encode_all(texts)

    return encode


def _ordered(source: TraceSource, left_out: Counter[str] | None, display: ProgressDisplay) -> Iterator[TraceRow]:
    """Yield the source's requests by time; records with problems are counted in `left_out`, or raised if it is None."""

    def count(error: TraceFormatError) -> None:
        assert left_out is not None
        left_out[error.kind] += 1

    rows = in_time_order(_watched(source.rows(None if left_out is None else count), _reading(source, display)))
    return _watched(rows, _Watch(lambda number: display.show("requests", number, source.num_requests)))


_SHOWN_EVERY_ROWS = 256
_QUIET_S = 1.0


class _Watch:
    """Calls `show` with the number of a request now and then, but not within the first second."""

    def __init__(self, show: Callable[[int], None]) -> None:
        self._show = show
        self._began = time.monotonic()

    def __call__(self, number: int) -> None:
        if number % _SHOWN_EVERY_ROWS == 0 and time.monotonic() - self._began > _QUIET_S:
            self._show(number)


def _reading(source: TraceSource, display: ProgressDisplay) -> _Watch:
    return _Watch(
        lambda number: display.show("KiB read", source.read_bytes >> 10, source.num_bytes >> 10, f"{number:,} requests")
    )


def _watched(rows: Iterator[TraceRow], watch: _Watch) -> Iterator[TraceRow]:
    for number, row in enumerate(rows, 1):
        watch(number)
        yield row


def _notes(source: TraceSource, requests: int, left_out: Counter[str]) -> list[str]:
    notes = []
    if source.format.unknown_prompts:
        notes.append(
            f"the source states only the length of {source.format.unknown_prompts:,} of {requests:,} inputs: whether "
            "they repeat earlier ones is unknown, and they are taken as new"
        )
    if not source.format.has_own_times:
        notes.append("times that the source does not state are assumed")
    if left_out:
        notes.append(f"{left_out.total():,} records with problems were left out: {_counts(left_out)}")
    return notes


def _counts(counts: Counter[Any]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common())


def _check_figures(source: TraceSource, found: TraceCheck) -> dict[str, Any]:
    problems = [
        {"line": each.line, "place": each.detail, "kind": each.kind, "found": each.found, "expected": each.expected}
        for each in found.problems
    ]
    return {
        "trace": source.name,
        "format": source.format.name,
        "requests": found.requests,
        "counts": dict(found.counts),
        "problems": problems,
    }


def _print_check(source: TraceSource, found: TraceCheck) -> None:
    for each in found.problems:
        print(f"{each.kind}: {each}")
    unlisted = found.counts.total() - len(found.problems)
    if unlisted:
        print(f"{unlisted:,} more problems; list them with --most")
    result = f"{found.counts.total():,} problems: {_counts(found.counts)}" if found.counts else "no problem"
    print(f"{source.name} ({source.format.name}): {found.requests:,} valid requests, {result}")


def _print_figures(source: TraceSource, figures: dict[str, Any], notes: list[str]) -> None:
    console = Console()
    table = figures_table(Text(f"{source.name} ({source.format.name})", "table.title"))
    for name, value in _figure_rows(figures):
        table.add_row(name, Text(value))
    console.print(table)
    for note in notes:
        console.print(Text(f"note: {note}", style="dim"), soft_wrap=True)


def _figure_rows(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "requests", f"{figures['requests']:,} in {figures['duration_s']:,.1f} s"
    yield "rate", f"{_rate(figures['requests_per_s'])}; {figures['busiest_minute_requests']:,} in the busiest minute"
    for name in ("prompt", "output"):
        lengths, rate = figures[f"{name}_tokens"], _rate(figures[f"{name}_tokens_per_s"])
        yield f"{name} tokens", f"{_lengths(lengths)}; {lengths['sum']:,} in all, {rate}"
    reuse = figures["reuse"]
    yield (
        "reuse",
        "unknown"
        if reuse is None
        else f"{reuse['token_hit_rate']:.1%} of the prompt tokens were seen before, in full blocks of "
        f"{reuse['block_tokens']}; {reuse['unique_blocks']:,} different blocks",
    )
    sessions = figures["sessions"]
    if sessions is None:
        yield "sessions", "none named"
    else:
        yield "sessions", f"{sessions['sessions']:,}; {sessions['requests_without_session']:,} requests without one"
        yield "turns", _lengths(sessions["turns"])


def _lengths(found: dict[str, Any]) -> str:
    return f"mean {found['mean']:,.1f}, p50 {found['p50']:,}, p90 {found['p90']:,}, p99 {found['p99']:,}, " + (
        f"longest {found['max']:,}"
    )


def _rate(per_second: float | None) -> str:
    return "all at once" if per_second is None else f"{per_second:,.2f} per second"
