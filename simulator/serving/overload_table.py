"""The comparison of admission modes as tables: for a terminal, and as Markdown for the documentation."""

from collections.abc import Callable

from rich.table import Table

from simulator.serving.confidence import Estimate
from simulator.serving.overload import ModeSummary, Overload

__all__ = ["markdown_table", "overload_table"]

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
    ("goodput against the last", lambda row: _signed(row.goodput_over_best)),
    ("good, of all that arrived", lambda row: _share(row.attainment)),
    ("rejected at arrival", lambda row: _share(row.rejected)),
    ("rejected after prefill", lambda row: _share(row.withheld)),
    ("served, TTFT missed", lambda row: _share(row.missed_ttft)),
    ("served, TBT missed", lambda row: _share(row.missed_tbt)),
    ("useful prefill, thousand tokens/s", lambda row: _number(row.useful_tokens, 1)),
    ("wasted prefill, million tokens", lambda row: _number(row.wasted_tokens, 1)),
    ("of it, withheld", lambda row: _number(row.wasted_withheld, 1)),
    ("wasted, of all that was computed", lambda row: _share(row.wasted_share)),
    ("false rejects, of the rejected", _false_rejects),
    ("false accepts, of the admitted", lambda row: _share(row.false_accepts)),
    ("swing of prefill load (std)", lambda row: _number(row.prefill_swing, 3)),
    ("swing of decode load (std)", lambda row: _number(row.decode_swing, 3)),
    ("their lag correlation", lambda row: _number(row.lag_correlation, 2)),
    ("at a lag of, s", lambda row: _number(row.lag_s, 0)),
    ("TTFT of the served, mean s", lambda row: _number(row.ttft_mean_s, 1)),
    ("TTFT of the served, P90 s", lambda row: _number(row.ttft_p90_s, 1)),
    ("TBT of the served, P90 ms", lambda row: _number(_scaled(row.tbt_p90_s, 1000), 1)),
)


def _scaled(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(estimate.mean * factor, estimate.low * factor, estimate.high * factor)


def overload_table(found: Overload) -> Table:
    """For a terminal."""
    seeds = len({run.seed for run in found.runs})
    title = f"{found.spec.rate_per_s:.2f} requests/s, {seeds} seeds, ± is the 95 % confidence interval"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for row in found.summaries:
        table.add_column(row.mode, justify="right")
    for name, cell in _ROWS:
        table.add_row(name, *(cell(row) for row in found.summaries))
    return table


def markdown_table(found: Overload) -> str:
    """The same as Markdown."""
    lines = ["| | " + " | ".join(f"`{row.mode}`" for row in found.summaries) + " |"]
    lines.append("|---|" + "---:|" * len(found.summaries))
    lines += [f"| {name} | " + " | ".join(cell(row) for row in found.summaries) + " |" for name, cell in _ROWS]
    return "\n".join(lines)
