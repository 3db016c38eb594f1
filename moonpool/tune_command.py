"""The command `moonpool simulate tune`: which objectives, which split of the nodes, tried before anybody is served."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moonpool.simulation_console import bad_input, progress_bar
from simulator.errors import BadSetting
from simulator.serving.overload_spec import overload_spec
from traces import CONVERSATION
from worker.policy.cost_profile import MOONCAKE

__all__ = ["run_tune"]


def run_tune(
    trace: Annotated[
        str, typer.Argument(metavar="TRACE", help=f"A Mooncake trace; '{CONVERSATION}' is the bundled one.")
    ] = CONVERSATION,
    rate: Annotated[float, typer.Option(help="Arrivals per second.")] = 5.0,
    ttft: Annotated[float, typer.Option(help="Objective of now: seconds to the first token.")] = 30.0,
    tbt: Annotated[float, typer.Option(help="Objective of now: seconds between tokens.")] = 0.1,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill nodes of now.")] = 8,
    decode: Annotated[int, typer.Option(min=1, help="Decode nodes of now.")] = 8,
    try_ttft: Annotated[str, typer.Option(metavar="S[,S...]", help="TTFT objectives to try; empty: none.")] = "",
    try_tbt: Annotated[str, typer.Option(metavar="S[,S...]", help="TBT objectives to try; empty: none.")] = "",
    try_prefill: Annotated[
        str, typer.Option(metavar="N[,N...]", help="So many of all nodes for prefill, the others decode; empty: none.")
    ] = "",
    profile: Annotated[
        Path,
        typer.Option(metavar="FILE", help="What work takes on your nodes (`moonpool profile`). Default: Mooncake's."),
    ] = MOONCAKE,
    seeds: Annotated[int, typer.Option(min=1, help="Workloads drawn from the trace; each setting has the same.")] = 3,
    requests: Annotated[int, typer.Option(min=1, help="Of each run, about.")] = 3000,
    output_scale: Annotated[
        float, typer.Option(help="Makes answers so many times as long as the trace has them.")
    ] = 1.0,
    longest_answer: Annotated[
        int, typer.Option(min=0, help="Answers end there (tokens), and clients allow as many; 0: the trace's longest.")
    ] = 0,
    pool_blocks: Annotated[int, typer.Option(min=1, help="Blocks in the memory of each pool node.")] = 6000,
    processes: Annotated[int, typer.Option(min=0, help="Runs at a time; 0: one per CPU.")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it: a name in .svg or .png.")] = None,
) -> None:
    """What other objectives, or another split of the nodes, would come to under the same arrivals.

    One thing is changed at a time; admission is by prediction, the very policy of a live conductor under virtual time.
    Goodput counts requests that met both objectives. The last line is JSON.

    Example: moonpool simulate tune --rate 6 --try-ttft 5,10,30,60 --try-tbt 0.05,0.2 --try-prefill 4,6,10,12
    """
    with bad_input():
        if plot is not None:
            from simulator.cache_report import check_plot_path

            check_plot_path(plot)
        if not rate > 0:
            raise BadSetting(f"a rate of {rate:g} requests a second; give a positive number")
        tried_ttft, tried_tbt = _seconds("--try-ttft", try_ttft), _seconds("--try-tbt", try_tbt)
        tried_prefill = _counts("--try-prefill", try_prefill)
        if not (tried_ttft or tried_tbt or tried_prefill):
            raise BadSetting("nothing to try: give --try-ttft, --try-tbt or --try-prefill")
        spec = overload_spec(
            trace,
            profile,
            prefill_nodes=prefill,
            decode_nodes=decode,
            ttft_s=ttft,
            tbt_s=tbt,
            requests=requests,
            output_scale=output_scale,
            longest_prompt=0,
            longest_answer=longest_answer,
            pool_blocks=pool_blocks,
            ssd_blocks=0,
            look_into=0.0,
            attained_share=0.95,
        )
        from simulator.serving.tuning import tune
        from simulator.serving.tuning_report import plot_tuning, tuning_tables

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
        raise BadSetting(f"{flag} is {text!r}: expected seconds, separated by commas, like 0.05,0.1") from error


def _counts(flag: str, text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")] if text else []
    except ValueError as error:
        raise BadSetting(f"{flag} is {text!r}: expected numbers of nodes, separated by commas, like 4,8,12") from error
