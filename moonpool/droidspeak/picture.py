"""Plot of a reuse profile: the accuracy of every group of layers against its cost."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from moonpool.profiling.picture import GRID, MUTED, STYLE, save_picture
from worker.policy.reuse_profile import ReusePoint, ReuseProfile

_CHOSEN, _OTHER, _REFUSED = "#0969da", "#8c959f", "#cf222e"
_LABELS: Final = 8  # points with a label; more would overlap


def draw(profile: ReuseProfile, points: Sequence[ReusePoint], path: Path) -> None:
    """Plot all measured `points`, and the profile's as a line. Raises ConfigError if the file cannot be written."""
    with mpl.rc_context(STYLE | {"svg.hashsalt": "reuse"}):
        figure = Figure(figsize=(8.4, 5.0), layout="constrained")
        axes = figure.subplots()
        chosen = {(point.first, point.last) for point in profile.points}
        others = [point for point in points if (point.first, point.last) not in chosen]
        axes.plot([p.cost for p in others], [p.accuracy for p in others], "o", color=_OTHER, alpha=0.6, markersize=4)
        axes.plot([p.cost for p in profile.points], [p.accuracy for p in profile.points], "o-", color=_CHOSEN)
        for point in profile.points[:_LABELS]:
            axes.annotate(
                f"{point.first}–{point.last}",
                (point.cost, point.accuracy),
                textcoords="offset points",
                xytext=(6, -12),
                color=_CHOSEN,
                fontsize=9,
            )
        accuracy = profile.accuracy
        for level, text, colour, side in (
            (accuracy.receiver, f"{profile.receiver} alone", _CHOSEN, "right"),
            (accuracy.all_reused, f"all KV from {profile.sender}", _REFUSED, "left"),
            (accuracy.sender, f"{profile.sender} alone", MUTED, "right"),
        ):
            axes.axhline(level, color=colour, linewidth=1.0, linestyle="--")
            axes.text(float(side == "right"), level, f" {text} ", color=colour, fontsize=9, va="bottom", ha=side)
        axes.set_xlim(0, 1)
        axes.set_ylim(-0.02, 1.02)
        axes.grid(True, color=GRID, linewidth=0.6)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlabel("work on the context, of a whole prefill's")
        axes.set_ylabel("exact answers")
        axes.set_title(f"Layers that {profile.receiver} computes itself", loc="left", fontsize=11)
        asked = f"{profile.questions:,} questions about {profile.contexts:,} contexts"
        figure.suptitle(f"{asked} of {profile.context_tokens:,.0f} tokens", fontsize=10, color=MUTED)
        save_picture(figure, path)
