"""Picture of the eviction benchmark's result."""

from pathlib import Path
from typing import Any

_MARKS = {
    "lru": ("#0969da", "o", "LRU"),
    "arc": ("#1a7f37", "o", "ARC"),
    "moonpool": ("#cf222e", "D", "Moonpool"),
    "belady": ("#57606a", "|", "oracle"),
}


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the hit rates of the held-out workloads and of the trace, in the format of the file's suffix.

    One panel per capacity; the line spans from the better of LRU and ARC to the oracle.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import PercentFormatter

    cells = result["cells"].get("held-out", [])
    panels = [(f"capacity: {100 * share:g} % of all blocks", share) for share in sorted({c["share"] for c in cells})]
    names = list(dict.fromkeys(cell["workload"] for cell in cells))
    trace = result["cells"].get("trace", [])
    with plt.rc_context({"svg.hashsalt": "eviction", "font.size": 9.0, "axes.titlelocation": "left"}):
        figure, axes = plt.subplots(
            1, len(panels) + bool(trace), figsize=(11.5, 0.8 + 0.3 * len(names)), layout="constrained"
        )
        for number, (axis, (title, share)) in enumerate(zip(axes, panels, strict=False)):
            rows = {cell["workload"]: cell for cell in cells if cell["share"] == share}
            _panel(axis, [rows[name] for name in names], title, names if not number else None)
        if trace:
            _panel(axes[-1], trace, "the bundled trace", [f"{cell['capacity']:,} blocks" for cell in trace])
            axes[-1].yaxis.tick_right()
        for axis in axes:
            axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def _panel(axis: Any, cells: list[dict[str, Any]], title: str, labels: list[str] | None) -> None:
    places = range(len(cells))
    best = [max(cell["lru"], cell["arc"]) for cell in cells]
    axis.hlines(places, best, [cell["belady"] for cell in cells], color="#d0d7de", linewidth=3, zorder=1)
    for policy, (colour, marker, label) in _MARKS.items():
        rates = [cell[policy] for cell in cells]
        size = 70 if marker == "|" else 22
        axis.scatter(rates, places, s=size, color=colour, marker=marker, label=label, zorder=3 if marker == "D" else 2)
    axis.set_yticks(places, labels if labels is not None else [""] * len(cells))
    axis.set_ylim(len(cells) - 0.5, -0.5)
    axis.set_title(title, fontsize=9.5)
    axis.set_xlabel("hit rate")
    axis.grid(axis="x", color="#d8dee4", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
