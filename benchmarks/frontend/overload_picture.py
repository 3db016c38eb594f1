"""Picture of the live comparison of admission modes: goodput, requests by outcome, wasted prefill, and goodput over
time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.frontend.overload_outcome import WINDOW_S

ENDS = {
    "good": "#1a7f37",
    "rejected": "#8c959f",
    "TTFT missed": "#cf222e",
    "TBT missed": "#8250df",
    "failed": "#1f2328",
}
USEFUL, WASTED = "#0969da", "#bc4c00"
LINES = {"none": "#8c959f", "early": "#bc4c00", "predicted-uniform": "#0969da", "predicted": "#1a7f37"}


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the picture in the format of the file's suffix (SVG, PNG)."""
    modes = result["modes"]
    with plt.rc_context({"svg.hashsalt": "overload-live", "font.size": 9.0, "axes.titlelocation": "left"}):
        figure = plt.figure(figsize=(10.0, 3.9 + 0.45 * len(modes)), layout="constrained")
        halves: Any = figure.subfigures(
            2, 1, height_ratios=(1.5 + 0.45 * len(modes), 2.4)
        )  # mypy assumes a single subfigure
        above, below = halves
        goodput, ends, prefill = above.subplots(1, 3, sharey=True, width_ratios=(1, 1.3, 1))
        _over_time(below.subplots(), modes, result["uncounted_s"])
        rates = [row["goodput_rps"] for row in modes.values()]
        _stack(goodput, [("requests/s", USEFUL, rates)])
        for place, rate in enumerate(rates):
            goodput.annotate(f"{rate:.2f}", (rate, place), (4, 0), textcoords="offset points", va="center")
        goodput.set_xlim(0, 1.2 * max(rates) or 1)
        goodput.set_title("goodput, requests/s")
        goodput.set_yticks(range(len(modes)), list(modes))
        goodput.invert_yaxis()
        assign_chunks = [
            (name, colour, [100 * row["ends"].get(name, 0) / row["requests"] for row in modes.values()])
            for name, colour in ENDS.items()
        ]
        _stack(ends, [share for share in assign_chunks if any(share[2])])
        ends.set_title("requests by outcome, %")
        tokens = [(row["computed_prompt_tokens"] / 1e3, row["wasted_prompt_tokens"] / 1e3) for row in modes.values()]
        useful = ("useful", USEFUL, [computed - wasted for computed, wasted in tokens])
        _stack(prefill, [useful, ("wasted", WASTED, [wasted for _, wasted in tokens])])
        prefill.set_title("prefill, thousand tokens")
        for axes in (ends, prefill):
            axes.legend(
                frameon=False, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.14), columnspacing=1.0
            )
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def _over_time(axes: Axes, modes: dict[str, Any], uncounted_s: float) -> None:
    """Draw goodput by window of arrivals, with a line per mode; excluded windows are shaded."""
    for mode, row in modes.items():
        windows = row["good_by_window"]
        middles = [(window + 0.5) * WINDOW_S for window in range(len(windows))]
        axes.plot(middles, windows, marker="o", markersize=3, color=LINES[mode], label=mode)
    axes.axvspan(0, uncounted_s, color="#d8dee4", alpha=0.5, linewidth=0)
    axes.set_xlim(0)
    axes.set_ylim(0)
    axes.set_title("goodput by time of arrival, requests/s (grey: not counted)")
    axes.set_xlabel("s")
    axes.grid(color="#d8dee4", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower right", bbox_to_anchor=(1.0, 1.0))


def _stack(axes: Axes, parts: list[tuple[str, str, list[float]]]) -> None:
    """Draw stacked horizontal bars, one per mode, from `parts`: (name, colour, width by mode)."""
    begins = [0.0] * len(parts[0][2])
    for name, colour, widths in parts:
        axes.barh(range(len(widths)), widths, left=begins, color=colour, height=0.62, label=name)
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    axes.grid(axis="x", color="#d8dee4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
