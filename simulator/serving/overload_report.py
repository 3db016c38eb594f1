"""Comparison of admission modes as tables, for a terminal and as Markdown, and as a plot."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from simulator.errors import BadSetting
from simulator.serving.confidence import Estimate
from simulator.serving.overload import ModeSummary, Overload

Cell = Callable[[ModeSummary], str]


def _number(estimate: Estimate, digits: int) -> str:
    half = (estimate.high - estimate.low) / 2
    return f"{estimate.mean:.{digits}f} ± {half:.{digits}f}"


def _share(estimate: Estimate) -> str:
    return f"{100 * estimate.mean:.1f} ± {50 * (estimate.high - estimate.low):.1f} %"


def _signed(estimate: Estimate) -> str:
    return f"{100 * estimate.mean:+.1f} ± {50 * (estimate.high - estimate.low):.1f} %"


def _false_rejects(row: ModeSummary) -> str:
    found = row.false_rejects
    if found is None:
        return "–"
    return f"{100 * found.mean:.0f} % ({100 * found.low:.0f}–{100 * found.high:.0f}, of {row.rejects_tried})"


_ROWS: tuple[tuple[str, Cell], ...] = (
    ("goodput, requests/s", lambda row: _number(row.goodput, 2)),
    ("goodput relative to the last mode", lambda row: _signed(row.goodput_over_best)),
    ("good, of all arrived", lambda row: _share(row.attainment)),
    ("rejected at arrival", lambda row: _share(row.rejected)),
    ("rejected after prefill", lambda row: _share(row.withheld)),
    ("served, TTFT missed", lambda row: _share(row.missed_ttft)),
    ("served, TBT missed", lambda row: _share(row.missed_tbt)),
    ("useful prefill, thousand tokens/s", lambda row: _number(row.useful_tokens, 1)),
    ("wasted prefill, million tokens", lambda row: _number(row.wasted_tokens, 1)),
    ("wasted prefill of requests rejected after prefill", lambda row: _number(row.wasted_withheld, 1)),
    ("wasted, of all computed tokens", lambda row: _share(row.wasted_share)),
    ("false rejects, of the rejected", _false_rejects),
    ("false accepts, of the admitted", lambda row: _share(row.false_accepts)),
    ("swing of prefill load (std)", lambda row: _number(row.prefill_swing, 3)),
    ("swing of decode load (std)", lambda row: _number(row.decode_swing, 3)),
    ("lag correlation of the loads", lambda row: _number(row.lag_correlation, 2)),
    ("lag, s", lambda row: _number(row.lag_s, 0)),
    ("TTFT of the served, mean, s", lambda row: _number(row.ttft_mean_s, 1)),
    ("TTFT of the served, P90, s", lambda row: _number(row.ttft_p90_s, 1)),
    ("TBT of the served, P90, ms", lambda row: _number(_scaled(row.tbt_p90_s, 1000), 1)),
)
_SIBLING_ROWS: tuple[tuple[str, Cell], ...] = (
    ("prompt tokens with a sibling's KV, of the served", lambda row: _share(row.sibling_share)),
    ("quality loss of the served, mean", lambda row: _share(row.quality_loss)),
)


def _rows(found: Overload) -> tuple[tuple[str, Cell], ...]:
    return _ROWS if found.spec.settings.siblings is None else (*_ROWS, *_SIBLING_ROWS)


def _scaled(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(estimate.mean * factor, estimate.low * factor, estimate.high * factor)


def overload_table(found: Overload) -> Table:
    """Return the comparison as a table for a terminal."""
    seeds = len({run.seed for run in found.runs})
    title = f"{found.spec.rate_per_s:.2f} requests/s, {seeds} seeds, ±: 95 % confidence interval"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for row in found.summaries:
        table.add_column(row.mode, justify="right")
    for name, cell in _rows(found):
        table.add_row(name, *(cell(row) for row in found.summaries))
    return table


def markdown_table(found: Overload) -> str:
    """Return the comparison as a Markdown table."""
    lines = ["| | " + " | ".join(f"`{row.mode}`" for row in found.summaries) + " |"]
    lines.append("|---|" + "---:|" * len(found.summaries))
    lines += [f"| {name} | " + " | ".join(cell(row) for row in found.summaries) + " |" for name, cell in _rows(found)]
    return "\n".join(lines)


_INK, _MUTED, _GRID = "#1f2328", "#59636e", "#d8dee4"
_BLUE, _ORANGE = "#0969da", "#bc4c00"
_ENDS: Final[tuple[tuple[str, str, Callable[[ModeSummary], float]], ...]] = (
    ("good", "#1a7f37", lambda row: row.attainment.mean),
    ("rejected at arrival", "#8c959f", lambda row: row.rejected.mean),
    ("rejected after prefill", "#bc4c00", lambda row: row.withheld.mean),
    ("TTFT missed", "#cf222e", lambda row: row.missed_ttft.mean),
    ("TBT missed", "#8250df", lambda row: row.missed_tbt.mean),
)
_SHOWN_S = 400  # duration of the plotted load series
_HIGHEST_LOAD = 2.0
_STYLE: Final[dict[Any, Any]] = {
    "svg.hashsalt": "overload",
    "font.size": 9.0,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _MUTED,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "text.color": _INK,
}


def plot_overload(found: Overload, path: Path) -> None:
    """Plot goodput, request outcomes, waste and loads over time. Raises BadSetting if the file cannot be written."""
    with mpl.rc_context(_STYLE):
        modes = found.summaries
        figure = Figure(figsize=(10.0, 3.6 + 1.35 * len(modes)), layout="constrained")
        halves: Any = figure.subfigures(2, 1, height_ratios=(3.0, 0.6 + 1.35 * len(modes)))
        top, below = halves
        goodput, ends, waste = top.subplots(1, 3, width_ratios=(1, 1.2, 1), sharey=True)
        _bars(goodput, modes, [row.goodput for row in modes], "goodput, requests/s", _BLUE)
        _stacked(ends, modes)
        _bars(waste, modes, [row.wasted_tokens for row in modes], "wasted prefill, M tokens", _ORANGE)
        goodput.set_yticks(range(len(modes)), [row.mode for row in modes])
        goodput.invert_yaxis()
        handles, labels = ends.get_legend_handles_labels()
        top.legend(handles, labels, frameon=False, fontsize=8, ncols=len(_ENDS), loc="outside lower center")
        _loads(below, found)
        try:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise BadSetting(f"cannot write the plot {path}: {error.strerror or error}") from error


def _bars(axes: Axes, modes: tuple[ModeSummary, ...], values: list[Estimate], title: str, colour: str) -> None:
    places = range(len(modes))
    means = [value.mean for value in values]
    errors = [[value.mean - value.low for value in values], [value.high - value.mean for value in values]]
    axes.barh(places, means, color=colour, height=0.62, xerr=errors, error_kw={"ecolor": _INK, "capsize": 3})
    for place, value in zip(places, values, strict=True):
        axes.annotate(
            f"{value.mean:.3g}", (value.high, place), (5, 0), textcoords="offset points", va="center", fontsize=8.5
        )
    axes.set_xlim(0, 1.22 * max(0.001, *(value.high for value in values)))
    axes.set_title(title)
    axes.grid(axis="x", color=_GRID, linewidth=0.7)


def _stacked(axes: Axes, modes: tuple[ModeSummary, ...]) -> None:
    begins = [0.0] * len(modes)
    for name, colour, share in _ENDS:
        widths = [100 * share(row) for row in modes]
        axes.barh(range(len(modes)), widths, left=begins, color=colour, height=0.62, label=name)
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    axes.set_xlim(0, 100)
    axes.set_title("requests by outcome, %")


def _loads(figure: Any, found: Overload) -> None:
    rows = figure.subplots(len(found.summaries), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    first = found.runs[0].seed
    for axes, row in zip(rows, found.summaries, strict=True):
        run = next(run for run in found.runs if run.mode == row.mode and run.seed == first)
        begin = max(0, len(run.prefill_load) - _SHOWN_S) // 2
        shown = slice(begin, begin + _SHOWN_S)
        times = range(begin, begin + len(run.prefill_load[shown]))
        for series, colour, name in ((run.prefill_load, _BLUE, "prefill"), (run.decode_load, _ORANGE, "decode")):
            axes.plot(times, [min(value, _HIGHEST_LOAD) for value in series[shown]], color=colour, lw=1.1, label=name)
        axes.axhline(1.0, color=_MUTED, lw=0.8, ls="--")
        axes.set_title(
            f"{row.mode}: swing {row.prefill_swing.mean:.3f} prefill, {row.decode_swing.mean:.3f} decode; "
            f"lag correlation {row.lag_correlation.mean:+.2f} at {row.lag_s.mean:.0f} s"
        )
        axes.grid(axis="y", color=_GRID, linewidth=0.7)
        axes.set_ylim(0, None)
    rows[0].legend(frameon=False, fontsize=8, loc="upper right", ncols=2, bbox_to_anchor=(1.0, 1.35))
    rows[-1].set_xlabel("virtual seconds (one seed); load relative to the objective")
