"""The live comparison of admission modes as a picture: what became of the requests, goodput, prefill done in vain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

ENDS = {
    "good": "#1a7f37",
    "rejected": "#8c959f",
    "TTFT missed": "#cf222e",
    "TBT missed": "#8250df",
    "failed": "#1f2328",
}
USEFUL, WASTED = "#0969da", "#bc4c00"


def draw(result: dict[str, Any], path: Path) -> None:
    """As the file's ending says (SVG, PNG)."""
    modes = result["modes"]
    with plt.rc_context({"svg.hashsalt": "overload-live", "font.size": 9.0, "axes.titlelocation": "left"}):
        figure, (goodput, ends, prefill) = plt.subplots(
            1, 3, figsize=(10.0, 1.5 + 0.45 * len(modes)), sharey=True, layout="constrained", width_ratios=(1, 1.3, 1)
        )
        rates = [row["goodput_rps"] for row in modes.values()]
        _stack(goodput, [("requests/s", USEFUL, rates)])
        for place, rate in enumerate(rates):
            goodput.annotate(f"{rate:.2f}", (rate, place), (4, 0), textcoords="offset points", va="center")
        goodput.set_xlim(0, 1.2 * max(rates) or 1)
        goodput.set_title("goodput, requests/s")
        goodput.set_yticks(range(len(modes)), list(modes))
        goodput.invert_yaxis()
        shares = [
            (name, colour, [100 * row["ends"].get(name, 0) / row["requests"] for row in modes.values()])
            for name, colour in ENDS.items()
        ]
        _stack(ends, [share for share in shares if any(share[2])])
        ends.set_title("what became of the requests, %")
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


def _stack(axes: Axes, parts: list[tuple[str, str, list[float]]]) -> None:
    """Horizontal bars, one per mode, made of `parts`: (name, colour, width by mode)."""
    begins = [0.0] * len(parts[0][2])
    for name, colour, widths in parts:
        axes.barh(range(len(widths)), widths, left=begins, color=colour, height=0.62, label=name)
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    axes.grid(axis="x", color="#d8dee4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
