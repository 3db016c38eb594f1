"""Table and plot of cache simulations."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter
from rich.console import Group
from rich.table import Table
from rich.text import Text

from simulator.cache import BELADY, CacheRun
from simulator.errors import BadSetting


def cache_table(runs: Sequence[CacheRun], source: str) -> Group:
    """Return a table of hit rates: a row per policy for a single capacity, else a row per capacity.

    The best policy of each capacity is bold.
    """
    capacities = list(dict.fromkeys(run.capacity for run in runs))
    best = {
        capacity: max((run.hit_rate for run in runs if run.capacity == capacity and run.policy != BELADY), default=0.0)
        for capacity in capacities
    }
    leaf_first = list(dict.fromkeys(run.policy for run in runs if run.leaf_first and run.policy != BELADY))
    held = f" of {capacities[0]:,} blocks" if len(capacities) == 1 else ""
    title = f"{source}: hit rate of one pool{held}" + (f"; leaf first: {', '.join(leaf_first)}" if leaf_first else "")
    table = _of_one_capacity(runs, best) if len(capacities) == 1 else _of_several(runs, capacities, best)
    return Group(Text(title, style="bold"), table)


def _of_one_capacity(runs: Sequence[CacheRun], best: dict[int, float]) -> Table:
    table = Table("policy")
    for heading in ("hit rate", "1st half", "2nd half", "evictions", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        halves = (f"{run.hit_rate_first_half:.4f}", f"{run.hit_rate_second_half:.4f}")
        table.add_row(_name(run.policy), _rate(run, best), *halves, f"{run.evictions:,}", f"{run.seconds:.1f} s")
    return table


def _of_several(runs: Sequence[CacheRun], capacities: Sequence[int], best: dict[int, float]) -> Table:
    table = Table()
    table.add_column("blocks", justify="right", no_wrap=True)
    for policy in dict.fromkeys(run.policy for run in runs):
        table.add_column(_name(policy), justify="right")
    for capacity in capacities:
        table.add_row(f"{capacity:,}", *(_rate(run, best) for run in runs if run.capacity == capacity))
    return table


def _name(policy: str) -> str:
    return "belady, limit" if policy == BELADY else policy


def _rate(run: CacheRun, best: dict[int, float]) -> str:
    text = f"{run.hit_rate:.4f}"
    return f"[bold]{text}[/bold]" if run.policy != BELADY and run.hit_rate == best[run.capacity] else text


_INK, _MUTED, _GRID = "#1f2328", "#59636e", "#d8dee4"
_COLOURS: Final = {
    "lru": "#0969da",
    "lfu": "#bc4c00",
    "length-aware": "#8250df",
    "arc": "#1a7f37",
    "moonpool": "#cf222e",
    BELADY: _MUTED,
}
_SUFFIXES: Final = (".svg", ".png")
_STYLE: Final[dict[Any, Any]] = {
    "svg.hashsalt": "cache",
    "font.size": 10.0,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "text.color": _INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
}


def check_plot_path(path: Path) -> None:
    """Raise BadSetting if a plot cannot be written to the path; called before the simulation."""
    if path.suffix not in _SUFFIXES:
        raise BadSetting(f"cannot write the plot {path}: the name must end in one of {', '.join(_SUFFIXES)}")
    if not path.parent.is_dir():
        raise BadSetting(f"cannot write the plot {path}: the folder {path.parent} does not exist")


def plot_runs(runs: Sequence[CacheRun], source: str, path: Path) -> None:
    """Plot hit rate over capacity, one line per policy. Raises BadSetting if the file cannot be written."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.add_subplot()
        for policy in dict.fromkeys(run.policy for run in runs):
            line = sorted((run.capacity, run.hit_rate) for run in runs if run.policy == policy)
            style = "--" if policy == BELADY else "-"
            label = "belady (the limit)" if policy == BELADY else policy
            axes.plot(*zip(*line, strict=True), style, marker="o", color=_COLOURS.get(policy), label=label)
        axes.set_xscale("log")
        capacities = sorted({run.capacity for run in runs})
        axes.set_xticks(_apart(capacities))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(int(value))))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_tick_params(which="minor", length=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color=_GRID, linewidth=0.7)
        axes.set_xlabel("blocks held")
        axes.set_ylabel("blocks found at look-up")
        axes.set_title(f"Prefix hit rate of one pool, {source}", loc="left", fontsize=11)
        axes.legend(frameon=False, fontsize=9.5, loc="best")
        try:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise BadSetting(f"cannot write the plot {path}: {error.strerror or error}") from error


def _apart(capacities: Sequence[int]) -> list[int]:
    """Return the capacities whose labels do not overlap on a logarithmic axis."""
    span = capacities[-1] / capacities[0]
    kept: list[int] = []
    for capacity in capacities:
        if not kept or capacity / kept[-1] > span**0.06:
            kept.append(capacity)
    return kept


def _short(blocks: int) -> str:
    return f"{blocks / 1000:.4g}k" if blocks >= 1000 else str(blocks)
