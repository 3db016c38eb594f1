"""The command `moonpool simulate`: the cluster's own policies on a trace, in seconds and without a cluster."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvpool import KvPoolError
from kvpool.policy.eviction import POLICIES
from simulator.cache import BELADY, CacheRun, simulate_cache
from simulator.cache_table import cache_table
from simulator.chains import ChainedTrace, chained
from simulator.errors import BadSetting, SimulatorError
from traces import CONVERSATION, TraceError, load_trace

__all__ = ["app"]

EXIT_BAD_INPUT = 2
_ALL = "all"
_NAMES = (*POLICIES, BELADY)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="The cluster's own policies under virtual time: no cluster needed, an hour of trace in seconds.",
)


@app.callback()
def simulate() -> None:
    """A group: each command simulates one thing."""


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
            metavar="N[,N...]", help="Blocks the pool holds, e.g. 10000 or 1k,10k,30k; inf: all that the trace has."
        ),
    ],
    policy: Annotated[
        str, typer.Option(metavar="NAME[,NAME...]", help=f"What leaves a full pool: {', '.join(_NAMES)}; or {_ALL}.")
    ] = "lru",
    tree: Annotated[
        bool | None,
        typer.Option(
            "--tree/--no-tree",
            help="Whether a block may leave before those that follow it (--no-tree), as the literature's policies "
            "assume, or not, as in the live pool. Default: --tree for moonpool alone.",
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it: a name in .svg or .png.")] = None,
) -> None:
    """Hit rate of one pool over a trace, by eviction policy and capacity; the last line is JSON.

    Hits are counted at look-up: the leading blocks of a prompt that are there. Then all its blocks are stored in order.

    Example: moonpool simulate cache conversation --capacity 1k,10k,30k --policy all --plot hits.svg
    """
    with _bad_input():
        policies = _policies(policy)
        sizes = [_capacity(word) for word in capacity.split(",")]
        if plot is not None:
            from simulator.cache_plot import check_plot_path, plot_runs

            check_plot_path(plot)
        loaded = chained(load_trace(trace))
        runs = _cache_runs(loaded, policies, [size or loaded.num_blocks for size in sizes], tree)
        Console().print(cache_table(runs, loaded.source))
        if plot is not None:
            plot_runs(runs, loaded.source, plot)
    lines = [{"trace": loaded.source, **asdict(run)} for run in runs]
    print(json.dumps(lines if len(lines) > 1 else lines[0], allow_nan=False), flush=True)


def _cache_runs(
    trace: ChainedTrace, policies: Sequence[str], capacities: Sequence[int], tree: bool | None
) -> list[CacheRun]:
    wanted = [(capacity, policy) for capacity in dict.fromkeys(capacities) for policy in policies]
    runs: list[CacheRun] = []
    with _progress(len(wanted) * len(trace.chains)) as advance:
        for capacity, policy in wanted:
            before = len(runs) * len(trace.chains)
            told = partial(_advanced, advance, before)
            runs.append(simulate_cache(trace, policy, capacity, leaf_first=tree, progress=told))
    return runs


def _advanced(advance: Callable[[int], None], before: int, done: int) -> None:
    advance(before + done)


def _policies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in (*_NAMES, _ALL)]:
        raise BadSetting(f"there is no policy {unknown[0]!r}; choose from {', '.join(_NAMES)}, or {_ALL}")
    return list(dict.fromkeys(one for name in names for one in (_NAMES if name == _ALL else (name,))))


def _capacity(word: str) -> int | None:
    """Blocks; None for `inf`."""
    word = word.strip()
    if word == "inf":
        return None
    digits, factor = (word[:-1], 1000) if word.endswith("k") else (word, 1)
    if not digits.isascii() or not digits.isdecimal() or not int(digits):
        raise BadSetting(f"a capacity of {word!r} blocks; give whole numbers from 1, like 10000 or 10k, or inf")
    return int(digits) * factor


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's stderr, gone at the end."""
    console = Console(stderr=True)
    columns: tuple[Any, ...] = (TextColumn("requests"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def _bad_input() -> Iterator[None]:
    try:
        yield
    except (SimulatorError, TraceError, KvPoolError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_BAD_INPUT) from error
