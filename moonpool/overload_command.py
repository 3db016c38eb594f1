"""The command `moonpool simulate overload`: admission modes side by side, the live policy under virtual time."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moonpool.simulation_console import bad_input, progress_bar
from simulator.errors import BadSetting
from simulator.serving.overload import MODES, Overload, compare_modes, modes_of
from simulator.serving.overload_report import markdown_table, overload_table
from simulator.serving.overload_spec import overload_spec
from traces import CONVERSATION
from worker.policy.cost_profile import MOONCAKE

__all__ = ["run_overload"]


def run_overload(
    trace: Annotated[
        str,
        typer.Argument(metavar="TRACE", help=f"A Mooncake trace; '{CONVERSATION}' is the bundled one."),
    ] = CONVERSATION,
    seeds: Annotated[
        int, typer.Option(min=1, help="Workloads drawn from the trace; each is run under every mode.")
    ] = 10,
    modes: Annotated[
        str,
        typer.Option(
            metavar="NAME[,NAME...]", help=f"Of {', '.join(MODES)}; the last is what others are compared with."
        ),
    ] = ",".join(MODES),
    profile: Annotated[
        Path, typer.Option(metavar="FILE", help="Cost profile: what work truly takes. Default: the bundled Mooncake's.")
    ] = MOONCAKE,
    load: Annotated[float, typer.Option(help="Arrivals, as a multiple of the capacity that is measured first.")] = 2.0,
    rate: Annotated[
        float, typer.Option(help="Arrivals per second instead; the capacity is not measured. 0: not given.")
    ] = 0.0,
    requests: Annotated[int, typer.Option(min=1, help="Of each run, about.")] = 23_000,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill nodes.")] = 8,
    decode: Annotated[int, typer.Option(min=1, help="Decode nodes.")] = 8,
    ttft: Annotated[float, typer.Option(help="Objective: seconds to the first token.")] = 30.0,
    tbt: Annotated[float, typer.Option(help="Objective: seconds between tokens.")] = 0.1,
    output_scale: Annotated[
        float, typer.Option(help="Makes answers so many times as long as the trace has them.")
    ] = 1.0,
    longest_prompt: Annotated[int, typer.Option(min=0, help="Leave longer prompts out (tokens); 0: none.")] = 0,
    longest_answer: Annotated[
        int, typer.Option(min=0, help="Answers end there (tokens), and clients allow as many; 0: the trace's longest.")
    ] = 0,
    pool_blocks: Annotated[int, typer.Option(min=1, help="Blocks in the memory of each pool node.")] = 6000,
    ssd_blocks: Annotated[int, typer.Option(min=0, help="And on its SSD.")] = 0,
    look_into: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the rejections that are tried out: false, or right?")
    ] = 0.005,
    attained_share: Annotated[
        float, typer.Option(help="Of the admitted, that are to meet each objective: margins are learned; 0: no margin.")
    ] = 0.95,
    processes: Annotated[int, typer.Option(min=0, help="Runs at a time; 0: one per CPU.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything there, the load over time too.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it: a name in .svg or .png.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
) -> None:
    """Admission modes side by side under overload, by the very policy of a live conductor; the last line is JSON.

    Goodput counts requests that met both objectives; a request's time between tokens is the mean of the longest tenth
    of its intervals. Every mode gets the same arrivals.

    Example: moonpool simulate overload --seeds 10 --tbt 0.05 --output-scale 4 --plot overload.svg
    """
    with bad_input():
        if plot is not None:
            from simulator.cache_report import check_plot_path

            check_plot_path(plot)
        if json_file is not None and not json_file.parent.is_dir():
            raise BadSetting(f"cannot write {json_file}: there is no folder {json_file.parent}")
        spec = overload_spec(
            trace,
            profile,
            prefill_nodes=prefill,
            decode_nodes=decode,
            ttft_s=ttft,
            tbt_s=tbt,
            requests=requests,
            output_scale=output_scale,
            longest_prompt=longest_prompt,
            longest_answer=longest_answer,
            pool_blocks=pool_blocks,
            ssd_blocks=ssd_blocks,
            look_into=look_into,
            attained_share=attained_share,
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
                told=console.print,
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
        from simulator.serving.overload_report import plot_overload

        plot_overload(found, plot)
    summary = found.to_json()
    del summary["runs"]
    print(json.dumps(summary, allow_nan=False), flush=True)
