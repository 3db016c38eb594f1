"""Table of the comparison: median and range over the repeats, and the better shape. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.disaggregation.measure import SHAPES, Run

NOTICEABLE = 0.02
"""Smallest relative difference of medians that counts: the throughput of an open loop is that of its trace."""
HEADINGS = ("speed", "figure", *SHAPES, "ratio", "better")
# name -> (label, factor for display, unit, True if more is better, None: no judgement)
FIGURES: dict[str, tuple[str, float, str, bool | None]] = {
    "completed": ("completed requests", 1, "", None),
    "rejected": ("rejected (429)", 1, "", False),
    "failed": ("failed", 1, "", False),
    "ttft_p50_s": ("TTFT p50", 1e3, "ms", False),
    "ttft_p90_s": ("TTFT p90", 1e3, "ms", False),
    "ttft_p99_s": ("TTFT p99", 1e3, "ms", False),
    "tpot_p50_s": ("TPOT p50", 1e3, "ms", False),
    "tpot_p99_s": ("TPOT p99", 1e3, "ms", False),
    "tbt_p50_s": ("TBT p50", 1e3, "ms", False),
    "tbt_p99_s": ("TBT p99", 1e3, "ms", False),
    "request_rps": ("throughput", 1, "requests/s", True),
    "output_tps": ("throughput", 1, "output tokens/s", True),
    "goodput_rps": ("goodput at the objectives", 1, "requests/s", True),
    "prefix_hit_rate": ("prefix hit rate", 1, "", True),
    "cpu_s": ("CPU of the cluster", 1, "s", False),
}


def rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Return a row per speed and figure.

    A shape is better if the ranges do not overlap and the medians differ by at least NOTICEABLE.
    """
    first, second = SHAPES
    table = []
    for speed in sorted({run.speed for run in runs}):
        for name, (words, factor, unit, more_is_better) in FIGURES.items():
            mine, other = values(runs, first, speed, name), values(runs, second, speed, name)
            verdict = _better(mine, other, more_is_better)
            shown = [_shown([value * factor for value in found], unit) for found in (mine, other)]
            table.append((f"{speed:g}", words, *shown, _ratio(mine, other), verdict))
    return table


def values(runs: Sequence[Run], shape: str, speed: float, name: str) -> list[float]:
    """Return the figure's values over the repeats."""
    found = [run.figures[name] for run in runs if (run.shape, run.speed) == (shape, speed)]
    return [value for value in found if value is not None]


def markdown(runs: Sequence[Run]) -> str:
    """Return the table in Markdown."""
    lines = [HEADINGS, tuple("---" for _ in HEADINGS), *rows(runs)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shown(found: list[float], unit: str) -> str:
    if not found:
        return "none"
    middle = f"{statistics.median(found):,.4g} {unit}".strip()
    return middle if min(found) == max(found) else f"{middle} ({min(found):,.4g}..{max(found):,.4g})"


def _ratio(mine: list[float], other: list[float]) -> str:
    if not mine or not other or not statistics.median(other):
        return "–"
    return f"{statistics.median(mine) / statistics.median(other):.2f}"


def _better(mine: list[float], other: list[float], more_is_better: bool | None) -> str:
    first, second = SHAPES
    if min(len(mine), len(other)) < 2 or more_is_better is None:
        return "–"
    middles = statistics.median(mine), statistics.median(other)
    if abs(middles[0] - middles[1]) < NOTICEABLE * max(middles):
        return "no difference seen"
    if min(mine) > max(other):
        return first if more_is_better else second
    if max(mine) < min(other):
        return second if more_is_better else first
    return "no difference seen"
