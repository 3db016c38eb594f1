"""Commands `moonpool simulate …`: the cluster's own policies on a trace under virtual time, without a cluster."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from engine.config import read_config
from engine.errors import EngineError
from kvpool import KvPoolError
from kvpool.policy.eviction import POLICIES
from loadtest.options import EarlierFlags
from moonpool.errors import MoonpoolError
from moonpool.model_files import local_model
from settings.hub_model import parse_model
from settings.worker import name_of_model
from simulator.cache import BELADY, CacheRun, ChainedTrace, chained, simulate_cache
from simulator.cache_report import cache_table, check_plot_path, plot_runs
from simulator.dialogue_run import DialogueRun, dialogue_table, simulate_dialogues
from simulator.dialogues import DialogueSettings, Routing
from simulator.errors import BadSetting, SimulatorError
from simulator.hardware import (
    KV_FORMATS,
    MODELS,
    WEIGHT_FORMATS,
    NumberFormat,
    PlannedModel,
    planned_model,
    plans,
)
from simulator.serving.overload import MODES, Overload, compare_modes, modes_of
from simulator.serving.overload_report import markdown_table, overload_table, plot_overload
from simulator.serving.overload_spec import OverloadScenario, overload_spec
from simulator.serving.tuning import tune
from simulator.serving.tuning_report import plot_tuning, tuning_tables
from traces import CONVERSATION, TraceError, load_trace
from worker.errors import ProfileError
from worker.policy.cost_profile import MOONCAKE

_EXIT_BAD_INPUT = 2
_ALL = "all"
_POLICIES = (*POLICIES, BELADY)
_STANDARD = DialogueSettings()

Trace = Annotated[str, typer.Argument(metavar="TRACE", help=f"A Mooncake trace; '{CONVERSATION}' is the bundled one.")]
Requests = Annotated[int, typer.Option(min=1, help="Approximate number of requests of each run.")]
OutputScale = Annotated[float, typer.Option(help="Factor on the trace's answer lengths.")]
LongestAnswer = Annotated[
    int, typer.Option(min=0, help="Maximum tokens of an answer, and max_tokens of requests; 0: the trace's longest.")
]
PoolBlocks = Annotated[
    int,
    typer.Option(min=1, help="Blocks in the memory of each pool node, of layers without windows if the model has any."),
]
Processes = Annotated[int, typer.Option(min=0, help="Concurrent runs; 0: one per CPU.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Plot the result to a .svg or .png file.")]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Run the cluster's own policies under virtual time: an hour of trace in seconds, without a cluster.",
)


@contextmanager
def progress_bar(unit: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal's stderr; the yielded function takes (done, total)."""
    console = Console(stderr=True)
    columns: tuple[Any, ...] = (TextColumn(unit), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(unit, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def bad_input() -> Iterator[None]:
    """Report errors of the input on stderr and exit with status 2."""
    try:
        yield
    except (SimulatorError, TraceError, KvPoolError, ProfileError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(_EXIT_BAD_INPUT) from error


@app.command("overload", cls=EarlierFlags)
def overload(
    trace: Trace = CONVERSATION,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of workloads drawn from the trace; each runs under every mode.")
    ] = 10,
    modes: Annotated[
        str,
        typer.Option(
            metavar="NAME[,NAME...]", help=f"Admission modes from {', '.join(MODES)}; the last one is the baseline."
        ),
    ] = ",".join(MODES),
    profile: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Cost profile with the true durations of work. Default: the bundled profile of Mooncake.",
        ),
    ] = MOONCAKE,
    load: Annotated[
        float, typer.Option(help="Arrival rate as a multiple of the capacity, which is measured first.")
    ] = 2.0,
    rate: Annotated[float, typer.Option(help="Arrivals per second, instead of --load. 0: use --load.")] = 0.0,
    requests: Requests = 23_000,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill nodes.")] = 8,
    decode: Annotated[int, typer.Option(min=1, help="Decode nodes.")] = 8,
    ttft_slo: Annotated[
        float, typer.Option(*("--ttft-slo", "--ttft"), help="Objective: seconds to the first token.")
    ] = 30.0,
    tbt_slo: Annotated[float, typer.Option(*("--tbt-slo", "--tbt"), help="Objective: seconds between tokens.")] = 0.1,
    output_scale: OutputScale = 1.0,
    longest_prompt: Annotated[int, typer.Option(min=0, help="Skip prompts with more tokens; 0: no limit.")] = 0,
    longest_answer: LongestAnswer = 0,
    pool_blocks: PoolBlocks = 6000,
    ssd_blocks: Annotated[int, typer.Option(min=0, help="Blocks on the SSD of each pool node.")] = 0,
    look_into: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of the rejections that are simulated as admissions, to evaluate them."),
    ] = 0.005,
    attained_share: Annotated[
        float,
        typer.Option(
            help="Share of admitted requests that should meet each objective, by learned margins; 0: no margins."
        ),
    ] = 0.95,
    endless_window: Annotated[
        int, typer.Option(min=0, help="Tokens that every request sees, sinks and rolling window; 0: it sees all.")
    ] = 0,
    reuse_profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Reuse profile of a sibling model that has computed prompts before."),
    ] = None,
    sibling_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the conversations whose prompts the sibling has computed.")
    ] = 0.0,
    processes: Processes = 0,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write all results to this file, including the load over time."),
    ] = None,
    plot: Plot = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
) -> None:
    """Compare admission modes under overload with the live conductor's policy; the last line is JSON.

    Goodput counts requests that met both objectives; a request's time between tokens is the mean of the longest tenth
    of its intervals. Every mode gets the same arrivals.

    Example: moonpool simulate overload --seeds 10 --tbt-slo 0.05 --output-scale 4 --plot overload.svg
    """
    with bad_input():
        if plot is not None:
            check_plot_path(plot)
        if json_file is not None and not json_file.parent.is_dir():
            raise BadSetting(f"cannot write {json_file}: there is no folder {json_file.parent}")
        spec = overload_spec(
            OverloadScenario(
                trace,
                profile,
                prefill_nodes=prefill,
                decode_nodes=decode,
                ttft_s=ttft_slo,
                tbt_s=tbt_slo,
                requests=requests,
                output_scale=output_scale,
                longest_prompt=longest_prompt,
                longest_answer=longest_answer,
                pool_blocks=pool_blocks,
                ssd_blocks=ssd_blocks,
                look_into=look_into,
                attained_share=attained_share,
                window_tokens=endless_window,
                reuse_profile=reuse_profile,
                sibling_share=sibling_share,
            )
        )
        console = Console(stderr=True)
        with progress_bar("runs") as advance:
            found = compare_modes(
                spec,
                modes=modes_of(modes),
                seeds=seeds,
                load=load,
                rate_per_s=rate or None,
                processes=processes or os.cpu_count() or 1,
                on_progress=console.print,
                progress=advance,
            )
        _show(found, json_file, plot, markdown)


def _show(found: Overload, json_file: Path | None, plot: Path | None, markdown: bool) -> None:
    if markdown:
        print(markdown_table(found))
    else:
        Console().print(overload_table(found))
    if json_file is not None:
        json_file.write_text(json.dumps(found.to_json(series=True), allow_nan=False) + "\n", encoding="utf-8")
    if plot is not None:
        plot_overload(found, plot)
    summary = found.to_json()
    del summary["runs"]
    print(json.dumps(summary, allow_nan=False), flush=True)


@app.command("tune", cls=EarlierFlags)
def tune_(
    trace: Trace = CONVERSATION,
    rate: Annotated[float, typer.Option(help="Arrivals per second.")] = 5.0,
    ttft_slo: Annotated[
        float, typer.Option(*("--ttft-slo", "--ttft"), help="Present objective: seconds to the first token.")
    ] = 30.0,
    tbt_slo: Annotated[
        float, typer.Option(*("--tbt-slo", "--tbt"), help="Present objective: seconds between tokens.")
    ] = 0.1,
    prefill: Annotated[int, typer.Option(min=1, help="Present number of prefill nodes.")] = 8,
    decode: Annotated[int, typer.Option(min=1, help="Present number of decode nodes.")] = 8,
    try_ttft: Annotated[str, typer.Option(metavar="S[,S...]", help="TTFT objectives to try; empty: none.")] = "",
    try_tbt: Annotated[str, typer.Option(metavar="S[,S...]", help="TBT objectives to try; empty: none.")] = "",
    try_prefill: Annotated[
        str,
        typer.Option(
            metavar="N[,N...]", help="Numbers of prefill nodes to try, with all others decoding; empty: none."
        ),
    ] = "",
    profile: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="Cost profile of your nodes (`moonpool bench profile`). Default: Mooncake's."
        ),
    ] = MOONCAKE,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of workloads drawn from the trace, the same for each setting.")
    ] = 3,
    requests: Requests = 3000,
    output_scale: OutputScale = 1.0,
    longest_answer: LongestAnswer = 0,
    pool_blocks: PoolBlocks = 6000,
    processes: Processes = 0,
    plot: Plot = None,
) -> None:
    """Evaluate other objectives, or another split of the nodes, under the same arrivals.

    One setting is changed at a time; admission is by prediction, with the live conductor's policy under virtual time.
    Goodput counts requests that met both objectives. The last line is JSON.

    Example: moonpool simulate tune --rate 6 --try-ttft 5,10,30,60 --try-tbt 0.05,0.2 --try-prefill 4,6,10,12
    """
    with bad_input():
        if plot is not None:
            check_plot_path(plot)
        if not rate > 0:
            raise BadSetting(f"--rate must be positive, got {rate:g}")
        tried_ttft, tried_tbt = _seconds("--try-ttft", try_ttft), _seconds("--try-tbt", try_tbt)
        tried_prefill = _counts("--try-prefill", try_prefill)
        if not (tried_ttft or tried_tbt or tried_prefill):
            raise BadSetting("nothing to try: give --try-ttft, --try-tbt or --try-prefill")
        spec = overload_spec(
            OverloadScenario(
                trace,
                profile,
                prefill_nodes=prefill,
                decode_nodes=decode,
                ttft_s=ttft_slo,
                tbt_s=tbt_slo,
                requests=requests,
                output_scale=output_scale,
                longest_prompt=0,
                longest_answer=longest_answer,
                pool_blocks=pool_blocks,
                ssd_blocks=0,
                look_into=0.0,
                attained_share=0.95,
            )
        )
        with progress_bar("runs") as advance:
            found = tune(
                replace(spec, rate_per_s=rate),
                ttft_s=tried_ttft,
                tbt_s=tried_tbt,
                prefill_nodes=tried_prefill,
                seeds=seeds,
                processes=processes or os.cpu_count() or 1,
                progress=advance,
            )
        for table in tuning_tables(found):
            Console().print(table)
        if plot is not None:
            plot_tuning(found, plot)
    print(json.dumps(found.to_json(), allow_nan=False), flush=True)


def _seconds(flag: str, text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")] if text else []
    except ValueError as error:
        raise BadSetting(f"{flag} must be seconds separated by commas, such as 0.05,0.1, got {text!r}") from error


def _counts(flag: str, text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")] if text else []
    except ValueError as error:
        raise BadSetting(
            f"{flag} must be numbers of nodes separated by commas, such as 4,8,12, got {text!r}"
        ) from error


@app.command("cache", no_args_is_help=True)
def cache(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help=f"A Mooncake trace: JSONL, plain or .xz .zst .gz; '{CONVERSATION}' is the bundled one.",
        ),
    ],
    capacity: Annotated[
        str,
        typer.Option(
            metavar="N[,N...]",
            help="Capacity of the pool in blocks, e.g. 10000 or 1k,10k,30k; inf: all blocks of the trace.",
        ),
    ],
    policy: Annotated[
        str, typer.Option(metavar="NAME[,NAME...]", help=f"Eviction policies: {', '.join(_POLICIES)}; or {_ALL}.")
    ] = "lru",
    tree: Annotated[
        bool | None,
        typer.Option(
            "--tree/--no-tree",
            help="Evict a block only after its successors (--tree), as the live pool does, or in any order (--no-tree) "
            "as the literature assumes. Default: --tree only for moonpool.",
        ),
    ] = None,
    plot: Plot = None,
) -> None:
    """Compute a pool's hit rate over a trace by eviction policy and capacity; the last line is JSON.

    Hits are the leading blocks of a prompt that are present at look-up. Then all its blocks are stored in order.

    Example: moonpool simulate cache conversation --capacity 1k,10k,30k --policy all --plot hits.svg
    """
    with bad_input():
        policies = _chosen("--policy", policy, _POLICIES)
        sizes = [_capacity(word) for word in capacity.split(",")]
        if plot is not None:
            check_plot_path(plot)
        loaded = chained(load_trace(trace))
        runs = _cache_runs(loaded, policies, [size or loaded.num_blocks for size in sizes], tree)
        Console().print(cache_table(runs, loaded.source))
        if plot is not None:
            plot_runs(runs, loaded.source, plot)
    _print_last_line([{"trace": loaded.source, **asdict(run)} for run in runs])


@app.command("dialogues")
def dialogues(
    routing: Annotated[
        str,
        typer.Option(metavar="NAME[,NAME...]", help=f"Routing of turns to servers: {', '.join(Routing)}; or all."),
    ] = _STANDARD.routing.value,
    dialogues: Annotated[int, typer.Option(help="Number of dialogues.")] = _STANDARD.dialogues,
    mean_history: Annotated[
        float, typer.Option(help="Mean number of messages that precede a turn in its dialogue.")
    ] = _STANDARD.mean_history_messages,
    servers: Annotated[int, typer.Option(help="Number of servers, each with a pool and a queue.")] = _STANDARD.servers,
    capacity: Annotated[int, typer.Option(help="Capacity of each server's pool in blocks.")] = _STANDARD.capacity,
    block_tokens: Annotated[int, typer.Option(help="Tokens per block.")] = _STANDARD.block_tokens,
    policy: Annotated[str, typer.Option(help=f"Eviction policy: {', '.join(POLICIES)}.")] = _STANDARD.policy,
    tails: Annotated[bool, typer.Option("--tails/--no-tails", help="Also keep partial last blocks.")] = _STANDARD.tails,
    balance: Annotated[
        float, typer.Option(help="Maximum seconds by which a sticky turn's queue may exceed the shortest one.")
    ] = _STANDARD.balance_s,
    seed: Annotated[int, typer.Option(help="Seed of dialogues and of random routing.")] = _STANDARD.seed,
) -> None:
    """Compute the share of prompts that dialogues reuse, by routing; the last line is JSON.

    Servers do not exchange KV: KV that only another server holds is recomputed.

    Example: moonpool simulate dialogues --routing sticky,random
    """
    with bad_input():
        settings = [
            DialogueSettings(
                routing=Routing(one),
                dialogues=dialogues,
                mean_history_messages=mean_history,
                servers=servers,
                capacity=capacity,
                block_tokens=block_tokens,
                policy=policy,
                tails=tails,
                balance_s=balance,
                seed=seed,
            )
            for one in _chosen("--routing", routing, tuple(Routing))
        ]
        runs: list[DialogueRun] = []
        for one in settings:
            with progress_bar("turns") as advance:
                runs.append(simulate_dialogues(one, advance))
    Console().print(dialogue_table(runs))
    _print_last_line([asdict(run) for run in runs])


@app.command("hardware")
def hardware(
    model: Annotated[
        Path | None,
        typer.Argument(metavar="[MODEL]", parser=parse_model, help="Hugging Face folder or id. [7B, 70B and a MoE]"),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, max=10**7, help="Tokens of a sequence, prompt and answer.")] = 512,
    weights: Annotated[str, typer.Option(help=f"Format of the weights: {', '.join(WEIGHT_FORMATS)}.")] = "16-bit",
    kv: Annotated[str, typer.Option(help=f"Format of the KV: {', '.join(KV_FORMATS)}.")] = "16-bit",
) -> None:
    """Show the largest batch, the time of a decode step and the throughput on common GPUs, from their data sheets.

    It is PPL.LLM's rule: 60 % of the arithmetic, 80 % of the memory's bandwidth, and memory filled with sequences.
    Prefill is not counted. The last line is JSON.

    Example: moonpool simulate hardware ./my-model --tokens 4096 --kv int8
    """
    with bad_input():
        formats = _format("--weights", weights, WEIGHT_FORMATS), _format("--kv", kv, KV_FORMATS)
        found = plans(list(MODELS.values()) if model is None else [_planned(model)], tokens, *formats)
    table = Table("model", "GPUs", *("batch", "arithmetic, ms", "memory, ms", "tokens/s"))
    for column in table.columns[2:]:
        column.justify = "right"
    for row in found:
        figures = (f"{row.batch:,}", f"{row.compute_ms:.1f}", f"{row.memory_ms:.1f}", f"{row.tokens_per_s:,.0f}")
        table.add_row(row.model, f"{row.gpus} x {row.gpu}", *figures)
    Console().print(table)
    print(json.dumps({"tokens": tokens, "weights": weights, "kv": kv, "plans": [asdict(row) for row in found]}))


def _format(flag: str, name: str, known: Mapping[str, NumberFormat]) -> NumberFormat:
    if name not in known:
        raise BadSetting(f"{flag} must be {' or '.join(known)}, got {name!r}")
    return known[name]


def _planned(model: Path) -> PlannedModel:
    try:
        return planned_model(name_of_model(model), read_config(local_model(model, weights=False)))
    except (EngineError, MoonpoolError) as error:
        raise BadSetting(f"model {model} cannot be planned: {error}") from error


def _cache_runs(
    trace: ChainedTrace, policies: Sequence[str], capacities: Sequence[int], tree: bool | None
) -> list[CacheRun]:
    pairs = [(capacity, policy) for capacity in dict.fromkeys(capacities) for policy in policies]
    runs: list[CacheRun] = []
    with progress_bar("requests") as advance:
        for capacity, policy in pairs:
            progress = partial(_advanced, advance, len(runs) * len(trace.chains), len(pairs) * len(trace.chains))
            runs.append(simulate_cache(trace, policy, capacity, leaf_first=tree, progress=progress))
    return runs


def _advanced(advance: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    advance(before + done, total)


def _chosen(flag: str, text: str, allowed: Sequence[str]) -> list[str]:
    """Parse names separated by commas, of which "all" stands for all. Raises BadSetting."""
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in (*allowed, _ALL)]:
        raise BadSetting(f"{flag} must be {', '.join(allowed)} or {_ALL}, got {unknown[0]!r}")
    return list(dict.fromkeys(one for name in names for one in (allowed if name == _ALL else (name,))))


def _capacity(word: str) -> int | None:
    """Parse a number of blocks; None for `inf`."""
    word = word.strip()
    if word == "inf":
        return None
    digits, factor = (word[:-1], 1000) if word.endswith("k") else (word, 1)
    if not digits.isascii() or not digits.isdecimal() or not int(digits):
        raise BadSetting(f"--capacity must be a positive number of blocks, such as 10000 or 10k, or inf, got {word!r}")
    return int(digits) * factor


def _print_last_line(runs: list[dict[str, Any]]) -> None:
    print(json.dumps(runs if len(runs) > 1 else runs[0], allow_nan=False), flush=True)
